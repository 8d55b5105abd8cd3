"""Where a collector keeps files: ``ROOT/<sender's key>/<day of arrival>/<name>``.

Everything here blocks, and is called in threads.  A file has its name only
when all of it is on the disk, and has been looked at: what reads the tree by
names, as ``dmsg analytics`` does, never sees half of one.

Events say themselves who wrote them, and senders are believed only so far:
``ROOT/producers/<producer>`` names the sender to whom a producer belongs, so that one
server's sender cannot write another's history.  A producer that is a public key has to
sign for its sender, and belongs to whoever shows that signature; one that is a name, as
a discovery's, belongs to the sender that brought it first.
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
from dmsg.directories import free_bytes
from dmsg.errors import DmsgError, KeyFormatError
from dmsg.keys import PubKey
from dmsg.telemetry.lines import read_lines, unpacked
from dmsg.telemetry.schema import MAX_LINE, SEGMENT_SUFFIX
from dmsg.telemetry.vouchers import is_vouched

LIMIT = 100 * 1024**3
"""Bytes of files in all, by default."""
OWN_PART = 2
"""One sender may have the whole divided by this."""
RESERVE = 1024**3
"""Bytes of the disk that stay free, by default."""
TEXT_LIMIT = 64 * 1024 * 1024
"""Bytes of a file, unpacked: four times those after which a server begins another one."""
LINES_LIMIT = 500_000
"""Lines of a file: each is looked at."""
PRODUCERS_LIMIT = 64
"""Producers of one sender: a server, a discovery, and who was there before them on that machine."""
PRODUCERS = "producers"
SIGNED = "signed"
"""The second line of a producer's file: the producer has signed for that sender."""
_PRODUCER = re.compile("[0-9a-zA-Z-]{1,80}")
_PART = ".part-"

_log = Logger()


class StoreError(DmsgError):
    """The store cannot be used."""


class Full(DmsgError):
    """There is no room now."""


class Unfit(DmsgError):
    """A file that is not kept; the text says why."""


