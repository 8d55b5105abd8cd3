"""Directories in which this program stores files: their paths, their free space, their sync to
the disk, and a check of who may write there."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

SOCKET_NAME = "agent.sock"


class UnsafeDirectory(OSError):
    """Error: another user could replace files in a directory."""


def config_directory() -> Path:
    """Return the path of the user's directory for settings, address book and keys. It need not exist."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "dmsg"


def state_directory() -> Path:
    """Return the path of the user's directory for logs. It need not exist."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "dmsg"


def data_directory() -> Path:
    """Return the path of the user's directory for data that cannot be created again. It need not exist."""
    return Path(os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")) / "dmsg"


def host_directory() -> Path:
    """Return the path of the directory in which ``dmsg host`` keeps a network, by default. It need not exist."""
    return data_directory() / "host"


def own_files_list() -> Path:
    """Return the path of the list of dmsg's files that are outside its own directories. It need not exist."""
    return data_directory() / "own-files.json"


def cache_directory() -> Path:
    """Return the path of the user's directory for files that can be created again. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dmsg"


def socket_directory() -> Path:
    """Return the path of the default directory for the agent's socket. It need not exist."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "dmsg" if runtime else cache_directory()


def free_bytes(path: str | Path) -> int | None:
    """Return the number of bytes that this user can still write to the file system of ``path``.

    :returns: the number; None if the file system does not report it. Many file systems in user space report that they
        have no blocks at all, which does not mean that they are full.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def sync_directory(path: Path) -> None:
    """Write the names in a directory to the disk. After that, files that were created, renamed or removed stay so in a
    power failure.

    :raises OSError: the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        # The error is ignored, because fsync has already reported any error of the disk.
        with suppress(OSError):
            os.close(descriptor)


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
    """Create a directory, with its parents, if it is absent, and check it with :func:`check_directory`. A new directory
    has mode 0700.

    :raises UnsafeDirectory: see :func:`check_directory`.
    :raises OSError: the directory cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
