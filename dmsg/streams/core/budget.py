"""Bytes by which the windows of a process may grow, shared among its peers.  No I/O."""

from __future__ import annotations

from collections import Counter

from dmsg.base.bounded_tables import uncount

WINDOW_BUDGET = 256 * 1024 * 1024
"""Bytes by which all windows of a process together grow beyond their first size."""


class Budget:
    """Bytes that windows may grow by, all together.

    A peer takes only what leaves as much as it has then: the first may have half, two that grow in turns a third
    each, and who comes late finds some.
    """

    __slots__ = ("_of", "left")

    def __init__(self, size: int = WINDOW_BUDGET) -> None:
        self.left = size
        self._of: Counter[bytes] = Counter()

    def take(self, peer: bytes, size: int) -> bool:
        """Whether ``peer`` may have so much more."""
        if self._of[peer] + size > self.left - size:
            return False
        self.left -= size
        self._of[peer] += size
        return True

    def give_back(self, peer: bytes, size: int) -> None:
        """What was taken is free again."""
        self.left += size
        uncount(self._of, peer, size)


BUDGET = Budget()
"""Of this process."""
