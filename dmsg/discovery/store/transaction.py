"""Atomic changes of a store."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dmsg.discovery.store.base import StoreContended

ATTEMPTS = 8
"""Attempts at a change in Redis; the change is refused when another process interfered with each of them."""

Result = TypeVar("Result")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all changes of the block, or none. If the disk is full SQLite rolls back by itself, and its error is
    kept."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


async def attempt(change: Callable[[], Awaitable[Result | None]]) -> Result:
    """Return the result of an optimistic change: read, decide, then write unless what was read has changed.

    :param change: makes one attempt; returns None if what it read had changed before it wrote.
    :raises StoreContended: each of :data:`ATTEMPTS` attempts failed.
    """
    for _ in range(ATTEMPTS):
        result = await change()
        if result is not None:
            return result
    raise StoreContended(f"other processes changed the entry during each of {ATTEMPTS} attempts")
