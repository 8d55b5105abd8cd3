"""Verification of receipts, before the pipeline counts them.

Verification does not use Spark. A receipt takes only 41 us of elliptic curve arithmetic, so several processes on this
machine are fast enough. Keys and secrets then need not be sent to a cluster.

For each sealed file of receipts there is a new file of checked receipts, with a line for each line, in the same order.
The line of a rejected receipt states the reason. The name of the new file is the digest of the sealed file, so that a
file that is delivered twice is checked and counted once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import signal
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dmsg.errors import DmsgError
from dmsg.telemetry.lines import lines_of
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipts import ReceiptError, Role, parse_receipt
from dmsg.telemetry.receipts_seen import NAME, ReceiptsSeen, receipt_id
from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX
from dmsg.telemetry.spool_listing import Reason, list_sealed, reason_of

_KEPT = ("v", "ts", "mono", "producer", "role", "boot", "seq", "peer", "former")
_NOT_READ = b"not read: "
REPEATED = "the receipt was submitted before"
MAX_COPIED_SIZE = 200
"""Maximum number of bytes of an unreadable line to copy."""
FILE_LIMIT = 512 * 1024 * 1024
"""Maximum number of bytes of text read from one file of receipts."""
SMALL_BYTES = 2 * 1024 * 1024
"""Size in bytes of the unchecked files below which one process is faster than several, which have to be started."""
SUBMITTED_FILES_PER_PROCESS = 4
"""Maximum number of files per process that are submitted and whose results have not been read yet."""


@dataclass
class Verification:
    """Result of a verification.

    :ivar files: number of files that were checked.
    :ivar believed: number of accepted receipts.
    :ivar refused: number of rejected receipts.
    """

    files: int = 0
    believed: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of rejected receipts by reason."""
    left: dict[Reason, set[str]] = field(default_factory=dict)
    """Paths of files and directories that could not be read, by reason."""


