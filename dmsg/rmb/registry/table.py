"""Registry in an SQLite database, for the registry service, and in memory for tests."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.databases import prepare_database
from dmsg.net.isolate import call_isolated
from dmsg.rmb.errors import RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import PAGE, TwinRegistry, follow
from dmsg.rmb.twins.address import MAX_TWIN
from dmsg.rmb.twins.twin import Twin

_COLUMNS = "id, account, relay, pk, strict, counter, signature"


def _twin(row: tuple[int, bytes, str | None, bytes | None, int, int, bytes]) -> Twin:
    return Twin(row[0], row[1], row[2], row[3], bool(row[4]), row[5], row[6])


@implementer(TwinRegistry)
class TableRegistry:
    """Registry in an SQLite file with a write-ahead log, or in memory.

    Ids count up from 1 and are never reused.  Each change has a number, by which readers of the change feed say what
    they have already read.
    """

    def __init__(self, path: str = ":memory:") -> None:
        """:raises RegistryUnavailable: ``path`` cannot be opened, or is not the database of a registry."""
        try:
            with prepare_database(path, 5.0) as self._db:
                self._db.execute("PRAGMA journal_mode=WAL")
                # Each commit waits for the disk. Otherwise a power cut could undo the creation of a twin, and the next
                # twin would get the same number and receive the messages for the first one.
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.execute(
                    """CREATE TABLE IF NOT EXISTS twins (
                        id INTEGER PRIMARY KEY AUTOINCREMENT, account BLOB NOT NULL UNIQUE, relay TEXT, pk BLOB,
                        strict INTEGER NOT NULL, counter INTEGER NOT NULL, signature BLOB NOT NULL,
                        change INTEGER NOT NULL UNIQUE)"""
                )
        except sqlite3.Error as error:
            raise RegistryUnavailable(f"{path}: {error}") from None
        self._watchers: list[Callable[[Twin], None]] = []

    def _find_one(self, where: str, value: int | bytes) -> Twin | None:
        row = self._db.execute(f"SELECT {_COLUMNS} FROM twins WHERE {where} = ?", (value,)).fetchone()  # noqa: S608
        return None if row is None else _twin(row)

    def get(self, twin: int) -> Deferred[Twin]:
        found = self._find_one("id", twin)
        return fail(TwinNotFound(f"twin not found {twin}")) if found is None else succeed(found)

    def id_by_account(self, account: bytes) -> Deferred[int]:
        found = self._find_one("account", account)
        return fail(TwinNotFound("no twin with this account")) if found is None else succeed(found.id)

    def put(self, statement: Twin) -> Deferred[Twin]:
        try:
            stored = self._put(statement)
        except RegistryRefused:
            return fail()
        except sqlite3.Error as error:
            return fail(RegistryUnavailable(str(error)))
        for changed in self._watchers:
            call_isolated(changed, stored)
        return succeed(stored)

    def _put(self, statement: Twin) -> Twin:
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            current = self._find_one("account", statement.account)
            follow(current, statement)
            change = 1 + db.execute("SELECT coalesce(max(change), 0) FROM twins").fetchone()[0]
            values = (
                statement.relay,
                statement.pk,
                statement.strict,
                statement.counter,
                statement.signature,
                change,
                statement.account,
            )
            if current is None:
                cursor = db.execute(
                    "INSERT INTO twins (relay, pk, strict, counter, signature, change, account) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
                number = cursor.lastrowid or 0
                if number > MAX_TWIN:
                    raise RegistryRefused("the registry has no free ids")
            else:
                db.execute(
                    "UPDATE twins SET relay = ?, pk = ?, strict = ?, counter = ?, signature = ?, change = ? "
                    "WHERE account = ?",
                    values,
                )
                number = current.id
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                # When the disk is full, SQLite has already rolled back the transaction. A second rollback would fail.
                db.execute("ROLLBACK")
            raise
        return replace(statement, id=number)

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM twins WHERE id > ? ORDER BY id LIMIT ?",  # noqa: S608
            (after, min(limit, PAGE)),
        )
        return succeed([_twin(row) for row in rows])

    def changes(self, since: int) -> tuple[list[Twin], int]:
        """Return the twins whose last change has a higher number than ``since``, and the ``since`` for the next call.

        If ``since`` is higher than the last number, the caller has followed another database. It then gets the last
        number, and later the changes after it.
        """
        last = self.last_change()
        if since > last:
            return [], last
        rows = self._db.execute(
            f"SELECT {_COLUMNS}, change FROM twins WHERE change > ? ORDER BY change LIMIT ?",  # noqa: S608
            (since, PAGE),
        ).fetchall()
        return [_twin(row) for row in rows], rows[-1][7] if rows else since

    def last_change(self) -> int:
        """Return the number of the last change; 0 if there is none."""
        number: int = self._db.execute("SELECT coalesce(max(change), 0) FROM twins").fetchone()[0]
        return number

    def count(self) -> int:
        """Return the number of twins."""
        number: int = self._db.execute("SELECT count(*) FROM twins").fetchone()[0]
        return number

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        self._watchers.append(on_change)

    def close(self) -> Deferred[None]:
        self._db.close()
        return succeed(None)
