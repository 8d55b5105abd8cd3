"""Manifest of a parcel: list of its files, directories and links, which the sender writes and the receiver checks.

A path is relative, with ``/`` between its parts; the first part is the name of a top-level item.  Names are bytes on
both sides: bytes that are no UTF-8 are transferred as surrogates (PEP 383).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TypedDict

from dmsg.apps.exposure import check_names
from dmsg.apps.partial_files import NAME_LIMIT
from dmsg.apps.transfer import TransferError

FILE, DIRECTORY, LINK = "f", "d", "l"
ENTRIES_LIMIT = 250_000
"""Maximum number of files, directories and links of one parcel."""
NAMES_LIMIT = 32 * 1024 * 1024
"""Maximum bytes of all paths and link targets together."""
PATH_LIMIT = 4096
"""Maximum bytes of one path."""
DEPTH_LIMIT = 200
"""Maximum number of parts of a path."""
MODE_MASK = 0o777
"""Bits of a file mode that are transferred; set-user-id, set-group-id and sticky are not."""


@dataclass(frozen=True, slots=True)
class Item:
    """Entry of a manifest: a file, a directory or a symbolic link.

    :ivar kind: ``FILE``, ``DIRECTORY`` or ``LINK``.
    :ivar size: bytes of a file, else 0.
    :ivar mode: permissions, nine bits.
    :ivar mtime: time of the last change, in nanoseconds since 1970.
    :ivar target: target of a link.
    """

    path: str
    kind: str
    size: int = 0
    mode: int = 0o644
    mtime: int = 0
    target: str = ""

    def below(self, name: str) -> Item:
        """Return the entry with another name for its top-level item."""
        _, slash, rest = self.path.partition("/")
        return replace(self, path=f"{name}{slash}{rest}")

    def to_list(self) -> list[object]:
        """Return the entry as a list for the wire."""
        fields = [self.path, self.kind, self.size, self.mode, self.mtime]
        return [*fields, self.target] if self.kind == LINK else fields


def parts_of(path: object) -> list[str]:
    """Return the parts of a path.

    :raises TransferError: the path could lead outside its directory, or is malformed.
    """
    if not isinstance(path, str) or not path or "\0" in path or not _is_name(path):
        raise TransferError("the list of files has a malformed path")
    parts = path.split("/")
    if len(parts) > DEPTH_LIMIT:
        raise TransferError(f"a path has more than {DEPTH_LIMIT} parts")
    if any(part in ("", ".", "..") or len(os.fsencode(part)) > NAME_LIMIT for part in parts):
        raise TransferError("the list of files has a malformed path")
    return parts


def stays_inside(path: str, target: object) -> bool:
    """Whether a link at ``path`` leads to something in the same tree, even with the tree's other links.

    Parts ``..`` may only come first.  After the name of another link, their target would be unknown.
    """
    if not isinstance(target, str) or not target or "\0" in target or not _is_name(target):
        return False
    if target.startswith("/"):
        return False
    up = 0
    parts = [part for part in target.split("/") if part not in ("", ".")]
    while up < len(parts) and parts[up] == "..":
        up += 1
    # The link's target may go up as far as the top directory of the tree, but not above it.
    return ".." not in parts[up:] and up <= path.count("/") - 1


def decode_item(value: object) -> Item:
    """Decode an entry that the other side sent.

    :raises TransferError: the entry is malformed or not allowed.
    """
    if not isinstance(value, list) or not 5 <= len(value) <= 6:
        raise TransferError("the list of files has a malformed entry")
    path, kind, size, mode, mtime, *rest = value
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
    """Summary of one sent file or directory: its bytes, files and directories."""

    name: str
    kind: str
    size: int
    files: int
    directories: int


class CheckedItems:
    """List of entries in the order of their arrival, which checks that each path comes once and after its directory.

    :param hidden: whether names that begin with a dot are allowed.
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
        """Add an entry.

        :raises TransferError: the entry does not fit those before it, or a limit is exceeded.
        """
        above, slash, _ = entry.path.rpartition("/")
        if entry.path in self._kinds or (slash and self._kinds.get(above) != DIRECTORY):
            raise TransferError("the list of files has an entry twice, or before its directory")
        check_names(entry.path, hidden=self._hidden)
        self._names += len(os.fsencode(entry.path)) + len(os.fsencode(entry.target))
        if len(self.entries) >= ENTRIES_LIMIT or self._names > NAMES_LIMIT:
            raise TransferError(f"more than {ENTRIES_LIMIT:,} files, or names of {NAMES_LIMIT >> 20} MiB")
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
        """Summaries to show to a person: for each top-level item its name, kind, bytes, number of files and of
        directories."""
        return list(self._tops.values())


def _is_name(text: str) -> bool:
    """Whether a system can have the name; surrogates may stand only for bytes that are no UTF-8."""
    try:
        return len(os.fsencode(text)) <= PATH_LIMIT
    except UnicodeEncodeError:
        return False
