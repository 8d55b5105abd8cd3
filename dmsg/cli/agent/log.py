"""The log of an agent in the background: a file, and the one before it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dmsg.directories import UnsafeDirectory, make_directory, state_directory
from dmsg.errors import DmsgError

LOG_SIZE = 1024 * 1024
"""Bytes of the log; then it becomes the one before, and a new one begins."""
LOOK_INTERVAL = 5.0
"""Seconds between looks at its size."""


def log_path() -> Path:
    """Return the default path of the log."""
    return state_directory() / "agent.log"


def open_log(path: Path) -> int:
    """A descriptor of the log, behind what is there; its directory is made, for this user alone.

    In a directory for all, as /tmp, somebody else may have put something there: that is not written to.

    :raises DmsgError: it cannot be written.
    """
    try:
        make_directory(path.parent)
        _check_owner(path)
        _turn(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            os.close(descriptor)
            raise DmsgError(f"{path}: is another user's")
        return descriptor
    except UnsafeDirectory as error:
        raise DmsgError(str(error.strerror)) from None
    except OSError as error:
        raise DmsgError(f"{path}: {error.strerror}") from None


def _check_owner(path: Path) -> None:
    """:raises DmsgError: it, or a link that has its name, is another user's."""
    with suppress(FileNotFoundError):
        if path.lstat().st_uid not in (os.geteuid(), 0):
            raise DmsgError(f"{path}: is another user's")


class Log:
    """Takes all that this process says on standard output and standard error.

    :raises DmsgError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._take()

    def look(self) -> None:
        """Begin a new one if this has become long; where that fails, this one goes on."""
        if os.fstat(2).st_size > LOG_SIZE:
            with suppress(DmsgError):  # A line about the failure would only make the log longer.
                self._take()

    def _take(self) -> None:
        descriptor = open_log(self._path)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)


def _turn(path: Path) -> None:
    if path.exists() and path.stat().st_size > LOG_SIZE:
        os.replace(path, path.with_name(path.name + ".1"))
