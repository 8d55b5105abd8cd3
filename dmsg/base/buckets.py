"""Token buckets, and rate limits per address.  The time is an argument of each call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_ADDRESSES = 16_384
"""Maximum number of addresses that one rate limit remembers. Above it, the address with the oldest last request is
forgotten."""


class Bucket:
    """Token bucket that fills at ``rate`` tokens per second up to ``burst`` tokens."""

    __slots__ = ("_at", "level")

    def __init__(self, burst: float, now: float) -> None:
        self.level = burst
        self._at = now

    def take(self, amount: float, rate: float, burst: float, now: float) -> bool:
        """Take ``amount`` tokens and return True. If fewer are left, take none and return False."""
        self.fill(rate, burst, now)
        if self.level < amount:
            return False
        self.level -= amount
        return True

    def fill(self, rate: float, burst: float, now: float) -> None:
        """Add the tokens for the time since the last call, up to ``burst``."""
        self.level = min(burst, self.level + (now - self._at) * rate)
        self._at = now


def _alone(address: str) -> Sequence[tuple[str, int]]:
    return ((address, 1),)


class RateLimit:
    """Rate limit that allows each address ``rate`` requests per second and ``burst`` requests in a burst.

    :param blocks: function that returns, for an address, the names against which its requests count, such as its
        address blocks. Each name comes with a factor that multiplies its rate and its burst. By default, requests count
        against the address alone.
    """

    def __init__(self, rate: float, burst: float, blocks: Callable[[str], Sequence[tuple[str, int]]] = _alone) -> None:
        """:param rate: requests per second; 0 means no limit."""
        self._rate = rate
        self._burst = burst
        self._blocks = blocks
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def reserve(self, address: str, now: float, longest: float) -> float | None:
        """Reserve one request of ``address``, if its wait is at most ``longest`` seconds.

        :returns: seconds to wait before the request may be made. None if the wait would exceed ``longest``; the request
            is not counted then.
        """
        if not self._rate:
            return 0.0
        left = []
        wait = 0.0
        for name, factor in self._blocks(address):
            tokens = self._tokens_left(name, factor, now)
            left.append((name, tokens))
            if tokens < 1.0:
                wait = max(wait, (1.0 - tokens) / (self._rate * factor))
        for name, tokens in left:
            self._keep(name, tokens - 1.0 if wait <= longest else tokens, now)
        return wait if wait <= longest else None

    def charge(self, address: str, requests: float, now: float) -> float:
        """Count ``requests`` further requests of ``address``, even above its limit. Its debt is at most its burst.

        :returns: seconds until the debt is paid; 0 if there is none.
        """
        if not self._rate:
            return 0.0
        wait = 0.0
        for name, factor in self._blocks(address):
            left = self._tokens_left(name, factor, now) - requests
            if left < 0.0:
                left = max(-self._burst * factor, left)
                wait = max(wait, -left / (self._rate * factor))
            self._keep(name, left, now)
        return wait

    def is_exhausted(self, address: str, now: float) -> bool:
        """Whether ``address``, or a block that its requests count against, has less than one request left."""
        return bool(self._rate) and any(
            self._tokens_left(name, factor, now) < 1.0 for name, factor in self._blocks(address)
        )

    def _tokens_left(self, name: str, factor: int, now: float) -> float:
        tokens, since = self._buckets.get(name, (self._burst * factor, now))
        return min(self._burst * factor, tokens + (now - since) * self._rate * factor)

    def _keep(self, name: str, tokens: float, now: float) -> None:
        self._buckets[name] = (tokens, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)

    def allow(self, address: str, now: float) -> bool:
        """Return whether ``address`` may make a request now, and count the request if so.

        :param now: seconds of a monotonic clock.
        """
        return self.reserve(address, now, 0.0) is not None
