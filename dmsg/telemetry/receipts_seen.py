"""Database of accepted receipts: each receipt counts once, whenever and in whatever file it comes again.

A receipt has no date. A server could hand in the receipts and events of an old transport again to
be credited twice.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from pathlib import Path

from dmsg.errors import DmsgError

NAME = ".seen.sqlite"
"""Name of the database, in the directory of the checked receipts."""
GENERATION_DAYS = 30
"""Days for which a receipt is remembered at least; it is forgotten after twice as many at most."""
PATIENCE = 60.0
"""Seconds to wait while another process has the database locked."""
_QUESTIONS = ("SELECT file FROM young WHERE receipt = ?", "SELECT file FROM old WHERE receipt = ?")


class ReceiptsSeen:
    """Set of accepted receipts on the disk: a hash of 8 bytes for each, and the file that it came in.

    Receipts are in two tables: once ``young`` is :data:`GENERATION_DAYS` old, it becomes ``old``, and the previous
    ``old`` is dropped.

    :param path: path of the database, which is created if it is absent.
    :param now: seconds since 1970.
    :raises DmsgError: the database cannot be used.
    """

    def __init__(self, path: Path, now: float | None = None) -> None:
        self._path = path
        day = int((time.time() if now is None else now) // 86400)
        try:
            self._base = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._base.execute("BEGIN IMMEDIATE")
            self._base.execute("CREATE TABLE IF NOT EXISTS since (day INTEGER)")
            for table in ("young", "old"):
                self._create(table)
            since = self._base.execute("SELECT day FROM since").fetchone()
            if since is None:
                self._base.execute("INSERT INTO since VALUES (?)", (day,))
            elif day >= since[0] + GENERATION_DAYS:
                self._base.execute("DROP TABLE old")
                self._base.execute("ALTER TABLE young RENAME TO old")
                self._create("young")
                self._base.execute("UPDATE since SET day = ?", (day,))
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _create(self, table: str) -> None:
        self._base.execute(
            f"CREATE TABLE IF NOT EXISTS {table} (receipt INTEGER PRIMARY KEY, file INTEGER) WITHOUT ROWID"
        )

    def _unusable(self, error: sqlite3.Error) -> DmsgError:
        return DmsgError(f"{self._path} cannot be used: {error}")

    def begin(self) -> None:
        """Begin a transaction for one file; :meth:`keep` commits it."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def is_new(self, transport: bytes, signer: bytes, file: str) -> bool:
        """Whether this end's receipt for a transport has not come in another file before; adds it to the set.

        :param file: id of the file in hex digits. After a crash the same file is checked again, and its receipts count
            as new.
        """
        receipt = int.from_bytes(hashlib.sha256(transport + signer).digest()[:8], "big", signed=True)
        name = int(file[:15], 16)
        try:
            for question in _QUESTIONS:
                found = self._base.execute(question, (receipt,)).fetchone()
                if found is not None:
                    return bool(found[0] == name)
            self._base.execute("INSERT INTO young VALUES (?, ?)", (receipt, name))
        except sqlite3.Error as error:
            raise self._unusable(error) from None
        return True

    def keep(self) -> None:
        """Commit the receipts of the file."""
        try:
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Close the database; receipts that were not committed are forgotten."""
        self._base.close()
