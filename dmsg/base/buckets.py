"""Token buckets: how much of something is left at a time.  No clock."""

from __future__ import annotations

from collections import OrderedDict

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


class RateLimit:
    """``rate`` requests a second and bursts of ``burst``, for each address."""

    def __init__(self, rate: float, burst: float) -> None:
        """:param rate: per second; 0 means no limit."""
        self._rate = rate
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def reserve(self, address: str, now: float, longest: float) -> float | None:
        """Seconds after which ``address`` may ask, which is counted; None when that is more than ``longest``."""
        if not self._rate:
            return 0.0
        tokens = self._left(address, now)
        wait = max(0.0, (1.0 - tokens) / self._rate)
        self._keep(address, tokens - 1.0 if wait <= longest else tokens, now)
        return wait if wait <= longest else None

    def charge(self, address: str, requests: float, now: float) -> float:
        """``address`` has used up so many requests more; it may owe its burst.

        :returns: seconds until it owes nothing any more.
        """
        if not self._rate:
            return 0.0
        left = max(-self._burst, self._left(address, now) - requests)
        self._keep(address, left, now)
        return max(0.0, -left / self._rate)

    def owes(self, address: str, now: float) -> bool:
        """It has no request left."""
        return bool(self._rate) and self._left(address, now) < 1.0

    def _left(self, address: str, now: float) -> float:
        tokens, since = self._buckets.get(address, (self._burst, now))
        return min(self._burst, tokens + (now - since) * self._rate)

    def _keep(self, address: str, tokens: float, now: float) -> None:
        self._buckets[address] = (tokens, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def allow(self, address: str, now: float) -> bool:
        """Whether ``address`` may ask now; counts the request when it may.

        :param now: seconds of a clock that does not go back.
        """
        return self.reserve(address, now, 0.0) is not None
