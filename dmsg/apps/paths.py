"""Files that a peer names, and where what comes of them lies: what may be one, and what may not."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from dmsg.apps.transfer import TransferError

PATH_LIMIT = 4096
"""Characters of a path."""
PART_SUFFIX = ".dmsg-part"
NAME_LIMIT = 255
"""Bytes of a name."""


def inside(root: Path, text: Any) -> Path:
    """The file that a peer names, below ``root``.

    :raises TransferError: it would be elsewhere, or cannot be a name.
    """
    if not isinstance(text, str) or not text or len(text) > PATH_LIMIT or text.endswith("/"):
        raise TransferError("path is malformed")
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        # it would be shown on terminals
        raise TransferError("path has control characters")
    base = root.resolve()
    path = (base / text).resolve()
    if not path.is_relative_to(base) or path == base:
        raise TransferError("path leads out of the directory")
    if path.name.endswith(PART_SUFFIX):
        raise TransferError("path is malformed")
    return path


def regular_size(path: Path) -> int:
    """Bytes of a file that can be sent.

    :raises TransferError: it is not there, or is no regular file: a pipe would block, a device has no size.
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


def part_name(name: str) -> str:
    """What a thing is called until it is whole."""
    part = f".{name}{PART_SUFFIX}"
    if len(os.fsencode(part)) <= NAME_LIMIT:
        return part
    return f".{hashlib.sha256(os.fsencode(name)).hexdigest()}{PART_SUFFIX}"


def part_of(path: Path) -> Path:
    """Where a file lies until it is whole."""
    return path.with_name(part_name(path.name))


def begun(path: Path) -> int:
    """Bytes that there are of a file that is not whole; what lies there and can be none of it is taken away."""
    part = part_of(path)
    try:
        status = part.lstat()
    except FileNotFoundError:
        return 0
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return status.st_size
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(part)  # of a directory that had this name
    else:
        part.unlink()
    return 0


def umask() -> int:
    """What this user gives nobody."""
    found = os.umask(0)
    os.umask(found)
    return found


def there_is(path: Path) -> os.stat_result | None:
    """The file that a copy takes the place of, if there is one.

    :raises TransferError: it is a device, a directory or the like, or may not be written.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise TransferError(f"{path.name}: not a regular file")
    if not os.access(path, os.W_OK):
        raise TransferError(f"{path.name}: may not be written")
    return found
