"""Where a thing lies until it is whole, and that one transfer at a time writes it.

``NAME`` is made as ``.NAME.dmsg-part`` beside it.  Who writes a part holds a lock on it, in this process or another:
a listener's two connections, or two commands in two terminals, would else write one file by turns, or take each
other's away.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from dmsg.apps.transfer import TransferError
from dmsg.filelock import is_at, lock_if_can

PART_SUFFIX = ".dmsg-part"
NAME_LIMIT = 255
"""Bytes of a name."""
IS_BUSY = "is being received from another connection"
"""By this the one that sends knows it."""


def part_name(name: str) -> str:
    """What a thing is called until it is whole."""
    part = f".{name}{PART_SUFFIX}"
    if len(os.fsencode(part)) <= NAME_LIMIT:
        return part
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()}{PART_SUFFIX}"


def part_of(path: Path) -> Path:
    """Where a thing lies until it is whole."""
    return path.with_name(part_name(path.name))


class HeldPart:
    """A part that this transfer alone writes; see :func:`hold`.

    :ivar path: of the part.
    :ivar size: bytes of a file that were there already.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Another transfer may go on with it; an empty one is taken away.  May be repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            if is_at(descriptor, self.path):
                _take_away_empty(self.path)
        os.close(descriptor)


def hold(target: Path, *, directory: bool = False) -> HeldPart:
    """The part of ``target``, made where there is none; what lies there and can be none of it is taken away.

    :raises TransferError: another transfer writes it.
    :raises OSError: it cannot be made.
    """
    part = part_of(target)
    while True:
        _make(part, directory=directory)
        try:
            status = part.lstat()
            if stat.S_ISLNK(status.st_mode) or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                part.unlink()
                continue
            descriptor = _open(part, status)
        except FileNotFoundError:
            continue  # who wrote it is done with it
        try:
            if not lock_if_can(descriptor):
                raise TransferError(f"{target.name} {IS_BUSY}")
            if not is_at(descriptor, part):
                continue  # it has become whole, or was taken away, before it was locked
            status = os.fstat(descriptor)
            if directory and stat.S_ISDIR(status.st_mode):
                held = HeldPart(part, descriptor, 0)
            elif not directory and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                held = HeldPart(part, descriptor, status.st_size)
            else:
                _take_away(part, status)
                continue
            os.fchmod(descriptor, 0o700 if directory else 0o600)  # it may have been whole, and have its mode
            descriptor = -1
            return held
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _open(part: Path, status: os.stat_result) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(part, flags)
    except PermissionError:
        part.chmod(0o700 if stat.S_ISDIR(status.st_mode) else 0o600)  # it was whole, and has a mode without reading
        return os.open(part, flags)


def _make(part: Path, *, directory: bool) -> None:
    with suppress(FileExistsError):
        if directory:
            part.mkdir(mode=0o700)
        else:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _take_away(part: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(part)  # of a directory that had this name
    else:
        part.unlink()


def _take_away_empty(part: Path) -> None:
    status = part.lstat()
    if stat.S_ISDIR(status.st_mode):
        part.rmdir()  # which takes only empty ones
    elif status.st_size == 0:
        part.unlink()
