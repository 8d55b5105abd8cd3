"""Where a parcel comes to be: nothing of it is outside, and nothing has its name before it is whole.

A thing ``NAME`` is made as ``.NAME.dmsg-part`` beside it.  What an earlier transfer left there is gone on with; what
belongs to another one is taken away.  No part of a path is followed where it is a link.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from dmsg.apps.parcels.manifest import DIRECTORY, FILE, LINK, Item, parts_of
from dmsg.apps.parts import PART_SUFFIX, HeldPart, hold, part_name
from dmsg.apps.paths import umask
from dmsg.apps.transfer import TransferError

CHUNK = 256 * 1024
HELD_PARTS = 64
"""Things of a parcel that are locked while it comes, which takes a descriptor each.  Who sends the same parcel again
meets the first of them."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Place:
    """A directory into which a parcel is put.

    :param overwrite: files of the same names are replaced; directories never are.
    """

    def __init__(self, directory: Path, *, overwrite: bool = False) -> None:
        self._directory = directory
        self._overwrite = overwrite
        self._mask = ~umask()
        """What this user gives others, whatever the sender gave his."""
        self._held: list[HeldPart] = []

    def check(self, names: Sequence[tuple[str, str]]) -> None:
        """Whether things of these names and kinds can be put here.

        :raises TransferError: one is there already, or its name cannot be one.
        """
        for name, kind in names:
            if "/" in name or name.endswith(PART_SUFFIX):
                raise TransferError("a name is malformed")
            parts_of(name)
            target = self._directory / name
            if not os.path.lexists(target):
                continue
            if kind == FILE and self._overwrite and stat.S_ISREG(target.lstat().st_mode):
                continue
            raise TransferError(f"{name} exists already")

    def free(self) -> int:
        """Bytes that still fit."""
        return shutil.disk_usage(self._directory).free

    def has_begun(self, names: Sequence[str]) -> bool:
        """Some of these things are here already, as an earlier transfer left them."""
        return any(os.path.lexists(self._directory / part_name(name)) for name in names)

    def hold(self, names: Sequence[tuple[str, str]]) -> None:
        """Things of these names and kinds begin to come, or go on; until :meth:`release`.

        :raises TransferError: another transfer, here or in another process, writes one of them.
        """
        try:
            for name, kind in names[:HELD_PARTS]:
                self._held.append(hold(self._directory / name, directory=kind == DIRECTORY))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The transfer is over; another may go on with what is not whole.  May be repeated."""
        held, self._held = self._held, []
        for part in held:
            part.release()

    # --- one entry each ---

    def _parent(self, entry: Item) -> tuple[int, str]:
        """An open directory, which the caller closes, and the name in it."""
        parts = parts_of(entry.path)
        parts[0] = part_name(parts[0])
        at = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                below = os.open(part, _OPEN_DIRECTORY, dir_fd=at)
                os.close(at)
                at = below
        except BaseException:
            os.close(at)
            raise
        return at, parts[-1]

    def clear(self, entry: Item) -> int:
        """Make way for an entry: what lies there and is of another kind goes.

        :returns: bytes of a file that are there already.
        """
        at, name = self._parent(entry)
        try:
            try:
                status = os.stat(name, dir_fd=at, follow_symlinks=False)
            except FileNotFoundError:
                status = None
            if status is not None:
                if entry.kind == FILE and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    os.chmod(name, 0o600, dir_fd=at)  # it may have been whole, and have its mode
                    return min(status.st_size, entry.size)
                if entry.kind == DIRECTORY and stat.S_ISDIR(status.st_mode):
                    os.chmod(name, 0o700, dir_fd=at)
                    return 0
                _remove(name, status, at)
            if entry.kind == DIRECTORY:
                os.mkdir(name, 0o700, dir_fd=at)
            return 0
        finally:
            os.close(at)

    def read(self, entry: Item, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes that are there, in pieces."""
        with self._open(entry, os.O_RDONLY) as file:
            while size and (data := file.read(min(CHUNK, size))):
                size -= len(data)
                yield data

    def _open(self, entry: Item, flags: int) -> IO[bytes]:
        at, name = self._parent(entry)
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        finally:
            os.close(at)
        return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b", buffering=0)

    def write_from(self, entry: Item, offset: int) -> IO[bytes]:
        """A file, open behind its first ``offset`` bytes; what is there beyond them is gone."""
        file = self._open(entry, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(file.fileno(), offset)
            file.seek(offset)
        except BaseException:
            file.close()
            raise
        return file

    def finish_file(self, entry: Item, file: IO[bytes]) -> None:
        """It is whole: give it its mode and time, see that the disk has it, and close it."""
        with file:
            os.fchmod(file.fileno(), entry.mode & self._mask)
            os.utime(file.fileno(), ns=(entry.mtime, entry.mtime))
            if "/" not in entry.path:
                os.fsync(file.fileno())

    # --- the end ---

    def finish(self, entries: Sequence[Item]) -> Iterator[None]:
        """All files are whole: links, modes and times of directories, and then their names; a little at a time.

        :raises TransferError: a name has been taken meanwhile.
        """
        known = {entry.path for entry in entries}
        for entry in entries:
            if entry.kind == LINK:
                at, name = self._parent(entry)
                try:
                    os.symlink(entry.target, name, dir_fd=at)
                    os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=at, follow_symlinks=False)
                finally:
                    os.close(at)
                yield None
        for entry in reversed(entries):  # those inside first: each changes the time of the one that it is in
            if entry.kind == DIRECTORY:
                at, name = self._parent(entry)
                try:
                    self._take_away_others(entry, at, name, known)
                    os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=at, follow_symlinks=False)
                    os.chmod(name, entry.mode & self._mask, dir_fd=at)
                finally:
                    os.close(at)
                yield None
        done = [entry for entry in entries if "/" not in entry.path]
        self.check([(entry.path, entry.kind) for entry in done])
        for entry in done:
            part, target = self._directory / part_name(entry.path), self._directory / entry.path
            if entry.kind == FILE and not self._overwrite:
                try:
                    os.link(part, target)  # which replaces nothing
                except FileExistsError:
                    raise TransferError(f"{entry.path} exists already") from None
                except OSError:
                    os.rename(part, target)  # a file system without hard links
                else:
                    os.unlink(part)
            else:
                os.rename(part, target)

    def path_of(self, name: str) -> Path:
        """Where a thing is when it is whole."""
        return self._directory / name

    def _take_away_others(self, entry: Item, at: int, name: str, known: set[str]) -> None:
        """What an earlier transfer of another tree left in this directory."""
        inside = os.open(name, _OPEN_DIRECTORY, dir_fd=at)
        try:
            for other in os.listdir(inside):
                if f"{entry.path}/{other}" not in known:
                    _remove(other, os.stat(other, dir_fd=inside, follow_symlinks=False), inside)
        finally:
            os.close(inside)


def _remove(name: str, status: os.stat_result, at: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, dir_fd=at)
    else:
        os.unlink(name, dir_fd=at)
