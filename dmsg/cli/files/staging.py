"""Staging directories: where copies from peer to peer are stored on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dmsg.apps.partial_files import PART_SUFFIX, part_name
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.cli.files.cp_run import parse_remote
from dmsg.directories import cache_directory, make_directory
from dmsg.filelock import is_at, lock_if_can

KEPT = 7 * 86400.0
"""Seconds for which the files of an interrupted copy are kept, so that the same command can resume it."""


def stage_of(sources: tuple[str, ...], target: str) -> Path | None:
    """Return the staging directory of a copy, or None if it needs none.

    The directory is the same for the same command, so that an interrupted copy resumes there.
    """
    if parse_remote(target) is None or any(parse_remote(source) is None for source in sources):
        return None
    return _staging_root() / hashlib.sha256("\0".join((*sources, target)).encode()).hexdigest()[:16]


@contextmanager
def stage(directory: Path | None) -> Iterator[None]:
    """Context manager for the use of a staging directory, which is removed after success and kept after an
    interruption.

    :param directory: result of :func:`stage_of`.
    :raises TransferError: the same command is already running.
    """
    if directory is None:
        yield
        return
    with _lock_new_directory(directory):
        _forget_old(directory)
        _begin_again(directory)
        try:
            yield
        except BaseException as error:
            if isinstance(error, TransferRefused):
                # The files of a refused copy are removed, because it would be refused again.
                shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):
                directory.rmdir()  # Only an empty directory is removed; received data are kept for the next attempt.
            raise
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lock_new_directory(directory: Path) -> Iterator[None]:
    """Create and lock a staging directory, to keep out the same command in another terminal.

    :raises TransferError: the same command is already running.
    """
    while True:
        make_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not lock_if_can(descriptor):
                raise TransferError("another dmsg cp of yours makes the same copy already: wait for it, or stop it")
            # If another copy ended and removed the directory before it was locked here, make the directory again.
            if is_at(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _staging_root() -> Path:
    return cache_directory() / "cp"


def _begin_again(directory: Path) -> None:
    """Turn each complete staged file into a partial one, so that it is compared with the source and not fetched again.

    Otherwise an existing directory would be refused, and an existing file would be fetched again as a whole.
    """
    for path in list(directory.iterdir()):
        part = directory / part_name(path.name)
        if not path.name.endswith(PART_SUFFIX) and not part.exists():
            path.rename(part)


def _forget_old(directory: Path) -> None:
    for other in _staging_root().iterdir():
        with suppress(OSError):
            if other != directory and time.time() - other.stat().st_mtime > KEPT:
                shutil.rmtree(other, ignore_errors=True)
