"""Rules that say which files of this machine peers may read and write.  Both sides of a transfer apply them.

* Names that begin with a dot (``.ssh``, ``.bash_profile``) are neither sent nor accepted unless an option allows them.
* Files of dmsg itself are never sent or overwritten: key files in any directory, the directories of settings, of
  logs and of ``dmsg host``, the files of a ``dmsg host`` with another ``--directory``, and the agent's socket.  They
  are recognised by device and inode, so a link, a hard link or a bind mount with another name does not hide them.
* A home directory, or a directory that contains one, is offered only if the user confirms it.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dmsg.apps.transfer import TransferError
from dmsg.directories import (
    SOCKET_NAME,
    config_directory,
    host_directory,
    own_files_list,
    socket_directory,
    state_directory,
    xdg_directory,
)
from dmsg.shared_files import exclusive_change, replace_file

KEY_FILE_LIMIT = 4096
"""Maximum size in bytes of a file that is searched for a secret key.  A larger file is not searched, because programs
read at most this many bytes of a key file."""
OWN_FILES_LIMIT = 1000
"""Maximum number of files in dmsg's own directories that are compared with a file to send, to find out whether that
file is a hard link to one of them.
"""
NAMED_FILES = ("DMSG_CONFIG", "DMSG_NAMES", "DMSG_AGENT", "DMSG_KEY_FILE", "RMB_KEY_FILE")
"""Environment variables that contain the path of a file of dmsg."""
OWN_FILES_CACHE_TIME = 1.0
"""Seconds for which the list of dmsg's own files is cached, because a transfer compares each of its files with them."""
NEED_HIDDEN = "names that begin with a dot are refused, unless both ends say --hidden"
"""Reason for a refusal; the other side recognises the text."""
_PLACES = (
    *NAMED_FILES,
    "HOME",
    "XDG_CONFIG_HOME",
    "XDG_STATE_HOME",
    "XDG_DATA_HOME",
    "XDG_CACHE_HOME",
    "XDG_RUNTIME_DIR",
)
_SECRET = re.compile(
    rb"^[ \t]*secret[ \t]+[0-9a-f]{64}[ \t\r]*$|^# the secret of a twin:|^type (sr25519|ed25519)[ \t\r]*$",
    re.MULTILINE | re.IGNORECASE,
)
_WORDS = re.compile(rb"(?:#[^\n]*\n)*((?:[a-z]{3,8} ){11,23}[a-z]{3,8})\s*")
"""Regular expression for a file that a person has written and that may contain the secret words of a twin."""
_LOOK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC


class OwnFile(OSError):
    """Error: a file or directory belongs to dmsg itself, so it is not sent and not overwritten."""

    def __init__(self, name: str) -> None:
        super().__init__(
            errno.EACCES, "is dmsg's own (a secret key, settings, logs), and is never sent or overwritten", name
        )


# --- names that begin with a dot ---


def has_dot(name: str) -> bool:
    """Whether a name begins with a dot.  Programs and shells may read such files without being asked to."""
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
    """Set of the files and directories that belong to dmsg itself, at one time.

    :ivar directories: paths of directories that belong to dmsg with their whole content, by device and inode.
    :ivar files: device and inode of other files.
    :ivar names: device and inode of a directory, and a name in that directory.  A file of this name belongs to dmsg,
        whether it exists or not.
    """

    directories: dict[tuple[int, int], str]
    files: frozenset[tuple[int, int]]
    names: frozenset[tuple[int, int, str]]

    def has_directory(self, status: os.stat_result) -> bool:
        """Whether a directory is in the set."""
        return (status.st_dev, status.st_ino) in self.directories

    def is_below(self, real: str) -> bool:
        """Whether a path is inside a directory of the set.

        :param real: path without links.
        """
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


def record_own_files(paths: Iterable[Path]) -> None:
    """Add files to the list of dmsg's own files that are outside this user's directories of dmsg.

    :param paths: absolute paths, whose files need not exist.
    :raises DmsgError: another program holds the lock of the list for too long.
    :raises OSError: the list cannot be written.
    """
    added = {os.fspath(path) for path in paths}
    if added <= set(_recorded_files()):
        return
    with exclusive_change(own_files_list()):
        # Files whose directory has been removed leave the list, so that the list does not grow forever.
        kept = [path for path in _recorded_files() if path not in added and os.path.isdir(os.path.dirname(path))]
        newest = [*kept, *sorted(added)][-OWN_FILES_LIMIT:]
        replace_file(own_files_list(), json.dumps({"files": newest}, indent=1) + "\n", mode=0o600)


