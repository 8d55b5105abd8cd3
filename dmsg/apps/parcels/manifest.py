"""Manifest of a parcel: list of its files, directories and links, which the sender sends and the receiver checks.

A path is relative, with ``/`` between its parts; the first part is the name of a top-level item.  The file system's
names are bytes.  Bytes that are not UTF-8 are sent as surrogate characters (PEP 383).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TypedDict

from dmsg.apps.exposure import check_names
from dmsg.apps.partial_files import NAME_LIMIT
from dmsg.apps.paths import is_possible, local_name
from dmsg.apps.transfer import TransferError

FILE, DIRECTORY, LINK = "f", "d", "l"
ENTRIES_LIMIT = 250_000
"""Maximum number of files, directories and links of one parcel."""
NAMES_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of all paths and link targets of one parcel together."""
DEPTH_LIMIT = 200
"""Maximum number of parts, such as directories, of a path."""
MODE_MASK = 0o777
"""Bits of a file's mode that are transferred.  Set-user-id, set-group-id and sticky bits are not."""


@dataclass(frozen=True, slots=True)
class Item:
    """Entry of a manifest: a file, a directory or a symbolic link.

    :ivar path: path of the entry in the parcel.
    :ivar kind: ``FILE``, ``DIRECTORY`` or ``LINK``.
    :ivar size: bytes of a file; 0 for other kinds.
    :ivar mode: permissions, nine bits.
    :ivar mtime: time of the last change, in nanoseconds since 1970.
    :ivar target: target of a link; empty for other kinds.
    """

    path: str
    kind: str
    size: int = 0
    mode: int = 0o644
    mtime: int = 0
    target: str = ""

    def below(self, name: str) -> Item:
        """Return a copy of the entry. Its path begins with ``name`` instead of the top-level item's name."""
        _, slash, rest = self.path.partition("/")
        return replace(self, path=f"{name}{slash}{rest}")

    def to_list(self) -> list[object]:
        """Return the entry as a list, which is its form in messages."""
        fields = [self.path, self.kind, self.size, self.mode, self.mtime]
        return [*fields, self.target] if self.kind == LINK else fields


def parts_of(path: object) -> list[str]:
    """Return the parts of a path.

    :raises TransferError: the path could lead outside its directory, or is malformed.
    """
    if not isinstance(path, str) or not is_possible(path):
        raise TransferError("the list of files has a malformed path")
    parts = path.split("/")
    if len(parts) > DEPTH_LIMIT:
        raise TransferError(f"a path has more than {DEPTH_LIMIT} parts")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > NAME_LIMIT for part in parts):
        raise TransferError("the list of files has a malformed path")
    return parts


def stays_inside(path: str, target: object) -> bool:
    """Whether the target of a link at ``path`` is in the same top-level item, even if the item has other links.

    In the target, ``..`` is allowed only at the start.  After another name, which may be a link, ``..`` could lead
    anywhere.
    """
    if not isinstance(target, str) or not is_possible(target):
        return False
    if target.startswith("/"):
        return False
    up = 0
    parts = [part for part in target.split("/") if part not in ("", ".")]
    while up < len(parts) and parts[up] == "..":
        up += 1
    # The target may go up as far as the top-level directory, but not above it.
    return ".." not in parts[up:] and up <= path.count("/") - 1


def decode_item(value: object) -> Item:
    """Return the entry in a list that the other side has sent.

    :raises TransferError: the entry is malformed or not allowed.
    """
    if not isinstance(value, list) or not 5 <= len(value) <= 6:
        raise TransferError("the list of files has a malformed entry")
    path, kind, size, mode, mtime, *rest = value
    path, *rest = (local_name(one) if isinstance(one, str) else one for one in (path, *rest))
    parts_of(path)
    numbers = ((size, 2**62), (mode, MODE_MASK), (mtime, 2**63 - 1))
    if any(type(number) is not int or not 0 <= number <= most for number, most in numbers):
        raise TransferError("the list of files has a malformed entry")
    if kind == LINK:
        if len(rest) != 1 or not stays_inside(path, rest[0]):
            raise TransferError("a symbolic link points outside the sent directory")
        return Item(path, LINK, 0, mode, mtime, rest[0])
    if rest or kind not in (FILE, DIRECTORY) or (kind == DIRECTORY and size):
        raise TransferError("the list of files has a malformed entry")
    return Item(path, kind, size, mode, mtime)


class TopLevelItem(TypedDict):
    """Summary of one top-level file or directory: its bytes, and its numbers of files and directories."""

    name: str
    kind: str
    size: int
    files: int
    directories: int


class CheckedItems:
    """List of the manifest's entries, in the order in which they arrived.

    Each path may occur only once, and only after the directory that contains it.

    :param hidden: whether names that begin with a dot are allowed.
    :ivar size: bytes of all files.
    :ivar files: number of files and links.
    """

    def __init__(self, *, hidden: bool = True) -> None:
        self._hidden = hidden
        self.entries: list[Item] = []
        self.size = 0
        self.files = 0
        self._tops: dict[str, TopLevelItem] = {}
        self._kinds: dict[str, str] = {}
        self._names = 0

    def add(self, entry: Item) -> None:
        """Check an entry and append it.

        :raises TransferError: the path occurs twice or before its directory, a name is not allowed, or a limit is
            exceeded.
        """
        above, slash, _ = entry.path.rpartition("/")
        if entry.path in self._kinds or (slash and self._kinds.get(above) != DIRECTORY):
            raise TransferError("the list of files has an entry twice, or before its directory")
        check_names(entry.path, hidden=self._hidden)
        self._names += len(os.fsencode(entry.path)) + len(os.fsencode(entry.target))
        if len(self.entries) >= ENTRIES_LIMIT or self._names > NAMES_LIMIT:
            raise TransferError(
                f"there are more than {ENTRIES_LIMIT:,} files, or their names have more than {NAMES_LIMIT >> 20} MiB"
            )
        self._kinds[entry.path] = entry.kind
        self.entries.append(entry)
        self.size += entry.size
        self.files += entry.kind != DIRECTORY
        name = entry.path.partition("/")[0]
        top = self._tops.setdefault(name, {"name": name, "kind": entry.kind, "size": 0, "files": 0, "directories": 0})
        top["size"] += entry.size
        top["files"] += entry.kind != DIRECTORY
        top["directories"] += entry.kind == DIRECTORY

    @property
    def tops(self) -> list[TopLevelItem]:
        """Summaries of the top-level items, for people."""
        return list(self._tops.values())
