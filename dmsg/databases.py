"""SQLite databases in files that only this user can read."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def prepare_database(path: str | os.PathLike[str], timeout: float) -> Iterator[sqlite3.Connection]:
    """Open a database in autocommit mode, and keep it open if the block, which prepares it, succeeds. If the block
    raises, the database is closed. A new file gets the mode 0600; an existing one keeps its mode.

    :param path: path of the file, or ``:memory:``.
    :param timeout: seconds to wait for a lock of another process.
    :raises sqlite3.Error: the database cannot be opened.
    """
    if path != ":memory:":
        # The file is created here, because SQLite would create a file that everybody may read, and a reader could also
        # lock the database. Further files of SQLite, such as PATH-wal, get the mode of this file. Errors are ignored
        # here, because SQLite reports them.
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    database = sqlite3.connect(path, isolation_level=None, timeout=timeout)
    try:
        yield database
    except BaseException:
        # Otherwise the database would stay open, and locked, until the garbage collector finds it.
        with suppress(sqlite3.Error):
            database.close()
        raise
