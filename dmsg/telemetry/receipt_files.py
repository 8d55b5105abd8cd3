"""Verification of one file of receipts, in two steps. Each step can run in any process that can read the file.

The first step verifies the signatures. The second step writes the checked file, with pseudonyms in place of the
clients' keys. Only one process has the secret of the pseudonyms and the database of accepted receipts. Between the two
steps, it looks up the receipts and the keys that the first step has found.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from dmsg.telemetry.lines import lines_of
from dmsg.telemetry.receipts import Receipt, ReceiptError, Role, parse_receipt, unpack_verified
from dmsg.telemetry.receipts_seen import receipt_id
from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX
from dmsg.telemetry.spool_listing import Reason, reason_of

_KEPT = ("v", "ts", "mono", "producer", "role", "boot", "seq", "peer", "former")
_NOT_READ = b"not read: "
REPEATED = "the receipt was submitted before"
MAX_COPIED_SIZE = 200
"""Maximum number of bytes of an unreadable line to copy."""
FILE_LIMIT = 512 * 1024 * 1024
"""Maximum number of bytes of text read from one file of receipts."""
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of Python for a line that is no event."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class UnreadFile:
    """File that cannot be read, and the reason."""

    path: str
    reason: Reason


@dataclass(frozen=True)
class VerifiedFile:
    """File whose signatures were verified. Whether its receipts occurred in other files before is not known yet.

    :ivar digest: first half of the file's SHA-256, in hexadecimal.
    :ivar signed: for each receipt in order, 1 if its signature is valid, otherwise 0.
    :ivar receipts: ids (``receipts_seen.receipt_id``) of the valid receipts, in order.
    :ivar keys: 33 bytes of each key that the valid receipts name as an end.
    """

    path: str
    digest: str
    signed: bytes
    receipts: array[int]
    keys: frozenset[bytes]


@dataclass(frozen=True)
class CheckedFile:
    """File to write.

    :ivar source: the file of receipts.
    :ivar new: for each valid receipt in order, 1 if it did not occur in another file before.
    :ivar names: names of the clients' keys.
    :ivar fresh: path of the temporary file to write.
    """

    source: VerifiedFile
    new: bytes
    names: Mapping[bytes, str]
    fresh: str


@dataclass
class CheckedCounts:
    """Numbers of receipts in a checked file.

    :ivar believed: number of accepted receipts.
    :ivar reasons: number of rejected receipts by reason.
    """

    believed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def checked_path(target: Path, digest: str) -> Path:
    """Return the path of the checked file for a file with this digest."""
    return target / f"{RECEIPTS_PREFIX}{digest}{SEGMENT_SUFFIX}"


def temporary_path(checked: Path) -> Path:
    """Return a path next to a checked file. Two processes never get the same path, even on different machines."""
    return checked.with_name(f".{checked.name}.{secrets.token_hex(8)}.part")


def check_line(
    line: bytes,
    client: Callable[[bytes], str],
    is_new: Callable[[bytes, bytes], bool] = lambda transport, signer: True,
    parse: Callable[[bytes], Receipt] = parse_receipt,
) -> tuple[bytes, bool | None, str]:
    """Convert a line of a spool to a line for the pipeline.

    Every line is parsed and encoded again, because two programs may read one line differently. A line that is copied
    unchanged could contain an event for the pipeline that this function did not find.

    :param client: returns the name of a client's key in the tables.
    :param is_new: returns whether no receipt of this transport and signer was accepted before.
    :param parse: parses a receipt and verifies its signature.
    :returns: the new line; whether its receipt is accepted (None if the line has no receipt); and why it is rejected.
    """
    try:
        row, receipt, reason = _read_line(line, is_new, parse)
        if row["type"] == "segment_end":
            return _encode_row(row), None, ""
        if receipt is not None:
            row["transport"] = receipt.transport.hex()
            row["server"] = receipt.server.hex()
            row["signer"] = client(receipt.signer)
            row["partner"] = client(receipt.peer)
            row["initiator"] = receipt.role is Role.INITIATOR
            row["delivered_out"], row["delivered_in"] = receipt.delivered_out, receipt.delivered_in
        return _encode_row(row), receipt is not None, reason
    except _UNREADABLE:
        return _quarantine_line(line), None, ""


def _read_line(
    line: bytes, is_new: Callable[[bytes, bytes], bool], parse: Callable[[bytes], Receipt]
) -> tuple[dict[str, Any], Receipt | None, str]:
    """Parse a line of a spool and check its receipt.

    :param is_new: as for :func:`check_line`.
    :param parse: as for :func:`check_line`.
    :returns: fields for the pipeline; the receipt if it is accepted; and why it is rejected.
    :raises ValueError: the line is neither a receipt nor the end of a file. Other errors of ``_UNREADABLE`` mean the
        same.
    """
    row = json.loads(line)
    kind = row["type"]
    if kind == "segment_end":
        return row, None, ""
    if kind not in ("receipt", "receipt_checked"):
        raise ValueError("no receipt")
    text = row["receipt"] if kind == "receipt" else None
    row = {name: row[name] for name in _KEPT if name in row} | {"type": "receipt_checked"}
    try:
        if text is None:
            raise ReceiptError("the spool marks the receipt as checked already; only the pipeline checks receipts")
        receipt = parse(bytes.fromhex(text))
        if receipt.server.hex() != row["producer"]:
            raise ReceiptError("the receipt is for another server than the one that reports it")
        if not is_new(receipt.transport, receipt.signer):
            raise ReceiptError(REPEATED)
    except ReceiptError as error:
        return row | {"reason": str(error)}, None, str(error)
    return row, receipt, ""


def _encode_row(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _quarantine_line(line: bytes) -> bytes:
    """Return a line that is not JSON and contains the start of ``line``.  The pipeline puts it into quarantine."""
    return _NOT_READ + json.dumps(line[:MAX_COPIED_SIZE].decode(errors="replace")).encode() + b"\n"


def verify_file(target: Path, path: str) -> VerifiedFile | UnreadFile:
    """Verify the signatures of a file. If a file with the same content was checked before, only its digest is returned.

    :param target: directory of the checked files.
    """
    signed, receipts, keys = bytearray(), array("q"), set[bytes]()

    def parse(data: bytes) -> Receipt:
        signed.append(0)
        receipt = parse_receipt(data)
        signed[-1] = 1
        return receipt

    def add(transport: bytes, signer: bytes) -> bool:
        receipts.append(receipt_id(transport, signer))
        return True

    def verify(source: IO[bytes], digest: str) -> VerifiedFile:
        is_checked = checked_path(target, digest).exists()
        for line in () if is_checked else lines_of(source, FILE_LIMIT):
            with suppress(*_UNREADABLE):
                _, receipt, _ = _read_line(line, add, parse)
                if receipt is not None:
                    keys.update((bytes(receipt.signer), bytes(receipt.peer)))
        return VerifiedFile(path, digest, bytes(signed), receipts, frozenset(keys))

    return _with_file(path, verify)


def write_checked(checked: CheckedFile) -> CheckedCounts | UnreadFile:
    """Write the checked file of a file whose signatures were verified.

    :returns: numbers of accepted and rejected receipts. If the file has changed since its signatures were verified,
        :class:`UnreadFile`.
    :raises OSError: the checked file cannot be written.
    """
    signed, new = iter(checked.source.signed), iter(checked.new)
    counts = CheckedCounts()

    def parse(data: bytes) -> Receipt:
        # A receipt that is not valid is parsed again in full, which finds the reason.
        return unpack_verified(data) if next(signed) else parse_receipt(data)

    def write(source: IO[bytes], digest: str) -> CheckedCounts | UnreadFile:
        if digest != checked.source.digest:
            return UnreadFile(checked.source.path, Reason.GONE)
        try:
            with gzip.open(checked.fresh, "wb", 3) as file:
                write_lines(source, file)
        except BaseException:
            # On a full disk, the part that was written would take further room.
            Path(checked.fresh).unlink(missing_ok=True)
            raise
        return counts

    def write_lines(source: IO[bytes], file: gzip.GzipFile) -> None:
        for line in lines_of(source, FILE_LIMIT):
            written, believed, reason = check_line(
                line, checked.names.__getitem__, lambda transport, signer: bool(next(new)), parse
            )
            file.write(written)
            if believed is not None:
                counts.believed += believed
                counts.reasons.update([] if believed else [reason])

    return _with_file(checked.source.path, write)


def _with_file(path: str, use: Callable[[IO[bytes], str], _Result]) -> _Result | UnreadFile:
    """Call a function with an open file and the digest of its content."""
    try:
        # The file is opened only once, because the spool may remove it at any time to make room for a newer file.
        source = open(path, "rb")
    except OSError as error:
        return UnreadFile(path, reason_of(error))
    with source:
        try:
            digest = hashlib.file_digest(source, "sha256").hexdigest()[:32]
            source.seek(0)
        except OSError as error:
            return UnreadFile(path, reason_of(error))
        return use(source, digest)
