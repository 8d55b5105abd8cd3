"""Twins that send too much: how many messages of each were refused, and a line of the log about it."""

from __future__ import annotations

from collections import Counter

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

MAX_LIMITED = 100
"""Twins that metrics name for having sent too much; others are counted together, as twin 0."""
LIMITED_EVERY = 60.0
"""Seconds between lines about twins that send too much."""
LIMITED_NAMED = 10
"""Twins named in one line."""

_log = Logger()


class Limited:
    """Counts and tells.

    :ivar of_twin: messages that were refused, by twin; all that have no place of their own are twin 0.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.of_twin: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._since = clock.seconds()

    def count(self, twin: int) -> None:
        """A message of ``twin`` was refused because it sends too much."""
        for counted in (self.of_twin, self._now):
            counted[twin if twin in counted or len(counted) < MAX_LIMITED else 0] += 1

    def tell(self, *, last: bool = False) -> None:
        """Those of the last minute, once a minute.

        :param last: the relay ends: those since the last line.
        """
        now = self._clock.seconds()
        if not self._now or (now - self._since < LIMITED_EVERY and not last):
            return
        counted, self._now = self._now, Counter()
        seconds, self._since = now - self._since, now
        most = ", ".join(f"twin {twin or 'others'}: {number}" for twin, number in counted.most_common(LIMITED_NAMED))
        _log.warn(
            "rate limit: {number} messages of {twins} twins refused in {seconds:.0f} s ({most})",
            number=counted.total(),
            twins=len(counted),
            seconds=min(seconds, LIMITED_EVERY * 2),
            most=most,
        )
