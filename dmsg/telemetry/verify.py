"""Verification of receipts, before the pipeline counts them.

Verification does not need Spark: one receipt takes 41 us of elliptic curve arithmetic, and keys and secrets stay
out of the cluster. Each sealed file of receipts becomes a file of checked ones, with the same lines in the
same order. A receipt that is rejected keeps its place, with the reason. The new file is named by the digest
of the old one, so that a file delivered twice is checked and counted once.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from dmsg.telemetry.lines import lines_of
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipts import ReceiptError, Role, parse_receipt
from dmsg.telemetry.receipts_seen import NAME, ReceiptsSeen
from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX
from dmsg.telemetry.spool_listing import Reason, list_sealed, reason_of

_KEPT = ("v", "ts", "mono", "producer", "role", "boot", "seq", "peer", "former")
SHOWN = 200
"""Bytes of an unreadable line that are kept."""
FILE_LIMIT = 512 * 1024 * 1024
"""Maximum number of bytes of text read from one file of receipts."""


@dataclass
class Verification:
    """Result of a verification."""

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
    """Turn a line of a spool into a line for the pipeline.

    Every line is parsed and written anew: a line that two programs read differently could pass as an event in
    one of them.

    :param is_new: whether no receipt of this transport and signer was accepted before.
    :returns: the line, whether its receipt is accepted (None if the line has none), and why not.
    """
    try:
        row = json.loads(line)
        kind = row["type"]
        if kind == "segment_end":
            return _written(row), None, ""
        if kind not in ("receipt", "receipt_checked"):
            return _unreadable(line), None, ""
        text = row["receipt"] if kind == "receipt" else None
        row = {name: row[name] for name in _KEPT if name in row} | {"type": "receipt_checked"}
        try:
            if text is None:
                raise ReceiptError("the spool marks the receipt as checked already; only the pipeline checks receipts")
            receipt = parse_receipt(bytes.fromhex(text))
            if receipt.server.hex() != row["producer"]:
                raise ReceiptError("the receipt is for another server than the one that reports it")
            if not is_new(receipt.transport, receipt.signer):
                raise ReceiptError("the receipt was handed in before")
        except ReceiptError as error:
            row["reason"] = str(error)
        else:
            row["transport"] = receipt.transport.hex()
            row["server"] = receipt.server.hex()
            row["signer"] = names.client(receipt.signer)
            row["partner"] = names.client(receipt.peer)
            row["initiator"] = receipt.role is Role.INITIATOR
            row["delivered_out"], row["delivered_in"] = receipt.delivered_out, receipt.delivered_in
        return _written(row), "reason" not in row, str(row.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _unreadable(line), None, ""


def _written(row: Mapping[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _unreadable(line: bytes) -> bytes:
    """Return a line that the pipeline keeps in quarantine."""
    return b"not read: " + json.dumps(line[:SHOWN].decode(errors="replace")).encode() + b"\n"


def verify_spool(spool: Path, target: Path, names: Pseudonyms) -> Verification:
    """Check the receipts of all files that were not checked before.

    :param spool: directory of the files, read recursively.
    :param target: directory that gets a checked file for each.
    :raises OSError: a file cannot be written.
    :raises DmsgError: the database of accepted receipts cannot be used.
    """
    found = Verification()
    target.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(ReceiptsSeen(target / NAME)) as seen:
        _verify(spool, target, names, seen, found)
    return found


def _verify(spool: Path, target: Path, names: Pseudonyms, seen: ReceiptsSeen, found: Verification) -> None:
    listing = list_sealed(spool, [f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}"])
    found.left = listing.left
    for sealed in listing.files:
        with contextlib.ExitStack() as files:
            try:
                # The file is opened once, because it may be removed at any time to make room for a newer one.
                source = files.enter_context(open(sealed.path, "rb"))
                digest = hashlib.file_digest(source, "sha256").hexdigest()[:32]
                source.seek(0)
            except OSError as error:
                listing.left[reason_of(error)].add(sealed.path)
                continue
            _verify_file(source, digest, target, names, seen, found)


def _verify_file(
    source: IO[bytes], digest: str, target: Path, names: Pseudonyms, seen: ReceiptsSeen, found: Verification
) -> None:
    """Check the receipts of a file, unless a file with the same content was checked before."""
    checked = target / f"{RECEIPTS_PREFIX}{digest}{SEGMENT_SUFFIX}"
    if checked.exists():
        return
    fresh = target / f".{checked.name}.{os.getpid()}.part"
    seen.begin()
    with gzip.open(fresh, "wb", 3) as file:
        for line in lines_of(source, FILE_LIMIT):
            written, believed, reason = check_line(line, names, partial(seen.is_new, file=digest))
            file.write(written)
            found.believed += believed is True
            if believed is False:
                found.refused += 1
                found.reasons[reason] += 1
    seen.keep()
    fresh.replace(checked)
    found.files += 1
