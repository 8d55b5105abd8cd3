"""Replay protection: which nonces of a peer are new, by order or by a replay window. No I/O."""

from __future__ import annotations

from typing import Protocol

WINDOW = 1024
"""Size of the replay window in nonces, down from the highest. A sender keeps fewer records than this in flight."""


class Nonces(Protocol):
    """Interface of the memory of received nonces in one direction.

    Call :meth:`accepts` before a record is opened, and :meth:`record` only when it was authentic. Otherwise anybody on
    the path could send forged records with the nonces of honest ones, and the honest records would be refused.
    """

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is new."""

    def record(self, nonce: int) -> None:
        """Remember the nonce of an authentic record."""


class GrowingNonces:
    """Nonces that must grow, with gaps allowed, for records that arrive in order, as over TCP."""

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is larger than the last one."""
        return nonce > self.last

    def record(self, nonce: int) -> None:
        """Remember the last nonce."""
        self.last = nonce


class NonceWindow:
    """Replay window: each nonce is accepted once, in any order within ``size`` below the highest.

    The window is for records of several streams that share one counter. The first nonce is 1; 0 is never valid.
    """

    __slots__ = ("_seen", "highest", "size")

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        self.highest = 0
        self._seen = 0
        """Bit mask of the last ``size`` nonces; bit 0 stands for the highest."""

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is above the window, or in it and not seen yet."""
        below = self.highest - nonce
        return nonce > 0 and (below < 0 or (below < self.size and not self._seen >> below & 1))

    def record(self, nonce: int) -> None:
        """Mark ``nonce`` as seen, and move the window up if needed."""
        above = nonce - self.highest
        if above > 0:
            # A jump by more than the window clears the mask, because shifting by a number that a peer chose could
            # allocate any amount of memory.
            kept = self._seen << above if above < self.size else 0
            self._seen = (kept | 1) & ((1 << self.size) - 1)
            self.highest = nonce
        else:
            self._seen |= 1 << -above
