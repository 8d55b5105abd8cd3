"""Changes of a store that happen whole, or not at all."""

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
    """All of it or nothing.  A full disk has SQLite roll back by itself, and the error is to be that one."""
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

    :param change: makes one attempt; None means that what it read had changed before it wrote.
    :raises StoreContended: so it was at each of :data:`ATTEMPTS`.
    """
    for _ in range(ATTEMPTS):
        result = await change()
        if result is not None:
            return result
    raise StoreContended(f"other processes changed it during each of {ATTEMPTS} attempts")
