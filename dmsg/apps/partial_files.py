"""Partial files: names of incomplete files, and a lock so that only one transfer writes each of them.

``NAME`` is first written to ``.NAME.dmsg-part`` in the same directory.  A transfer locks its partial file against other
transfers, in this process and in others.  Otherwise two connections of a listener, or commands in two terminals, could
write to one file by turns, or remove each other's file.  A partial file of another user is never used, because that
user could read and change the data.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from dmsg.apps.descriptors import check_ours, make_private, new_file, new_name, open_ours
from dmsg.apps.transfer import TransferError
from dmsg.filelock import is_at, lock_if_can
from dmsg.net.threads import paced

PART_SUFFIX = ".dmsg-part"
NAME_LIMIT = 255
"""Maximum bytes of a file's name."""
IS_BUSY = "is being received from another connection"
"""Reason for a refusal; the sender recognises the text, and tries again later."""


def part_name(name: str) -> str:
    """Return the name of the partial file that belongs to the final name ``name``."""
    part = f".{name}{PART_SUFFIX}"
    if len(os.fsencode(part)) <= NAME_LIMIT:
        return part
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()}{PART_SUFFIX}"


def part_of(path: Path) -> Path:
    """Return the path of the partial file that belongs to the final path ``path``."""
    return path.with_name(part_name(path.name))


class HeldPart:
    """Partial file that is locked for this transfer; see :func:`hold_part`.

    :ivar size: number of bytes of the file that existed already.
    """

    def __init__(self, name: str, at: int, descriptor: int, size: int) -> None:
        self.size = size
        self._name = name
        self._at = at
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Unlock the partial file for other transfers, and remove it if it is empty.  Further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            if is_at(descriptor, self._name, self._at):
                _take_away_empty(self._name, self._at)
        os.close(descriptor)


def hold_part(target: str, at: int, *, directory: bool = False) -> HeldPart:
    """Lock the partial file of ``target``, and create it first if it does not exist.

    A link, or another object that cannot be used as the partial file, is removed from its name first.

    :param at: descriptor of the directory of ``target``.  It must stay open until the partial file is released.
    :param directory: whether ``target`` is a directory.
    :raises TransferError: another transfer writes the file.
    :raises NotOurs: the name belongs to a file of another user.
    :raises OSError: the file cannot be created.
    """
    part = part_name(target)
    while True:
        _make(part, at, directory=directory)
        try:
            status = os.stat(part, dir_fd=at, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                check_ours(status, at, part)
                os.unlink(part, dir_fd=at)
                continue
            descriptor = open_ours(part, at, part)
        except FileNotFoundError:
            continue  # Another transfer has just completed or removed the file, so the loop tries again.
        try:
            if not lock_if_can(descriptor):
                raise TransferError(f"{target} {IS_BUSY}")
            if not is_at(descriptor, part, at):
                continue  # The file was completed or removed before it was locked, so the loop tries again.
            status = os.fstat(descriptor)
            fits = stat.S_ISDIR(status.st_mode) if directory else stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if not fits or not make_private(descriptor):
                removed = take_away(part, at)
                if removed is not None:
                    # The old directory already has another name, so it does no harm if some of its files cannot be
                    # removed.
                    removed.addErrback(lambda _: None)
                continue
            held = HeldPart(part, at, descriptor, 0 if directory else status.st_size)
            descriptor = -1
            return held
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _make(part: str, at: int, *, directory: bool) -> None:
    with suppress(FileExistsError):
        if directory:
            os.mkdir(part, 0o700, dir_fd=at)
        else:
            os.close(new_file(at, part))


def take_away(name: str, at: int) -> Deferred[None] | None:
    """Remove a file, or a directory with its content.  The name is free when the function returns.

    :returns: for a directory, Deferred that fires when a thread has removed the content; None if nothing is left to do.
    :raises OSError: the file cannot be removed.
    """
    if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=at)
        return None
    # The content is removed in a thread only while the global reactor runs, because ``deferToThread`` uses the threads
    # of that reactor.
    from twisted.internet import reactor

    aside = f"{new_name()}{PART_SUFFIX}"
    os.rename(name, aside, src_dir_fd=at, dst_dir_fd=at)
    parent = os.dup(at)

    def remove() -> None:
        try:
            shutil.rmtree(aside, dir_fd=parent)
        finally:
            os.close(parent)

    if getattr(reactor, "running", False):
        return deferToThread(remove)
    remove()
    return None


def _take_away_empty(part: str, at: int) -> None:
    status = os.stat(part, dir_fd=at, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        os.rmdir(part, dir_fd=at)  # ``rmdir`` removes only an empty directory.
    elif status.st_size == 0:
        os.unlink(part, dir_fd=at)


class PartUse(NamedTuple):
    """Space that a partial file or directory uses.

    :ivar size: bytes of all its files.
    :ivar entries: number of files, directories and links; 0 if it is absent.
    :ivar changed: time of the last change of any of them, in seconds of the system's clock.
    """

    size: int
    entries: int
    changed: float


def measure_part(path: Path) -> PartUse:
    """Return the space that a partial file or directory uses.  Blocks while it reads a directory."""
    size, entries, changed = 0, 0, 0.0

    def add(one: str | Path) -> None:
        nonlocal size, entries, changed
        with suppress(OSError):
            status = os.lstat(one)
            size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
            entries += 1
            changed = max(changed, status.st_mtime)

    add(path)
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            add(os.path.join(directory, name))
    return PartUse(size, entries, changed)


def sweep_parts(paths: Iterable[Path], before: float) -> dict[Path, bool]:
    """Remove those of some partial files that nobody has continued for long.  Blocks.

    A partial file that a transfer is writing, or that belongs to another user, is left alone and not returned.

    :param before: time of the system's clock in seconds; a partial file whose last change is older is removed.
    :returns: whether each partial file still exists, by path.
    """
    exist: dict[Path, bool] = {}
    for path in paced(paths):
        stays = _sweep_part(path.parent, path.name, before)
        if stays or not os.path.lexists(path):
            exist[path] = stays
    return exist


def _sweep_part(directory: Path, name: str, before: float) -> bool:
    """Remove a partial file if it is old.

    :returns: whether it stays because it is not old; False also if it is being written, or cannot be used.
    """
    try:
        at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        descriptor = open_ours(name, at, name)
    except OSError:
        os.close(at)
        return False
    try:
        if not lock_if_can(descriptor) or not is_at(descriptor, name, at):
            return False
        if measure_part(directory / name).changed >= before:
            return True
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(name, dir_fd=at)
        else:
            os.unlink(name, dir_fd=at)
        return False
    except OSError:
        return False
    finally:
        os.close(descriptor)
        os.close(at)
