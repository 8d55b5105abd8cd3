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

    def allow(self, address: str, now: float) -> bool:
        """Whether ``address`` may ask now; counts the request when it may.

        :param now: seconds of a clock that does not go back.
        """
        if not self._rate:
            return True
        tokens, since = self._buckets.pop(address, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate)
        allowed = tokens >= 1.0
        self._buckets[address] = (tokens - 1.0 if allowed else tokens, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return allowed
