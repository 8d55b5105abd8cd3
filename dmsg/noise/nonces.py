"""Which nonces of a peer are new: those that grow, or those that a window has not seen.  No I/O."""

from __future__ import annotations

from typing import Protocol

WINDOW = 1024
"""Nonces from the highest down that may still come: a sender keeps fewer records than that on their way."""


class Nonces(Protocol):
    """What was received of one direction.

    Ask :meth:`takes` before a record is opened and call :meth:`took` when it was authentic:
    a nonce that is remembered before would let anybody on the way use up those of honest records.
    """

    def takes(self, nonce: int) -> bool:
        """Whether it is new."""

    def took(self, nonce: int) -> None:
        """A record with it was authentic."""


class Growing:
    """Each is larger than the one before; gaps are allowed: records come in order, as over TCP."""

    __slots__ = ("last",)

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def takes(self, nonce: int) -> bool:
        """It is larger than the last one."""
        return nonce > self.last

    def took(self, nonce: int) -> None:
        """It is the last one now."""
        self.last = nonce


class NonceWindow:
    """Each comes once, in any order within ``size`` below the highest: one counter for records of several streams.

    0 is none: the first one is 1.
    """

    __slots__ = ("_seen", "highest", "size")

    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        self.highest = 0
        self._seen = 0
        """A bit for each of the last ``size``; bit 0 is the highest."""

    def takes(self, nonce: int) -> bool:
        """It is above the window, or in it and was not seen."""
        below = self.highest - nonce
        return nonce > 0 and (below < 0 or (below < self.size and not self._seen >> below & 1))

    def took(self, nonce: int) -> None:
        """It was seen; the window moves up to it."""
        above = nonce - self.highest
        if above > 0:
            # a jump beyond the window forgets all: nothing is gained by shifting that far
            kept = self._seen << above if above < self.size else 0
            self._seen = (kept | 1) & ((1 << self.size) - 1)
            self.highest = nonce
        else:
            self._seen |= 1 << -above
