"""Credits: bytes that servers delivered on a day, computed from the receipts of both ends of each transport.

The input is the sealed files of receipts that servers write. The result depends only on the contents of these files. It
does not depend on the names or the order of the files, on the servers' own counts, or on discovery
(docs/pipeline/statement.md).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path

from dmsg.errors import DmsgError
from dmsg.telemetry.lines import unpack_gzip
from dmsg.telemetry.receipts import RECEIPT_SIZE, Receipt, ReceiptError, Role, named_keys, parse_receipt
from dmsg.telemetry.schema import MAX_LINE, MAX_NUMBER

DAYS_BEFORE = 30
"""Default number of earlier days whose receipts are read as well, to detect repetitions. A receipt that a server
reports again within these days is not credited again.
"""
MAX_RECEIPT_BYTES = MAX_NUMBER
"""Maximum number of bytes that a receipt may state for a direction."""
FILE_LIMIT = 64 * 1024 * 1024
"""Maximum size in bytes of a file of receipts, and of its unpacked text. Servers seal files at 16 MiB of text."""
MAX_RECEIPTS = 4_000_000
"""Maximum number of different receipts of a day."""
DAY_MS = 86_400_000
_KEY = slice(2, 51)
"""Part of a receipt that consists of the transport's id and the server's key."""
_HEX = re.compile(f"[0-9a-f]{{{2 * RECEIPT_SIZE}}}")


class InputError(DmsgError):
    """Error: the receipts cannot be used. Its text says why."""


@dataclass(slots=True)
class Pair:
    """Credited transports of one server between two clients.

    :ivar bytes_ab: bytes from the initiator to the responder.
    """

    transports: int = 0
    bytes_ab: int = 0
    bytes_ba: int = 0


@dataclass(slots=True)
class ServerSum:
    """Sums of one server over a day.

    :ivar credited: bytes for which both ends signed.
    :ivar difference: sum of the differences between the counts of both ends, in bytes, over the credited transports.
    :ivar one_sided: number of transports with a receipt of only one end by the end of the day.
    :ivar conflict: number of transports for which several pairs of clients signed.
    """

    transports: int = 0
    credited: int = 0
    difference: int = 0
    one_sided: int = 0
    conflict: int = 0


PairKey = tuple[bytes, bytes, bytes]
"""Public keys of a server, of the initiator and of the responder."""


@dataclass
class Credits:
    """Credits of a day.

    :ivar first: first day whose receipts were considered.
    :ivar inputs: SHA-256 of each file that has receipts of the days considered, in hex.
    :ivar refused: number of receipts of the day that are not credited, by reason.
    :ivar damaged: reason for each file that was left out because it cannot be read completely, by path.
    """

    day: date
    first: date
    inputs: dict[str, Path] = field(default_factory=dict)
    servers: dict[bytes, ServerSum] = field(default_factory=dict)
    pairs: dict[PairKey, Pair] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    damaged: dict[Path, str] = field(default_factory=dict)


def compute_credits(
    files: Iterable[Path], day: date, first: date, about: bytes | None = None, only: Container[str] | None = None
) -> Credits:
    """Compute the credits of a day from sealed files of receipts.

    :param first: first day whose receipts are considered.
    :param about: public key; only receipts that name this server or client are considered.
    :param only: SHA-256 of the files to use, in hex; None for all files.
    :raises InputError: there are too many receipts.
    """
    reader = _Reader(Credits(day, first), about)
    for path in files:
        reader.read(path, only)
    reader.read_earlier()
    for key, receipts in reader.of_day.items():
        _settle(reader.found, key[16:], receipts)
    return reader.found


class _Reader:
    """Reader of files. It collects the receipts of the day by transport and server, with the first day on which each
    receipt occurs."""

    def __init__(self, credits: Credits, about: bytes | None) -> None:
        self.found = credits
        self.of_day: dict[bytes, dict[bytes, int]] = {}
        self._about = about
        self._low, self._high = _number(credits.first), _number(credits.day)
        self._count = 0
        self._earlier: list[tuple[str, Path]] = []

    def read(self, path: Path, only: Container[str] | None) -> None:
        """Read the receipts of the day from a file, and record whether the file also has receipts of earlier days."""
        try:
            digest, text = _read(path)
        except (OSError, InputError) as error:
            self.found.damaged[path] = getattr(error, "strerror", None) or str(error)
            return
        if digest in self.found.inputs or (only is not None and digest not in only):
            return
        days = set()
        for number, data, reason in self._select_receipts(text):
            days.add(number)
            if number == self._high:
                self._add(number, data, reason)
        if days:
            self.found.inputs[digest] = path
        if days - {self._high}:
            self._earlier.append((digest, path))

    def _select_receipts(self, text: bytes) -> Iterator[tuple[int, bytes, str]]:
        for number, data, reason in _receipts(text):
            if self._low <= number <= self._high and (self._about is None or self._about in _names(data)):
                yield number, data, reason

    def _add(self, number: int, data: bytes, reason: str) -> None:
        if reason:
            self.found.refused[reason] += 1
            return
        known = self.of_day.setdefault(data[_KEY], {})
        self._count += data not in known
        if self._count > MAX_RECEIPTS:
            raise InputError(f"there are more than {MAX_RECEIPTS:,} receipts of {self.found.day}")
        known[data] = number

    def read_earlier(self) -> None:
        """Read the receipts of earlier days for those transports that also have receipts of the day."""
        for digest, path in self._earlier:
            again, text = _read(path)
            if again != digest:
                raise InputError(f"{path} has changed while it was read")
            for number, data, reason in self._select_receipts(text):
                known = self.of_day.get(data[_KEY])
                if number < self._high and not reason and known is not None:
                    known[data] = min(number, known.get(data, number))


def _number(day: date) -> int:
    return (day - date(1970, 1, 1)) // timedelta(1)


def _read(path: Path) -> tuple[str, bytes]:
    """Return the SHA-256 of a file and its text.

    :raises InputError: the file is damaged or too large.
    """
    with open(path, "rb") as file:
        packed = file.read(FILE_LIMIT + 1)
    text = bytearray()
    try:
        for piece in unpack_gzip(io.BytesIO(packed)):
            text += piece
            if len(text) > FILE_LIMIT:
                break
    except (zlib.error, EOFError):
        raise InputError("the file is damaged or incomplete") from None
    if max(len(packed), len(text)) > FILE_LIMIT:
        raise InputError(f"the file is larger than {FILE_LIMIT >> 20} MiB")
    return hashlib.sha256(packed).hexdigest(), bytes(text)


def _receipts(text: bytes) -> Iterator[tuple[int, bytes, str]]:
    """Yield for each receipt the number of its day, its bytes, and a text that says why the receipt must not be
    credited, even if its signature is valid. The text is empty if the receipt may be credited."""
    for line in text.split(b"\n"):
        # Only lines with one flat JSON object in ASCII are accepted, because programs could read other lines
        # differently.
        if b'"receipt"' not in line or len(line) > MAX_LINE or line.count(b"{") != 1 or b"[" in line:
            continue
        try:
            row = json.loads(line.decode("ascii"))
        except ValueError:
            continue
        if not isinstance(row, dict) or row.get("type") != "receipt":
            continue
        at, receipt = row.get("ts"), row.get("receipt")
        if type(at) is not int or not isinstance(receipt, str) or not _HEX.fullmatch(receipt):
            continue
        data = bytes.fromhex(receipt)
        ours = named_keys(data)[1].hex() == row.get("producer")
        yield at // DAY_MS, data, "" if ours else "of another server than the one that reports it"


def _names(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the public keys of the server, the signer and the peer that a receipt names."""
    return data[18:51], data[51:84], data[84:117]


