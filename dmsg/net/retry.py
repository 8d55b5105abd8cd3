"""How long to wait before something that failed is tried again."""

from __future__ import annotations

from random import Random

FIRST_DELAY = 0.5
"""Seconds after no failure; each one makes it longer."""
DELAY_FACTOR = 1.7
MAX_DELAY = 60.0
"""Seconds at most, before chance has its share."""
JITTER = 0.3
"""Share of a delay that is drawn by chance, so that clients do not come back in step."""


def retry_delay(failures: int, random: Random) -> float:
    """Seconds to wait; grows with each failure, with jitter.

    :param failures: failed tries in a row, as who asks counts them: links to servers do not count the first one.
    """
    delay = min(MAX_DELAY, FIRST_DELAY * DELAY_FACTOR ** min(failures, 30))
    return delay * (1 - JITTER + 2 * JITTER * random.random())