def check_line(
    line: bytes, names: Pseudonyms, is_new: Callable[[bytes, bytes], bool] = lambda transport, signer: True
) -> tuple[bytes, bool | None, str]:
    """Convert a line of a spool to a line for the pipeline.

    Every line is parsed and encoded again, because two programs may read one line differently. A line that is copied
    unchanged could contain an event for the pipeline that this function did not find.

    :param is_new: returns whether no receipt of this transport and signer was accepted before.
    :returns: the new line; whether its receipt is accepted (None if the line has no receipt); and why it is rejected.
    """
    try:
        row = json.loads(line)
        kind = row["type"]
        if kind == "segment_end":
            return _encode_row(row), None, ""
        if kind not in ("receipt", "receipt_checked"):
            return _quarantine_line(line), None, ""
        text = row["receipt"] if kind == "receipt" else None
        row = {name: row[name] for name in _KEPT if name in row} | {"type": "receipt_checked"}
        try:
            if text is None:
                raise ReceiptError("the spool marks the receipt as checked already; only the pipeline checks receipts")
            receipt = parse_receipt(bytes.fromhex(text))
            if receipt.server.hex() != row["producer"]:
                raise ReceiptError("the receipt is for another server than the one that reports it")
            if not is_new(receipt.transport, receipt.signer):
                raise ReceiptError(REPEATED)
        except ReceiptError as error:
            row["reason"] = str(error)
        else:
            row["transport"] = receipt.transport.hex()
            row["server"] = receipt.server.hex()
            row["signer"] = names.client(receipt.signer)
            row["partner"] = names.client(receipt.peer)
            row["initiator"] = receipt.role is Role.INITIATOR
            row["delivered_out"], row["delivered_in"] = receipt.delivered_out, receipt.delivered_in
        return _encode_row(row), "reason" not in row, str(row.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _quarantine_line(line), None, ""


def _encode_row(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _quarantine_line(line: bytes) -> bytes:
    """Return a line that is not JSON and contains the start of ``line``.  The pipeline puts it into quarantine."""
    return _NOT_READ + json.dumps(line[:MAX_COPIED_SIZE].decode(errors="replace")).encode() + b"\n"


def verify_spool(spool: Path, target: Path, names: Pseudonyms, *, processes: int | None = None) -> Verification:
    """Check the receipts of all files that were not checked before.

    :param spool: directory of the files. Its subdirectories are read, too.
    :param target: directory for the new files of checked receipts.
    :param processes: number of processes that verify signatures; by default one for each core.
    :raises OSError: a file cannot be written.
    :raises DmsgError: the database of accepted receipts cannot be used.
    """
    found = Verification()
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(ReceiptsSeen(target / NAME)) as seen:
        listing = list_sealed(spool, [f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}"])
        found.left = listing.left
        unknown: list[str] = []
        size = 0
        for sealed in listing.files:
            digest = _known_digest(sealed.path, seen)
            if digest is None or not _checked_path(target, digest).exists():
                unknown.append(sealed.path)
                size += sealed.size
        number = (os.cpu_count() or 1) if processes is None else processes
        checks = _by_processes if number > 1 and size >= SMALL_BYTES else _in_this_process
        for one in checks(unknown, partial(_check_file, target, names), number):
            if isinstance(one, _Unread):
                listing.left[one.reason].add(one.path)
            else:
                _accept(one, target, seen, found)
    return found


def _known_digest(path: str, receipts_seen: ReceiptsSeen) -> str | None:
    """Return the digest of a file that was checked before; None if it was not, or has changed."""
    try:
        return receipts_seen.digest_of(path, os.stat(path))
    except OSError:
        return None


def _checked_path(target: Path, digest: str) -> Path:
    return target / f"{RECEIPTS_PREFIX}{digest}{SEGMENT_SUFFIX}"


@dataclass(frozen=True)
class _Unread:
    """File that cannot be read, and the reason."""

    path: str
    reason: Reason


@dataclass(frozen=True)
class _CheckedFile:
    """File whose signatures were verified. Whether its receipts occurred in other files before is not known yet.

    :ivar fresh: temporary file with the checked receipts; None if a file with the same content was checked before.
    :ivar receipts: ids of the receipts that are valid, in order.
    :ivar reasons: number of rejected receipts by reason.
    """

    path: str
    status: os.stat_result
    digest: str
    fresh: Path | None
    receipts: array[int]
    reasons: Counter[str]


_Check = Callable[[str], "_CheckedFile | _Unread"]


def _in_this_process(paths: list[str], check: _Check, processes: int) -> Iterator[_CheckedFile | _Unread]:
    return map(check, paths)


def _by_processes(paths: list[str], check: _Check, processes: int) -> Iterator[_CheckedFile | _Unread]:
    """Check files in several processes, and yield the results in the order of the paths."""
    # A fork server starts the processes. This process may have threads, such as Spark's, with which a plain fork is
    # unsafe.
    context = multiprocessing.get_context("forkserver")
    waiting: deque[Future[_CheckedFile | _Unread]] = deque()
    # The processes ignore Ctrl-C, because this process handles it and then stops them.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessPoolExecutor(processes, context, signal.signal, ignore) as pool:
            for path in paths:
                waiting.append(pool.submit(check, path))
                if len(waiting) >= SUBMITTED_FILES_PER_PROCESS * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DmsgError(
            "a process that verifies receipts has ended, perhaps for lack of memory: repeat the command"
        ) from None


def _check_file(target: Path, names: Pseudonyms, path: str) -> _CheckedFile | _Unread:
    """Verify the signatures of a file, and write a temporary file with the checked receipts. If a file with the same
    content was checked before, do nothing."""
    receipts, reasons = array("q"), Counter[str]()

    def add(transport: bytes, signer: bytes) -> bool:
        receipts.append(receipt_id(transport, signer))
        return True

    try:
        # The file is opened only once, because the spool may remove it at any time to make room for a newer file.
        source = open(path, "rb")
    except OSError as error:
        return _Unread(path, reason_of(error))
    with source:
        try:
            status = os.fstat(source.fileno())
            digest = hashlib.file_digest(source, "sha256").hexdigest()[:32]
            source.seek(0)
        except OSError as error:
            return _Unread(path, reason_of(error))
        checked = _checked_path(target, digest)
        if checked.exists():
            return _CheckedFile(path, status, digest, None, receipts, reasons)
        fresh = target / f".{checked.name}.{os.getpid()}.part"
        with gzip.open(fresh, "wb", 3) as file:
            for line in lines_of(source, FILE_LIMIT):
                written, believed, reason = check_line(line, names, add)
                file.write(written)
                if believed is False:
                    reasons[reason] += 1
    return _CheckedFile(path, status, digest, fresh, receipts, reasons)


def _accept(checked_file: _CheckedFile, target: Path, receipts_seen: ReceiptsSeen, verification: Verification) -> None:
    """Reject those receipts of a checked file that occurred in another file before, and rename the file to its final
    name."""
    checked = _checked_path(target, checked_file.digest)
    receipts_seen.begin()
    if checked_file.fresh is not None and not checked.exists():
        new = receipts_seen.are_new(checked_file.receipts, checked_file.digest)
        repeated = new.count(False)
        if repeated:
            _reject_repeated(checked_file.fresh, new)
        verification.files += 1
        verification.believed += len(new) - repeated
        verification.refused += repeated + checked_file.reasons.total()
        verification.reasons.update(checked_file.reasons)
        if repeated:
            verification.reasons[REPEATED] += repeated
    receipts_seen.add_file(checked_file.path, checked_file.status, checked_file.digest)
    receipts_seen.keep()
    if checked_file.fresh is not None:
        if checked.exists():
            checked_file.fresh.unlink()
        else:
            checked_file.fresh.replace(checked)


def _reject_repeated(fresh: Path, new: list[bool]) -> None:
    """Rewrite a checked file, so that receipts that occurred in another file before are rejected.

    :param new: whether each valid receipt is new, in order.
    """
    again = fresh.with_name(f"{fresh.name}.new")
    valid = iter(new)
    with gzip.open(fresh, "rb") as source, gzip.open(again, "wb", 3) as file:
        for line in source:
            kept = line
            row = None if line.startswith(_NOT_READ) else json.loads(line)
            if row is not None and row["type"] == "receipt_checked" and "reason" not in row and not next(valid):
                fields = {name: row[name] for name in (*_KEPT, "type") if name in row}
                kept = _encode_row({**fields, "reason": REPEATED})
            file.write(kept)
    again.replace(fresh)
