"""Log files of twistd that another program rotates, which are reopened at SIGHUP and SIGUSR1.

A program such as logrotate renames the file and sends a signal.  Without this module the entity would continue to write
to the renamed file, and at SIGUSR1 twistd itself would rename the new file once more.
"""

from __future__ import annotations

import signal
from typing import cast

from twisted.internet.interfaces import IReactorFromThreads
from twisted.logger import ILogObserver, Logger
from twisted.python.logfile import BaseLogFile

_log = Logger()
_files: list[BaseLogFile] = []


def log_file_of(observer: ILogObserver) -> BaseLogFile | None:
    """Return the file that an observer of twistd writes to; None for standard output or syslog."""
    # The private attribute is used, because twistd makes the observer and keeps the file only there.
    file = getattr(observer, "_outFile", None)
    return file if isinstance(file, BaseLogFile) else None


def reopen_at_signals(file: BaseLogFile) -> None:
    """Reopen ``file`` at each SIGUSR1; :func:`reopen_log_files` does so at SIGHUP."""
    _files.append(file)

    def is_rotated(number: int, frame: object) -> None:
        from twisted.internet import reactor

        cast(IReactorFromThreads, reactor).callFromThread(reopen_log_files)

    signal.signal(signal.SIGUSR1, is_rotated)


def reopen_log_files() -> None:
    """Reopen all log files by their names; a file that cannot be opened is kept as it was."""
    for file in _files:
        try:
            # Opening is tried first, because a reopen closes the old file: if the new one could not be opened, the
            # entity would have no log to report it.
            with open(file.path, "ab"):
                pass
            file.reopen()
        except OSError as error:
            _log.error("the log file cannot be reopened: {path}: {why}", path=file.path, why=error.strerror)
        else:
            _log.info("the log file was reopened")
