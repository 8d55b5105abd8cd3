"""Sealed files of receipts, as servers write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from dmsg.keys import SecKey
from dmsg.telemetry.receipts import Receipt, Role

DAY = date(2026, 3, 10)
SERVER, OTHER, OPERATOR = (SecKey.from_seed(name) for name in (b"server", b"other", b"operator"))
A, B, C = (SecKey.from_seed(name) for name in (b"a", b"b", b"c"))


def transport(number: int) -> bytes:
    return number.to_bytes(16, "big")


def signed(
    number: int,
    role: Role,
    signer: SecKey,
    peer: SecKey,
    sent: int,
    received: int,
    server: SecKey = SERVER,
) -> bytes:
    """Return the 198 bytes of the receipt of one end."""
    receipt = Receipt(role, transport(number), server.public, signer.public, peer.public, sent, received)
    return receipt.sign(signer)


def both(number: int, ab: int, ba: int, *, a: SecKey = A, b: SecKey = B, server: SecKey = SERVER) -> list[bytes]:
    """Return the receipts of both ends, which agree."""
    return [
        signed(number, Role.INITIATOR, a, b, ab, ba, server),
        signed(number, Role.RESPONDER, b, a, ba, ab, server),
    ]


def line(receipt: bytes, day: date = DAY, *, server: SecKey = SERVER, time: str = "12:00:00", **fields: Any) -> bytes:
    """Return a line of a spool with this receipt."""
    at = datetime.fromisoformat(f"{day}T{time}").replace(tzinfo=UTC)
    row = {
        "v": 1,
        "type": "receipt",
        "producer": server.public.hex(),
        "role": "server",
        "boot": "00" * 16,
        "seq": 0,
        "ts": int(at.timestamp() * 1000),
        "mono": 0,
        "receipt": receipt.hex(),
        "peer": "0" * 16,
        **fields,
    }
    return json.dumps(row, separators=(",", ":")).encode()


def write(path: Path, lines: Iterable[bytes]) -> Path:
    """Write a sealed file with these lines; the same lines always give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(one + b"\n" for one in lines), mtime=0))
    return path


BEFORE, AFTER = DAY - timedelta(1), DAY + timedelta(1)
