"""SQLite on a simulated disk: a VFS for the SQLite library that Python's ``sqlite3`` uses.

In the context of :func:`dmsg.testing.sqlite_on`, the disk replaces the file system in every call of
``sqlite3.connect``, so stores run unchanged. The VFS assumes what SQLite's own VFS for Unix
assumes: a torn write damages no bytes beside it.

The VFS has no locks, so a database can have only one connection at a time.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

from dmsg.testing.disk import Disk, DiskFile, PowerLost

NAME = b"dmsg-simulated-disk"
MAX_PATH = 1024
"""Maximum number of bytes of a path, with the terminating zero."""
SECTOR_SIZE = 4096
"""Number of bytes that SQLite's own VFS for Unix reports as the size of a sector."""
OK, IO_ERROR, FULL, CANNOT_OPEN = 0, 10, 13, 14
SHORT_READ, DELETE_NO_FILE = IO_ERROR | 2 << 8, IO_ERROR | 23 << 8
NOT_FOUND = 12
POWERSAFE_OVERWRITE = 0x1000
OPEN_CREATE, OPEN_DELETE_ON_CLOSE, OPEN_MAIN_DATABASE = 0x4, 0x8, 0x100
OPEN_LOG = 0x800 | 0x4000 | 0x80000
"""Flags of journals and logs. SQLite's own VFS for Unix syncs their directory when it first syncs such a file."""
JULIAN_EPOCH = 2440587.5
"""Julian day number of 1970-01-01."""


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


class _Methods(Structure):
    """``sqlite3_io_methods``, version 2."""

    _fields_ = [
        ("version", c_int),
        *_pointers("close", "read", "write", "truncate", "sync", "file_size", "lock", "unlock", "is_reserved"),
        *_pointers("control", "sector_size", "characteristics", "shm_map", "shm_lock", "shm_barrier", "shm_unmap"),
    ]


class _File(Structure):
    """``sqlite3_file`` of this VFS. ``number`` is the key under which the VFS stores the open file."""

    _fields_ = [("methods", c_void_p), ("number", c_int64)]


class _Vfs(Structure):
    """``sqlite3_vfs``, version 1."""

    _fields_ = [
        ("version", c_int),
        ("file_size", c_int),
        ("max_path", c_int),
        *_pointers("next"),
        ("name", c_char_p),
        *_pointers("data", "open", "delete", "access", "full_path"),
        *_pointers("load", "load_error", "find_symbol", "unload"),
        *_pointers("randomness", "sleep", "current_time", "last_error"),
    ]


@dataclass
class _Open:
    """File that a connection has open."""

    disk: Disk
    file: DiskFile
    name: str | None
    syncs_names: bool
    deletes: bool
    power_cuts: int

    @property
    def is_usable(self) -> bool:
        """Whether the file was opened after the last simulated power failure. An older file cannot be used any more."""
        return self.power_cuts == self.disk.power_cuts

    def check(self) -> None:
        if not self.is_usable:
            raise PowerLost


def _guarded(kind: Any, function: Callable[..., int]) -> Any:
    """Return a function that C can call. If ``function`` raises OSError, it returns SQLite's code for this error."""

    def call(*arguments: Any) -> int:
        try:
            return function(*arguments)
        except OSError as error:
            return FULL if error.errno == errno.ENOSPC else IO_ERROR

    return kind(call)


_FILE = POINTER(_File)


