"""Search for the files and directories to send.  Each file is opened again when it is sent.

Both the search and the later opening use descriptors, so a link that replaces a directory meanwhile is not followed.  A
file that is opened again is compared with the file that was offered.
"""

from __future__ import annotations

import io
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dmsg.apps.descriptors import Descent, generation_of, open_within
from dmsg.apps.exposure import OwnFile, OwnFiles, check_directory, has_dot, own_files
from dmsg.apps.parcels.manifest import DIRECTORY, FILE, LINK, MODE_MASK, CheckedItems, Item, parts_of, stays_inside
from dmsg.apps.parcels.wire import THINGS_LIMIT, fits_into_message
from dmsg.apps.sources import (
    UNMEASURED_LIMIT,
    SourceChanged,
    content_of_unmeasured,
    gone_error,
    named_path,
    open_regular,
    resized_error,
)
from dmsg.apps.transfer import TransferError

UNMEASURED_IN_ALL = 16 * UNMEASURED_LIMIT
"""Maximum total bytes of those files of a parcel whose sizes the system does not report."""
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class WalkResult:
    """Result of :func:`walk`: the entries to send, and the paths that are not sent.

    :ivar base: directory that contains all items, directly or in directories below it. In the path from this directory
        to an item, no link is followed. If None, the parent directory of each item is used instead.
    :ivar checked: manifest of the entries to send.
    :ivar tops: local path of each top-level item, by the name under which it is sent.
    :ivar inodes: inodes of the entries, in the order of the manifest.
    :ivar generations: generations of the inodes (:func:`~dmsg.apps.descriptors.generation_of`), in the same order; 0
        for directories and links.
    :ivar contents: contents of files whose sizes the system does not report, by index of the entry.
    :ivar left_out: paths that are not sent, such as links that lead out of their tree, devices and sockets.
    :ivar dotted: paths that are not sent because the name begins with a dot.
    :ivar own: paths that are not sent because they belong to dmsg itself, such as key files.
    """

    hidden: bool = False
    base: Path | None = None

    checked: CheckedItems = field(default_factory=CheckedItems)
    tops: dict[str, Path] = field(default_factory=dict)
    inodes: array[int] = field(default_factory=lambda: array("Q"))
    generations: array[int] = field(default_factory=lambda: array("L"))
    contents: dict[int, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    dotted: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    _unmeasured: int = 0

    @property
    def offer(self) -> dict[str, object]:
        """Message that offers the entries."""
        checked = self.checked
        return {"offer": "files", "things": checked.tops, "size": checked.size, "files": checked.files}

    @contextmanager
    def open_parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Open the directory that contains a top-level item.

        :param name: name under which the item is sent.
        :returns: descriptor of the directory, and the item's name in it.
        :raises OwnFile: the directory belongs to dmsg itself.
        """
        path = self.tops[name]
        try:
            at = open_within(self.base or path.parent, path.parent)
        except OwnFile:
            raise OwnFile(path.name) from None
        try:
            yield at, path.name
        finally:
            os.close(at)

    def add(self, entry: Item, inode: int, generation: int = 0, content: bytes | None = None) -> None:
        """Add an entry to the manifest.

        :param generation: generation of a file's inode.
        :param content: content of a file whose size the system does not report, else None.
        :raises TransferError: the entry contradicts those before it, or a limit is exceeded.
        """
        parts_of(entry.path)
        if content is not None:
            self._unmeasured += len(content)
            if self._unmeasured > UNMEASURED_IN_ALL:
                raise TransferError(f"files of unknown size have more than {UNMEASURED_IN_ALL:,} bytes together")
            self.contents[len(self.inodes)] = content
        self.checked.add(entry)
        self.inodes.append(inode)
        self.generations.append(generation)


class OfferedFiles:
    """Files of an offered parcel, which the sender opens one after the other."""

    def __init__(self, walked: WalkResult) -> None:
        self._walked = walked
        self._top = ""
        self._descent: Descent | None = None
        self._descriptor = -1

    def open(self, index: int) -> IO[bytes]:
        """Open a file, and check that it is still the file that was offered.

        :param index: index of the entry in the manifest.
        :raises SourceChanged: the file is absent, shorter, or another file.
        """
        entry = self._walked.checked.entries[index]
        content = self._walked.contents.get(index)
        if content is not None:
            return io.BytesIO(content)
        try:
            file = self._open_offered(entry)
        except OSError as error:
            raise gone_error(entry.path, error) from None
        except TransferError:
            raise SourceChanged(f"{entry.path} changed after it was offered: it is no longer a file") from None
        status = os.fstat(file.fileno())
        if status.st_size < entry.size or (status.st_size > entry.size and self._is_other(index, file, status)):
            file.close()
            raise resized_error(entry.path, status.st_size, entry.size)
        return file

    def _is_other(self, index: int, file: IO[bytes], status: os.stat_result) -> bool:
        """Whether a file is another one than the offered one, which may have grown."""
        offered = self._walked.inodes[index], self._walked.generations[index]
        return (status.st_ino, generation_of(file.fileno())) != offered

    def has_changed(self, index: int, file: IO[bytes]) -> bool:
        """Whether somebody has written to an open file since it was offered."""
        entry = self._walked.checked.entries[index]
        if index in self._walked.contents:
            return False
        status = os.fstat(file.fileno())
        return (status.st_size, max(0, status.st_mtime_ns)) != (entry.size, entry.mtime)

    def _open_offered(self, entry: Item) -> IO[bytes]:
        top, *parts = entry.path.split("/")
        if not parts:
            with self._walked.open_parent(top) as (at, name):
                return open_regular(name, entry.path, at)
        if top != self._top or self._descent is None:
            self.close()
            with self._walked.open_parent(top) as (at, name):
                self._descriptor = os.open(name, _READ_DIRECTORY, dir_fd=at)
            self._top, self._descent = top, Descent(self._descriptor)
        return open_regular(parts[-1], entry.path, self._descent.at(parts[:-1]))

    def close(self) -> None:
        """Close the directories.  Further calls do nothing."""
        descent, self._descent = self._descent, None
        if descent is not None:
            descent.close()
            os.close(self._descriptor)


def walk(
    paths: Sequence[Path], *, hidden: bool = False, called: str | None = None, base: Path | None = None
) -> WalkResult:
    """Find all files, directories and links to send.  Blocks while it reads the disk.

    :param paths: files and directories that the user named.
    :param hidden: whether to include names that begin with a dot.
    :param called: name under which a single path is sent; None for its own name.
    :param base: directory that contains all paths, directly or in directories below it. In the part of a path after
        this directory, no link is followed. None if the paths themselves may be links.
    :raises TransferError: two paths have the same name, a file cannot be read or must not be sent, or there are more
        paths than one offer can name.
    """
    walked = WalkResult(hidden, base)
    if len(paths) > THINGS_LIMIT:
        raise _too_many(f"{len(paths):,} files and directories are more than {THINGS_LIMIT:,}")
    for path in paths:
        _add_path(walked, path, called)
    if not walked.checked.entries:
        raise TransferError("there is nothing to send")
    if not fits_into_message(**walked.offer):
        raise _too_many(f"the names of {len(paths):,} files and directories are too long")
    return walked


def _add_path(walked: WalkResult, path: Path, called: str | None) -> None:
    """Add a file or directory that the user named, with its content."""
    top = named_path(path).absolute()
    name = top.name or top.resolve().name
    if name in ("", "..", "."):
        name = top.resolve().name
    if not name:
        raise TransferError(f"{path}: this path has no file name")
    if has_dot(name) and not walked.hidden:
        raise TransferError(f"{path}: its name begins with a dot; use --hidden to send it")
    real = top
    try:
        if walked.base is None:
            real = top.resolve()  # If the user names a link, its target is sent.
        if name in walked.tops:
            raise TransferError(f"two of the given files are called {name}")
        name = called or name
        walked.tops[name] = real
        with walked.open_parent(name) as (at, there):
            mode = os.stat(there, dir_fd=at, follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                _add_file(walked, there, name, at)
            elif stat.S_ISDIR(mode):
                _add_directory(walked, real, name, at)
            else:
                raise TransferError("this is neither a file nor a directory; use - to send standard input")
    except OSError as error:
        what = path if error.filename in (None, str(top), str(real), real.name, name) else error.filename
        raise TransferError(f"{what}: {error.strerror}") from None
    except TransferError as error:
        raise TransferError(f"{path}: {error}") from None


def _too_many(reason: str) -> TransferError:
    return TransferError(f"{reason}, so they cannot be sent in one transfer: put them into one directory, and send it")


def _add_file(walked: WalkResult, source: str, path: str, at: int, own: OwnFiles | None = None) -> None:
    with open_regular(source, path, at, own=own) as file:
        status = os.fstat(file.fileno())
        content = content_of_unmeasured(file, status, path)
        generation = generation_of(file.fileno())
    size = status.st_size if content is None else len(content)
    item = Item(path, FILE, size, status.st_mode & MODE_MASK, max(0, status.st_mtime_ns))
    walked.add(item, status.st_ino, generation, content)


def _add_directory(walked: WalkResult, source: Path, name: str, at: int) -> None:
    top = os.open(source.name, _READ_DIRECTORY, dir_fd=at)
    descent = Descent(top)
    own = own_files()
    try:
        check_directory(top, os.fspath(source), above=True)
        unread: list[tuple[str, ...]] = [()]
        pending: list[tuple[tuple[str, ...], Iterator[str]]] = []
        while unread or pending:
            where: tuple[str, ...] = ()
            try:
                if unread:
                    where = unread.pop()
                    pending.append((where, iter(_names(walked, descent.at(where), "/".join((name, *where))))))
                where, names = pending[-1]
                below = next(names, None)
                if below is None:
                    pending.pop()
                    continue
                where = (*where, below)
                if _add_entry(walked, below, "/".join((name, *where)), descent.at(where[:-1]), own):
                    unread.append(where)
            except OSError as error:
                error.filename = os.fspath(source.joinpath(*where))
                raise
    finally:
        descent.close()
        os.close(top)


def _add_entry(walked: WalkResult, name: str, path: str, at: int, own: OwnFiles) -> bool:
    """Add the entry of one file, directory or link to the manifest.

    :returns: whether it is a directory whose content has yet to be added.
    """
    if has_dot(name) and not walked.hidden:
        walked.dotted.append(path)
        return False
    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode) and own.has_directory(status):
        walked.own.append(path)
        return False
    if stat.S_ISREG(status.st_mode):
        try:
            _add_file(walked, name, path, at, own)
        except OwnFile:
            walked.own.append(path)
    elif stat.S_ISLNK(status.st_mode) and stays_inside(path, target := os.readlink(name, dir_fd=at)):
        mtime = max(0, status.st_mtime_ns)
        walked.add(Item(path, LINK, 0, status.st_mode & MODE_MASK, mtime, target), status.st_ino)
    elif not stat.S_ISDIR(status.st_mode):
        walked.left_out.append(path)
    return stat.S_ISDIR(status.st_mode)


def _names(walked: WalkResult, at: int, path: str) -> list[str]:
    """Add a directory's entry to the manifest, and return the names in the directory."""
    inside = os.open(".", _READ_DIRECTORY, dir_fd=at)
    try:
        status = os.fstat(inside)
        entry = Item(path, DIRECTORY, 0, status.st_mode & MODE_MASK, max(0, status.st_mtime_ns))
        walked.add(entry, status.st_ino)
        return sorted(os.listdir(inside))
    finally:
        os.close(inside)
