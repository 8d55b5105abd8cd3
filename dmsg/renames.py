"""Renames of files that never replace an existing file."""

from __future__ import annotations

import os
from contextlib import suppress


def rename_to_new(source: str | os.PathLike[str], target: str | os.PathLike[str], *, at: int | None = None) -> None:
    """Rename a file. If something exists at the target, both stay as they are.

    :param at: descriptor of the directory to which relative paths belong; None for the current directory.
    :raises FileExistsError: something exists at the target, even if it appeared only during this call.
    :raises OSError: the file cannot be renamed.
    """
    try:
        # ``link`` fails if its target exists, but ``rename`` replaces it.
        os.link(source, target, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # The file system has no hard links. An empty file reserves the name, so that ``rename`` replaces no other file.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at))
        try:
            os.rename(source, target, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with suppress(OSError):
                os.unlink(target, dir_fd=at)
            raise
    else:
        os.unlink(source, dir_fd=at)
