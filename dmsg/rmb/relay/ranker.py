"""Ranking of relays: the relay with the fewest recent failures is tried first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from random import Random

FAILURE_PERIOD = 3600.0
"""Seconds for which a failure counts against a relay."""
MAX_FAILURES = 100
"""Maximum number of failures that are remembered for one relay."""
MAX_RELAYS = 1000
"""Maximum number of relays whose failures are remembered."""


class Ranker:
    """Ranking of relays by their failures in the last ``period`` seconds. Relays with the same number of failures are
    in random order."""

    def __init__(self, period: float = FAILURE_PERIOD, random: Random | None = None) -> None:
        self.period = period
        self._random = random or Random()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def downvote(self, relay: str, now: float) -> None:
        """Record a failure of a relay."""
        times = self._failures.setdefault(relay, deque(maxlen=MAX_FAILURES))
        times.append(now)
        self._failures.move_to_end(relay)
        if len(self._failures) > MAX_RELAYS:
            self._failures.popitem(last=False)

    def rate(self, relay: str, now: float) -> float:
        """Return the number of failures of a relay per hour."""
        times = self._failures.get(relay)
        if times is None:
            return 0.0
        while times and times[0] <= now - self.period:
            times.popleft()
        if not times:
            del self._failures[relay]
        return len(times) * 3600 / self.period

    def order(self, relays: Iterable[str], now: float) -> list[str]:
        """Return the relays, ordered by their failures, fewest first."""
        ordered = list(relays)
        # ``sorted`` is stable, so relays with equal rates stay in random order and share the load.
        self._random.shuffle(ordered)
        return sorted(ordered, key=lambda relay: self.rate(relay, now))
