"""Store of a collector's files, as ``ROOT/<sender's key>/<day of arrival>/<name>``.

All functions block and are called in threads. A file gets its final name only when it is checked and completely on the
disk. So a program that finds files by their names, such as ``dmsg analytics``, never reads a part of a file.

Each event names its producer, and a sender could write any name into its events. Therefore each producer belongs to one
sender, which the file ``ROOT/producers/<producer>`` names. So the sender of one server cannot forge the events of
another server. A producer whose name is a public key belongs to the sender that presents a voucher signed with this
key. A producer with another name, such as a discovery, belongs to the first sender that delivers its events.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import threading
import zlib
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from twisted.logger import Logger

from dmsg.base.units import human_size
from dmsg.collector.wire import Offer
from dmsg.directories import free_bytes, sync_directory
from dmsg.directory_checks import check_state_path
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey
from dmsg.telemetry.lines import read_lines, unpack_gzip
from dmsg.telemetry.schema import MAX_LINE, SEGMENT_SUFFIX
from dmsg.telemetry.vouchers import is_vouched

LIMIT = 100 * 1024**3
"""Default maximum size of all files together, in bytes."""
SENDER_DIVISOR = 2
"""Divisor of the limit of all files. The result is the maximum size of the files of one sender."""
RESERVE = 1024**3
"""Default disk space to leave free, in bytes."""
TEXT_LIMIT = 64 * 1024 * 1024
"""Maximum number of unpacked bytes of a file: four times the size at which a server seals a file."""
LINES_LIMIT = 500_000
"""Maximum number of lines of a file, because each line is parsed."""
PRODUCERS_LIMIT = 64
"""Maximum number of producers that may belong to one sender. Usually they are a server and a discovery, and those that
ran on the same machine earlier."""
PRODUCERS = "producers"
SIGNED = "signed"
"""Second line of a producer's file in ``ROOT/producers`` if the producer has signed a voucher for the sender."""
_PRODUCER = re.compile("[0-9a-zA-Z-]{1,80}")
_PART = ".part-"

_log = Logger()


class StoreError(DmsgError):
    """Error: the store cannot be used. Its text says why."""


class StoreFull(DmsgError):
    """Error: the store has no room for the file now. The sender may try again later."""


class FileRejected(DmsgError):
    """Error: the file is rejected permanently. Its text says why."""


