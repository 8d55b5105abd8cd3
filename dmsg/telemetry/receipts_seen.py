"""Database of accepted receipts, by which each receipt is counted once, even if it occurs again later or in another
file.

A receipt has no date. Without the database, a server could report the receipts and events of an old transport again,
and be credited twice. The database also contains the files that were checked, so that each file is read once.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from dmsg.databases import prepare_database
from dmsg.errors import DmsgError

NAME = ".seen.sqlite"
"""Name of the database, in the directory of the checked receipts."""
GENERATION_DAYS = 30
"""Minimum number of days for which a receipt stays in the database. It is removed after at most twice as many days."""
LOCK_TIMEOUT = 60.0
"""Maximum seconds to wait for another process that has locked the database."""
_QUESTIONS = ("SELECT file FROM young WHERE receipt = ?", "SELECT file FROM old WHERE receipt = ?")
_TABLES = {
    "young": "(receipt INTEGER PRIMARY KEY, file INTEGER) WITHOUT ROWID",
    "old": "(receipt INTEGER PRIMARY KEY, file INTEGER) WITHOUT ROWID",
    "young_files": "(path BLOB PRIMARY KEY, status TEXT, digest TEXT) WITHOUT ROWID",
    "old_files": "(path BLOB PRIMARY KEY, status TEXT, digest TEXT) WITHOUT ROWID",
}


def receipt_id(transport: bytes, signer: bytes) -> int:
    """Return the number that identifies, in the database, the receipts of one end of a transport."""
    return int.from_bytes(hashlib.sha256(transport + signer).digest()[:8], "big", signed=True)


class ReceiptsSeen:
    """Set of accepted receipts in a database: for each receipt a hash of 8 bytes, and the file in which it occurred
    first.

    Receipts are in two tables. When the table ``young`` is :data:`GENERATION_DAYS` days old, it replaces the table
    ``old``, and a new ``young`` begins. Two further tables, which are replaced in the same way, contain the files that
    were checked. A file that is no longer in them is read again.

    :param path: path of the database, which is created if it is absent.
    :param now: seconds since 1970.
    :raises DmsgError: the database cannot be used.
    """

    def __init__(self, path: Path, now: float | None = None) -> None:
        self._path = path
        day = int((time.time() if now is None else now) // 86400)
        try:
            with prepare_database(path, LOCK_TIMEOUT) as self._base:
                self._base.execute("PRAGMA journal_mode = WAL")
                self._base.execute("PRAGMA synchronous = NORMAL")
                self._base.execute("BEGIN IMMEDIATE")
                self._base.execute("CREATE TABLE IF NOT EXISTS since (day INTEGER)")
                for table in _TABLES:
                    self._create(table)
                since = self._base.execute("SELECT day FROM since").fetchone()
                if since is None:
                    self._base.execute("INSERT INTO since VALUES (?)", (day,))
                elif day >= since[0] + GENERATION_DAYS:
                    for kind in ("", "_files"):
                        self._base.execute(f"DROP TABLE old{kind}")
                        self._base.execute(f"ALTER TABLE young{kind} RENAME TO old{kind}")
                        self._create(f"young{kind}")
                    self._base.execute("UPDATE since SET day = ?", (day,))
                self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _create(self, table: str) -> None:
        self._base.execute(f"CREATE TABLE IF NOT EXISTS {table} {_TABLES[table]}")

    def _unusable(self, error: sqlite3.Error) -> DmsgError:
        return DmsgError(f"{self._path} cannot be used: {error}")

    def begin(self) -> None:
        """Begin a transaction; :meth:`keep` commits it."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def are_new(self, receipts: Iterable[int], file: str) -> list[bool]:
        """Add receipts (:func:`receipt_id`) to the set, and return for each whether it is new, which means that it has
        not occurred in another file.

        :param file: id of the file, in hex digits. If the same file is checked again after a crash, its receipts still
            count as new.
        """
        name = int(file[:15], 16)
        try:
            return [self._is_new(receipt, name) for receipt in receipts]
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _is_new(self, receipt: int, name: int) -> bool:
        for question in _QUESTIONS:
            found = self._base.execute(question, (receipt,)).fetchone()
            if found is not None:
                return bool(found[0] == name)
        self._base.execute("INSERT INTO young VALUES (?, ?)", (receipt, name))
        return True

    def withdraw(self, receipts: Iterable[int], file: str) -> None:
        """Remove those receipts from the set that occurred first in this file, because the file could not be used.

        :param file: as for :meth:`are_new`.
        """
        name = int(file[:15], 16)
        try:
            self._base.executemany(
                "DELETE FROM young WHERE receipt = ? AND file = ?", ((one, name) for one in receipts)
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def digest_of(self, path: str, status: os.stat_result) -> str | None:
        """Return the digest of a file that was checked before; None if it was not, or has changed since.

        :param status: present status of the file.
        """
        for kind in ("young", "old"):
            try:
                found = self._base.execute(
                    f"SELECT status, digest FROM {kind}_files WHERE path = ?",  # noqa: S608
                    (os.fsencode(path),),
                ).fetchone()
            except sqlite3.Error as error:
                raise self._unusable(error) from None
            if found is not None:
                return str(found[1]) if found[0] == _text(status) else None
        return None

    def add_file(self, path: str, status: os.stat_result, digest: str) -> None:
        """Add a file that was checked.

        :param status: status of the file when it was read.
        """
        try:
            self._base.execute(
                "INSERT OR REPLACE INTO young_files VALUES (?, ?, ?)", (os.fsencode(path), _text(status), digest)
            )
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def keep(self) -> None:
        """Commit the transaction."""
        try:
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Close the database. Receipts that were not committed are discarded."""
        self._base.close()


def _text(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_dev} {status.st_ino}"
