"""Files of a spool, as entities write them."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

from dmsg.collector.wire import Offer

BOOT = "0123456789abcdef" * 2


def spool_name(number: int, boot: str = BOOT, prefix: str = "events-") -> str:
    return f"{prefix}{boot}-{number:06d}.jsonl.gz"


def packed(producer: str = "02ab", count: int = 3, first: int = 0) -> bytes:
    """Return the content of a finished file."""
    rows = ({"v": 1, "type": "heartbeat", "producer": producer, "seq": first + number} for number in range(count))
    return gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows), mtime=0)


def offer_of(name: str, data: bytes) -> Offer:
    return Offer(name, len(data), hashlib.sha256(data).hexdigest())


def kept_files(root: Path) -> dict[str, bytes]:
    """Return the files of a store, by name."""
    return {path.name: path.read_bytes() for path in root.glob("*/*/*.jsonl.gz")}