class Store:
    """One directory; one collector at a time uses it.

    :param limit: bytes of files; ``reserve``: of the disk that stay free.
    :ivar total: bytes of files that are there, as of the last look.
    """

    def __init__(self, root: Path, *, limit: int = LIMIT, reserve: int = RESERVE) -> None:
        self.root = root
        self._limit, self._reserve = limit, reserve
        self._lock: IO[bytes] | None = None
        self._guard = threading.Lock()
        self._held: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Bytes of files, as of the last look and with what came since."""
        return sum(self._held.values())

    # --- life ---

    def open(self) -> None:
        """Take the directory, and put away what an earlier collector left half done.

        :raises StoreError: it cannot be used, or another collector uses it.
        """
        try:
            (self.root / PRODUCERS).mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "wb")  # it stays open
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
        self.look()

    def close(self) -> None:
        """Give the directory back."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def look(self) -> None:
        """Count what is there: files may have been taken away."""
        held: dict[str, int] = {}
        for path in self.root.glob(f"*/*/*{SEGMENT_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                origin = path.parent.parent.name
                held[origin] = held.get(origin, 0) + path.stat().st_size
        with self._guard:
            self._held = held

    # --- files ---

    def has(self, origin: PubKey, offer: Offer) -> bool:
        """Whether it is there already.

        :raises Unfit: there is another one of that name.
        """
        for path in self.root.glob(f"{origin.hex()}/*/{offer.name}"):
            with open(path, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != offer.sha256:
                    raise Unfit("another file of that name is there")
            return True
        return False

    def check_room(self, origin: PubKey, size: int, own_coming: int = 0, coming: int = 0) -> None:
        """:raises Full: so many bytes more are too many.

        :param own_coming: bytes that the same sender is about to bring by another stream; ``coming``: that all are.
        """
        with self._guard:
            own, total = self._held.get(origin.hex(), 0), sum(self._held.values())
        if total + coming + size > self._limit:
            raise Full("the collector's limit is reached")
        if own + own_coming + size > self._limit // OWN_PART:
            raise Full("this sender has filled its part of the collector")
        free = free_bytes(self.root)
        if free is not None and free - coming - size < self._reserve:
            missing = self._reserve + coming + size - free
            raise Full(f"the collector's disk is full: {human_size(missing)} more are needed")

    def part(self, origin: PubKey) -> IO[bytes]:
        """A file to receive into.

        :raises OSError: it cannot be written.
        """
        place = self.root / origin.hex()
        place.mkdir(exist_ok=True)
        return tempfile.NamedTemporaryFile(dir=place, prefix=_PART, delete=False, buffering=0)

    def discard(self, part: IO[bytes]) -> None:
        """What was received is not kept."""
        part.close()
        Path(part.name).unlink(missing_ok=True)

    def keep(self, origin: PubKey, offer: Offer, part: IO[bytes], now: float) -> Path:
        """Look at what was received and give it its name; when this returns it outlives the power.

        :param now: seconds since 1970.
        :raises Unfit: it is not kept.
        :raises OSError: it could not be written.
        """
        received = Path(part.name)
        with open(received, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != offer.sha256:
                raise Unfit("these are not the bytes that were offered")
        if self.has(origin, offer):  # by another stream, meanwhile
            self.discard(part)
            return received
        self._claim(origin, self._producer(received), offer.voucher)
        os.fsync(part.fileno())
        part.close()
        day = self.root / origin.hex() / f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d}"
        if not day.is_dir():
            day.mkdir(exist_ok=True)
            _sync(day.parent)
            _sync(self.root)
        kept = day / offer.name
        os.chmod(received, 0o640)
        received.replace(kept)
        _sync(day)
        with self._guard:
            self._held[origin.hex()] = self._held.get(origin.hex(), 0) + offer.size
        return kept

    def _producer(self, path: Path) -> str:
        """Whose events are in a file.

        :raises Unfit: nobody's, or those of several.
        """
        with open(path, "rb") as file:
            size, torn = _check_size(file)
        found, read, cut = set(), 0, False
        for number, line in enumerate(read_lines(path, TEXT_LIMIT)):
            if number == LINES_LIMIT:
                raise Unfit(f"it has more than {LINES_LIMIT} lines")
            read += len(line)
            # programs do not agree on what a line is that some of them cannot read: one of them would take it for
            # an event of anybody
            if cut or b"\r" in line:
                raise Unfit("a line in it is no JSON")
            try:
                producer = json.loads(line)["producer"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if not torn or not _is_cut(error):
                    raise Unfit("a line in it is no JSON, or of nobody") from None
                cut = True  # the last one of a torn file
                continue
            if not isinstance(producer, str) or not _PRODUCER.fullmatch(producer):
                raise Unfit("a producer's name is none")
            found.add(producer)
            if len(found) > 1:
                raise Unfit("events of several producers are in it")
        if read < size:
            raise Unfit(f"a line in it is longer than {MAX_LINE} bytes")
        if not found:
            raise Unfit("no event is in it")
        return found.pop()

    def _claim(self, origin: PubKey, producer: str, voucher: str) -> None:
        """:raises Unfit: the producer is another's, or has not signed for this sender, or the sender has too many."""
        key = _key_of(producer)
        signed = key is not None and (key == origin or is_vouched(key, origin, voucher))
        place = self.root / PRODUCERS
        with self._guard:
            try:
                owner, _, words = (place / producer).read_text().strip().partition("\n")
            except FileNotFoundError:
                owner = words = ""
            if owner == origin.hex() and (signed <= (words == SIGNED)):
                return
            if key is not None and not signed:
                raise Unfit(
                    f"producer {producer[:16]} is a public key, and has not signed for this sender: its server does "
                    "so when it starts with --telemetry and the directory of these files"
                )
            if owner and not signed:
                raise Unfit(
                    f"producer {producer[:16]} belongs to {owner[:16]}; if it has moved, remove {PRODUCERS}/{producer}"
                    " at the collector"
                )
            # of a claim that the power cut there is nothing
            if owner != origin.hex():
                self._check_number(origin)
            if owner not in ("", origin.hex()):
                _log.warn(
                    "producer {producer} has signed for {origin}, and belongs to it: {owner} brought events in its "
                    "name until now, which are below {owner_directory}",
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
            _sync(place)

    def _check_number(self, origin: PubKey) -> None:
        place = self.root / PRODUCERS
        mine = sum(path.read_text().startswith(origin.hex()) for path in place.iterdir())
        if mine >= PRODUCERS_LIMIT:
            raise Unfit(f"this sender has brought {mine} producers already")


def _key_of(producer: str) -> PubKey | None:
    """The public key that a producer is; None: a name.

    :raises Unfit: a key in another spelling would be another producer.
    """
    try:
        key = PubKey.from_hex(producer)
    except KeyFormatError:
        return None
    if key.hex() != producer:
        raise Unfit("a producer's key is not in lower case")
    return key


def _is_cut(error: Exception) -> bool:
    """Whether a line could not be read because its end is missing, and for no other reason."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())


def _check_size(file: IO[bytes]) -> tuple[int, bool]:
    """Bytes of text, and whether the file is torn.

    :raises Unfit: it is no gzip, or more than :data:`TEXT_LIMIT` when unpacked.
    """
    size = 0
    try:
        for piece in unpacked(file):
            size += len(piece)
            if size > TEXT_LIMIT:
                raise Unfit(f"it has more than {TEXT_LIMIT} bytes of text")
    except EOFError:
        return size, True
    except zlib.error:
        if not size:
            raise Unfit("it is not packed by gzip") from None
        return size, True  # what lies before the tear is read
    return size, False


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
