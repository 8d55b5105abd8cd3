"""Memory budget from which the receive windows of a process grow, shared by its peers. No I/O.

Whether a window may grow depends on the number of bytes that its peer has already taken. Initial windows are not
charged. So a new stream can always begin, and a refused growth only makes a stream slower.
"""

from __future__ import annotations

from collections import Counter

from dmsg.base.bounded_tables import decrement

WINDOW_BUDGET = 256 * 1024 * 1024
"""Number of bytes by which all receive windows of a process together may grow beyond their initial sizes."""


class Budget:
    """Budget of bytes by which all receive windows together may grow.

    A peer may take bytes only if, afterwards, the peer has no more bytes than are left in the budget. So the first peer
    gets at most half of the budget, two peers that take bytes alternately get a third each, and some bytes are always
    left for later peers.
    """

    __slots__ = ("_of", "left")

    def __init__(self, size: int = WINDOW_BUDGET) -> None:
        self.left = size
        self._of: Counter[bytes] = Counter()

    def take(self, peer: bytes, size: int) -> bool:
        """Take ``size`` bytes for ``peer`` and return True. Return False, and take none, if ``peer`` may not take that
        many."""
        if self._of[peer] + size > self.left - size:
            return False
        self.left -= size
        self._of[peer] += size
        return True

    def give_back(self, peer: bytes, size: int) -> None:
        """Return ``size`` bytes, which ``peer`` had taken, to the budget."""
        self.left += size
        decrement(self._of, peer, size)


BUDGET = Budget()
"""Default budget, which all clients of this process share."""
