"""Which receipts were believed before: one counts once, whenever and in whatever file it comes again.

A receipt has no date.  A server that hands in those of an old transport again,
with its events, would be credited again for it.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from pathlib import Path

from dmsg.errors import DmsgError

NAME = ".seen.sqlite"
"""Beside the checked receipts."""
GENERATION_DAYS = 30
"""A receipt is known for so many days at least, and twice as many at most."""
PATIENCE = 60.0
"""Seconds that another process may take with the same file."""
_QUESTIONS = ("SELECT file FROM young WHERE receipt = ?", "SELECT file FROM old WHERE receipt = ?")


class Seen:
    """What is remembered of receipts, on the disk: 8 bytes of a hash, and of the file that they came in.

    :param path: of the database; it is made if it is not there.
    :param now: seconds since 1970.
    :raises DmsgError: it cannot be used.
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
        """Look at a file; what is told until :meth:`keep` is remembered together."""
        try:
            self._base.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def is_new(self, transport: bytes, signer: bytes, file: str) -> bool:
        """Whether this end's word on a transport did not come in another file before; from now on it did.

        :param file: hex digits that name the file: who was killed while looking at it looks at it again.
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
        """Remember it."""
        try:
            self._base.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def close(self) -> None:
        """Forget what was not kept."""
        self._base.close()
