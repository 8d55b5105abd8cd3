"""Simulated disk: a directory of files that loses unsynced changes in a power cut.

The disk stores for each file its synced content, the changes since then, and the content that programs read. As on a
real disk, some of the unsynced changes survive a power cut: none, all before some moment, or any of them. Each sector
of :data:`SECTOR_SIZE` bytes survives or is lost as a whole, so a part of one write can survive. Names of files survive
or are lost in the same way until their directory is synced.

The disk can also be full, and single operations can fail.
"""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from random import Random

SECTOR_SIZE = 512
"""Number of bytes that a disk writes completely or not at all."""
Torn = Callable[[int, int], bool]
"""Function that returns whether a change of the file reaches a sector of the disk. Its arguments are the numbers of the
sector and of the change."""


class Operation(Enum):
    """Operations that change a disk."""

    WRITE = "write"
    TRUNCATE = "truncate"
    SYNC = "sync"
    NAME = "create or delete a file"
    SYNC_NAMES = "sync the directory"


class PowerLost(OSError):
    """Error: the disk has no power, or the file was opened before a power cut."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the disk has no power")


def _resize(content: bytearray, size: int) -> None:
    if size > len(content):
        content.extend(bytes(size - len(content)))
    else:
        del content[size:]


def _write(content: bytearray, offset: int, data: bytes) -> None:
    if offset > len(content):
        _resize(content, offset)
    content[offset : offset + len(data)] = data


def _sectors(start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Return, for each sector that overlaps a range of offsets, its number, and the start and end of the overlap."""
    while start < end:
        sector = start // SECTOR_SIZE
        stop = min(end, (sector + 1) * SECTOR_SIZE)
        yield sector, start, stop
        start = stop


