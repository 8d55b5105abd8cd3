"""Token buckets: how much of something is left at a time.  No clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_ADDRESSES = 16_384
"""Addresses remembered; the one that was silent longest is forgotten first."""


class Bucket:
    """Fills with ``rate`` a second up to ``burst``; ``take`` empties it."""

    __slots__ = ("_at", "level")

    def __init__(self, burst: float, now: float) -> None:
        self.level = burst
        self._at = now

    def take(self, amount: float, rate: float, burst: float, now: float) -> bool:
        """Whether there was so much.  Nothing is taken if not."""
        self.fill(rate, burst, now)
        if self.level < amount:
            return False
        self.level -= amount
        return True

    def fill(self, rate: float, burst: float, now: float) -> None:
        """Time has passed."""
        self.level = min(burst, self.level + (now - self._at) * rate)
        self._at = now


def _alone(address: str) -> Sequence[tuple[str, int]]:
    return ((address, 1),)


class RateLimit:
    """``rate`` requests a second and bursts of ``burst``, for each address.

    :param blocks: names of all that a request of an address counts for, each with a factor: how many times the rate and
        burst it has.  By default the address alone.
    """

    def __init__(self, rate: float, burst: float, blocks: Callable[[str], Sequence[tuple[str, int]]] = _alone) -> None:
        """:param rate: per second; 0 means no limit."""
        self._rate = rate
        self._burst = burst
        self._blocks = blocks
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def reserve(self, address: str, now: float, longest: float) -> float | None:
        """Seconds after which ``address`` may ask, which is counted; None when that is more than ``longest``."""
        if not self._rate:
            return 0.0
        left = []
        wait = 0.0
        for name, factor in self._blocks(address):
            tokens = self._left(name, factor, now)
            left.append((name, tokens))
            if tokens < 1.0:
                wait = max(wait, (1.0 - tokens) / (self._rate * factor))
        for name, tokens in left:
            self._keep(name, tokens - 1.0 if wait <= longest else tokens, now)
        return wait if wait <= longest else None

    def charge(self, address: str, requests: float, now: float) -> float:
        """``address`` has used up so many requests more; it may owe its burst.

        :returns: seconds until it owes nothing any more.
        """
        if not self._rate:
            return 0.0
        wait = 0.0
        for name, factor in self._blocks(address):
            left = max(-self._burst * factor, self._left(name, factor, now) - requests)
            self._keep(name, left, now)
            wait = max(wait, -left / (self._rate * factor))
        return wait

    def owes(self, address: str, now: float) -> bool:
        """Whether the limit has no request left."""
        return bool(self._rate) and any(self._left(name, factor, now) < 1.0 for name, factor in self._blocks(address))

    def _left(self, name: str, factor: int, now: float) -> float:
        tokens, since = self._buckets.get(name, (self._burst * factor, now))
        return min(self._burst * factor, tokens + (now - since) * self._rate * factor)

    def _keep(self, name: str, tokens: float, now: float) -> None:
        self._buckets[name] = (tokens, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def allow(self, address: str, now: float) -> bool:
        """Whether ``address`` may ask now; counts the request when it may.

        :param now: seconds of a clock that does not go back.
        """
        return self.reserve(address, now, 0.0) is not None
