"""Checks of paths that a peer has sent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dmsg.apps.exposure import check_names, check_target
from dmsg.apps.partial_files import PART_SUFFIX
from dmsg.apps.transfer import TransferError

PATH_LIMIT = 4096
"""Maximum bytes of a path, which is also the maximum of Linux."""


def local_name(text: str) -> str:
    """Return the form in which this program uses a name or path that a peer has sent.

    Peers send the bytes of a name as UTF-8, and other bytes as surrogate characters (PEP 383).  A program whose file
    system encoding is not UTF-8, as with ``LC_ALL=C`` and without Python's UTF-8 mode, decodes the same bytes to other
    characters, and could not use the peer's text.

    :returns: the name; the unchanged text if it stands for no bytes, so that no file can have it.
    """
    try:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    except UnicodeError:
        return text


def is_possible(path: str) -> bool:
    """Whether a file system can have the path.  Surrogate characters may only stand for bytes that are not UTF-8."""
    try:
        return 0 < len(os.fsencode(path)) <= PATH_LIMIT and "\0" not in path
    except UnicodeEncodeError:
        return False


def path_inside(root: Path, text: object, *, hidden: bool = False) -> Path:
    """Return the local path of a file that a peer has named relative to ``root``.

    :param hidden: whether the path, and the targets of links on it, may contain names that begin with a dot.
    :raises TransferError: the path leads outside ``root``, or is invalid.
    """
    if not isinstance(text, str) or text.endswith("/") or not is_possible(text := local_name(text)):
        raise TransferError("the path is malformed")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        # A terminal that shows the path would interpret control characters.
        raise TransferError("path has control characters")
    check_names(text, hidden=hidden)
    base = root.resolve()
    path = (base / text).resolve()
    if not path.is_relative_to(base) or path == base:
        raise TransferError("the path leads outside the directory")
    if path.name.endswith(PART_SUFFIX):
        raise TransferError("the path is malformed")
    # The path without links is checked, too, because a link may lead to a name with a dot.
    check_names(path.relative_to(base).as_posix(), hidden=hidden)
    return path


def regular_size(path: Path) -> int:
    """Return the size in bytes of a regular file.

    :raises TransferError: the file is absent, or it is not regular, because a pipe would block and a device has no
        size.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise TransferError(f"{path}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise TransferError(f"{path}: is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"{path}: not a regular file")
    return status.st_size


def umask() -> int:
    """Return the umask of this process."""
    found = os.umask(0)
    os.umask(found)
    return found


def find_replaced(name: str, at: int) -> os.stat_result | None:
    """Return the status of an existing file that a copy is about to replace; None if there is none.

    :param at: descriptor of the directory.
    :raises TransferError: the existing file is not regular, or this user may not write to it.
    :raises OwnFile: the file belongs, or would belong, to dmsg itself.
    """
    check_target(name, at)
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise TransferError(f"{name}: not a regular file")
    if not os.access(name, os.W_OK, dir_fd=at):
        raise TransferError(f"{name}: the file permissions forbid writing")
    return found
