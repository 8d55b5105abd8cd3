"""Destination of a parcel: the directory for its files, where an interrupted transfer resumes its partial files.

Files stay inside the directory, and get their final names only when they are complete.  An item ``NAME`` is first
written to ``.NAME.dmsg-part`` in the same directory.  If an earlier transfer of the same item has left such a partial
file, the transfer resumes it; anything else that has this name is removed.  No link is followed on any path, and no
file of another user is used.  If somebody replaces a file after it was checked, the transfer fails
(:mod:`dmsg.apps.descriptors`).
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
from dmsg.apps.paths import find_replaced, umask
from dmsg.apps.sources import open_regular
from dmsg.apps.transfer import TransferError
from dmsg.directories import free_bytes
from dmsg.renames import rename_to_new

CHUNK = 256 * 1024
HELD_PARTS = 64
"""Maximum number of items of a parcel that are locked during the transfer.  Each lock needs a descriptor.  Further
items need no lock, because a second transfer of the same parcel already fails at the first locked item.
"""
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Destination:
    """Directory that a parcel is written to.

    :param overwrite: whether files of the same names are replaced.  Directories are never replaced.
    :param hidden: whether names that begin with a dot are accepted.
    :param base: directory above ``directory``.  Absent directories between the two are created, and no link between
        them is followed.  None if ``directory`` exists.
    :param copies: whether to write files as cp(1) does.  A file that replaces another file keeps the mode of the
        replaced file, which must be writable.  An existing file with the same content counts as received.
    :ivar overwrites: whether files of the same names are replaced.
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
        self.overwrites = overwrite
        self._copies = copies
        self._same: str | None = None
        """Name of an existing file that is assumed to have the same content, until the sender has compared the hash."""
        self._mask = ~umask()
        """Permissions that this user's umask allows.  Other permissions are removed from the modes that the sender
        sends.
        """
        self._held: list[HeldPart] = []
        self._tops: dict[str, tuple[int, int]] = {}
        """Device and inode of each top-level partial file or directory that was created or checked, by name."""
        self._top: int | None = None
        self._descent: Descent | None = None

    def check(self, names: Sequence[tuple[str, str]]) -> None:
        """Check that items can be written here.

        :param names: name and kind of each item.
        :raises TransferError: an item exists already, or its name is invalid.
        :raises OwnFile: an item belongs, or would belong, to dmsg itself.
        """
        for name, kind in names:
            if "/" in name or name.endswith(PART_SUFFIX):
                raise TransferError("the offer has a malformed name")
            parts_of(name)
            check_names(name, hidden=self.hidden)
            try:
                at = self._root_descriptor()
            except FileNotFoundError:
                if self._base is None:
                    raise
                continue  # The target directory is absent, so it contains no such item. It is created on acceptance.
            check_target(name, at)
            try:
                there = os.stat(name, dir_fd=at, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if kind == FILE and self.overwrites and self._copies:
                find_replaced(name, at)
            elif kind != FILE or not stat.S_ISREG(there.st_mode) or not (self.overwrites or self._copies):
                raise _exists(name)

    def free(self) -> int | None:
        """Return the number of free bytes on the disk; None if the file system does not report it."""
        try:
            return free_bytes(self._directory)
        except FileNotFoundError:
            if self._base is None:
                raise
            return free_bytes(self._base)

    def has_begun(self, names: Sequence[str]) -> bool:
        """Whether a file or a partial file of one of these names exists already."""
        for name in (*map(part_name, names), *names):
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=self._root_descriptor(), follow_symlinks=False)
                return True
        return False

    def hold(self, names: Sequence[tuple[str, str]]) -> None:
        """Lock items for this transfer, until :meth:`release`.

        :param names: name and kind of each item.
        :raises TransferError: another transfer, in this process or another, writes one of the items.
        """
        self._root_descriptor(make=self._base is not None)
        try:
            for name, kind in names[:HELD_PARTS]:
                self._held.append(hold_part(name, self._root_descriptor(), directory=kind == DIRECTORY))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the items, so that another transfer may resume incomplete ones.  Further calls do nothing."""
        held, self._held = self._held, []
        for part in held:
            part.release()
        descent, self._descent = self._descent, None
        top, self._top = self._top, None
        if descent is not None:
            descent.close()
        if top is not None:
            os.close(top)

    def _root_descriptor(self, *, make: bool = False) -> int:
        """Return a descriptor of the directory.  All calls refer to the same directory, even if it is renamed
        meanwhile.

        :param make: whether to create the directory if it is absent.
        """
        if self._top is None:
            self._top = open_within(self._base or self._directory, self._directory, make=make)
            self._descent = Descent(self._top)
        return self._top

    # --- files and directories of the parcel ---

    def _parent(self, entry: Item) -> tuple[int, str]:
        """Return a descriptor of the directory that contains an entry, and the entry's name there.  The descriptor is
        valid until the next call.
        """
        parts = entry.path.split("/")  # The parts of the path were checked when the entry arrived.
        parts[0] = part_name(parts[0])
        self._root_descriptor()
        assert self._descent is not None
        return self._descent.at(parts[:-1]), parts[-1]

    def clear(self, entry: Item) -> Generator[object, object, int]:
        """Prepare the partial file or directory of an entry, in small steps, so that the transfer can resume it.

        A partial file or directory that the transfer cannot resume, for example one of the wrong kind, is removed.
        The directory of a directory entry is created if it is absent.

        :returns: number of bytes of the entry's file that exist already.
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
                        # The sender gets the hash of these bytes.  With hashes of beginnings of any length, a peer
                        # could find out the content of another peer's unfinished file, byte by byte.
                        return 0 if is_directory or status.st_size > entry.size else status.st_size
                finally:
                    os.close(descriptor)
            yield take_away(name, at)
            at, name = self._parent(entry)
        if entry.kind == DIRECTORY:
            os.mkdir(name, 0o700, dir_fd=at)
            self._remember(entry, os.stat(name, dir_fd=at, follow_symlinks=False))
        return 0

    def _has_same(self, entry: Item) -> bool:
        """Whether a file of the entry's name and size exists.  The sender is then asked whether its content is the
        same.

        :raises TransferError: a file of another size exists and must not be replaced.
        """
        if not self._copies or self.overwrites or entry.kind != FILE or "/" in entry.path:
            return False
        try:
            found = os.stat(entry.path, dir_fd=self._root_descriptor(), follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            raise _exists(entry.path)
        return True

    def _remember(self, entry: Item, status: os.stat_result) -> None:
        if "/" not in entry.path:
            self._tops[entry.path] = status.st_dev, status.st_ino

    def read(self, entry: Item, size: int) -> Iterator[bytes]:
        """Yield the first ``size`` bytes of the entry's existing file, in chunks."""
        same = entry.path == self._same
        with (
            open_regular(entry.path, entry.path, self._root_descriptor())
            if same
            else self._open(entry, new=False) as file
        ):
            while size and (data := file.read(min(CHUNK, size))):
                size -= len(data)
                yield data

    def _open(self, entry: Item, *, new: bool) -> FileIO:
        """Open the entry's partial file for writing.

        :param new: whether to create the file if it is absent.
        :raises TransferError: somebody has replaced the file.
        """
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
                raise _replaced_error(entry.path)
            self._remember(entry, status)
        except BaseException:
            os.close(descriptor)
            raise
        return FileIO(descriptor, "r+b")

    def write_from(self, entry: Item, offset: int) -> FileIO:
        """Open the entry's file for writing at ``offset``, and remove everything after the offset.

        :raises TransferError: the existing file has other content, and must not be replaced.
        """
        if entry.path == self._same:
            if offset != entry.size:
                raise _exists(entry.path)
            return open_regular(entry.path, entry.path, self._root_descriptor())
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
                before = find_replaced(entry.path, self._root_descriptor())
                # The new file gets the mode of the file that it replaces. Another mode could give access to users who
                # had none.
                if before is not None:
                    mode = stat.S_IMODE(before.st_mode)
            os.fchmod(file.fileno(), mode)
            os.utime(file.fileno(), ns=(entry.mtime, entry.mtime))
            if "/" not in entry.path:
                os.fsync(file.fileno())

    # --- end of the transfer ---

    def finish(self, entries: Sequence[Item]) -> Iterator[object]:
        """Complete the parcel in small steps.

        Links are created first.  Directories then get their modes and times.  At the end, all items get their final
        names.

        :raises TransferError: another file has taken a final name meanwhile.
        """
        known = set()
        for entry in entries:
            known.add(entry.path)
            if entry.kind == LINK:
                at, name = self._parent(entry)
                os.symlink(entry.target, name, dir_fd=at)
                os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=at, follow_symlinks=False)
            yield None
        # Inner directories come first, because a change inside a directory sets the directory's time.
        for entry in reversed(entries):
            if entry.kind == DIRECTORY:
                with self._open_inside(entry) as inside:
                    yield from self._take_away_others(entry, inside, known)
                    os.utime(inside, ns=(entry.mtime, entry.mtime))
                    os.fchmod(inside, entry.mode & self._mask)
            yield None
        done = [entry for entry in entries if "/" not in entry.path and entry.path != self._same]
        self.check([(entry.path, entry.kind) for entry in done])
        for entry in done:
            self._put_in_place(entry)

    def _put_in_place(self, entry: Item) -> None:
        at, part, target = self._root_descriptor(), part_name(entry.path), entry.path
        status = os.stat(part, dir_fd=at, follow_symlinks=False)
        if self._tops.get(entry.path) != (status.st_dev, status.st_ino):
            raise _replaced_error(entry.path)
        if entry.kind == FILE and not self.overwrites:
            try:
                rename_to_new(part, target, at=at)
            except FileExistsError:
                raise _exists(entry.path) from None
        else:
            os.rename(part, target, src_dir_fd=at, dst_dir_fd=at)

    def path_of(self, name: str) -> Path:
        """Return the final path of a top-level item."""
        return self._directory / name

    @contextmanager
    def _open_inside(self, entry: Item) -> Iterator[int]:
        """Open a directory of the parcel, and yield its descriptor.

        :raises TransferError: somebody has replaced the directory.
        """
        at, name = self._parent(entry)
        inside = os.open(name, _OPEN_DIRECTORY, dir_fd=at)
        try:
            status = os.fstat(inside)
            if self._tops.get(entry.path, (status.st_dev, status.st_ino)) != (status.st_dev, status.st_ino):
                raise _replaced_error(entry.path)
            yield inside
        finally:
            os.close(inside)

    def _take_away_others(self, entry: Item, inside: int, known: set[str]) -> Iterator[object]:
        """Remove everything in a directory of the parcel that is not in the manifest.  An earlier transfer may have
        left it.

        :param inside: descriptor of the directory.
        :param known: paths of all entries of the manifest.
        """
        for other in os.listdir(inside):
            if f"{entry.path}/{other}" not in known:
                yield take_away(other, inside)
            yield None


def _is_lone_file(status: os.stat_result) -> bool:
    """Whether a file is regular and has only one name, so that writing to it changes no other file."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _exists(name: str) -> TransferError:
    return TransferError(f"{name} exists already")


def _replaced_error(path: str) -> TransferError:
    return TransferError(f"{path}: somebody has replaced it during the transfer")
