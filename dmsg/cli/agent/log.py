"""Log of an agent in the background: writes the present file, and keeps the previous one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dmsg.directories import UnsafeDirectory, make_directory, state_directory
from dmsg.errors import DmsgError

LOG_SIZE = 1024 * 1024
"""Maximum bytes of the log; then it becomes the previous one, and a new one begins."""
CHECK_INTERVAL = 5.0
"""Seconds between checks of the log's size."""


def log_path() -> Path:
    """Return the default path of the log."""
    return state_directory() / "agent.log"


def open_log(path: Path) -> int:
    """Return a descriptor that appends to the log; its directory is created for this user alone.

    In a shared directory such as /tmp another user may have created a file of that name, which is not written to.

    :raises DmsgError: the log cannot be written.
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
    """Check the owner of the log.

    :raises DmsgError: the file, or a link of its name, belongs to another user.
    """
    with suppress(FileNotFoundError):
        if path.lstat().st_uid not in (os.geteuid(), 0):
            raise DmsgError(f"{path}: this file belongs to another user")


class Log:
    """Log that receives standard output and standard error of this process.

    :raises DmsgError: the log cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._take()

    def rotate_if_long(self) -> None:
        """Start a new log if the present one is too long; if that fails, continue with the present one."""
        if os.fstat(2).st_size > LOG_SIZE:
            with suppress(DmsgError):
                # The failure is not logged, because a line about it would only make the log longer.
                self._take()

    def _take(self) -> None:
        descriptor = open_log(self._path)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)


def _turn(path: Path) -> None:
    if path.exists() and path.stat().st_size > LOG_SIZE:
        os.replace(path, path.with_name(path.name + ".1"))
