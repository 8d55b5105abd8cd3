"""Replay protection: decides which nonces of a peer are new, by a growing counter or by a replay window. No I/O."""

from __future__ import annotations

from typing import Protocol

WINDOW = 1024
"""Size of the replay window: number of nonces that are tracked, counted from the highest received nonce downwards. A
sender has fewer records than this in flight."""


class Nonces(Protocol):
    """Interface of an object that remembers which nonces were received in one direction.

    Call :meth:`accepts` before decrypting a record, and :meth:`record` only after the record proved authentic.
    Otherwise anybody on the path could send forged records with future nonces, and the honest records with these nonces
    would be refused.
    """

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is new."""

    def record(self, nonce: int) -> None:
        """Remember the nonce of an authentic record."""


class GrowingNonces:
    """Replay check for records that arrive in order, as over TCP: each nonce must be larger than the last. Gaps are
    allowed."""

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is larger than the last accepted nonce."""
        return nonce > self.last

    def record(self, nonce: int) -> None:
        """Store ``nonce`` as the last accepted nonce."""
        self.last = nonce


class NonceWindow:
    """Replay window: accepts each nonce once, in any order, if it is less than ``size`` below the highest one received.

    Records of several streams that share one counter may arrive out of order, so they need a window. The first nonce is
    1; 0 is never valid.
    """

    __slots__ = ("_seen", "highest", "size")

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        self.highest = 0
        self._seen = 0
        """Bit mask of received nonces: bit n stands for the nonce that is n below the highest. It has ``size`` bits."""

    def accepts(self, nonce: int) -> bool:
        """Whether ``nonce`` is higher than all received ones, or is inside the window and was not received yet."""
        below = self.highest - nonce
        return nonce > 0 and (below < 0 or (below < self.size and not self._seen >> below & 1))

    def record(self, nonce: int) -> None:
        """Mark ``nonce`` as received. If it is the highest so far, move the window up."""
        above = nonce - self.highest
        if above > 0:
            # A jump of ``size`` or more clears the mask. Shifting by a number that a peer chose could allocate any
            # amount of memory.
            kept = self._seen << above if above < self.size else 0
            self._seen = (kept | 1) & ((1 << self.size) - 1)
            self.highest = nonce
        else:
            self._seen |= 1 << -above
