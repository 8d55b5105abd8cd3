"""Atomic changes of a store."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dmsg.discovery.store.base import StoreContended

ATTEMPTS = 8
"""Maximum number of attempts at a change in Redis; if other processes interfere with all of them, the change is
refused."""

Result = TypeVar("Result")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager that commits all changes of its block, or none.  If the disk is full, SQLite rolls back by
    itself, and its original error is raised."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


async def attempt(change: Callable[[], Awaitable[Result | None]]) -> Result:
    """Return the result of an optimistic change, which reads, decides, and writes only if the values that it read have
    not changed.

    :param change: makes one attempt; returns None if what it read had changed before it wrote.
    :raises StoreContended: each of :data:`ATTEMPTS` attempts failed.
    """
    for _ in range(ATTEMPTS):
        result = await change()
        if result is not None:
            return result
    raise StoreContended(f"other processes changed the entry during each of {ATTEMPTS} attempts")
