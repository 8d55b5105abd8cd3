"""Locks on key files: only one program at a time uses a key on this machine, and a second program learns which one.

Two programs with one key disturb each other: servers send new requests to the newest connection, and each program
replaces the other's entry in discovery.  The lock is ``FILE.lock`` beside the key file, or the key file itself if
nothing can be written beside it.  It ends with the process that has it, even if the process is killed.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from dmsg.base.printable import printable
from dmsg.errors import KeyFileError
from dmsg.filelock import NoLocks, is_at, take_lock

LOCK_SUFFIX = ".lock"
_WHO_SIZE = 256
KEY_ADVICE = (
    "stop that, or use another key (dmsg key new FILE); with --share both run, and others reach only the newest"
)
"""Advice for a key file that is in use."""
_held: dict[str, list[KeyLock]] = {}


class KeyInUse(KeyFileError):
    """Error: another program uses this key file."""


class KeyLock:
    """Lock on a key file; :meth:`release` ends it."""

    def __init__(self, path: str, descriptor: int | None, beside: str | None) -> None:
        self._path = path
        self.descriptor = descriptor
        self.lock_file = beside

    def release(self) -> None:
        """Release the lock.  May be repeated."""
        holders = _held.get(self._path, [])
        if self in holders:
            holders.remove(self)
            if not holders:
                del _held[self._path]
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is None or any(other.descriptor == descriptor for other in holders):
            return
        if self.lock_file is not None:
            # The file is removed while the lock is still held, so that it cannot be another program's file.
            with suppress(OSError):
                os.unlink(self.lock_file)
        os.close(descriptor)


def hold_key(
    path: str | os.PathLike[str], program: str, *, share: bool = False, advice: str = KEY_ADVICE, display_path: str = ""
) -> KeyLock:
    """Lock a key file, or another file, for ``program``; the same process may do so several times.

    :param share: whether other programs that share the lock are accepted.
    :param advice: what a user can do who finds the file in use.
    :param display_path: name, for the message, of the thing in use; by default the path of the file.
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


def _hold_beside(real: str, program: str, share: bool, advice: str, display_path: str) -> KeyLock | None:
    """Lock the file beside a key file; return None if nothing can be written there."""
    beside = real + LOCK_SUFFIX
    while True:
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            mine = take_lock(descriptor, share=share)
        except NoLocks:  # The error is ignored: on a file system without locks, the key is used unlocked.
            os.close(descriptor)
            return KeyLock(real, None, None)
        if not mine:
            who = os.read(descriptor, _WHO_SIZE).decode("utf-8", "replace")
            os.close(descriptor)
            if share:
                return KeyLock(real, None, None)
            raise KeyInUse(_in_use(display_path, who, advice))
        # The file that was opened may just have been removed by the program that had the lock.
        if is_at(descriptor, Path(beside)):
            break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    with suppress(OSError):
        # The error is ignored: the lock works even if a full disk prevents writing the name of the program.
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
    """Return the name of this process for programs that find the key in use; its other arguments are never shown."""
    return " ".join((Path(sys.argv[0]).name or "python", *words))
