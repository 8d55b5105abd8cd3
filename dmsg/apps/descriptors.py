"""Access to files and directories by descriptors: the object that is used is always the object that was checked.

Below an open directory, no link is followed, and no file of another user is used.  Otherwise, in a shared directory
such as ``/tmp``, another user could create a file with the name of a partial file in advance, and keep it open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dmsg.apps.exposure import check_directory, check_target

HELD_DIRECTORIES = 8
"""Maximum number of directories that a :class:`Descent` keeps open, however long its path is."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_GET_GENERATION = 0x80007601 | struct.calcsize("l") << 16
"""Request ``FS_IOC_GETVERSION`` of ``linux/fs.h``."""
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class NotOurs(OSError):
    """Error: a file or directory belongs to another user."""


def open_within(base: Path, path: Path, *, make: bool = False) -> int:
    """Open a directory in order to look up names in it.  Links are followed only on the path to ``base``, not below.

    :param path: ``base`` or a directory below it.
    :param make: whether to create absent directories.
    :returns: descriptor of the directory.
    :raises OwnFile: the directory contains dmsg's own files.
    :raises OSError: the directory is absent, or a part of the path below ``base`` is a link.
    """
    at = os.open(base, _SEARCH)
    try:
        check_directory(at, path.name, above=True)
        for part in path.relative_to(base).parts:
            if make:
                check_target(part, at)
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=at)
            below = os.open(part, _SEARCH | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
            check_directory(at, part)
    except BaseException:
        os.close(at)
        raise
    return at


class Descent:
    """Cache of open directories below a top directory.  Each directory is opened relative to its parent; the last few
    stay open.

    :param top: descriptor of the top directory; the caller closes it.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._parts: tuple[str, ...] = ()
        self._open_directories: dict[int, int] = {}
        """Descriptors by depth of the directory below the top directory."""

    def at(self, parts: Sequence[str]) -> int:
        """Return a descriptor of the directory at a path, in order to look up names in it; valid until the next call.

        :param parts: names of the directories on the path below the top directory.
        :raises OSError: the directory is absent, or a part of the path is a link.
        """
        if len(parts) in self._open_directories and self._parts == tuple(parts):
            return self._open_directories[len(parts)]
        common = 0
        for one, other in zip(parts, self._parts, strict=False):
            if one != other:
                break
            common += 1
        for depth in [depth for depth in self._open_directories if depth > common]:
            os.close(self._open_directories.pop(depth))
        begin = max(self._open_directories, default=0)
        self._parts = tuple(parts[:begin])
        at = self._open_directories[begin] if begin else self._top
        for depth in range(begin, len(parts)):
            at = os.open(parts[depth], _SEARCH | os.O_NOFOLLOW, dir_fd=at)
            self._open_directories[depth + 1] = at
            if len(self._open_directories) > HELD_DIRECTORIES:
                os.close(self._open_directories.pop(min(self._open_directories)))
            self._parts = tuple(parts[: depth + 1])
        return at

    def close(self) -> None:
        """Close the descriptors.  Further calls do nothing."""
        kept, self._open_directories, self._parts = self._open_directories, {}, ()
        for descriptor in kept.values():
            os.close(descriptor)


def generation_of(descriptor: int) -> int:
    """Return the generation of an open file's inode: a number of 32 bits that tells the file apart from others that had
    the same inode before.

    Some file systems, such as ext4, give the inode of a removed file to the next new one.

    :returns: 0 if the file system does not tell.
    """
    if sys.platform != "linux":
        return 0
    try:
        found = fcntl.ioctl(descriptor, _GET_GENERATION, bytes(struct.calcsize("l")))
    except OSError:
        return 0
    # The kernel writes an int, although the request names a long.
    return int.from_bytes(found[:4], sys.byteorder)


def new_file(at: int, name: str) -> int:
    """Create a file with mode 0600 and return its descriptor.

    :param at: descriptor of the directory.
    :raises FileExistsError: the name is in use.
    """
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)


def new_name() -> str:
    """Return a name that nobody can guess."""
    return f".dmsg-{secrets.token_hex(8)}"


def is_ours(status: os.stat_result, at: int) -> bool:
    """Whether a file belongs to this user.

    On some file systems, such as those without owners, all files have one owner, who need not be this user.  A new file
    is created to find out whether that is so.

    :param at: descriptor of the directory that contains the file.
    """
    if status.st_uid == os.geteuid():
        return True
    name = new_name()
    try:
        descriptor = new_file(at, name)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_uid == status.st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=at)


def check_ours(status: os.stat_result, at: int, name: str) -> None:
    """Check the owner of a file.

    :raises NotOurs: the file belongs to another user.
    """
    if not is_ours(status, at):
        text = f"{name} is another user's (uid {status.st_uid}), and is not used: remove it, or use another directory"
        raise NotOurs(errno.EPERM, text, name)


def open_ours(name: str, at: int, display_name: str) -> int:
    """Open an existing regular file or directory of this user.  If its mode denies access, it first gets mode 0600 or
    0700.

    :param at: descriptor of the directory that contains ``name``.
    :param display_name: name to use in errors.
    :returns: descriptor, for reading and writing if it is a file.
    :raises NotOurs: another user owns the file; the file is left unchanged.
    :raises OSError: the file is absent, a link, or of another kind.
    """
    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "this is neither a file nor a directory", display_name)
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= os.O_RDONLY | os.O_DIRECTORY if stat.S_ISDIR(status.st_mode) else os.O_RDWR
    check_ours(status, at, display_name)
    try:
        descriptor = os.open(name, flags, dir_fd=at)
    except PermissionError:
        # An earlier transfer has completed this file and has set the sender's mode, which may deny access.
        _grant_own_access(name, at, status)
        descriptor = os.open(name, flags, dir_fd=at)
    try:
        now = os.fstat(descriptor)
        if not os.path.samestat(status, now):
            # Somebody has replaced the file since its owner was checked, so the owner of the new file is checked.
            check_ours(now, at, display_name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private(descriptor: int) -> bool:
    """Set the mode of an open file or directory to 0600 or 0700, so that other users lose access.

    :returns: False if the old mode let other users write to the file, because one of them may still have it open.
    """
    before = os.fstat(descriptor).st_mode
    wanted = 0o700 if stat.S_ISDIR(before) else 0o600
    if stat.S_IMODE(before) == wanted:
        return True
    os.fchmod(descriptor, wanted)
    if stat.S_ISDIR(before) or not before & WRITABLE_BY_OTHERS:
        # An open descriptor of a directory gives no more access than the directory's present mode.
        return True
    # If the file system has no modes, the mode is unchanged here, and other users can access every file anyway.
    return stat.S_IMODE(os.fstat(descriptor).st_mode) == stat.S_IMODE(before)


def _grant_own_access(name: str, at: int, status: os.stat_result) -> None:
    """Set the mode of this user's file or directory to 0600 or 0700, so that this user can open it.

    The mode is left unchanged if the file has been replaced since ``status`` was read.
    """
    descriptor = os.open(name, getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if os.path.samestat(os.fstat(descriptor), status):
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700 if stat.S_ISDIR(status.st_mode) else 0o600)
    finally:
        os.close(descriptor)
