"""Checks of paths that a peer names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dmsg.apps.exposure import check_names, check_target
from dmsg.apps.partial_files import PART_SUFFIX
from dmsg.apps.transfer import TransferError

PATH_LIMIT = 4096
"""Maximum characters of a path."""


def path_inside(root: Path, text: object, *, hidden: bool = False) -> Path:
    """Return the file that a peer names, below ``root``.

    :param hidden: whether the path, and the targets of links on it, may contain names that begin with a dot.
    :raises TransferError: the path leads outside ``root``, or is invalid.
    """
    if not isinstance(text, str) or not text or len(text) > PATH_LIMIT or text.endswith("/"):
        raise TransferError("path is malformed")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        # Control characters are refused, because the path is shown on terminals, which interpret them.
        raise TransferError("path has control characters")
    check_names(text, hidden=hidden)
    base = root.resolve()
    path = (base / text).resolve()
    if not path.is_relative_to(base) or path == base:
        raise TransferError("the path leads outside the directory")
    if path.name.endswith(PART_SUFFIX):
        raise TransferError("path is malformed")
    # The resolved path is checked, so that the target of a link is covered, too.
    check_names(path.relative_to(base).as_posix(), hidden=hidden)
    return path


def regular_size(path: Path) -> int:
    """Return the size in bytes of a file that can be sent.

    :raises TransferError: the file is absent or not regular: pipes would block, and devices have no size.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise TransferError(f"{path}: {error.strerror}") from None
    if stat.S_ISDIR(status.st_mode):
        raise TransferError(f"{path}: is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise TransferError(f"{path}: is not a regular file")
    return status.st_size


def umask() -> int:
    """Return the umask of this process."""
    found = os.umask(0)
    os.umask(found)
    return found


def find_replaced(name: str, at: int) -> os.stat_result | None:
    """Return the file that a copy replaces, or None.

    :param at: descriptor of the directory.
    :raises TransferError: the existing file is a device, a directory or the like, or must not be written.
    :raises OwnFile: the file is, or would be, dmsg's own.
    """
    check_target(name, at)
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise TransferError(f"{name}: not a regular file")
    if not os.access(name, os.W_OK, dir_fd=at):
        raise TransferError(f"{name}: no permission to write this file")
    return found
