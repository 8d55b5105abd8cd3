"""Log file of an agent in the background.  When the file is full, it becomes the previous log, and a new one begins."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dmsg.directories import state_directory
from dmsg.directory_checks import UnsafeDirectory, make_directory
from dmsg.errors import DmsgError

LOG_SIZE = 1024 * 1024
"""Maximum bytes of the log file.  A longer file is renamed to ``NAME.1``, and a new file begins."""
CHECK_INTERVAL = 5.0
"""Seconds between two checks of the log's size."""


def log_path() -> Path:
    """Return the default path of the log file."""
    return state_directory() / "agent.log"


def open_log(path: Path) -> int:
    """Open the log file for appending, and return its descriptor.  Its directory is created if it does not exist.

    A file of another user is not written to.  In a shared directory such as /tmp, that user could have created it in
    advance.

    :raises DmsgError: the file cannot be written, or belongs to another user.
    """
    try:
        make_directory(path.parent)
        _check_owner(path)
        _turn(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            os.close(descriptor)
            raise DmsgError(f"{path}: this file belongs to another user")
        return descriptor
    except UnsafeDirectory as error:
        raise DmsgError(str(error.strerror)) from None
    except OSError as error:
        raise DmsgError(f"{path}: {error.strerror}") from None


def _check_owner(path: Path) -> None:
    """Check that the log file belongs to this user or to root.

    :raises DmsgError: the file, or a link in its place, belongs to another user.
    """
    with suppress(FileNotFoundError):
        if path.lstat().st_uid not in (os.geteuid(), 0):
            raise DmsgError(f"{path}: this file belongs to another user")


class Log:
    """Log file to which standard output and standard error of this process are redirected.

    :raises DmsgError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._take()

    def rotate_if_long(self) -> None:
        """Begin a new log file if the present one is too long.  If that fails, continue to write to the present one."""
        if os.fstat(2).st_size > LOG_SIZE:
            with suppress(DmsgError):
                # A message about this error would go to the same log, and make it longer.
                self._take()

    def _take(self) -> None:
        descriptor = open_log(self._path)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)


def _turn(path: Path) -> None:
    if path.exists() and path.stat().st_size > LOG_SIZE:
        os.replace(path, path.with_name(path.name + ".1"))
