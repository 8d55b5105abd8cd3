"""A file that is there as a whole, or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dmsg.errors import DmsgError


def write_whole(target: Path, data: bytes) -> None:
    """Write a file beside it and give that its name; what is no file, as a device or a pipe, is written to.

    :raises DmsgError: it cannot be written; nothing is left of it, and what was there stays.
    """
    target = target.resolve() if target.is_symlink() else target
    try:
        if target.exists() and not target.is_file():
            with open(target, "wb") as file:
                file.write(data)
            return
        fresh = target.with_name(f".{target.name}.part")
        try:
            fresh.write_bytes(data)
            fresh.replace(target)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DmsgError(f"{target} cannot be written: {error.strerror}") from None
