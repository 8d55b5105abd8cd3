"""Set of byte strings that strangers send, which forgets the oldest.  No I/O, no clock.

An entry is a number of 8 bytes in a flat array, not a Python object.  Long-lived objects among short-lived ones would
fragment the heap, so that the process could not return memory to the system.  The number is a fingerprint: Python's
hash of the bytes, which is keyed with a secret of the process.  So nobody can construct a collision.  By chance, one in
10**14 lookups finds a string that was not added.
"""

from __future__ import annotations

from array import array

_SPACE = 4
"""Number of slots of the hash table per entry. The table is thus at most a quarter full, and a lookup takes one or two
steps."""


class Fingerprints:
    """Set of the most recently added byte strings.

    When its current table is full, the set starts a new one and keeps only the previous table for lookups.

    :param least: minimum number of strings that are remembered. The maximum is twice as many.
    """

    __slots__ = ("_before", "_count", "_entries_per_table", "_mask", "_now")

    def __init__(self, least: int) -> None:
        self._entries_per_table = least
        self._mask = (1 << (_SPACE * least - 1).bit_length()) - 1
        self._now = self._before = array("q")
        self._count = 0

    def __len__(self) -> int:
        """Return the number of entries in the current table."""
        return self._count

    def __contains__(self, data: object) -> bool:
        mark = _mark(data)
        return any(table and table[self._slot(table, mark)] == mark for table in (self._now, self._before))

    def add(self, data: bytes) -> None:
        """Add ``data`` to the set."""
        if self._count == self._entries_per_table or not self._now:
            self._before, self._now = self._now, array("q", bytes(8 * (self._mask + 1)))
            self._count = 0
        mark = _mark(data)
        slot = self._slot(self._now, mark)
        self._count += self._now[slot] != mark
        self._now[slot] = mark

    def clear(self) -> None:
        """Forget all strings."""
        self._now = self._before = array("q")
        self._count = 0

    def _slot(self, table: array[int], mark: int) -> int:
        """Return the index in ``table`` of the hash ``mark``, or the free index at which to store it."""
        slot = mark & self._mask
        while table[slot] not in (0, mark):
            slot = (slot + 1) & self._mask
        return slot


def _mark(data: object) -> int:
    return hash(data) or 1  # 0 marks a free slot, so 1 replaces a hash of 0.
