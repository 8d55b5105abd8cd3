"""Advisory locks on open files, by flock(2); a lock ends with the process that has it, even if the process is
killed."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS, errno.EINVAL})
"""Error numbers of file systems without locks."""


class NoLocks(OSError):
    """Error: the file system has no locks, so the caller must continue without one."""


def take_lock(descriptor: int, *, share: bool = False) -> bool:
    """Lock an open file, without waiting.

    :param share: whether other processes that share the lock are accepted.
    :returns: False if another process holds the lock.
    :raises NoLocks: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise NoLocks(error.errno, error.strerror) from None
        return False
    return True


def lock_if_can(descriptor: int) -> bool:
    """Take a lock like :func:`take_lock`; on a file system without locks, return True as well."""
    try:
        return take_lock(descriptor)
    except NoLocks:
        return True


def is_at(descriptor: int, path: str | Path, at: int | None = None) -> bool:
    """Whether an open file still has this name.  The process that had its lock before may have removed it.

    :param at: descriptor of the directory that the path begins in.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=at, follow_symlinks=False))
    except FileNotFoundError:
        return False
