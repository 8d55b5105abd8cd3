"""Rules for the files that peers may see and write on this machine; both sides of a transfer apply them.

* Names that begin with a dot (``.ssh``, ``.bash_profile``) are neither sent nor accepted unless an option allows them.
* Files of dmsg itself are never sent or overwritten: key files wherever they are, the directories of settings and of
  logs, and the agent's socket.  They are recognised by device and inode, so that no link, hard link or bind mount leads
  to them under another name.
* A home directory, or one above it, is offered only if the user confirms it.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dmsg.apps.transfer import TransferError
from dmsg.directories import SOCKET_NAME, config_directory, socket_directory, state_directory

KEY_FILE_LIMIT = 4096
"""Maximum bytes of a file in which to look for a secret key; programs that read key files read no more."""
OWN_FILES_LIMIT = 1000
"""Maximum number of entries of dmsg's own directories to compare with a file that has several hard links."""
NAMED_FILES = ("DMSG_CONFIG", "DMSG_NAMES", "DMSG_AGENT", "DMSG_KEY_FILE", "RMB_KEY_FILE")
"""Environment variables that name a file of dmsg's own."""
OWN_AGE = 1.0
"""Seconds for which the result of :func:`own_files` is cached, because it is needed for each file of a large
directory."""
NEED_HIDDEN = "names that begin with a dot are refused, unless both ends say --hidden"
"""Reason of a refusal, which both sides recognise."""
_PLACES = (*NAMED_FILES, "HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
_SECRET = re.compile(
    rb"^[ \t]*secret[ \t]+[0-9a-f]{64}[ \t\r]*$|^# the secret of a twin:|^type (sr25519|ed25519)[ \t\r]*$",
    re.MULTILINE | re.IGNORECASE,
)
_WORDS = re.compile(rb"(?:#[^\n]*\n)*((?:[a-z]{3,8} ){11,23}[a-z]{3,8})\s*")
"""Regular expression for the content of a file that may contain the secret words of a twin, written by hand."""
_LOOK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC


class OwnFile(OSError):
    """Error: a file or directory is dmsg's own, and is neither sent to a peer nor written for one."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EACCES, "is dmsg's own (a secret key, settings, logs): never given, never written", name)


# --- names that begin with a dot ---


def has_dot(name: str) -> bool:
    """Whether a name begins with a dot.  Programs and shells may read such a file without being told to."""
    return name.startswith(".") and name not in (".", "..")


def check_names(path: str, *, hidden: bool) -> None:
    """Check the names in a path.

    :param hidden: whether names that begin with a dot are allowed.
    :raises TransferError: a name begins with a dot.
    """
    if not hidden and any(has_dot(name) for name in path.split("/")):
        raise TransferError(f"{path}: {NEED_HIDDEN}")


# --- dmsg's own files ---


@dataclass(frozen=True)
class OwnFiles:
    """Set of dmsg's own files at one time.

    :ivar directories: device and inode of each directory whose whole content is dmsg's own.
    :ivar files: device and inode of other files.
    :ivar names: device and inode of a directory, and a name in it that is, or would be, dmsg's own.
    """

    directories: dict[tuple[int, int], str]
    files: frozenset[tuple[int, int]]
    names: frozenset[tuple[int, int, str]]

    def has_directory(self, status: os.stat_result) -> bool:
        """Whether a directory is in the set."""
        return (status.st_dev, status.st_ino) in self.directories

    def is_below(self, real: str) -> bool:
        """Whether a path without links leads into a directory of the set."""
        return any(real.startswith(os.path.join(path, "")) for path in self.directories.values())

    def has_file(self, status: os.stat_result) -> bool:
        """Whether a file is in the set, or is a hard link to a file in one of its directories."""
        identity = status.st_dev, status.st_ino
        if identity in self.files:
            return True
        return status.st_nlink > 1 and any(identity == other for other in self._contents())

    def _contents(self) -> Iterator[tuple[int, int]]:
        left = OWN_FILES_LIMIT
        for path in self.directories.values():
            for directory, _, names in os.walk(path):
                for name in names:
                    left -= 1
                    if left < 0:
                        return
                    with suppress(OSError):
                        status = os.lstat(os.path.join(directory, name))
                        yield status.st_dev, status.st_ino


def own_files() -> OwnFiles:
    """Return the set of dmsg's own files and directories."""
    return _look_for_own_files(tuple(map(os.environ.get, _PLACES)), int(time.monotonic() / OWN_AGE))


@lru_cache(maxsize=1)
def _look_for_own_files(places: tuple[str | None, ...], second: int) -> OwnFiles:
    """Return dmsg's own files.

    :param places: values of the environment variables; like ``second``, only a key of the cache.
    :param second: number of the present interval of ``OWN_AGE`` seconds.
    """
    directories: dict[tuple[int, int], str] = {}
    files: set[tuple[int, int]] = set()
    names: set[tuple[int, int, str]] = set()
    whole = [config_directory(), state_directory()]
    single = [Path(os.environ[name]) for name in NAMED_FILES if os.environ.get(name)]
    if os.environ.get("DMSG_NAMES"):
        single.append(Path(f"{os.environ['DMSG_NAMES']}.groups"))
    if os.environ.get("DMSG_CONFIG"):
        beside = Path(os.environ["DMSG_CONFIG"]).absolute().parent
        # This file is included even if absent, because the agent creates its key there at its first start.
        single.append(beside / "key")
        if beside.name == "dmsg":
            whole.append(beside)
    sockets = socket_directory()
    if os.environ.get("XDG_RUNTIME_DIR"):
        whole.append(sockets)
    else:
        # Only the socket is protected, because the other files of this directory can be made again.
        single.append(sockets / SOCKET_NAME)
    for path in (*whole, *single):
        names.update(_name_of(path))
        with suppress(OSError):
            status = os.stat(path)
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode) and path in whole:
                directories[identity] = os.path.realpath(path)
            else:
                files.add(identity)
    return OwnFiles(directories, frozenset(files), frozenset(names))


