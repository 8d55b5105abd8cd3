"""SQLite databases in files that only this user can read, and that no other user has created."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmsg.directory_checks import UnsafeDirectory, check_state_path

DATABASE_FILE_SUFFIXES = ("", "-journal", "-wal", "-shm")
"""Suffixes of the names of a database's files: the database, its rollback journal, its write-ahead log, and the index
of this log.
"""


@contextmanager
def prepare_database(path: str | os.PathLike[str], timeout: float) -> Iterator[sqlite3.Connection]:
    """Open a database in autocommit mode, and keep it open if the block, which prepares it, succeeds. If the block
    raises, the database is closed. A new file gets the mode 0600; an existing one keeps its mode.

    :param path: path of the file, or ``:memory:``.
    :param timeout: seconds to wait for a lock of another process.
    :raises sqlite3.Error: the database cannot be opened, or another user has put one of its files into a shared
        directory, or could replace it.
    """
    if path != ":memory:":
        _check_files(path)
        # The file is created here, because SQLite would create a file that everybody may read, and a reader could also
        # lock the database. Further files of SQLite, such as PATH-wal, get the mode of this file. Errors are ignored
        # here, because SQLite reports them.
        with suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _check_files(path)
    database = sqlite3.connect(path, isolation_level=None, timeout=timeout)
    try:
        yield database
        if path != ":memory:":
            # Another user may have created one of the other files since the first check.
            _check_files(path)
    except BaseException:
        # Otherwise the database would stay open, and locked, until the garbage collector finds it.
        with suppress(sqlite3.Error):
            database.close()
        raise


def _check_files(path: str | os.PathLike[str]) -> None:
    for suffix in DATABASE_FILE_SUFFIXES:
        try:
            check_state_path(Path(os.fspath(path) + suffix))
        except UnsafeDirectory as error:
            raise sqlite3.OperationalError(error.strerror) from None
