"""Reserve of disk space, so that delivered messages can be deleted even when the disk is full.

SQLite first writes each deletion to its log, so without a reserve a full disk would prevent deletions, too.
"""

from __future__ import annotations

import os
from contextlib import suppress

RESERVE = 8 * 1024 * 1024
"""Number of bytes that are reserved on the disk for the queue of a relay."""
MIN_RESERVE = 64 * 1024
"""Smallest useful size in bytes of the reserve of disk space, if the disk has no space for all of ``RESERVE``."""
SUFFIX = "-reserve"


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
            with open(self._path, "ab", buffering=0) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                # Without posix_fallocate, zeros are written instead.
                while (missing := size - os.fstat(file.fileno()).st_size) > 0:
                    file.write(bytes(min(missing, MIN_RESERVE)))
        except OSError:
            return False
        return True

    def _shrink(self, size: int) -> None:
        with suppress(OSError):
            os.truncate(self._path, size)

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
