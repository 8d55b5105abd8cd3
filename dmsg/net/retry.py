"""Delays before retries: exponential backoff with jitter."""

from __future__ import annotations

from random import Random

FIRST_DELAY = 0.5
"""Delay in seconds if there was no failure; each failure multiplies it by ``DELAY_FACTOR``."""
DELAY_FACTOR = 1.7
MAX_DELAY = 60.0
"""Maximum delay in seconds, before jitter."""
JITTER = 0.3
"""Fraction by which a delay is randomly made shorter or longer, so that clients do not return in step."""


def retry_delay(failures: int, random: Random) -> float:
    """Return the seconds to wait before the next try.

    :param failures: number of failures in a row, as the caller counts them. For links to servers, the first failure is
        not counted.
    """
    delay = min(MAX_DELAY, FIRST_DELAY * DELAY_FACTOR ** min(failures, 30))
    return delay * (1 - JITTER + 2 * JITTER * random.random())