def _name_of(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield the nearest existing directory above a path, and the path's next part, which may be absent."""
    path = path.absolute()
    for above in path.parents:
        with suppress(OSError):
            status = os.stat(above)
            yield status.st_dev, status.st_ino, path.relative_to(above).parts[0]
            return


def check_directory(descriptor: int, name: str, *, above: bool = False) -> None:
    """Check an open directory.

    :param above: whether to check the directories above it, too.
    :raises OwnFile: a directory is dmsg's own.
    """
    own = own_files()
    at = os.dup(descriptor)
    try:
        status = os.fstat(at)
        while True:
            if own.has_directory(status):
                raise OwnFile(name)
            if not above:
                return
            before, upper = status, os.open("..", _LOOK | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = upper
            status = os.fstat(at)
            if os.path.samestat(before, status):
                return
    except PermissionError:
        return  # The check ends here, because this user may not read the directories above.
    finally:
        os.close(at)


def check_source(
    descriptor: int, name: str, *, path: str | os.PathLike[str] | None = None, own: OwnFiles | None = None
) -> None:
    """Check a regular file that is open for reading, before it is sent to a peer.

    :param own: result of :func:`own_files`, for callers that check many files.
    :param path: path of the file, if its directory has not been checked.
    :raises OwnFile: the file is dmsg's own.
    """
    status = os.fstat(descriptor)
    if (own or own_files()).has_file(status) or (status.st_size <= KEY_FILE_LIMIT and has_secret(descriptor)):
        raise OwnFile(name)
    if path is not None:
        at = os.open(os.path.dirname(os.path.realpath(path)), _LOOK | os.O_DIRECTORY)
        try:
            check_directory(at, name, above=True)
        finally:
            os.close(at)


def check_target(name: str, at: int) -> None:
    """Check a name before a file is written there for a peer.

    :param at: descriptor of the directory that contains the name and has been checked.
    :raises OwnFile: the file is, or would be, dmsg's own.
    """
    directory, own = os.fstat(at), own_files()
    if (directory.st_dev, directory.st_ino, name) in own.names:
        raise OwnFile(name)
    try:
        status = os.stat(name, dir_fd=at, follow_symlinks=False)
        if own.has_directory(status):
            raise OwnFile(name)
        if not stat.S_ISREG(status.st_mode):
            return
        if own.has_file(status):
            raise OwnFile(name)
        if status.st_size > KEY_FILE_LIMIT:
            return
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except OwnFile:
        raise
    except OSError:
        return  # This is allowed: the file is absent or unreadable, and key files of this user would be readable.
    try:
        if has_secret(descriptor):
            raise OwnFile(name)
    finally:
        os.close(descriptor)


def check_written(path: Path) -> None:
    """Check the path of a file that a peer's data will be written to.

    :raises OwnFile: the file is, or would be, dmsg's own.
    :raises OSError: its directory is absent.
    """
    real = Path(os.path.realpath(path))  # The target of a link is checked, because writing follows the link.
    at = os.open(real.parent, _LOOK | os.O_DIRECTORY)
    try:
        check_directory(at, os.fspath(path), above=True)
        check_target(real.name, at)
    finally:
        os.close(at)


def has_secret(descriptor: int) -> bool:
    """Whether an open file is a key file of dmsg or of a twin; the position in the file is preserved."""
    try:
        data = os.pread(descriptor, KEY_FILE_LIMIT, 0)
        private = not os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return False
    if _SECRET.search(data):
        return True
    # Words are searched for only in files that other users cannot access, because dmsg accepts them only from such
    # files.
    words = _WORDS.fullmatch(data) if private else None
    if words is None:
        return False
    from dmsg.apps.codes.words import word_list

    return set(words[1].decode().split()) <= set(word_list())


# --- directories that contain more than the user may expect ---


def is_home_or_above(directory: Path) -> bool:
    """Whether a directory is a home directory of this user or of its owner, or contains one."""
    status = os.stat(directory)
    homes = [os.path.expanduser("~")]
    for user in (os.geteuid(), status.st_uid):
        with suppress(KeyError):
            homes.append(pwd.getpwuid(user).pw_dir)
    for home in homes:
        real = Path(os.path.realpath(home))
        for above in (real, *real.parents):
            with suppress(OSError):
                if os.path.samestat(os.stat(above), status):
                    return True
    return False
