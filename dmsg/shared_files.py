"""Small files that several programs change. Only one program changes a file at a time, and each change is atomic.

A program has to read, change and write a file within :func:`exclusive_change`. Otherwise it could overwrite a change
that another program makes at the same time. The lock is on the file ``FILE.lock``. It ends with the process that holds
it, so a file ``FILE.lock`` of a killed program blocks nobody.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmsg.errors import DmsgError
from dmsg.filelock import LOCK_SUFFIX, is_at, lock_if_can

LOCK_TIMEOUT = 5.0
"""Seconds to wait until another program has made its change. A change takes milliseconds, unless that program is
suspended.
"""
_LOCK_RETRY = 0.02


class FileBusy(DmsgError):
    """Error: another program is changing the file, and did not finish within the timeout."""


@contextmanager
def exclusive_change(path: Path, *, timeout: float | None = None) -> Iterator[None]:
    """Context manager within which no other program changes a file. Missing directories are created, with mode 0700.

    :param timeout: seconds to wait for another program; None for ``LOCK_TIMEOUT``.
    :raises FileBusy: another program did not release the lock within the timeout.
    :raises OSError: the lock file cannot be created.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = f"{target}{LOCK_SUFFIX}"
    descriptor = _take(lock, target, time.monotonic() + (LOCK_TIMEOUT if timeout is None else timeout))
    try:
        yield
    finally:
        # The lock file is removed before the lock is released. After the release, the next program may already have
        # locked the file.
        with suppress(OSError):
            os.unlink(lock)
        os.close(descriptor)


def _take(lock: str, target: Path, deadline: float) -> int:
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        # The program that held the lock before may have removed the file since it was opened here; then the loop opens
        # a new one.
        if lock_if_can(descriptor) and is_at(descriptor, lock):
            return descriptor
        os.close(descriptor)
        if time.monotonic() >= deadline:
            raise FileBusy(f"{target}: another program is changing this file; stop that program, or try again")
        time.sleep(_LOCK_RETRY)


def replace_file(path: Path, text: str, *, mode: int | None = None) -> None:
    """Replace the content of a file atomically. After an error the old file is unchanged, and no temporary file is
    left.

    If the path is a symbolic link, its target is replaced, and the link stays.

    :param mode: mode of the file; None keeps the mode of the old file, and gives a new file 0600.
    :raises OSError: the file cannot be written.
    """
    target = path.resolve()
    if mode is None:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            # The data are written to the disk before the rename. Otherwise a crash of the machine could leave an empty
            # file in place of the old one.
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
