"""Which of several relays to try first: the one that failed least often lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from random import Random

PERIOD = 3600.0
"""Seconds that a failure counts."""
MAX_FAILURES = 100
"""Failures of one relay that are remembered."""
MAX_RELAYS = 1000
"""Relays of which failures are remembered."""


class Ranker:
    """Orders relays by their failures in the last ``period`` seconds; equal ones at random."""

    def __init__(self, period: float = PERIOD, random: Random | None = None) -> None:
        self.period = period
        self._random = random or Random()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def downvote(self, relay: str, now: float) -> None:
        """It failed."""
        times = self._failures.setdefault(relay, deque(maxlen=MAX_FAILURES))
        times.append(now)
        self._failures.move_to_end(relay)
        if len(self._failures) > MAX_RELAYS:
            self._failures.popitem(last=False)

    def rate(self, relay: str, now: float) -> float:
        """Failures an hour."""
        times = self._failures.get(relay)
        if times is None:
            return 0.0
        while times and times[0] <= now - self.period:
            times.popleft()
        if not times:
            del self._failures[relay]
        return len(times) * 3600 / self.period

    def order(self, relays: Iterable[str], now: float) -> list[str]:
        """The best first."""
        ordered = list(relays)
        self._random.shuffle(ordered)
        return sorted(ordered, key=lambda relay: self.rate(relay, now))
