"""Reserve of disk space, so that delivered messages can be deleted even when the disk is full.

SQLite first writes each deletion to its log, so without a reserve a full disk would prevent deletions, too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

RESERVE = 8 * 1024 * 1024
"""Number of bytes that are reserved on the disk for the queue of a relay."""
MIN_RESERVE = 64 * 1024
"""Smallest useful size in bytes of the reserve of disk space, if the disk has no space for all of ``RESERVE``."""
SUFFIX = "-reserve"


@contextmanager
def closing_descriptor(descriptor: int) -> Iterator[int]:
    """Close a file descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Reserve:
    """File that only occupies disk space. It is emptied when the queue needs the space.

    :param path: path of the database. The reserve is a file in the same directory.
    """

    def __init__(self, path: str, size: int | None = None) -> None:
        """:param size: bytes to reserve; None selects ``RESERVE``."""
        self._path = path + SUFFIX
        self._size = RESERVE if size is None else size

    def take(self, unused: int = 0) -> bool:
        """Reserve the space, or as much of it as the disk has.

        :param unused: bytes of free pages in the database, which count as free space.
        :returns: whether all of the space is reserved, and half as much space is still free in addition.
        """
        if self._grow(self._size):
            more = self._size // 2 - unused
            enough = more <= 0 or self._grow(self._size + more)
            self._shrink(self._size)
            return enough
        size = self._size // 2
        while size >= MIN_RESERVE and not self._grow(size):
            size //= 2
        return False

    def _grow(self, size: int) -> bool:
        try:
            with closing_descriptor(self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT)) as descriptor:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, 0, size)
                # Without posix_fallocate, zeros are written instead.
                while (missing := size - os.fstat(descriptor).st_size) > 0:
                    os.write(descriptor, bytes(min(missing, MIN_RESERVE)))
        except OSError:
            return False
        return True

    def _shrink(self, size: int) -> None:
        with suppress(OSError), closing_descriptor(self._open(os.O_WRONLY)) as descriptor:
            os.ftruncate(descriptor, size)

    def _open(self, flags: int) -> int:
        """Open the file of the reserve, which only this user can read.

        :raises OSError: the file cannot be opened, is a link, or belongs to another user.
        """
        descriptor = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        status = os.fstat(descriptor)
        # In a directory such as /tmp, another user may have put a link to a file of this user in this place. Without
        # this check, the linked file would be emptied.
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EPERM, "this file is a link, or belongs to another user", self._path)

    def release(self) -> None:
        """Free the reserved space."""
        self._shrink(0)

    def suffices_for(self, path: str) -> bool:
        """Whether the file at ``path`` has at most half the size of the reserve."""
        try:
            return os.path.getsize(path) <= self._size // 2
        except OSError:
            return True

    def remove(self) -> None:
        """Delete the reserve's file, because the queue is closed."""
        with suppress(OSError):
            os.unlink(self._path)
