"""Reopening of twistd's log files at SIGHUP and SIGUSR1, for programs such as logrotate, and checks at the start.

Such a program renames the log file and then sends a signal.  Without this module, the entity would continue to write to
the renamed file after SIGHUP.  After SIGUSR1, twistd would itself rotate the log, a second time.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import cast

from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import ILogObserver, Logger
from twisted.python.logfile import BaseLogFile

from dmsg.directory_checks import check_state_path

LOG_FILE_MODE = 0o640
"""Mode of a new log file, before the umask. A log contains addresses and keys of clients, so that only this user and
its group, such as a program that collects logs, may read it.
"""
_log = Logger()
_files: list[BaseLogFile] = []


def log_file_of(observer: ILogObserver) -> BaseLogFile | None:
    """Return the file that a log observer writes to; None for standard output or syslog."""
    # twistd creates the observer, which gives access to its file only through this private attribute.
    file = getattr(observer, "_outFile", None)
    return file if isinstance(file, BaseLogFile) else None


def reopen_at_signals(file: BaseLogFile) -> None:
    """Reopen ``file`` at each SIGUSR1, and whenever :func:`reopen_log_files` is called, as at SIGHUP."""
    _files.append(file)

    def is_rotated(number: int, frame: object) -> None:
        from twisted.internet import reactor

        cast(IReactorFromThreads, reactor).callFromThread(reopen_log_files)

    signal.signal(signal.SIGUSR1, is_rotated)


def reopen_log_files() -> None:
    """Reopen all log files under their names.  If a file cannot be opened, the entity continues to write to the old
    one.
    """
    for file in _files:
        try:
            # Opening is tried first, because ``reopen`` closes the old file before it opens the new one. If it then
            # could not open the new one, the entity would have no log in which to report that.
            create_log_file(file.path)
            file.reopen()
        except OSError as error:
            _log.error("the log file cannot be reopened: {path}: {why}", path=file.path, why=error.strerror)
        else:
            _log.info("the log file was reopened")


def create_log_file(path: str) -> None:
    """Create a log file if it is absent. twistd itself would create a file that everybody may read. For each further
    file that twistd begins after 1 MB, it copies the mode of the first one.

    :raises OSError: the file cannot be opened.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, LOG_FILE_MODE))


def check_can_write(path: Path) -> None:
    """Check that twistd can write a file, without creating or changing it.

    :raises OSError: twistd cannot create or open the file, or another user has put it into a shared directory.
    """
    check_state_path(path)
    try:
        with open(path, "r+b", 0) as file:
            if not file.seekable():  # twistd seeks the end of a log, and would wait for the writer of a pipe.
                raise OSError(errno.ESPIPE, "this is a pipe or a terminal, not a file")
    except FileNotFoundError:
        # A link to a missing file is followed, as in twistd.
        parent = Path(os.path.realpath(path)).parent
        os.stat(parent)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def remove_empty_pid_file(path: Path) -> None:
    """Remove a pid file without a number, which a full disk or a power failure leaves. With such a file, twistd
    would refuse each start.

    :raises OSError: the file cannot be removed.
    """
    with suppress(FileNotFoundError):
        if path.stat().st_size == 0:
            path.unlink()
            sys.stderr.write(f"{path}: removed an empty pid file, which a full disk or a power failure may have left\n")
