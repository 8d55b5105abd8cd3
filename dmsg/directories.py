"""Directories in which this program stores files: their paths, their free space, and their sync to the disk."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

SOCKET_NAME = "agent.sock"


def xdg_directory(variable: str) -> Path | None:
    """Return the directory that an environment variable of the XDG Base Directory Specification names.

    The specification requires programs to ignore a relative path. Otherwise settings and keys would depend on the
    working directory, which another user may have prepared.

    :param variable: name of the variable, such as ``XDG_CONFIG_HOME``.
    :returns: the path, which need not exist; None if the variable is unset, empty or relative.
    """
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else None


def _own_directory(variable: str, default: str) -> Path:
    return (xdg_directory(variable) or Path(os.path.expanduser(default))) / "dmsg"


def config_directory() -> Path:
    """Return the path of the user's directory for settings, address book and keys. It need not exist."""
    return _own_directory("XDG_CONFIG_HOME", "~/.config")


def state_directory() -> Path:
    """Return the path of the user's directory for logs. It need not exist."""
    return _own_directory("XDG_STATE_HOME", "~/.local/state")


def data_directory() -> Path:
    """Return the path of the user's directory for data that cannot be created again. It need not exist."""
    return _own_directory("XDG_DATA_HOME", "~/.local/share")


def host_directory() -> Path:
    """Return the path of the directory in which ``dmsg host`` keeps a network, by default. It need not exist."""
    return data_directory() / "host"


def own_files_list() -> Path:
    """Return the path of the list of dmsg's files that are outside its own directories. It need not exist."""
    return data_directory() / "own-files.json"


def cache_directory() -> Path:
    """Return the path of the user's directory for files that can be created again. It need not exist."""
    return _own_directory("XDG_CACHE_HOME", "~/.cache")


def socket_directory() -> Path:
    """Return the path of the default directory for the agent's socket. It need not exist."""
    runtime = xdg_directory("XDG_RUNTIME_DIR")
    return cache_directory() if runtime is None else runtime / "dmsg"


def note_on_working_directory(error: BaseException | None) -> str:
    """Return text to append to an error message if the error's likely cause is a removed working directory.

    The system reports such a directory as a missing file, often without a name or with that of an existing file.

    :returns: the text; empty if the error has another cause.
    """
    if not isinstance(error, OSError) or error.errno != errno.ENOENT:
        return ""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "; the working directory has been removed: change to another directory"
    return ""


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
