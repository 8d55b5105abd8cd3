"""Throttle for log lines that strangers can cause: at most one line of each kind per interval.  No I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

INTERVAL = 10.0
"""Minimum seconds between two lines of one kind."""
MAX_KINDS = 100
"""Maximum number of kinds that are counted separately; further kinds share one count."""


class LogThrottle:
    """Throttle that decides whether a log line may be written now.

    :param now: function that returns the seconds of a monotonic clock.
    :param every: minimum seconds between two lines of one kind.
    """

    def __init__(self, now: Callable[[], float], every: float = INTERVAL) -> None:
        self._now = now
        self._every = every
        self._reported: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def count_left_out(self, kind: Hashable = "") -> int | None:
        """Return how many lines of this kind were suppressed since the last written one; None if this line is
        suppressed, too."""
        now = self._now()
        while self._reported and next(iter(self._reported.values()))[0] <= now - self._every * MAX_KINDS:
            self._reported.popitem(last=False)
        if kind not in self._reported and len(self._reported) >= MAX_KINDS:
            kind = None
        at, count = self._reported.get(kind, (-self._every, 0))
        if now - at < self._every:
            self._reported[kind] = at, count + 1
            return None
        self._reported.pop(kind, None)
        self._reported[kind] = now, 0
        return count

    def suffix(self, kind: Hashable = "") -> str | None:
        """Return the result of :meth:`count_left_out` as text to append to the log line; None if the line is
        suppressed."""
        count = self.count_left_out(kind)
        if count is None:
            return None
        return f", and {count} more since the last line" if count else ""
