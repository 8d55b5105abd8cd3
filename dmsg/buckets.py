"""Token buckets: how much of something is left at a time.  No clock."""

from __future__ import annotations


class Bucket:
    """Fills with ``rate`` a second up to ``burst``; ``take`` empties it."""

    __slots__ = ("_at", "level")

    def __init__(self, burst: float, now: float) -> None:
        self.level = burst
        self._at = now

    def take(self, amount: float, rate: float, burst: float, now: float) -> bool:
        """Whether there was so much.  Nothing is taken if not."""
        self.fill(rate, burst, now)
        if self.level < amount:
            return False
        self.level -= amount
        return True

    def fill(self, rate: float, burst: float, now: float) -> None:
        """Time has passed."""
        self.level = min(burst, self.level + (now - self._at) * rate)
        self._at = now
