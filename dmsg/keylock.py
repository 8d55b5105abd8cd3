"""Locks on key files. With them only one program on this machine uses a key at a time, and the error of a second
program says which program that is.

Two programs with one key disturb each other: servers send new requests to the newest connection, and each program
replaces the other's entry in discovery. The locked file is ``FILE.lock`` beside the key file ``FILE``; if it cannot be
created, the key file itself. The lock ends with the process that holds it, even if the process is killed.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from dmsg.base.printable import printable
from dmsg.errors import KeyFileError
from dmsg.filelock import LOCK_SUFFIX, NoLocks, is_at, take_lock

_WHO_SIZE = 256
KEY_ADVICE = (
    "stop that, or use another key (dmsg key new FILE); with --share both run, and others reach only the newest"
)
"""Advice in the error message for a key file that is in use."""
_held: dict[str, list[KeyLock]] = {}


class KeyInUse(KeyFileError):
    """Error: another program uses this key file."""


class KeyLock:
    """Lock on a key file, which :meth:`release` ends."""

    def __init__(self, path: str, descriptor: int | None, beside: str | None) -> None:
        self._path = path
        self.descriptor = descriptor
        self.lock_file = beside

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        holders = _held.get(self._path, [])
        if self in holders:
            holders.remove(self)
            if not holders:
                del _held[self._path]
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is None or any(other.descriptor == descriptor for other in holders):
            return
        if self.lock_file is not None:
            # The lock file is removed before the lock is released. After the release, the next program may already have
            # locked the file.
            with suppress(OSError):
                os.unlink(self.lock_file)
        os.close(descriptor)


def hold_key(
    path: str | os.PathLike[str], program: str, *, share: bool = False, advice: str = KEY_ADVICE, display_path: str = ""
) -> KeyLock:
    """Lock a key file, or another file, for ``program``. A process may lock the same file several times.

    :param program: name of the program, which the error of a second program contains.
    :param share: whether several programs may hold the lock at the same time, if all of them pass True.
    :param advice: advice in the error message for the user whose file is in use.
    :param display_path: name of the file in the error message; by default its path.
    :raises KeyInUse: another program holds the lock; the message says which one, and what to do.
    """
    real = os.path.realpath(path)
    if real in _held:
        first = _held[real][0]
        again = KeyLock(real, first.descriptor, first.lock_file)
        _held[real].append(again)
        return again
    lock = _hold_beside(real, program, share, advice, display_path or real)
    if lock is None:
        lock = _hold_itself(real, share, advice, display_path or real)
    _held[real] = [lock]
    return lock


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether a program holds the lock that :func:`hold_key` has created beside ``path``.

    The lock file of a program that was killed remains, but nobody holds its lock.  On a file system without locks, the
    result is False.

    :raises OSError: the lock file exists and cannot be opened.
    """
    beside = os.path.realpath(path) + LOCK_SUFFIX
    while True:
        try:
            descriptor = os.open(beside, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # The lock is shared, so that two programs that check the file at the same time do not refuse each other.
            if not take_lock(descriptor, share=True):
                return True
            # If the file has been replaced since it was opened, another program may hold the lock on the new file.
            if is_at(descriptor, Path(beside)):
                return False
        except NoLocks:
            return False
        finally:
            os.close(descriptor)


def _hold_beside(real: str, program: str, share: bool, advice: str, display_path: str) -> KeyLock | None:
    """Lock the file ``FILE.lock`` beside a key file; return None if it cannot be created."""
    beside = real + LOCK_SUFFIX
    while True:
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            mine = take_lock(descriptor, share=share)
        except NoLocks:  # On a file system without locks, the key is used unlocked.
            os.close(descriptor)
            return KeyLock(real, None, None)
        if not mine:
            who = os.read(descriptor, _WHO_SIZE).decode("utf-8", "replace")
            os.close(descriptor)
            if share:
                return KeyLock(real, None, None)
            raise KeyInUse(_in_use(display_path, who, advice))
        # The program that held the lock before may have removed the file since it was opened here; then the loop opens
        # a new one.
        if is_at(descriptor, Path(beside)):
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    with suppress(OSError):
        # A full disk prevents writing the name of the program, but the lock works without the name.
        os.pwrite(descriptor, f"{os.getpid()} {time.strftime('%H:%M')} {program}\n".encode()[:_WHO_SIZE], 0)
    return KeyLock(real, descriptor, beside)


def _hold_itself(real: str, share: bool, advice: str = KEY_ADVICE, display_path: str = "") -> KeyLock:
    try:
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return KeyLock(real, None, None)
    try:
        mine = take_lock(descriptor, share=share)
    except NoLocks:
        os.close(descriptor)
        return KeyLock(real, None, None)
    if not mine:
        os.close(descriptor)
        if share:
            return KeyLock(real, None, None)
        raise KeyInUse(_in_use(display_path or real, "", advice))
    return KeyLock(real, descriptor, None)


def _in_use(display_path: str, holder: str, advice: str) -> str:
    words = holder.strip().split(" ", 2)
    by = f"{words[2]} (process {words[0]}, since {words[1]})" if len(words) == 3 else "another program"
    return f"{display_path} is in use by {printable(by)}: {advice}"


def this_program(*words: str) -> str:
    """Return the name of this program, with ``words``, for the error message of another program that finds the key in
    use. It does not contain the arguments of the command line, which may be secret.
    """
    return " ".join((Path(sys.argv[0]).name or "python", *words))
