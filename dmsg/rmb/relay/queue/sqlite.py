"""Queues of a relay in an SQLite file, for one process."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.base.bounded_tables import decrement
from dmsg.databases import prepare_database
from dmsg.net.isolate import call_isolated
from dmsg.net.reactor import cancel_call
from dmsg.net.turn_end import at_turn_end
from dmsg.rmb.errors import QueueUnavailable
from dmsg.rmb.relay.queue.interface import (
    BATCH,
    BATCH_BYTES,
    FEDERATION,
    REFUSALS,
    QueuedMessage,
    QueueId,
    QueueLimits,
    QueueWatcher,
    RelayQueue,
)
from dmsg.rmb.relay.queue.removals import Removals
from dmsg.rmb.relay.queue.reserve import Reserve

MAX_REMOVED_PER_CALL = 1000
"""Maximum number of expired messages that are removed in one call."""
RETRY_EVERY = 1.0
"""Seconds between two attempts to write to the file, while writing fails."""

_log = Logger()


def _rows_within_limit(cursor: sqlite3.Cursor, column: int) -> list[Any]:
    """Return rows until the lengths in one column add up to ``BATCH_BYTES``."""
    rows = []
    size = 0
    for row in cursor:
        # The row that exceeds the limit is still returned. Otherwise a message above BATCH_BYTES would never be read.
        rows.append(row)
        size += len(row[column])
        if size >= BATCH_BYTES:
            break
    cursor.close()
    return rows


@implementer(RelayQueue)
class SQLiteQueue:
    """Queues in an SQLite file, for one process.

    The appends of a reactor turn are committed together at its end. A commit does not wait for the disk
    (``synchronous=NORMAL``) unless the queue is durable (``synchronous=FULL``). Committed messages survive ``kill -9``,
    and in a durable queue also a power cut. In any other queue, a power cut loses the messages that the operating
    system has not written yet, at most those since the last checkpoint. A power cut never damages the file.

    While the file cannot be written, for example because the disk is full, appends are refused. Messages that are
    delivered meanwhile are remembered, not returned again, and deleted as soon as possible. Disk space is reserved for
    their deletion.

    :param durable: whether an append waits until the message is on the disk.
    :ivar trouble: reason why appends are refused now, or None.
    """

    def __init__(
        self, path: str, clock: IReactorTime, limits: QueueLimits | None = None, *, durable: bool = False
    ) -> None:
        """:raises QueueUnavailable: the database cannot be opened, or another process uses it."""
        self._path = path
        self._clock = clock
        self.limits = limits or QueueLimits()
        self._watcher: QueueWatcher | None = None
        try:
            with prepare_database(path, 1.0) as self._db:
                # The lock prevents a second process from using the file. Both would deliver every message.
                self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._db.execute("BEGIN EXCLUSIVE")
                self._db.execute(
                    """CREATE TABLE IF NOT EXISTS messages (
                        id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL, until REAL NOT NULL,
                        data BLOB NOT NULL, sender INTEGER NOT NULL DEFAULT 0)"""
                )
                if "sender" not in {row[1] for row in self._db.execute("PRAGMA table_info(messages)")}:
                    self._db.execute("ALTER TABLE messages ADD COLUMN sender INTEGER NOT NULL DEFAULT 0")
                self._db.execute("CREATE INDEX IF NOT EXISTS of_session ON messages (session, id)")
                self._db.execute("CREATE INDEX IF NOT EXISTS by_time ON messages (until)")
                self._db.execute("COMMIT")
                self._sizes: dict[str, list[int]] = {}
                self._from: Counter[int] = Counter()
                self.total = 0
                self._count()
        except sqlite3.Error as error:
            raise QueueUnavailable(f"{path}: {error}") from None
        self._waiting: list[tuple[Deferred[QueueId], int]] = []
        self._open = False
        self._last_taken: QueueId | None = None
        self.trouble: str | None = None
        self._removals = Removals()
        self._deleting: list[tuple[str, Sequence[QueueId]]] = []
        self._retrying: IDelayedCall | None = None
        self._reserve = None if path == ":memory:" else Reserve(path)
        if self._reserve is not None and not self._reserve.take():
            self._in_trouble("the disk is full, or nearly")

    def __len__(self) -> int:
        return sum(count for count, _ in self._sizes.values())

    @property
    def forgotten(self) -> int:
        return self._removals.forgotten

    def _begin(self) -> None:
        if not self._open:
            self._db.execute("BEGIN IMMEDIATE")
            self._open = True
            # All writes of a reactor turn share one commit, because a commit takes longer than an insert.
            at_turn_end(self._clock)(self._commit)

    def _commit(self) -> None:
        if not self._open:
            return
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo(error)
            return
        self._open = False
        # The Deferreds fire only after the commit, because a message that is reported as stored must survive a killed
        # process.
        deleting, self._deleting = self._deleting, []
        for session, ids in deleting:
            self._removals.done(session, ids)
        waiting, self._waiting = self._waiting, []
        for deferred, number in waiting:
            deferred.callback(number)

    def _undo(self, error: sqlite3.Error) -> None:
        """Roll back a failed transaction, refuse appends from now on, and count the stored messages again."""
        self._open = False
        self._deleting = []
        waiting, self._waiting = self._waiting, []
        try:
            self._db.rollback()
            self._count()
        except sqlite3.Error as another:
            _log.error("the queue cannot be read: {error}", error=str(another))
        self._in_trouble(str(error))
        for deferred, _ in waiting:
            deferred.errback(QueueUnavailable(str(error)))

    def _failed(self, error: sqlite3.Error) -> None:
        """Process the failure of a statement. SQLite may have rolled back the other statements of its transaction."""
        # After some errors, such as a full disk, SQLite ends the whole transaction. Then the other appends of this
        # reactor turn are lost as well, and their callers must get the error.
        if self._open and not self._db.in_transaction:
            self._undo(error)
        self._in_trouble(str(error))

    # --- a file that cannot be written ---

    def _in_trouble(self, reason: str) -> None:
        if self.trouble is None:
            _log.error("the queue cannot be written to; messages are refused until it can: {error}", error=reason)
        self.trouble = reason
        if self._retrying is None:
            self._retrying = self._clock.callLater(RETRY_EVERY, self._retry)

    def _checkpoint(self) -> None:
        """Move SQLite's log into the database, so that the data do not take up space in both."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _free_bytes(self) -> int:
        """Return the number of bytes in free pages of the database."""
        try:
            pages, size = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_size"))
        except sqlite3.Error:
            return 0
        return int(pages * size)

    def _cancel_retry(self) -> None:
        retrying, self._retrying = self._retrying, None
        cancel_call(retrying)

    def _retry(self) -> None:
        """Delete the messages that were delivered while the file could not be written. Then accept appends again if
        there is space."""
        self._retrying = None
        self._commit()
        if self._removals and self._reserve is not None:
            self._reserve.release()
            if self._reserve.suffices_for(self._path + "-wal"):
                self._checkpoint()
        found = self._removals.oldest()
        try:
            self._begin()
            for session, ids in found.items():
                self._delete(session, ids)
                self._deleting.append((session, ids))
        except sqlite3.Error as error:
            self._undo(error)
            return
        self._commit()
        if self._retrying is not None:
            return  # The commit has failed, and has scheduled the next retry.
        self._checkpoint()
        if self._removals:
            self._retrying = self._clock.callLater(0, self._retry)
        elif self._reserve is None or self._reserve.take(self._free_bytes()):
            self.trouble = None
            _log.info("the queue can be written to again")
        else:
            self._in_trouble("the disk is full, or nearly")

    def _count(self) -> None:
        rows = self._db.execute("SELECT session, count(*), sum(length(data)) FROM messages GROUP BY session")
        self._sizes = {row[0]: [row[1], row[2]] for row in rows}
        self.total = sum(size for _, size in self._sizes.values())
        self._from = Counter(
            dict(self._db.execute("SELECT sender, sum(length(data)) FROM messages WHERE sender GROUP BY sender"))
        )

    def _refusal(self, size: int, sender: int) -> str | None:
        """Return the reason to refuse a message because of a limit; None if it is within the limits."""
        if self.total + size > self.limits.total:
            return REFUSALS[0]
        if sender and self._from[sender] + size > self.limits.sender_size:
            return REFUSALS[1].format(sender=sender)
        return None

    def append(self, session: str, data: bytes, until: float, sender: int = 0) -> Deferred[QueueId]:
        refusal = self._refusal(len(data), sender)
        if refusal is not None:
            return fail(QueueUnavailable(refusal))
        if self.trouble is not None:
            return fail(QueueUnavailable(self.trouble))
        try:
            self._begin()
            cursor = self._db.execute(
                "INSERT INTO messages (session, until, data, sender) VALUES (?, ?, ?, ?)",
                (session, until, data, sender),
            )
        except sqlite3.Error as error:
            self._failed(error)
            return fail(QueueUnavailable(str(error)))
        sizes = self._sizes.setdefault(session, [0, 0])
        sizes[0] += 1
        sizes[1] += len(data)
        self.total += len(data)
        if sender:
            self._from[sender] += len(data)
        deferred: Deferred[QueueId] = Deferred()
        self._waiting.append((deferred, cursor.lastrowid or 0))
        if session != FEDERATION and (sizes[0] > self.limits.messages or sizes[1] > self.limits.size):
            # An error here is only logged: the message is stored, even if the oldest ones could not be evicted.
            call_isolated(self._drop_oldest, session, sizes)
        return deferred

    def _drop_oldest(self, session: str, sizes: list[int]) -> None:
        rows = self._db.execute("SELECT id, length(data) FROM messages WHERE session = ? ORDER BY id", (session,))
        ids: list[QueueId] = []
        over, size = sizes[0] - self.limits.messages, sizes[1]
        for number, length in rows:
            if len(ids) >= over and size <= self.limits.size:
                break
            ids.append(number)
            size -= length
        self._delete(session, ids)
        if self._watcher is not None:
            self._watcher.dropped(session, len(ids))

    def _delete(self, session: str, ids: Sequence[QueueId]) -> None:
        for number in ids:
            row = self._db.execute(
                "DELETE FROM messages WHERE id = ? RETURNING length(data), sender", (number,)
            ).fetchone()
            if row is not None:
                self._forget(session, *row)

    def _forget(self, session: str, length: int, sender: int) -> None:
        self.total -= length
        if sender:
            decrement(self._from, sender, length)
        sizes = self._sizes.get(session)
        if sizes is None:
            return
        sizes[0] -= 1
        sizes[1] -= length
        if not sizes[0]:
            del self._sizes[session]

    def read(self, session: str, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        if session not in self._sizes:
            return succeed([])
        try:
            while True:
                cursor = self._db.execute(
                    "SELECT id, data FROM messages WHERE session = ? AND id > ? ORDER BY id LIMIT ?",
                    (session, after or 0, BATCH),
                )
                batch = [QueuedMessage(*row) for row in _rows_within_limit(cursor, 1)]
                left = self._removals.without_removed(session, batch)
                if left or not batch:
                    return succeed(left)
                after = batch[-1].id
        except sqlite3.Error as error:
            return fail(QueueUnavailable(str(error)))

    def poll(self, sessions: Sequence[str]) -> Deferred[list[str]]:
        return succeed([])

    def remove(self, session: str, ids: Sequence[QueueId]) -> None:
        # Readers must skip these messages until the deletion is committed. Otherwise they would be delivered twice.
        self._removals.add(session, ids)
        if self.trouble is not None:
            return  # The ids are remembered; the next retry deletes all these messages together.
        try:
            self._begin()
            self._delete(session, ids)
            self._deleting.append((session, ids))
        except sqlite3.Error as error:
            self._failed(error)

    def expired(self, now: float) -> Deferred[list[tuple[str, bytes]]]:
        try:
            cursor = self._db.execute(
                "SELECT id, session, data FROM messages WHERE until <= ? ORDER BY until LIMIT ?",
                (now, MAX_REMOVED_PER_CALL),
            )
            rows = [row for row in _rows_within_limit(cursor, 2) if not self._removals.has(row[1], row[0])]
        except sqlite3.Error as error:
            return fail(QueueUnavailable(str(error)))
        for number, session, _ in rows:
            self.remove(session, [number])
        return succeed([(session, data) for _, session, data in rows])

    def watch(self, watcher: QueueWatcher) -> None:
        self._watcher = watcher

    def present(self, sessions: Sequence[str]) -> None:
        """Do nothing. Only one process uses the file, so no other process needs to know where a session is
        connected."""

    def note_absent(self, session: str) -> None:
        """Do nothing. Only one process uses the file, so no other process needs to know where a session is
        connected."""

    def note_connected(self, session: str) -> None:
        """Do nothing. Only one process uses the file, so no other process needs to know where a session is
        connected."""

    def take_federation(self) -> Deferred[list[QueuedMessage]]:
        def taken(batch: list[QueuedMessage]) -> list[QueuedMessage]:
            if batch:
                self._last_taken = batch[-1].id
            return batch

        return self.read(FEDERATION, self._last_taken).addCallback(taken)

    def release_federation(self) -> None:
        self._last_taken = None

    def is_elsewhere(self, session: str) -> Deferred[bool]:
        return succeed(False)

    def close(self) -> Deferred[None]:
        self._commit()
        tried = 0
        while len(self._removals) not in (0, tried):
            # The loop ends if an attempt deleted nothing, for example because the disk is full.
            tried = len(self._removals)
            self._retry()
            self._cancel_retry()
        self._cancel_retry()
        call_isolated(self._db.close)
        if self._reserve is not None:
            self._reserve.remove()
        return succeed(None)
