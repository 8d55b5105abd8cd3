"""Delays before retries: exponential backoff with jitter."""

from __future__ import annotations

from random import Random

FIRST_DELAY = 0.5
"""Delay in seconds for 0 failures. Each failure multiplies the delay by ``DELAY_FACTOR``."""
DELAY_FACTOR = 1.7
MAX_DELAY = 60.0
"""Maximum delay in seconds, before jitter."""
JITTER = 0.3
"""Fraction by which a delay is randomly shortened or lengthened, so that clients do not all retry at the same time."""


def retry_delay(failures: int, random: Random) -> float:
    """Return the seconds to wait before the next attempt.

    :param failures: number of consecutive failures, as the caller counts them. For links to servers, the first failure
        is not counted.
    """
    delay = min(MAX_DELAY, FIRST_DELAY * DELAY_FACTOR ** min(failures, 30))
    return delay * (1 - JITTER + 2 * JITTER * random.random())
