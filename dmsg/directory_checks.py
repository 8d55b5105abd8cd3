"""Checks that no other user of this machine can replace files that this program reads or writes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class UnsafeDirectory(OSError):
    """Error: another user could replace files in a directory."""


def check_directory(path: Path) -> None:
    """Check that no other user can replace the files of this user in a directory.

    The directory must belong to this user or to root. Others may have write permission only if the sticky bit is set,
    as in ``/tmp``. In a directory of this user, its group may have write permission, because many systems give each
    user a group of their own.

    :raises UnsafeDirectory: other users could replace files.
    :raises OSError: the directory is absent.
    """
    status = os.stat(path)
    mine = status.st_uid == os.geteuid()
    writers = stat.S_IWOTH if mine else stat.S_IWOTH | stat.S_IWGRP
    if (mine or status.st_uid == 0) and (status.st_mode & stat.S_ISVTX or not status.st_mode & writers):
        return
    whose = "" if mine else f" of another user (uid {status.st_uid})"
    todo = f"do: chmod 700 {path}" if mine else "use a directory of your own"
    text = f"{path} is a directory{whose} where others may write (mode {stat.S_IMODE(status.st_mode):04o}); {todo}"
    if not mine and not status.st_mode & writers:
        text = f"{path} is a directory of another user (uid {status.st_uid}); {todo}"
    raise UnsafeDirectory(errno.EPERM, text)


def check_not_planted(path: Path) -> None:
    """Check that no part of a path is a file, link or directory that another user has put into a shared directory.

    A directory is shared if everybody may write to it and it has the sticky bit, as ``/tmp`` has.  Its owner and root
    are trusted.  These are the rules by which Linux follows links if ``fs.protected_symlinks`` is set.

    :param path: path that need not exist.
    :raises UnsafeDirectory: another user, who could read and replace what is written there, has created a part.
    """
    for whole in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for one in (*reversed(whole.parents), whole):
            try:
                above, status = os.stat(one.parent), os.lstat(one)
            except OSError:
                break  # The error is reported when the path is used.
            is_shared = above.st_mode & stat.S_ISVTX and above.st_mode & stat.S_IWOTH
            if is_shared and status.st_uid not in (0, os.geteuid(), above.st_uid):
                raise UnsafeDirectory(
                    errno.EPERM,
                    f"{one} is another user's (uid {status.st_uid}), and {one.parent} is a shared directory: "
                    "use a directory of your own",
                )


def make_directory(path: Path) -> None:
    """Create a directory, with its parents, if it is absent. Check it with :func:`check_directory`, and its path with
    :func:`check_not_planted`. A new directory has mode 0700.

    :raises UnsafeDirectory: another user could replace files in the directory, or could replace the directory.
    :raises OSError: the directory cannot be created.
    """
    check_not_planted(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
