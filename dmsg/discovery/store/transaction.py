"""Atomic changes of a store: transactions of SQLite, and optimistic changes in Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dmsg.discovery.store.base import StoreContended

ATTEMPTS = 8
"""Maximum number of attempts at a change in Redis. If other processes interfere with all of them, the change fails."""

Result = TypeVar("Result")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Context manager that commits all changes made within it or, after an exception, none of them.

    The exception is raised again. If the disk was full, SQLite has already rolled back.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


async def attempt(change: Callable[[], Awaitable[Result | None]]) -> Result:
    """Repeat an optimistic change until an attempt succeeds, and return its result.

    An optimistic change reads values, decides, and writes only if nobody has changed these values since then.

    :param change: makes one attempt; returns None if the values had changed.
    :raises StoreContended: each of :data:`ATTEMPTS` attempts failed.
    """
    for _ in range(ATTEMPTS):
        result = await change()
        if result is not None:
            return result
    raise StoreContended(f"other processes changed the nameplate during each of {ATTEMPTS} attempts")
