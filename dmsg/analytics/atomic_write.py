"""Atomic writing of a file: at any time the target has either the old content or the new, never a part of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dmsg.directory_checks import check_not_planted
from dmsg.errors import DmsgError


def write_atomically(target: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file in the target's directory, and rename this file to the target. A target that
    is a device or a pipe is written directly.

    :raises DmsgError: the target cannot be written, or another user has put it, or a directory above it, into a shared
        directory. The temporary file is removed and the old content stays.
    """
    try:
        check_not_planted(target)
        target = target.resolve() if target.is_symlink() else target
        if target.exists() and not target.is_file():
            with open(target, "wb") as file:
                file.write(data)
            return
        fresh = target.with_name(f".{target.name}.part")
        try:
            # A file that an earlier process left is removed. The file is not opened, because in a shared directory
            # another user could have put a link in its place.
            fresh.unlink(missing_ok=True)
            with open(fresh, "xb") as file:
                file.write(data)
            fresh.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DmsgError(f"{target} cannot be written: {error.strerror}") from None
