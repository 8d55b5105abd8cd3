"""Counts the messages refused by the rate limit by twin, and writes a periodic line about these twins to the log."""

from __future__ import annotations

from collections import Counter

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

MAX_TWINS = 100
"""Number of twins that metrics name for exceeding the limit; the rest are counted together, as twin 0."""
LOG_INTERVAL = 60.0
"""Seconds between log lines about twins that exceed the limit."""
MAX_NAMED = 10
"""Maximum number of twins named in one log line."""

_log = Logger()


class LimitLog:
    """Counter of messages refused by the rate limit, which logs them once a minute.

    :ivar of_twin: number of refused messages by twin; twins beyond ``MAX_TWINS`` are counted as twin 0.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.of_twin: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._since = clock.seconds()

    def count(self, twin: int) -> None:
        """Count a message of ``twin`` that was refused by the rate limit."""
        for counted in (self.of_twin, self._now):
            # Each twin that is named adds a line to the metrics, and twins are cheap to create, so the table is
            # bounded.
            counted[twin if twin in counted or len(counted) < MAX_TWINS else 0] += 1

    def log_refused(self, *, last: bool = False) -> None:
        """Log the refused messages since the last line, at most once a minute.

        :param last: whether the relay stops, so that the line is written at once.
        """
        now = self._clock.seconds()
        if not self._now or (now - self._since < LOG_INTERVAL and not last):
            return
        counted, self._now = self._now, Counter()
        seconds, self._since = now - self._since, now
        most = ", ".join(f"twin {twin or 'others'}: {number}" for twin, number in counted.most_common(MAX_NAMED))
        _log.warn(
            "rate limit: {number} messages of {twins} twins refused in {seconds:.0f} s ({most})",
            number=counted.total(),
            twins=len(counted),
            seconds=min(seconds, LOG_INTERVAL * 2),
            most=most,
        )
