"""Atomic changes of a store: transactions of SQLite, and optimistic changes in Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from twisted.internet.defer import Deferred, succeed

from dmsg.discovery.store.base import StoreContended
from dmsg.net.turn_end import AtTurnEnd

ATTEMPTS = 8
"""Maximum number of attempts at a change in Redis. If other processes interfere with all of them, the change fails."""
ROLLED_BACK = "SQLite has rolled back the changes of this reactor turn"

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


class Changes:
    """Atomic changes of a database, and their acknowledgements.

    Without ``at_turn_end``, each change is a transaction of its own, and is acknowledged at once. With it, all changes
    of a reactor turn are one transaction. They are committed at the end of the turn, and acknowledged after that. In a
    durable store each commit waits for the disk, so a commit for each change would make the store slow.
    """

    def __init__(self, db: sqlite3.Connection, at_turn_end: AtTurnEnd | None = None) -> None:
        self._db = db
        self._at_turn_end = at_turn_end
        self._is_open = False
        self._waiting: list[Callable[[sqlite3.Error | None], None]] = []

    @contextmanager
    def change(self) -> Iterator[None]:
        """Context manager that makes all changes within it or, after an exception, none of them.

        The exception is raised again.
        """
        if self._at_turn_end is None:
            with transaction(self._db):
                yield
            return
        self._begin(self._at_turn_end)
        self._db.execute("SAVEPOINT change")
        try:
            yield
            self._db.execute("RELEASE change")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO change")
                self._db.execute("RELEASE change")
            raise

    def acknowledge(self, value: Result) -> Deferred[Result]:
        """Return a Deferred that fires with a value once the last change is committed. It fails with
        ``sqlite3.Error`` if the change cannot be committed."""
        if self._at_turn_end is None:
            return succeed(value)
        deferred: Deferred[Result] = Deferred()

        def committed(error: sqlite3.Error | None) -> None:
            if error is None:
                deferred.callback(value)
            else:
                deferred.errback(error)

        self._waiting.append(committed)
        return deferred

    def commit(self) -> None:
        """Commit the changes that are not committed yet."""
        if not self._is_open:
            return
        self._is_open = False
        error: sqlite3.Error | None = None
        try:
            if not self._db.in_transaction:
                raise sqlite3.OperationalError(ROLLED_BACK)
            self._db.execute("COMMIT")
        except sqlite3.Error as caught:
            error = caught
            if self._db.in_transaction:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
        self._acknowledge_all(error)

    def _begin(self, at_turn_end: AtTurnEnd) -> None:
        if self._is_open and not self._db.in_transaction:
            # After some errors, such as a full disk, SQLite rolls back the whole transaction.
            self._is_open = False
            self._acknowledge_all(sqlite3.OperationalError(ROLLED_BACK))
        if not self._is_open:
            self._db.execute("BEGIN IMMEDIATE")
            self._is_open = True
            at_turn_end(self.commit)

    def _acknowledge_all(self, error: sqlite3.Error | None) -> None:
        waiting, self._waiting = self._waiting, []
        for acknowledge in waiting:
            acknowledge(error)


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
