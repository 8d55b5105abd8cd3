"""Advisory locks on open files, by flock(2). A lock ends with the process that holds it, even if
the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

LOCK_SUFFIX = ".lock"
"""Suffix of the name of the file that is locked in place of a file which programs replace."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS, errno.EINVAL})
"""Error numbers with which file systems without locks answer."""


class NoLocks(OSError):
    """Error: the file system does not support locks. The caller has to continue without a lock."""


def take_lock(descriptor: int, *, share: bool = False) -> bool:
    """Lock an open file, without waiting.

    :param share: whether to take a shared lock, which several processes can hold.
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
    """Take a lock like :func:`take_lock`, but return True on a file system without locks."""
    try:
        return take_lock(descriptor)
    except NoLocks:
        return True


def is_at(descriptor: int, path: str | Path, at: int | None = None) -> bool:
    """Whether an open file is still the file at ``path``. A process that held the lock before may have removed the open
    file.

    :param at: descriptor of the directory to which a relative path refers.
    """
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, dir_fd=at, follow_symlinks=False))
    except FileNotFoundError:
        return False
