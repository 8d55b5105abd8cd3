"""Helpers of the tests of the message bus."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from tests.support import VECTORS


def vectors(name: str) -> Any:
    """Return a file of ``tests/vectors/rmb``."""
    return json.loads((VECTORS / "rmb" / f"{name}.json").read_text())


def envelope_of(row: dict[str, Any]) -> Envelope:
    """Return the envelope that a row of challenges.json describes."""
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


class StrictClock(Clock):
    """Clock that refuses calls in the past, as reactors do."""

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> IDelayedCall:
        assert delay >= 0, "a call in the past"
        return super().callLater(delay, callable, *args, **kw)


class Failing:
    """Connection to a database whose statements fail when the test says so.

    :ivar full: statements that begin with these words fail.
    :ivar rolls_back: whether a failing statement rolls back its transaction, as SQLite does on a full disk.
    :ivar seen: the statements so far.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.full: tuple[str, ...] = ()
        self.rolls_back = False
        self.seen: list[str] = []

    def execute(self, statement: str, *arguments: Any) -> Any:
        self.seen.append(statement)
        if self.full and statement.startswith(self.full):
            if self.rolls_back:
                self._connection.rollback()
            raise sqlite3.OperationalError("database or disk is full")
        return self._connection.execute(statement, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def fail_statements(queue: SQLiteQueue) -> Failing:
    """Put a failing connection between a queue and its database."""
    disk: Any = Failing(queue._db)
    queue._db = disk
    return disk
