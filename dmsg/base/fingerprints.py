"""Set of byte strings that strangers send, of which the oldest are forgotten.  No I/O, no clock.

An entry is 8 bytes in a flat table, and no Python object.  Long-lived objects among short-lived ones would fragment the
heap, and the system would not get memory back.  A fingerprint is Python's hash of the bytes, which is keyed with a
secret of the process.  So nobody can construct a collision, and by chance one occurs once in 10**14 cases.
"""

from __future__ import annotations

from array import array

_SPACE = 4
"""Number of slots per entry.  A table is at most a quarter full, so a lookup takes one or two steps."""


class Fingerprints:
    """Set of the most recently added byte strings.

    :param least: minimum number of strings to remember; the maximum is twice as many.
    """

    __slots__ = ("_before", "_count", "_entries_per_table", "_mask", "_now")

    def __init__(self, least: int) -> None:
        self._entries_per_table = least
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
        """Return the slot of ``mark``, or the free slot where it belongs."""
        slot = mark & self._mask
        while table[slot] not in (0, mark):
            slot = (slot + 1) & self._mask
        return slot


def _mark(data: object) -> int:
    return hash(data) or 1  # 0 marks a free slot, so a fingerprint of 0 is replaced by another number.
