"""Destination of a parcel: files stay inside its directory, and get their names only when they are complete.

A thing ``NAME`` is made as ``.NAME.dmsg-part`` beside it.  What an earlier transfer left there is gone on with; what
belongs to another one is taken away.  No part of a path is followed where it is a link, and what another user has made
there, or has put in the place of something that was looked at, is not used: see :mod:`dmsg.apps.descriptors`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from dmsg.apps.descriptors import Descent, make_private, new_file, open_ours, open_within
from dmsg.apps.exposure import check_names, check_target
from dmsg.apps.parcels.manifest import DIRECTORY, FILE, LINK, Item, parts_of
from dmsg.apps.partial_files import PART_SUFFIX, HeldPart, hold_part, part_name, take_away
from dmsg.apps.paths import there_is, umask
from dmsg.apps.sources import open_regular
from dmsg.apps.transfer import TransferError
from dmsg.directories import free_bytes

CHUNK = 256 * 1024
HELD_PARTS = 64
"""Things of a parcel that are locked while it comes, which takes a descriptor each.  Who sends the same parcel again
meets the first of them."""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Destination:
    """A directory into which a parcel is put.

    :param overwrite: files of the same names are replaced; directories never are.
    :param hidden: names that begin with a dot are taken.
    :param base: a directory above it: no link is followed between the two, and directories between are made.
    :param copies: files are put there as cp(1) does: one that takes the place of another keeps the mode of that one,
        which has to be writable; one that is there already and is the same counts as received.
    """

    def __init__(
        self,
        directory: Path,
        *,
        overwrite: bool = False,
        hidden: bool = False,
        base: Path | None = None,
        copies: bool = False,
    ) -> None:
        self.hidden = hidden
        self._directory = directory
        self._base = base
        self._overwrite = overwrite
        self._copies = copies
        self._same: str | None = None
        """The name of a file that is there already, as far as the sender has not said otherwise."""
        self._mask = ~umask()
        """Umask of this user, which limits the modes that the sender asks for."""
        self._held: list[HeldPart] = []
        self._tops: dict[str, tuple[int, int]] = {}
        """Device and inode of each part that was made or looked at, by its name."""
        self._top: int | None = None
        self._descent: Descent | None = None

    def check(self, names: Sequence[tuple[str, str]]) -> None:
        """Whether things of these names and kinds can be put here.

        :raises TransferError: one is there already, or its name cannot be one.
        :raises OwnFile: one is, or would be, dmsg's own.
        """
        for name, kind in names:
            if "/" in name or name.endswith(PART_SUFFIX):
                raise TransferError("a name is malformed")
            parts_of(name)
            check_names(name, hidden=self.hidden)
            try:
                at = self._opened()
            except FileNotFoundError:
                if self._base is None:
                    raise
                continue  # nothing is there until the thing is taken
            check_target(name, at)
            try:
                there = os.stat(name, dir_fd=at, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if kind == FILE and self._overwrite and self._copies:
                there_is(name, at)
            elif kind != FILE or not stat.S_ISREG(there.st_mode) or not (self._overwrite or self._copies):
                raise _exists(name)

    def free(self) -> int | None:
        """Bytes that still fit; None where the file system does not say."""
        try:
            return free_bytes(self._directory)
        except FileNotFoundError:
            if self._base is None:
                raise
            return free_bytes(self._base)

    def has_begun(self, names: Sequence[str]) -> bool:
        """Whether some of these files exist already, partially or completely."""
        for name in (*map(part_name, names), *names):
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self._opened(), follow_symlinks=False)
                return True
        return False

    def hold(self, names: Sequence[tuple[str, str]]) -> None:
        """Things of these names and kinds begin to come, or go on; until :meth:`release`.

        :raises TransferError: another transfer, here or in another process, writes one of them.
        """
        self._opened(make=self._base is not None)
        try:
            for name, kind in names[:HELD_PARTS]:
                self._held.append(hold_part(name, self._opened(), directory=kind == DIRECTORY))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """The transfer is over; another may go on with what is not whole.  May be repeated."""
        held, self._held = self._held, []
        for part in held:
            part.release()
        descent, self._descent = self._descent, None
        top, self._top = self._top, None
        if descent is not None:
            descent.close()
        if top is not None:
            os.close(top)

    def _opened(self, *, make: bool = False) -> int:
        """The directory itself, the same until the end, whatever has its name."""
        if self._top is None:
            self._top = open_within(self._base or self._directory, self._directory, make=make)
            self._descent = Descent(self._top)
        return self._top

    # --- one entry each ---

    def _parent(self, entry: Item) -> tuple[int, str]:
        """The directory that an entry is in, which is valid until the next call, and the name in it."""
        parts = entry.path.split("/")  # which were looked at when they came
        parts[0] = part_name(parts[0])
        self._opened()
        assert self._descent is not None
        return self._descent.at(parts[:-1]), parts[-1]

    def clear(self, entry: Item) -> Generator[object, object, int]:
        """Make way for an entry: what lies there and is of another kind goes, a little at a time.

        :returns: bytes of a file that are there already.
        """
        if self._has_same(entry):
            self._same = entry.path
            return entry.size
        at, name = self._parent(entry)
        try:
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            status = None
        if status is not None:
            is_directory = stat.S_ISDIR(status.st_mode)
            if is_directory if entry.kind == DIRECTORY else entry.kind == FILE and _is_lone_file(status):
                descriptor = open_ours(name, at, entry.path)
                try:
                    status = os.fstat(descriptor)
                    if make_private(descriptor) and (is_directory or _is_lone_file(status)):
                        self._remember(entry, status)
                        return 0 if is_directory else min(status.st_size, entry.size)
                finally:
                    os.close(descriptor)
            yield take_away(name, at)
            at, name = self._parent(entry)
        if entry.kind == DIRECTORY:
            os.mkdir(name, 0o700, dir_fd=at)
            self._remember(entry, os.stat(name, dir_fd=at, follow_symlinks=False))
        return 0

    def _has_same(self, entry: Item) -> bool:
        """Whether a file of that name and size is there, which the sender may say is the same.

        :raises TransferError: one of another size is there, and is not to be replaced.
        """
        if not self._copies or self._overwrite or entry.kind != FILE or "/" in entry.path:
            return False
        try:
            found = os.stat(entry.path, dir_fd=self._opened(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            raise _exists(entry.path)
        return True

    def _remember(self, entry: Item, status: os.stat_result) -> None:
        if "/" not in entry.path:
            self._tops[entry.path] = status.st_dev, status.st_ino

    def read(self, entry: Item, size: int) -> Iterator[bytes]:
        """The first ``size`` bytes that are there, in pieces."""
        same = entry.path == self._same
        with open_regular(entry.path, entry.path, self._opened()) if same else self._open(entry, new=False) as file:
            while size and (data := file.read(min(CHUNK, size))):
                size -= len(data)
                yield data

    def _open(self, entry: Item, *, new: bool) -> FileIO:
        """:param new: it may be absent.  :raises TransferError: something else has come to be there."""
        at, name = self._parent(entry)
        if new:
            with suppress(FileExistsError):
                file = FileIO(new_file(at, name), "r+b")
                if "/" not in entry.path:
                    self._remember(entry, os.fstat(file.fileno()))
                return file
        descriptor = open_ours(name, at, entry.path)
        try:
            status = os.fstat(descriptor)
            before = self._tops.get(entry.path, (status.st_dev, status.st_ino))
            if not _is_lone_file(status) or before != (status.st_dev, status.st_ino) or not make_private(descriptor):
                raise _replaced(entry.path)
            self._remember(entry, status)
        except BaseException:
            os.close(descriptor)
            raise
        return FileIO(descriptor, "r+b")

    def write_from(self, entry: Item, offset: int) -> FileIO:
        """A file, open behind its first ``offset`` bytes; what is there beyond them is gone.

        :raises TransferError: the file that is there is not the same, and is not to be replaced.
        """
        if entry.path == self._same:
            if offset != entry.size:
                raise _exists(entry.path)
            return open_regular(entry.path, entry.path, self._opened())
        file = self._open(entry, new=True)
        try:
            os.ftruncate(file.fileno(), offset)
            file.seek(offset)
        except BaseException:
            file.close()
            raise
        return file

    def finish_file(self, entry: Item, file: FileIO) -> None:
        """Complete a file: set its mode and time, sync it to disk, and close it."""
        with file:
            if entry.path == self._same:
                return
            mode = entry.mode & self._mask
            if self._copies and "/" not in entry.path:
                before = there_is(entry.path, self._opened())
                if before is not None:  # who could not read it shall not from now on
                    mode = stat.S_IMODE(before.st_mode)
            os.fchmod(file.fileno(), mode)
            os.utime(file.fileno(), ns=(entry.mtime, entry.mtime))
            if "/" not in entry.path:
                os.fsync(file.fileno())

    # --- the end ---

    def finish(self, entries: Sequence[Item]) -> Iterator[object]:
        """All files are whole: links, modes and times of directories, and then their names; a little at a time.

        :raises TransferError: a name has been taken meanwhile.
        """
        known = set()
        for entry in entries:
            known.add(entry.path)
            if entry.kind == LINK:
                at, name = self._parent(entry)
                os.symlink(entry.target, name, dir_fd=at)
                os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=at, follow_symlinks=False)
            yield None
        for entry in reversed(entries):  # those inside first: each changes the time of the one that it is in
            if entry.kind == DIRECTORY:
                with self._inside(entry) as inside:
                    yield from self._take_away_others(entry, inside, known)
                    os.utime(inside, ns=(entry.mtime, entry.mtime))
                    os.fchmod(inside, entry.mode & self._mask)
            yield None
        done = [entry for entry in entries if "/" not in entry.path and entry.path != self._same]
        self.check([(entry.path, entry.kind) for entry in done])
        for entry in done:
            self._put_in_place(entry)

    def _put_in_place(self, entry: Item) -> None:
        at, part, target = self._opened(), part_name(entry.path), entry.path
        status = os.stat(part, dir_fd=at, follow_symlinks=False)
        if self._tops.get(entry.path) != (status.st_dev, status.st_ino):
            raise _replaced(entry.path)
        if entry.kind == FILE and not self._overwrite:
            try:
                # which replaces nothing
                os.link(part, target, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
            except FileExistsError:
                raise _exists(entry.path) from None
            except OSError:
                os.rename(part, target, src_dir_fd=at, dst_dir_fd=at)  # a file system without hard links
            else:
                os.unlink(part, dir_fd=at)
        else:
            os.rename(part, target, src_dir_fd=at, dst_dir_fd=at)

    def path_of(self, name: str) -> Path:
        """Return the final path of an entry."""
        return self._directory / name

    @contextmanager
    def _inside(self, entry: Item) -> Iterator[int]:
        """A directory of the parcel, open.  :raises TransferError: another one has come to be there."""
        at, name = self._parent(entry)
        inside = os.open(name, _OPEN_DIRECTORY, dir_fd=at)
        try:
            status = os.fstat(inside)
            if self._tops.get(entry.path, (status.st_dev, status.st_ino)) != (status.st_dev, status.st_ino):
                raise _replaced(entry.path)
            yield inside
        finally:
            os.close(inside)

    def _take_away_others(self, entry: Item, inside: int, known: set[str]) -> Iterator[object]:
        """Remove partial files that an earlier transfer of another tree left in this directory."""
        for other in os.listdir(inside):
            if f"{entry.path}/{other}" not in known:
                yield take_away(other, inside)
            yield None


def _is_lone_file(status: os.stat_result) -> bool:
    """A regular file that has no second name: what is written to it is written nowhere else."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _exists(name: str) -> TransferError:
    return TransferError(f"{name} exists already")


def _replaced(path: str) -> TransferError:
    return TransferError(f"{path}: somebody has put something else in its place while it came")
