"""Directory for received files on a disk that may become full, in a walk of transfers by codes."""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from dmsg.apps.parcels.destination import Destination
from dmsg.apps.parcels.manifest import Item

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LimitedDestination(Destination):
    """Destination of a parcel on a disk that may become full.

    :ivar room: number of bytes for which the disk has room; None for a disk that is not full.
    :ivar is_freed_soon: whether another program frees the disk as soon as the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.room: int | None = None
        self.is_freed_soon = False

    def free(self) -> int | None:
        return super().free() if self.room is None else self.room

    def write_from(self, entry: Item, offset: int) -> FileIO:
        with super().write_from(entry, offset) as file:
            # The copy of the descriptor shares the position in the file.
            return _LimitedFile(os.dup(file.fileno()), self)


class _LimitedFile(FileIO):
    """File on a disk that may become full."""

    def __init__(self, descriptor: int, place: LimitedDestination) -> None:
        super().__init__(descriptor, "r+b")
        self._place = place

    def write(self, data: ReadableBuffer, /) -> int:
        """Write as many bytes as the disk has room for, and return their number.

        :raises OSError: the disk is full.
        """
        place = self._place
        if place.room is None:
            return super().write(data)
        if not place.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(memoryview(data)[: place.room])
        place.room -= written
        if not place.room and place.is_freed_soon:
            place.room = None
        return written