@dataclass(slots=True)
class _Word:
    """Receipts of one end of a transport, in short: their first day, and the smallest counts that they state."""

    day: int
    sent: int
    received: int


def _settle(credits: Credits, server: bytes, receipts: dict[bytes, int]) -> None:
    """Add the credits for one transport.

    :param receipts: first day of each receipt of the transport, by the receipt's bytes.
    """
    words: dict[tuple[Role, bytes, bytes], _Word] = {}
    today = _number(credits.day)
    for data, day in receipts.items():
        try:
            receipt = _parse(data)
        except ReceiptError as error:
            if day == today:
                credits.refused[str(error)] += 1
            continue
        word = words.setdefault(
            (receipt.role, receipt.signer, receipt.peer), _Word(day, receipt.delivered_out, receipt.delivered_in)
        )
        word.day = min(word.day, day)
        word.sent, word.received = min(word.sent, receipt.delivered_out), min(word.received, receipt.delivered_in)
    pairs = []
    for (role, a, b), word in words.items():
        other = words.get((Role.RESPONDER, b, a)) if role is Role.INITIATOR else None
        if other is not None:
            pairs.append((a, b, word, other))
    if not any(word.day == today for word in words.values()):
        return  # The server has submitted these receipts before, so they are not credited again.
    total = credits.servers.setdefault(server, ServerSum())
    if len(pairs) > 1:
        total.conflict += 1
        return
    if not pairs:
        total.one_sided += 1
        return
    ((a, b, one, other),) = pairs
    if max(one.day, other.day) != today:
        return
    pair = credits.pairs.setdefault((server, a, b), Pair())
    ab, ba = min(one.sent, other.received), min(other.sent, one.received)
    pair.transports += 1
    pair.bytes_ab += ab
    pair.bytes_ba += ba
    total.transports += 1
    total.credited += ab + ba
    total.difference += abs(one.sent - other.received) + abs(other.sent - one.received)


def _parse(data: bytes) -> Receipt:
    receipt = parse_receipt(data)
    if max(receipt.delivered_out, receipt.delivered_in) > MAX_RECEIPT_BYTES:
        raise ReceiptError("the receipt states more than 1 PiB")
    return receipt