class DiskFile:
    """Content of a file on a simulated disk.

    :ivar content: content that programs read.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self._synced = bytearray()
        # A change is an offset and the bytes that were written there, or a new size and None.
        self._changes: list[tuple[int, bytes | None]] = []

    def write(self, offset: int, data: bytes) -> None:
        _write(self.content, offset, data)
        self._changes.append((offset, data))

    def truncate(self, size: int) -> None:
        _resize(self.content, size)
        self._changes.append((size, None))

    def sync(self) -> None:
        for offset, data in self._changes:
            if data is None:
                _resize(self._synced, offset)
            else:
                _write(self._synced, offset, data)
        self._changes.clear()

    def tear(self, random: Random) -> None:
        """Decide which unsynced changes the next power cut loses: a random part of them is written to the disk now, and
        the power cut will lose the others."""
        if self._changes:
            self._synced = self._torn(*_draw_torn(random, len(self._changes)))
            self._changes.clear()

    def revert(self) -> None:
        """Restore the content that the disk has kept."""
        self.content = bytearray(self._synced)
        self._changes.clear()

    def _torn(self, size_changes: int, is_kept: Torn) -> bytearray:
        """Return the content after a power cut: the synced content with a part of the unsynced changes.

        :param size_changes: number of changes, counted from the first, that determine the size of the file. The file
            gets the size that it had after these changes.
        :param is_kept: which changes survive in each sector.
        """
        content = bytearray(self._synced)
        size = len(content)
        for index, (offset, data) in enumerate(self._changes):
            if data is None:
                for sector, start, end in _sectors(offset, len(content)):
                    if is_kept(sector, index):
                        content[start:end] = bytes(end - start)
                if index < size_changes:
                    size = offset
                continue
            end_of_data = offset + len(data)
            if end_of_data > len(content):
                _resize(content, end_of_data)
            for sector, start, end in _sectors(offset, end_of_data):
                if is_kept(sector, index):
                    content[start:end] = data[start - offset : end - offset]
            if index < size_changes:
                size = max(size, end_of_data)
        _resize(content, size)
        return content


def _draw_torn(random: Random, changes: int) -> tuple[int, Torn]:
    """Draw what survives of the unsynced changes of a file: the arguments of :meth:`DiskFile._torn`.

    In each sector the first changes survive, and the later ones are lost. How many survive is drawn.
    """
    way = random.randrange(4)
    last = 0 if way == 0 else random.randint(0, changes)
    kept: defaultdict[int, int]
    if way == 0:  # No unsynced change survives.
        kept = defaultdict(int)
    elif way == 1:  # All changes before one moment survive; of the change at that moment, only some sectors.
        kept = defaultdict(lambda: last - random.randint(0, 1))
    else:  # An arbitrary part of the unsynced changes survives.
        kept = defaultdict(lambda: random.randint(0, changes))
    return last, lambda sector, index: index < kept[sector]


class Disk:
    """Directory of files on a simulated disk.

    Each change is one operation. It raises :exc:`PowerLost` if the disk has no power, and OSError if it fails.

    :param random: random numbers that decide what a power cut keeps.
    :ivar operations: number of operations so far.
    :ivar cut_at: number of the operation during which the power is lost, or None.
    :ivar capacity: maximum number of bytes in all files, or None.
    :ivar has_power: whether the disk has power.
    :ivar power_cuts: number of times that the power was restored. A file that was opened before the last power cut must
        not be used.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.operations = 0
        self.cut_at: int | None = None
        self.capacity: int | None = None
        self.has_power = True
        self.power_cuts = 0
        self._files: dict[str, DiskFile] = {}
        self._synced_names: dict[str, DiskFile] = {}
        self._name_changes: list[tuple[str, DiskFile | None]] = []
        self._failing: dict[Operation, list[int]] = {}

    def fail(self, operation: Operation, after: int = 0) -> None:
        """Make one operation fail with EIO.

        After a failed sync, as on Linux, programs read what they wrote, but only a part of it may ever reach the disk.

        :param after: number of operations of this kind that succeed before.
        """
        self._failing.setdefault(operation, []).append(after)

    def cut_power(self) -> None:
        """Turn the power off. From now on every operation raises :exc:`PowerLost`."""
        self.has_power = False

    def restore_power(self) -> None:
        """Lose a random part of what was not synced, and turn the power on. Open files cannot be used any more. Faults
        that were planned with :meth:`fail` or ``cut_at`` are cancelled."""
        for name, file in self._name_changes:
            if self.random.random() < 0.5:
                _rename(self._synced_names, name, file)
        self._name_changes.clear()
        self._files = dict(self._synced_names)
        for file in self._files.values():
            file.tear(self.random)
            file.revert()
        self.power_cuts += 1
        self.has_power = True
        self.cut_at = None
        self._failing.clear()

    def exists(self, name: str) -> bool:
        self._check_power()
        return name in self._files

    def open(self, name: str, *, create: bool = False) -> DiskFile:
        """Return the file with this name.

        :param create: whether to create the file if it does not exist.
        :raises FileNotFoundError: the file does not exist, and must not be created.
        """
        self._check_power()
        file = self._files.get(name)
        if file is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            file = DiskFile()
            self._change_name(name, file)
        return file

    def delete(self, name: str) -> None:
        """Delete a file.

        :raises FileNotFoundError: the file does not exist.
        """
        self._check_power()
        if name not in self._files:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._change_name(name, None)

    def read(self, file: DiskFile, offset: int, size: int) -> bytes:
        """Return the bytes at an offset; fewer than ``size`` if the file ends there."""
        self._check_power()
        return bytes(file.content[offset : offset + size])

    def write(self, file: DiskFile, offset: int, data: bytes) -> None:
        """Write to a file. The changes may be lost until :meth:`sync`."""
        with self._operation(Operation.WRITE):
            grown = max(0, offset + len(data) - len(file.content))
            if self.capacity is not None and grown and self.used + grown > self.capacity:
                raise OSError(errno.ENOSPC, "the disk is full")
            file.write(offset, data)

    def truncate(self, file: DiskFile, size: int) -> None:
        with self._operation(Operation.TRUNCATE):
            file.truncate(size)

    def sync(self, file: DiskFile) -> None:
        """Make all changes of a file permanent, but not the file's name."""
        try:
            with self._operation(Operation.SYNC):
                pass
        except PowerLost:
            raise
        except OSError:
            file.tear(self.random)
            raise
        file.sync()

    def sync_names(self) -> None:
        """Sync the directory: files that were created, renamed or removed so far stay so after a power cut."""
        with self._operation(Operation.SYNC_NAMES):
            pass
        self._synced_names = dict(self._files)
        self._name_changes.clear()

    @property
    def used(self) -> int:
        """Number of bytes in all files."""
        return sum(len(file.content) for file in self._files.values())

    def _change_name(self, name: str, file: DiskFile | None) -> None:
        with self._operation(Operation.NAME):
            _rename(self._files, name, file)
            self._name_changes.append((name, file))

    def _check_power(self) -> None:
        if not self.has_power:
            raise PowerLost

    @contextmanager
    def _operation(self, operation: Operation) -> Iterator[None]:
        """Context manager of one operation. If the power is cut during the operation, its changes are made but not
        synced, and :exc:`PowerLost` is raised."""
        self._check_power()
        self.operations += 1
        planned = self._failing.get(operation)
        if planned:
            self._failing[operation] = [after - 1 for after in planned if after]
            if 0 in planned:
                raise OSError(errno.EIO, f"cannot {operation.value}")
        yield
        if self.cut_at is not None and self.operations >= self.cut_at:
            self.cut_power()
            raise PowerLost


def _rename(names: dict[str, DiskFile], name: str, file: DiskFile | None) -> None:
    if file is None:
        names.pop(name, None)
    else:
        names[name] = file
