"""Files and directories by descriptors: what was looked at is what is used, whoever changes names meanwhile.

No link is followed below a directory that is open, and nothing of another user is used: in a directory for all, as
``/tmp``, everybody can make what has the name of a part, and keep it open.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dmsg.apps.exposure import check_directory, check_target

HELD_DIRECTORIES = 8
"""Descriptors that a :class:`Descent` keeps of the directories on its way, however deep that is."""
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


class NotOurs(OSError):
    """A file or directory is another user's."""


def open_within(base: Path, path: Path, *, make: bool = False) -> int:
    """Open a directory for looking up names in it; only links on the way to ``base`` are followed.

    :param path: ``base`` or a directory below it, without links.
    :param make: directories that are absent are made.
    :raises OwnFile: dmsg's own files are there.
    :raises OSError: it is not there, or a part of the path has become a link.
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
    """Directories below one, each opened in the one above it; the last ones are kept open for what comes next.

    :param top: descriptor of the directory; the caller closes it.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._parts: tuple[str, ...] = ()
        self._kept: dict[int, int] = {}
        """Descriptors by depth, in order."""

    def at(self, parts: Sequence[str]) -> int:
        """Descriptor of a directory, for looking up names in it; valid until the next call.

        :raises OSError: it is not there, or a part of the path is a link.
        """
        if len(parts) in self._kept and self._parts == tuple(parts):
            return self._kept[len(parts)]
        common = 0
        for one, other in zip(parts, self._parts, strict=False):
            if one != other:
                break
            common += 1
        for depth in [depth for depth in self._kept if depth > common]:
            os.close(self._kept.pop(depth))
        begin = max(self._kept, default=0)
        self._parts = tuple(parts[:begin])
        at = self._kept[begin] if begin else self._top
        for depth in range(begin, len(parts)):
            at = os.open(parts[depth], _SEARCH | os.O_NOFOLLOW, dir_fd=at)
            self._kept[depth + 1] = at
            if len(self._kept) > HELD_DIRECTORIES:
                os.close(self._kept.pop(min(self._kept)))
            self._parts = tuple(parts[: depth + 1])
        return at

    def close(self) -> None:
        """Close what is kept.  May be repeated."""
        kept, self._kept, self._parts = self._kept, {}, ()
        for descriptor in kept.values():
            os.close(descriptor)


def new_file(at: int, name: str) -> int:
    """Descriptor of a new file, for this user alone.  :raises FileExistsError: there is something of that name."""
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)


def new_name() -> str:
    """A name that nobody could guess."""
    return f".dmsg-{secrets.token_hex(8)}"


def is_ours(status: os.stat_result, at: int) -> bool:
    """Whether this user, and no other, is the owner.

    :param at: the directory that it is in.  On file systems that know no owners, or not ours, all that is made there
        has the same one: a new file shows which.
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
    """:raises NotOurs: it is another user's."""
    if not is_ours(status, at):
        text = f"{name} is another user's (uid {status.st_uid}) and not used: remove it, or take another directory"
        raise NotOurs(errno.EPERM, text, name)


def open_ours(name: str, at: int, shown: str) -> int:
    """Open a regular file or a directory that is there, with mode 0600 or 0700 from now on.

    :param shown: its name, as an error has it.
    :returns: a descriptor, for reading and writing if it is a file.
    :raises NotOurs: it is another user's; nothing of it is touched.
    :raises OSError: it is not there, or is a link, or something else.
    """
    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "is neither file nor directory", shown)
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    flags |= os.O_RDONLY | os.O_DIRECTORY if stat.S_ISDIR(status.st_mode) else os.O_RDWR
    check_ours(status, at, shown)
    try:
        descriptor = os.open(name, flags, dir_fd=at)
    except PermissionError:
        _let_ourselves_in(name, at, status)  # it was whole, and has a mode without reading
        descriptor = os.open(name, flags, dir_fd=at)
    try:
        now = os.fstat(descriptor)
        if not os.path.samestat(status, now):  # somebody has replaced it since it was looked at
            check_ours(now, at, shown)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private(descriptor: int) -> bool:
    """Take an open file or directory from all others.

    :returns: False: another user may have it open for writing, from when its mode allowed that.
    """
    before = os.fstat(descriptor).st_mode
    wanted = 0o700 if stat.S_ISDIR(before) else 0o600
    if stat.S_IMODE(before) == wanted:
        return True
    os.fchmod(descriptor, wanted)
    if stat.S_ISDIR(before) or not before & WRITABLE_BY_OTHERS:
        return True  # in a directory nobody can do anything from now on, whatever he has open
    # a file system without modes has the same as before, for all files alike
    return stat.S_IMODE(os.fstat(descriptor).st_mode) == stat.S_IMODE(before)


def _let_ourselves_in(name: str, at: int, status: os.stat_result) -> None:
    """Change the mode of exactly that file, which this user may not open."""
    descriptor = os.open(name, getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if os.path.samestat(os.fstat(descriptor), status):
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700 if stat.S_ISDIR(status.st_mode) else 0o600)
    finally:
        os.close(descriptor)
