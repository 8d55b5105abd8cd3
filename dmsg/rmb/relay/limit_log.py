"""Counter, for each twin, of the messages that the rate limit refuses, with a periodic log line about these twins."""

from __future__ import annotations

from collections import Counter

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

MAX_TWINS = 100
"""Maximum number of twins above the rate limit that the metrics name. Further twins are counted together, as twin 0."""
LOG_INTERVAL = 60.0
"""Seconds between two log lines about twins above the rate limit."""
MAX_NAMED = 10
"""Maximum number of twins named in one log line."""

_log = Logger()


class LimitLog:
    """Counter of messages that the rate limit refused. It logs them once a minute.

    :ivar of_twin: number of refused messages of each twin. After ``MAX_TWINS`` twins, further ones are counted as twin
        0.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self.of_twin: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._since = clock.seconds()

    def count(self, twin: int) -> None:
        """Count a message of ``twin`` that the rate limit refused."""
        for counted in (self.of_twin, self._now):
            # The table is bounded, because each twin adds a line to the metrics, and twins are cheap to create.
            counted[twin if twin in counted or len(counted) < MAX_TWINS else 0] += 1

    def log_refused(self, *, last: bool = False) -> None:
        """Log the messages refused since the last log line, at most once a minute.

        :param last: whether to log them even if the minute is not over, because the relay stops.
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
