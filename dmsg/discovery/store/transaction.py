"""Atomic changes of a store: transactions of SQLite, and optimistic changes in Redis."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.python.failure import Failure

from dmsg.discovery.store.base import StoreContended
from dmsg.net.turn_end import AtTurnEnd

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


class Changes:
    """Atomic changes of a database.

    Without ``at_turn_end``, each change is made at once, in a transaction of its own. With it, changes wait for the end
    of the reactor turn, and are then made in one transaction, in the order in which they were requested. A transaction
    for each change would take twice the time, and in a durable store each transaction waits for the disk. The database
    is locked only while the changes are made, not while requests are parsed and signatures are verified.
    """

    def __init__(self, db: sqlite3.Connection, at_turn_end: AtTurnEnd | None = None) -> None:
        self._db = db
        self._at_turn_end = at_turn_end
        self._waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def make(self, change: Callable[[], Result]) -> Deferred[Result]:
        """Make a change. The Deferred fires with the result of ``change`` once the change is committed.

        If ``change`` raises an exception, nothing of this change is written, and the Deferred fails with the exception.
        If the transaction cannot be committed, the Deferreds of all changes in it fail with the same error.
        """
        if self._at_turn_end is None:
            return self._make_now(change)
        if not self._waiting:
            self._at_turn_end(self.commit)
        deferred: Deferred[Result] = Deferred()
        self._waiting.append((change, deferred))
        return deferred

    def make_at_once(self, change: Callable[[], Result]) -> Deferred[Result]:
        """Make the changes that wait, and then this change in a transaction of its own."""
        self.commit()
        return self._make_now(change)

    def _make_now(self, change: Callable[[], Result]) -> Deferred[Result]:
        try:
            with transaction(self._db):
                result = change()
        except Exception:
            return fail()
        return succeed(result)

    def commit(self) -> None:
        """Make the changes that wait, in one transaction, and fire their Deferreds."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        results: list[Any]
        try:
            with transaction(self._db):
                results = [self._attempt(change) for change, _ in waiting]
        except Exception:
            # The result of each change, including a refusal, may depend on earlier changes of the transaction.
            results = [Failure() for _ in waiting]
        for (_, deferred), result in zip(waiting, results, strict=True):
            # A Failure makes the Deferred fail.
            deferred.callback(result)

    def _attempt(self, change: Callable[[], Any]) -> Any:
        """Make one change of a transaction; return its result, or a Failure if nothing of the change was written."""
        db = self._db
        db.execute("SAVEPOINT change")
        try:
            result = change()
        except Exception:
            # After some errors, such as a full disk, SQLite rolls back the whole transaction.
            if not db.in_transaction:
                raise
            db.execute("ROLLBACK TO change")
            result = Failure()
        db.execute("RELEASE change")
        return result


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
