"""Directories that this program keeps things in: where they are, what room they have, who else may write there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SOCKET_NAME = "agent.sock"


class UnsafeDirectory(OSError):
    """Another user could take away what is in a directory, and put something else there."""


def config_directory() -> Path:
    """Return the directory of the user's settings, address book and keys, whether it is there or not."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "dmsg"


def state_directory() -> Path:
    """Return the directory of logs, whether it is there or not."""
    return Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "dmsg"


def cache_directory() -> Path:
    """Return the directory of what may be made again, whether it is there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dmsg"


def socket_directory() -> Path:
    """Return the directory of the agent's socket, where no other is named, whether it is there or not."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "dmsg" if runtime else cache_directory()


def free_bytes(path: str | Path) -> int | None:
    """Bytes that this user may still write to the file system of ``path``.

    :returns: None where the file system does not say: one without block counts, as many in user space are, is not full.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def check_directory(path: Path) -> None:
    """Check that no other user can replace what this one keeps in a directory.

    It is this user's or root's, and others may write there only under a sticky bit, as in ``/tmp``.  The group of a
    directory of this user's may: many systems give everybody a group of his own.

    :raises UnsafeDirectory: others may.
    :raises OSError: it is not there.
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


def make_directory(path: Path) -> None:
    """Make a directory for this user alone if it is absent, with those above it, and check it.

    :raises UnsafeDirectory: see :func:`check_directory`.
    :raises OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_directory(path)