class Store:
    """Directory of a collector's files, used by one collector at a time.

    :param limit: maximum number of bytes of all files.
    :param reserve: bytes of disk space to leave free.
    """

    def __init__(self, root: Path, *, limit: int = LIMIT, reserve: int = RESERVE) -> None:
        self.root = root
        self._limit, self._reserve = limit, reserve
        self._lock: IO[bytes] | None = None
        self._guard = threading.Lock()
        self._held: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Total size of all files in bytes: the result of the last count plus the files added since."""
        return sum(self._held.values())

    # --- opening and closing ---

    def open(self) -> None:
        """Lock the directory, and remove the incomplete files that an earlier process left.

        :raises StoreError: the directory cannot be used, or another collector is using it.
        """
        try:
            check_state_path(self.root)
            (self.root / PRODUCERS).mkdir(parents=True, exist_ok=True)
            # The file stays open, because its lock ends when it is closed.
            lock = open(self.root / ".lock", "wb")
        except OSError as error:
            raise StoreError(f"{self.root} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise StoreError(f"{self.root} is in use by another collector") from None
        self._lock = lock
        for part in self.root.glob(f"*/{_PART}*"):
            part.unlink(missing_ok=True)
        self.recount()

    def close(self) -> None:
        """Release the lock of the directory."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def recount(self) -> None:
        """Count the stored bytes again, because other programs may have removed files."""
        held: dict[str, int] = {}
        for path in self.root.glob(f"*/*/*{SEGMENT_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                origin = path.parent.parent.name
                held[origin] = held.get(origin, 0) + path.stat().st_size
        with self._guard:
            self._held = held

    # --- files ---

    def has(self, origin: PubKey, offer: Offer) -> bool:
        """Whether the offered file is already stored.

        :raises FileRejected: a different file with the same name is stored.
        """
        for path in self.root.glob(f"{origin.hex()}/*/{offer.name}"):
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != offer.sha256:
                    raise FileRejected("the collector has another file of that name")
            return True
        return False

    def check_room(self, origin: PubKey, size: int, own_coming: int = 0, coming: int = 0) -> None:
        """Check that there is room for a file of ``size`` bytes.

        :param own_coming: number of bytes that the same sender is about to deliver over other streams.
        :param coming: number of bytes that all senders are about to deliver.
        :raises StoreFull: there is no room.
        """
        with self._guard:
            own, total = self._held.get(origin.hex(), 0), sum(self._held.values())
        if total + coming + size > self._limit:
            raise StoreFull("the collector is full: its limit for all senders is reached")
        if own + own_coming + size > self._limit // SENDER_DIVISOR:
            raise StoreFull("this sender has reached its quota at the collector")
        free = free_bytes(self.root)
        if free is not None and free - coming - size < self._reserve:
            missing = self._reserve + coming + size - free
            raise StoreFull(f"the collector's disk is full: {human_size(missing)} more are needed")

    def open_part(self, origin: PubKey) -> IO[bytes]:
        """Create a temporary file for a file that is being received.

        :raises OSError: the file cannot be created.
        """
        place = self.root / origin.hex()
        place.mkdir(exist_ok=True)
        return tempfile.NamedTemporaryFile(dir=place, prefix=_PART, delete=False, buffering=0)

    def discard(self, part: IO[bytes]) -> None:
        """Remove a temporary file."""
        part.close()
        Path(part.name).unlink(missing_ok=True)

    def keep(self, origin: PubKey, offer: Offer, part: IO[bytes], now: float) -> Path:
        """Check a received file and rename it to its final name. After this, the file survives a power failure.

        :param part: temporary file with the received bytes.
        :param now: present time, in seconds since 1970.
        :returns: path of the stored file.
        :raises FileRejected: the file is rejected.
        :raises OSError: the file could not be written.
        """
        received = Path(part.name)
        with open(received, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != offer.sha256:
                raise FileRejected("the bytes differ from the SHA-256 that was offered")
        if self.has(origin, offer):  # The name is in use, because the file was delivered over another stream meanwhile.
            self.discard(part)
            return received
        self._claim(origin, self._producer(received), offer.voucher)
        # The file is synced before it is renamed, and its directory after that, so that after a power failure the file
        # is either missing or complete. Everything is synced before the answer, because the sender then removes its
        # copy.
        os.fsync(part.fileno())
        part.close()
        day = self.root / origin.hex() / f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}"
        if not day.is_dir():
            day.mkdir(exist_ok=True)
            sync_directory(day.parent)
            sync_directory(self.root)
        kept = day / offer.name
        os.chmod(received, 0o640)
        received.replace(kept)
        sync_directory(day)
        with self._guard:
            self._held[origin.hex()] = self._held.get(origin.hex(), 0) + offer.size
        return kept

    def _producer(self, path: Path) -> str:
        """Return the producer of the events in a file.

        :raises FileRejected: the file has no producer, or several.
        """
        with open(path, "rb") as file:
            size, torn = _check_size(file)
        found, read, cut = set(), 0, False
        for number, line in enumerate(read_lines(path, TEXT_LIMIT)):
            if number == LINES_LIMIT:
                raise FileRejected(f"the file has more than {LINES_LIMIT} lines")
            read += len(line)
            # A file with a malformed line is rejected, because programs disagree about the end of such a line. One of
            # them could read a part of the line as an event of any producer.
            if cut or b"\r" in line:
                raise FileRejected("a line in the file is not JSON")
            try:
                producer = json.loads(line)["producer"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if not torn or not _is_cut(error):
                    raise FileRejected("a line in the file is not a JSON object that names its producer") from None
                cut = True  # The last line of an incomplete file may be cut, so an error there is ignored.
                continue
            if not isinstance(producer, str) or not _PRODUCER.fullmatch(producer):
                raise FileRejected("a producer's name in the file is malformed")
            found.add(producer)
            if len(found) > 1:
                raise FileRejected("the file has events of several producers")
        # The reader stops at a line that is too long, so it has then read less text than the file contains.
        if read < size:
            raise FileRejected(f"a line in the file is longer than {MAX_LINE} bytes")
        if not found:
            raise FileRejected("the file has no events")
        return found.pop()

    def _claim(self, origin: PubKey, producer: str, voucher: str) -> None:
        """Record that a producer belongs to a sender.

        :raises FileRejected: the producer belongs to another sender or has not signed for this sender, or this
            sender has too many producers.
        """
        key = _key_of(producer)
        signed = key is not None and (key == origin or is_vouched(key, origin, voucher))
        place = self.root / PRODUCERS
        with self._guard:
            try:
                owner, _, words = (place / producer).read_text().strip().partition("\n")
            except FileNotFoundError:
                owner = words = ""
            # If the producer already belongs to this sender, its record is rewritten only when the sender presents a
            # voucher for the first time.
            if owner == origin.hex() and (signed <= (words == SIGNED)):
                return
            if key is not None and not signed:
                raise FileRejected(
                    f"producer {producer[:16]} is a public key and has signed no voucher for this sender: start the "
                    "producer's server with --telemetry and the directory of these files, so that it signs a voucher"
                )
            if owner and not signed:
                raise FileRejected(
                    f"producer {producer[:16]} belongs to sender {owner[:16]}; if the producer now uses another "
                    f"sender, remove {PRODUCERS}/{producer} at the collector"
                )
            # The file is written under another name and renamed, so that a power failure leaves no incomplete claim.
            if owner != origin.hex():
                self._check_number(origin)
            if owner not in ("", origin.hex()):
                _log.warn(
                    "producer {producer} has signed a voucher for sender {origin} and now belongs to this sender: "
                    "earlier events of this producer, which {owner} sent, are in {owner_directory}",
                    producer=producer[:16],
                    origin=origin.short,
                    owner=owner[:8],
                    owner_directory=str(self.root / owner),
                )
            fresh = place / f".{producer}"
            with open(fresh, "w") as file:
                file.write(f"{origin.hex()}\n{SIGNED if signed else ''}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(place / producer)
            sync_directory(place)

    def _check_number(self, origin: PubKey) -> None:
        place = self.root / PRODUCERS
        mine = sum(path.read_text().startswith(origin.hex()) for path in place.iterdir())
        if mine >= PRODUCERS_LIMIT:
            raise FileRejected(f"this sender has already sent files of {mine} entities, which is the limit")


def _key_of(producer: str) -> PubKey | None:
    """Return the public key that names a producer; None if the producer has another kind of name.

    :raises FileRejected: the key has upper-case letters, and would therefore count as a different producer.
    """
    try:
        key = PubKey.from_hex(producer)
    except KeyFormatError:
        return None
    if key.hex() != producer:
        raise FileRejected("a producer's key in the file is not in lower case")
    return key


def _is_cut(error: Exception) -> bool:
    """Whether parsing a line failed only because its end is missing."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())


def _check_size(file: IO[bytes]) -> tuple[int, bool]:
    """Return the number of unpacked bytes, and whether the end of the file is missing.

    :raises FileRejected: the file is not gzip, or has more than :data:`TEXT_LIMIT` bytes unpacked.
    """
    size = 0
    try:
        for piece in unpack_gzip(file):
            size += len(piece)
            if size > TEXT_LIMIT:
                raise FileRejected(f"the file has more than {TEXT_LIMIT} bytes after unpacking")
    except EOFError:
        return size, True
    except zlib.error:
        if not size:
            raise FileRejected("the file is not in gzip format") from None
        return size, True  # A damaged file is accepted, because the part before the damage can be used.
    return size, False