class _SimulatedVfs:
    """The VFS (SQLite's interface to files). A process has one, which is never deleted, because SQLite may call its
    functions until the process ends."""

    def __init__(self) -> None:
        self.disk: Disk | None = None
        self._open: dict[int, _Open] = {}
        self._next = 1
        # Path of the file closed last if a power cut had made it unusable; else None. SQLite deletes a log just
        # after closing it. A connection from before the power cut must not delete the log of a later connection.
        self._closed_unusable: str | None = None
        # Maps the number of an open database file to the shared memory with the index of its write-ahead log.
        self._shared: dict[int, list[Any]] = {}
        self._kept: list[Any] = []
        try:
            import _sqlite3

            library = ctypes.CDLL(_sqlite3.__file__)
            self._find, self._register, self._unregister, self._random = (
                getattr(library, f"sqlite3_{name}")
                for name in ("vfs_find", "vfs_register", "vfs_unregister", "randomness")
            )
        except (AttributeError, OSError) as error:
            raise NotImplementedError(f"SQLite's VFS cannot be replaced in this Python: {error}") from None
        self._find.restype = c_void_p
        self._methods = _Methods(
            2,
            self._function(self._close, c_int, _FILE),
            self._function(self._read, c_int, _FILE, c_void_p, c_int, c_int64),
            self._function(self._write, c_int, _FILE, c_void_p, c_int, c_int64),
            self._function(self._truncate, c_int, _FILE, c_int64),
            self._function(self._sync, c_int, _FILE, c_int),
            self._function(self._file_size, c_int, _FILE, POINTER(c_int64)),
            self._function(lambda file, level: OK, c_int, _FILE, c_int),
            self._function(lambda file, level: OK, c_int, _FILE, c_int),
            self._function(self._is_reserved, c_int, _FILE, POINTER(c_int)),
            self._function(lambda file, code, argument: NOT_FOUND, c_int, _FILE, c_int, c_void_p),
            self._function(lambda file: SECTOR_SIZE, c_int, _FILE),
            self._function(lambda file: POWERSAFE_OVERWRITE, c_int, _FILE),
            self._function(self._map_shared, c_int, _FILE, c_int, c_int, c_int, POINTER(c_void_p)),
            self._function(lambda file, first, number, flags: OK, c_int, _FILE, c_int, c_int, c_int),
            self._function(lambda file: OK, None, _FILE),
            self._function(self._unmap_shared, c_int, _FILE, c_int),
        )
        self._vfs = _Vfs(
            1,
            ctypes.sizeof(_File),
            MAX_PATH,
            None,
            NAME,
            None,
            self._function(self._open_file, c_int, c_void_p, c_char_p, _FILE, c_int, POINTER(c_int)),
            self._function(self._delete, c_int, c_void_p, c_char_p, c_int),
            self._function(self._access, c_int, c_void_p, c_char_p, c_int, POINTER(c_int)),
            self._function(self._full_path, c_int, c_void_p, c_char_p, c_int, c_void_p),
            None,
            None,
            None,
            None,
            self._function(self._randomness, c_int, c_void_p, c_int, c_void_p),
            self._function(lambda vfs, microseconds: microseconds, c_int, c_void_p, c_int),
            self._function(self._current_time, c_int, c_void_p, POINTER(c_double)),
            None,
        )

    def _function(self, function: Callable[..., int], *kinds: Any) -> c_void_p:
        made = _guarded(CFUNCTYPE(*kinds), function)
        self._kept.append(made)
        return ctypes.cast(made, c_void_p)

    @contextmanager
    def use(self, disk: Disk) -> Iterator[None]:
        """Context manager in which SQLite opens files on the disk."""
        if self.disk is not None:
            raise RuntimeError("SQLite uses a simulated disk already")
        before = c_void_p(self._find(None))
        self.disk = disk
        self._register(ctypes.byref(self._vfs), 1)
        self._random(0, None)  # SQLite discards its random state, and takes a new seed from the disk's random numbers.
        try:
            yield
        finally:
            self._register(before, 1)
            self._unregister(ctypes.byref(self._vfs))
            self._random(0, None)
            self.disk = None

    @property
    def _current(self) -> Disk:
        if self.disk is None:
            raise PowerLost
        return self.disk

    # --- the file system ---

    def _open_file(self, vfs: int, name: bytes | None, file: Any, flags: int, found_flags: Any) -> int:
        file.contents.methods = None  # SQLite calls no method of a file without methods, such as one that is not open.
        disk = self._current
        path = None if name is None else name.decode()
        if flags & OPEN_MAIN_DATABASE and any(one.is_usable and one.name == path for one in self._open.values()):
            return CANNOT_OPEN
        try:
            content = DiskFile() if path is None else disk.open(path, create=bool(flags & OPEN_CREATE))
        except FileNotFoundError:
            return CANNOT_OPEN
        self._open[self._next] = _Open(
            disk,
            content,
            path,
            syncs_names=bool(flags & OPEN_CREATE and flags & OPEN_LOG),
            deletes=bool(flags & OPEN_DELETE_ON_CLOSE),
            power_cuts=disk.power_cuts,
        )
        file.contents.number = self._next
        file.contents.methods = ctypes.addressof(self._methods)
        self._next += 1
        if found_flags:
            found_flags[0] = flags
        return OK

    def _delete(self, vfs: int, name: bytes, sync_names: int) -> int:
        if name.decode() == self._closed_unusable:
            raise PowerLost
        try:
            self._current.delete(name.decode())
        except FileNotFoundError:
            return DELETE_NO_FILE
        if sync_names:
            self._current.sync_names()
        return OK

    def _access(self, vfs: int, name: bytes, flags: int, found: Any) -> int:
        found[0] = self._current.exists(name.decode())
        return OK

    @staticmethod
    def _full_path(vfs: int, name: bytes, size: int, path: int) -> int:
        if len(name) >= size:
            return CANNOT_OPEN
        ctypes.memmove(path, name + b"\0", len(name) + 1)
        return OK

    def _randomness(self, vfs: int, size: int, data: int) -> int:
        ctypes.memmove(data, self._current.random.randbytes(size), size)
        return size

    @staticmethod
    def _current_time(vfs: int, found: Any) -> int:
        found[0] = JULIAN_EPOCH
        return OK

    # --- an open file ---

    def _close(self, file: Any) -> int:
        closed = self._open.pop(file.contents.number)
        self._closed_unusable = None if closed.is_usable else closed.name
        if closed.deletes and closed.name is not None:
            closed.check()
            closed.disk.delete(closed.name)
        return OK

    def _get(self, file: Any) -> _Open:
        one = self._open[file.contents.number]
        one.check()
        return one

    def _read(self, file: Any, data: int, size: int, offset: int) -> int:
        one = self._get(file)
        found = one.disk.read(one.file, offset, size)
        ctypes.memmove(data, found + bytes(size - len(found)), size)
        return OK if len(found) == size else SHORT_READ

    def _write(self, file: Any, data: int, size: int, offset: int) -> int:
        one = self._get(file)
        one.disk.write(one.file, offset, ctypes.string_at(data, size))
        return OK

    def _truncate(self, file: Any, size: int) -> int:
        one = self._get(file)
        one.disk.truncate(one.file, size)
        return OK

    def _sync(self, file: Any, flags: int) -> int:
        one = self._get(file)
        one.disk.sync(one.file)
        if one.syncs_names:
            one.disk.sync_names()
            one.syncs_names = False
        return OK

    def _file_size(self, file: Any, found: Any) -> int:
        found[0] = len(self._get(file).file.content)
        return OK

    @staticmethod
    def _is_reserved(file: Any, found: Any) -> int:
        found[0] = 0
        return OK

    def _map_shared(self, file: Any, region: int, size: int, extend: int, found: Any) -> int:
        self._get(file)
        regions = self._shared.setdefault(file.contents.number, [])
        found[0] = None
        if region >= len(regions):
            if not extend:
                return OK
            regions += (ctypes.create_string_buffer(size) for _ in range(region + 1 - len(regions)))
        found[0] = ctypes.addressof(regions[region])
        return OK

    def _unmap_shared(self, file: Any, delete: int) -> int:
        # Each database has only one connection here, so no other connection uses the shared memory.
        self._shared.pop(file.contents.number, None)
        return OK


_vfs: _SimulatedVfs | None = None


@contextmanager
def sqlite_on(disk: Disk) -> Iterator[None]:
    """Context manager in which ``sqlite3.connect`` opens all databases on the disk.

    Connections must be closed before the context ends. Databases in memory stay in memory.

    :raises NotImplementedError: this Python does not give access to its SQLite library.
    """
    global _vfs  # noqa: PLW0603
    if _vfs is None:
        _vfs = _SimulatedVfs()
    with _vfs.use(disk):
        yield
