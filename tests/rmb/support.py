"""What the tests of the message bus share."""

from __future__ import annotations

import json
from typing import Any

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from tests.support import VECTORS


def vectors(name: str) -> Any:
    """A file of ``tests/vectors/rmb``."""
    return json.loads((VECTORS / "rmb" / f"{name}.json").read_text())


def envelope_of(row: dict[str, Any]) -> Envelope:
    """The envelope that a row of challenges.json describes."""
    envelope = Envelope(uid=row["uid"], timestamp=row["timestamp"], expiration=row["expiration"])
    for name in ("tags", "schema", "federation"):
        if name in row:
            setattr(envelope, name, row[name])
    for name in ("source", "destination"):
        if name in row:
            getattr(envelope, name).twin = row[name]["twin"]
            getattr(envelope, name).SetInParent()
            if "connection" in row[name]:
                getattr(envelope, name).connection = row[name]["connection"]
    if "request" in row:
        envelope.request.command = row["request"]["command"]
    if "error" in row:
        envelope.error.code = row["error"]["code"]
        envelope.error.message = row["error"]["message"]
        envelope.error.SetInParent()
    for name in ("response", "ping", "pong"):
        if name in row:
            getattr(envelope, name).SetInParent()
    for name in ("plain", "cipher"):
        if f"{name}_hex" in row:
            setattr(envelope, name, bytes.fromhex(row[f"{name}_hex"]))
    envelope.relays.extend(row.get("relays", ()))
    return envelope
