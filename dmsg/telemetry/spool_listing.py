"""Listing of the sealed files below a local directory, and of the files and directories that cannot be read.

Symbolic links are followed. Files and directories that cannot be read are left out, with a reason. A later listing
includes them when they can be read. URIs of files have the form that Java uses, because the tables of the pipeline name
files by these URIs.
"""

from __future__ import annotations

import os
import stat
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from dmsg.errors import DmsgError

QUIET_SECONDS = 3600
"""Seconds without a change after which a directory need not be listed again until it changes."""
MAX_PATH_LENGTH = 100
"""Maximum number of characters of a path to show in a message."""
_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-!.~'()*:@&=+$,;/")
"""ASCII characters that Java does not quote in the path of a URI."""


class Reason(StrEnum):
    """Reason why a file or directory is left out of a listing."""

    DANGLING = "the link leads to nothing"
    FORBIDDEN = "permission to read it is missing"
    SPECIAL = "it is no regular file"
    NOT_UTF8 = "its name is not UTF-8"
    GONE = "it was removed before it could be read"
    UNREADABLE = "the disk or the network does not deliver it"


Left = Mapping[str, tuple[int, str]]
"""Files and directories that were left out: for each reason their number and the first path."""


@dataclass(frozen=True)
class SealedFile:
    """Sealed file of a directory.

    :ivar path: absolute path.
    """

    path: str
    size: int


@dataclass
class Listing:
    """Result of a listing.

    :ivar files: sealed files, ordered by path.
    :ivar left: paths of the files and directories that were left out, by reason.
    :ivar quiet: directories that need not be listed again while their time of change, in ns since 1970, stays the same.
    """

    files: list[SealedFile] = field(default_factory=list)
    left: dict[Reason, set[str]] = field(default_factory=lambda: defaultdict(set))
    quiet: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Sum of the sizes of the files in bytes."""
        return sum(file.size for file in self.files)


def list_sealed(
    root: str | os.PathLike[str], patterns: Iterable[str], known: Mapping[str, int] = MappingProxyType({})
) -> Listing:
    """Return the sealed files below a directory.

    Like Spark, the listing leaves out names that begin with a dot, and names that begin with ``_`` and contain no
    ``=``. Each directory is listed once, even if several links lead to it, because links may form a loop.

    :param patterns: glob patterns of the names of files.
    :param known: :attr:`Listing.quiet` of an earlier listing with the same patterns. Directories in it that have not
        changed are skipped, so their files are not in the result.
    :raises DmsgError: ``root`` is not a readable directory.
    """
    found = Listing()
    wanted = list(patterns)
    top = os.path.abspath(root)
    if not _is_utf8(top):
        raise DmsgError(f"the files in {shorten_path(top)} cannot be read, because {Reason.NOT_UTF8}")
    seen: set[tuple[int, int]] = set()
    # Directories are listed before links, so that a file that both lead to is listed under its real path.
    directories: list[str] = [top]
    links: list[str] = []
    while directories or links:
        directory = directories.pop() if directories else links.pop(0)
        try:
            status = os.stat(directory)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if known.get(directory) == status.st_mtime_ns:
                found.quiet[directory] = status.st_mtime_ns
                continue
            with os.scandir(directory) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if directory == top:
                raise DmsgError(f"{shorten_path(top)} cannot be read: {error.strerror}") from None
            found.left[reason_of(error)].add(directory)
            continue
        plain = True
        for entry in ordered:
            fits = any(fnmatchcase(entry.name, pattern) for pattern in wanted)
            try:
                kind = _kind_of(entry, fits=fits)
            except _Left as left:
                found.left[left.reason].add(entry.path)
                plain = False
                continue
            plain = plain and kind is not _Kind.DIRECTORY and not entry.is_symlink()
            if kind is _Kind.DIRECTORY:
                (links if entry.is_symlink() else directories).append(entry.path)
            elif kind is _Kind.FILE:
                found.files.append(SealedFile(entry.path, entry.stat().st_size))
        # A directory's time changes when a file is added. So a directory whose time has not changed need not be listed
        # again, if it contains only files and none of them was left out. If the last change is recent, the directory is
        # listed again in any event: a further change possibly leaves the time as it is, because the time has a limited
        # resolution and can be set by another machine's clock.
        if plain and time.time() - status.st_mtime > QUIET_SECONDS:
            found.quiet[directory] = status.st_mtime_ns
    found.files.sort(key=lambda file: file.path)
    return found


class _Kind(Enum):
    DIRECTORY = 0
    FILE = 1
    OTHER = 2


class _Left(Exception):
    """Error: an entry of a directory is left out of the listing.

    :ivar reason: why it is left out.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def _kind_of(entry: os.DirEntry[str], *, fits: bool) -> _Kind:
    """Return whether an entry of a directory is a wanted file, a directory to list, or something else, which is
    ignored.

    :param fits: whether the name is that of a wanted file.
    :raises _Left: the entry is a wanted file or a directory, but cannot be read.
    """
    if _is_hidden(entry.name):
        return _Kind.OTHER
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        reason = reason_of(error)
        if entry.is_symlink():
            # A broken link of any name is reported, because it may have led to a directory.
            raise _Left(reason if reason is Reason.FORBIDDEN else Reason.DANGLING) from None
        if fits:
            raise _Left(reason) from None
        return _Kind.OTHER
    if not (fits or stat.S_ISDIR(mode)):
        return _Kind.OTHER
    if not _is_utf8(entry.name):
        raise _Left(Reason.NOT_UTF8)
    if stat.S_ISDIR(mode):
        return _Kind.DIRECTORY
    if not stat.S_ISREG(mode):
        raise _Left(Reason.SPECIAL)
    if not _may_read(entry.path):
        raise _Left(Reason.FORBIDDEN)
    return _Kind.FILE


def _may_read(path: str) -> bool:
    """Whether this process has the permission to read a file."""
    return os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids)


def reason_of(error: OSError) -> Reason:
    """Return the reason for which a file is not read after this error of the operating system."""
    if isinstance(error, FileNotFoundError):
        return Reason.GONE
    return Reason.FORBIDDEN if isinstance(error, PermissionError) else Reason.UNREADABLE


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_uri(path: str) -> str:
    """Return the URI of an absolute path in the form that Java uses, such as ``file:/a%20b``."""
    return "file:" + "".join(_quoted(path))


def _quoted(path: str) -> Iterator[str]:
    for one in path:
        if one in _PLAIN or (ord(one) > 0x9F and unicodedata.category(one) not in ("Zs", "Zl", "Zp")):
            yield one
        else:
            yield "".join(f"%{byte:02X}" for byte in one.encode())


def merge(listings: Iterable[Mapping[Reason, set[str]]]) -> Left:
    """Combine the paths that several listings left out. A path that occurs in several of them is counted once."""
    paths: dict[Reason, set[str]] = defaultdict(set)
    for left in listings:
        for reason, some in left.items():
            paths[reason] |= some
    return {reason: (len(some), shorten_path(min(some))) for reason, some in sorted(paths.items()) if some}


def shorten_path(path: str) -> str:
    """Return a path as text for people. A long path is shortened at its start."""
    text = os.fsencode(path).decode(errors="replace")
    return text if len(text) <= MAX_PATH_LENGTH else "..." + text[-MAX_PATH_LENGTH:]


def left_lines(left: Left) -> list[str]:
    """Return a line of text for each reason, with the number of paths and the first one."""
    return [
        f"not read, because {reason}: {first}" + (f" and {count - 1:,} more" if count > 1 else "")
        for reason, (count, first) in left.items()
    ]