def _recorded_files() -> list[str]:
    """Return the absolute paths in the list; none if there is no list, or the list cannot be read."""
    try:
        files = json.loads(own_files_list().read_text())["files"]
        return [path for path in files if isinstance(path, str) and os.path.isabs(path) and "\0" not in path]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def own_files() -> OwnFiles:
    """Return the set of dmsg's own files and directories."""
    return _look_for_own_files(tuple(map(os.environ.get, _PLACES)), int(time.monotonic() / OWN_FILES_CACHE_TIME))


@lru_cache(maxsize=1)
def _look_for_own_files(places: tuple[str | None, ...], interval: int) -> OwnFiles:
    """Return the set of dmsg's own files and directories.  Both parameters are only keys of the cache.

    :param places: values of the environment variables that determine the set.
    :param interval: number of the present interval of ``OWN_FILES_CACHE_TIME`` seconds.
    """
    directories: dict[tuple[int, int], str] = {}
    files: set[tuple[int, int]] = set()
    names: set[tuple[int, int, str]] = set()
    whole = [config_directory(), state_directory(), host_directory()]
    single = [Path(os.environ[name]) for name in NAMED_FILES if os.environ.get(name)]
    single += [own_files_list(), *map(Path, _recorded_files())]
    if os.environ.get("DMSG_NAMES"):
        single.append(Path(f"{os.environ['DMSG_NAMES']}.groups"))
    if os.environ.get("DMSG_CONFIG"):
        beside = Path(os.environ["DMSG_CONFIG"]).absolute().parent
        # The file is protected even if it does not exist, because the agent creates its key there at its first start.
        single.append(beside / "key")
        if beside.name == "dmsg":
            whole.append(beside)
    sockets = socket_directory()
    if xdg_directory("XDG_RUNTIME_DIR") is not None:
        whole.append(sockets)
    else:
        # Only the socket is protected, because the other files of this directory are a cache.
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
    """Yield one item for a path, which need not exist: device and inode of the nearest existing directory above it, and
    the name in this directory that leads to the path.
    """
    try:
        path = path.absolute()
    except FileNotFoundError:
        return  # The working directory has been removed, so a relative path leads to no file.
    for above in path.parents:
        with suppress(OSError):
            status = os.stat(above)
            yield status.st_dev, status.st_ino, path.relative_to(above).parts[0]
            return


def check_directory(descriptor: int, name: str, *, above: bool = False) -> None:
    """Check that an open directory does not belong to dmsg itself.

    :param name: name to use in errors.
    :param above: whether to check also all directories above it.
    :raises OwnFile: a directory belongs to dmsg itself.
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
        return  # The check ends here, because this user has no right to read the directories above.
    finally:
        os.close(at)


def check_source(
    descriptor: int, name: str, *, path: str | os.PathLike[str] | None = None, own: OwnFiles | None = None
) -> None:
    """Check a regular file that is open for reading, before it is sent to a peer.

    :param name: name to use in errors.
    :param path: path of the file, if its directory has not been checked.
    :param own: result of :func:`own_files`, for callers that check many files.
    :raises OwnFile: the file belongs to dmsg itself.
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
    """Check that a peer's data may be written to a name.

    :param at: descriptor of the directory that contains the name.  The directory has been checked.
    :raises OwnFile: the file belongs, or would belong, to dmsg itself.
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
        return  # The file is absent, or this user cannot read it. In both cases it is no key file of this user.
    try:
        if has_secret(descriptor):
            raise OwnFile(name)
    finally:
        os.close(descriptor)


def check_written(path: Path) -> None:
    """Check that a peer's data may be written to a path.

    :raises OwnFile: the file belongs, or would belong, to dmsg itself.
    :raises OSError: the directory of the file is absent.
    """
    real = Path(os.path.realpath(path))  # A write would follow the link, so the link's target is checked.
    at = os.open(real.parent, _LOOK | os.O_DIRECTORY)
    try:
        check_directory(at, os.fspath(path), above=True)
        check_target(real.name, at)
    finally:
        os.close(at)


def has_secret(descriptor: int) -> bool:
    """Whether an open file contains a secret key of dmsg or of a twin.  The position in the file does not change."""
    try:
        data = os.pread(descriptor, KEY_FILE_LIMIT, 0)
        private = not os.fstat(descriptor).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError:
        return False
    if _SECRET.search(data):
        return True
    # A file with a mnemonic counts as a secret only if other users have no access, because dmsg accepts such files only
    # then.
    words = _WORDS.fullmatch(data) if private else None
    if words is None:
        return False
    from dmsg.apps.codes.words import word_list

    return set(words[1].decode().split()) <= set(word_list())


# --- home directories ---


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
