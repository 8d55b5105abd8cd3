"""Checks that no other user of this machine can replace files that this program reads or writes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class UnsafeDirectory(OSError):
    """Error: another user could change a file, or replace files in a directory."""


def check_directory(path: Path) -> None:
    """Check that no other user can replace the files of this user in a directory.

    The directory must belong to this user or to root. Others may have write permission only if the sticky bit is set,
    as in ``/tmp``. In a directory of this user, its group may have write permission, because many systems give each
    user a group of their own.

    :raises UnsafeDirectory: other users could replace files.
    :raises OSError: the directory is absent.
    """
    _check_status(path, os.stat(path))


def _check_status(path: Path, status: os.stat_result) -> None:
    """Check that only this user and root can change a directory or a file.

    :param status: status of the directory or file.
    :raises UnsafeDirectory: other users could change it.
    """
    mine = status.st_uid == os.geteuid()
    is_directory = stat.S_ISDIR(status.st_mode)
    writers = stat.S_IWOTH if mine else stat.S_IWOTH | stat.S_IWGRP
    is_sticky = is_directory and bool(status.st_mode & stat.S_ISVTX)
    if (mine or status.st_uid == 0) and (is_sticky or not status.st_mode & writers):
        return
    kind = "directory" if is_directory else "file"
    whose = "" if mine else f" of another user (uid {status.st_uid})"
    todo = f"do: chmod {'700' if is_directory else '600'} {path}" if mine else f"use a {kind} of your own"
    text = f"{path} is a {kind}{whose} where others may write (mode {stat.S_IMODE(status.st_mode):04o}); {todo}"
    if not mine and not status.st_mode & writers:
        text = f"{path} is a {kind} of another user (uid {status.st_uid}); {todo}"
    raise UnsafeDirectory(errno.EPERM, text)


def check_trusted_place(path: Path) -> None:
    """Check that no other user can replace a file that decides whom this user trusts, such as the address book.

    :param path: path of the file, which need not exist.
    :raises UnsafeDirectory: other users could replace the file, or have created it.
    """
    check_not_planted(path)
    for whole in {Path(os.path.abspath(path)), Path(os.path.realpath(path))}:
        with suppress(FileNotFoundError, NotADirectoryError):  # The error is reported when the path is used.
            check_directory(whole.parent)


def read_trusted(path: Path) -> str:
    """Return the text of a file that decides whom this user trusts.

    :raises UnsafeDirectory: other users could change or replace the file.
    :raises OSError: the file cannot be read.
    :raises UnicodeDecodeError: the file is not text.
    """
    with open(path) as file:
        check_trusted_place(path)
        status = os.fstat(file.fileno())
        # The mode of a device or a pipe is not checked, because everybody may write to ``/dev/null``.
        if stat.S_ISREG(status.st_mode):
            _check_status(path, status)
        return file.read()


def check_not_planted(path: Path) -> None:
    """Check that no part of a path is a file, link or directory that another user has put into a shared directory.

    A directory is shared if everybody may write to it and it has the sticky bit, as ``/tmp`` has.  Its owner and root
    are trusted.  These are the rules by which Linux follows links if ``fs.protected_symlinks`` is set.

    :param path: path that need not exist.
    :raises UnsafeDirectory: another user, who could read and replace what is written there, has created a part.
    """
    for one, above, status in _parts(path):
        is_shared = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
        if status is not None and is_shared and status.st_uid not in (0, os.geteuid(), above.st_uid):
            raise UnsafeDirectory(
                errno.EPERM,
                f"{one} is another user's (uid {status.st_uid}), and {one.parent} is a shared directory: "
                "use a directory of your own",
            )


def check_state_path(path: Path) -> None:
    """Check the path of a file or directory that an entity keeps from one start to the next.

    Besides :func:`check_not_planted`, no part of the path may be in another user's directory in which everybody may
    replace files.  A directory of root is accepted, because containers mount empty volumes with mode 0777.

    :param path: path that need not exist.
    :raises UnsafeDirectory: another user could replace a part of the path, or has created it.
    """
    check_not_planted(path)
    for one, above, _ in _parts(path):
        is_open = above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX
        if is_open and above.st_uid not in (0, os.geteuid()):
            _check_status(one.parent, above)


def _parts(path: Path) -> Iterator[tuple[Path, os.stat_result, os.stat_result | None]]:
    """Yield each part of a path whose directory exists, with the status of that directory and its own status, which is
    None if the part is absent.  If the path leads over links, the parts of the real path follow.
    """
    for whole in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for one in (*reversed(whole.parents), whole):
            status = None
            try:
                above = os.stat(one.parent)
                with suppress(FileNotFoundError):
                    status = os.lstat(one)
            except OSError:
                break  # The error is reported when the path is used.
            yield one, above, status


def make_directory(path: Path) -> None:
    """Create a directory, with its parents, if it is absent. Check it with :func:`check_directory`, and its path with
    :func:`check_not_planted`. A new directory has mode 0700.

    :raises UnsafeDirectory: another user could replace files in the directory, or could replace the directory.
    :raises OSError: the directory cannot be created.
    """
    check_not_planted(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
