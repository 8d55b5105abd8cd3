"""A set of byte strings that strangers send, of which the oldest are forgotten.  No I/O, no clock.

An entry is 8 bytes in a flat table, and no object: objects that stay for long, made one by one between others that are
freed, keep the memory around them from going back to the system.  Fingerprints are Python's hashes of bytes, which are
keyed with a secret of the process: nobody can make two that are alike, and chance makes one in 10**14.
"""

from __future__ import annotations

from array import array

_SPACE = 4
"""Slots for each entry of a table: a quarter full at most, so a look takes one or two steps."""


class Fingerprints:
    """The last byte strings that were added.

    :param least: how many are remembered at least; twice as many at most.
    """

    __slots__ = ("_before", "_count", "_least", "_mask", "_now")

    def __init__(self, least: int) -> None:
        self._least = least
        self._mask = (1 << (_SPACE * least - 1).bit_length()) - 1
        self._now = self._before = array("q")
        self._count = 0

    def __len__(self) -> int:
        """Return the number of entries in the younger table."""
        return self._count

    def __contains__(self, data: object) -> bool:
        mark = _mark(data)
        return any(table and table[self._slot(table, mark)] == mark for table in (self._now, self._before))

    def add(self, data: bytes) -> None:
        """Remember ``data``."""
        if self._count == self._least or not self._now:
            self._before, self._now = self._now, array("q", bytes(8 * (self._mask + 1)))
            self._count = 0
        mark = _mark(data)
        slot = self._slot(self._now, mark)
        self._count += self._now[slot] != mark
        self._now[slot] = mark

    def clear(self) -> None:
        """Forget all of them."""
        self._now = self._before = array("q")
        self._count = 0

    def _slot(self, table: array[int], mark: int) -> int:
        """Return where ``mark`` is, or the free slot where it belongs."""
        slot = mark & self._mask
        while table[slot] not in (0, mark):
            slot = (slot + 1) & self._mask
        return slot


def _mark(data: object) -> int:
    return hash(data) or 1  # 0 stands for a free slot
