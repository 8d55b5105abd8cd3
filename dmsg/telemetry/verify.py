"""Checking the signatures of receipts, before the pipeline counts them.

Not in Spark: 41 us of elliptic curves for each need no cluster, and keys and
secrets stay out of it.  Each finished file of receipts becomes a file of
checked ones, with the same lines in the same order; one that is not believed
keeps its place and says why.  The file is named by what was read, so that the
same receipts, brought twice, are checked and counted once.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmsg.telemetry.lines import read_lines
from dmsg.telemetry.pseudonyms import Pseudonyms
from dmsg.telemetry.receipts import ReceiptError, Role, parse_receipt
from dmsg.telemetry.schema import RECEIPTS_PREFIX, SEGMENT_SUFFIX

FILE_LIMIT = 512 * 1024 * 1024
"""Bytes of text of one file of receipts; what is beyond is not read."""


@dataclass
class Checked:
    """What was found."""

    files: int = 0
    believed: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Why receipts are not believed, and how many."""


def check_line(line: bytes, names: Pseudonyms) -> tuple[bytes, bool | None, str]:
    """A line of a spool as a line for the pipeline.

    :returns: the line, whether its receipt is believed (None for what is no receipt), and why not.
    """
    try:
        row: Any = json.loads(line)
        if row["type"] != "receipt":
            return line, None, ""
        data = row.pop("receipt")
        row["type"] = "receipt_checked"
        try:
            receipt = parse_receipt(bytes.fromhex(data))
        except ReceiptError as error:
            row["reason"] = str(error)
        else:
            row["transport"] = receipt.transport.hex()
            row["server"] = receipt.server.hex()
            row["signer"] = names.client(receipt.signer)
            row["partner"] = names.client(receipt.peer)
            row["initiator"] = receipt.role is Role.INITIATOR
            row["delivered_out"], row["delivered_in"] = receipt.delivered_out, receipt.delivered_in
        text = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        return text, "reason" not in row, str(row.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return line, None, ""  # the pipeline keeps it in quarantine


def verify_spool(spool: Path, target: Path, names: Pseudonyms) -> Checked:
    """Check the receipts of all files that were not checked yet.

    :param spool: looked through with all below.
    :param target: gets a file for each.
    :raises OSError: it cannot be written.
    """
    found = Checked()
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(spool.rglob(f"{RECEIPTS_PREFIX}*{SEGMENT_SUFFIX}")):
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        except FileNotFoundError:
            continue  # it made room for a newer one
        checked = target / f"{RECEIPTS_PREFIX}{digest}{SEGMENT_SUFFIX}"
        if checked.exists():
            continue
        fresh = target / f".{checked.name}.{os.getpid()}.part"
        with gzip.open(fresh, "wb", 3) as file:
            for line in read_lines(path, FILE_LIMIT):
                written, believed, reason = check_line(line, names)
                file.write(written)
                found.believed += believed is True
                if believed is False:
                    found.refused += 1
                    found.reasons[reason] += 1
        fresh.replace(checked)
        found.files += 1
    return found
