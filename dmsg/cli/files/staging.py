"""Staging directories: local directories for the files of a copy from peer to peer."""

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
from dmsg.directories import cache_directory
from dmsg.directory_checks import make_directory
from dmsg.filelock import is_at, lock_if_can

STAGING_LIFETIME = 7 * 86400.0
"""Seconds for which the files of an interrupted copy are stored, so that the same command can resume it."""


def stage_of(sources: tuple[str, ...], target: str) -> Path | None:
    """Return the staging directory of a copy from peer to peer; None for other copies.

    The path depends only on the arguments, so that the same command resumes an interrupted copy.
    """
    if parse_remote(target) is None or any(parse_remote(source) is None for source in sources):
        return None
    return _staging_root() / hashlib.sha256("\0".join((*sources, target)).encode()).hexdigest()[:16]


@contextmanager
def stage(directory: Path | None) -> Iterator[None]:
    """Context manager that creates and locks a staging directory.  The directory is removed after success, but not
    after an interruption.

    :param directory: result of :func:`stage_of`; None to do nothing.
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
                # The same command would be refused again, so its partial files are of no use and are removed.
                shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):
                # ``rmdir`` fails if the directory has received data, which stays there for the next attempt.
                directory.rmdir()
            raise
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lock_new_directory(directory: Path) -> Iterator[None]:
    """Create and lock a staging directory.  The lock excludes the same command in another terminal.

    :raises TransferError: the same command is already running.
    """
    while True:
        make_directory(directory)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not lock_if_can(descriptor):
                raise TransferError("another dmsg cp of yours makes the same copy already: wait for it, or stop it")
            # Another dmsg cp may have ended, and removed the directory before it was locked here. Then the loop creates
            # the directory again.
            if is_at(descriptor, directory):
                yield
                return
        finally:
            os.close(descriptor)


def _staging_root() -> Path:
    return cache_directory() / "cp"


def _begin_again(directory: Path) -> None:
    """Rename complete staged files to partial files.  The next copy then compares their hashes with the sources.

    Without this, an existing directory would be refused, and an existing file would be fetched again as a whole.
    """
    for path in list(directory.iterdir()):
        part = directory / part_name(path.name)
        if not path.name.endswith(PART_SUFFIX) and not part.exists():
            path.rename(part)


def _forget_old(directory: Path) -> None:
    for other in _staging_root().iterdir():
        with suppress(OSError):
            if other != directory and time.time() - other.stat().st_mtime > STAGING_LIFETIME:
                shutil.rmtree(other, ignore_errors=True)
