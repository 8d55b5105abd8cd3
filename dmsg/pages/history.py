"""History of numbers: samples of the last minutes, and rates and percentiles computed from them. No I/O and no
clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from dmsg.pages.model import Line

K = TypeVar("K", bound=Hashable)

MAX_SAMPLES = 300
"""Maximum number of stored samples. One is taken every two seconds, so they cover ten minutes."""
MAX_NAMES = 128
"""Maximum number of time series of an entity. Each reason of drops, refusals or ends has a time series of its own.
Further names are ignored."""
RATE_OVER = 5
"""Number of samples over which the present rate is computed."""


class History:
    """Time series of numbers, by name."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._values: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._times)

    @property
    def seconds(self) -> float:
        """Seconds from the first sample to the last."""
        return self._times[-1] - self._times[0] if self._times else 0.0

    def add(self, now: float, numbers: Mapping[str, float], counts: Mapping[str, float] | None = None) -> None:
        """Add a sample. A series without a number in this sample has no value at that time.

        :param numbers: number of each series, by name.
        :param counts: numbers of further series. Before the first number of such a series, its value is 0.
        """
        for some, before in ((numbers, math.nan), (counts or {}, 0.0)):
            for name in some:
                if name not in self._values and len(self._values) < MAX_NAMES:
                    self._values[name] = deque([before] * len(self._times), maxlen=MAX_SAMPLES)
        self._times.append(now)
        numbers = {**numbers, **(counts or {})}
        for name, values in self._values.items():
            values.append(numbers.get(name, math.nan))

    def points(self, line: Line) -> list[tuple[float, float]]:
        """Return the points of a line as (seconds before the last sample, value), the oldest first."""
        values = self._values.get(line.number)
        if values is None:
            return []
        end = self._times[-1]
        if not line.rate:
            return [(end - at, value) for at, value in zip(self._times, values, strict=True) if not math.isnan(value)]
        found = []
        times, before, value_before = iter(self._times), None, 0.0
        for at, value in zip(times, values, strict=True):
            if math.isnan(value):
                continue
            if before is not None and at > before:
                # If a counter has become smaller, it was reset to 0, so its growth is its present value.
                grown = value - value_before if value >= value_before else value
                found.append((end - at, grown / (at - before)))
            before, value_before = at, value
        return found

    def now(self, line: Line) -> float | None:
        """Return the present value of a line, or its rate over the last samples; None if there is no value yet."""
        values = self._values.get(line.number)
        if not values:
            return None
        if not line.rate:
            return None if math.isnan(values[-1]) else values[-1]
        values = deque(value for value in values if not math.isnan(value))
        over = min(RATE_OVER, len(values) - 1)
        if not over or self._times[-1] <= self._times[-1 - over]:
            return None
        grown = values[-1] - values[-1 - over]
        return max(0.0, grown) / (self._times[-1] - self._times[-1 - over])


def reason_number(name: str) -> str:
    """Return the name of the time series for the count of a reason."""
    return f"reason {name}"


class Growth(Generic[K]):
    """Computes the growth per second of totals between two samples."""

    def __init__(self) -> None:
        self._first = True
        self._before: dict[K, float] = {}
        self._at = 0.0

    def since(self, now: float, totals: Mapping[K, float]) -> dict[K, float]:
        """Return the growth per second of each total since the previous sample; 0 at the first sample."""
        seconds = now - self._at
        rates = {
            name: max(0.0, total - self._before.get(name, total if self._first else 0.0)) / seconds
            if seconds > 0.0
            else 0.0
            for name, total in totals.items()
        }
        self._first = False
        self._before, self._at = dict(totals), now
        return rates


def bucket_counts(sums: list[float]) -> list[float]:
    """Return the count of each bucket, from the cumulative counts of a histogram."""
    return [now - before for now, before in zip(sums, [0.0, *sums], strict=False)]


class Quantiles:
    """Computes percentiles of the values that a histogram has counted since the previous sample.

    :param borders: upper bounds of the buckets, in ascending order; the last may be infinite.
    """

    def __init__(self, borders: tuple[float, ...]) -> None:
        self._borders = borders
        self._before = [0.0] * len(borders)

    def since(self, counts: list[float], *shares: float) -> list[float]:
        """Return for each quantile the upper bound of the bucket that contains it; an empty list if nothing was
        counted.

        :param counts: count of each bucket since the histogram was created.
        :param shares: quantiles from 0 to 1.
        """
        grown = [max(0.0, now - before) for now, before in zip(counts, self._before, strict=True)]
        self._before = list(counts)
        total = sum(grown)
        return [self._at(grown, share * total) for share in shares] if total else []

    def _at(self, increases: list[float], rank: float) -> float:
        passed = 0.0
        finite = [border for border in self._borders if border != float("inf")]
        for border, number in zip(self._borders, increases, strict=True):
            passed += number
            if passed >= rank:
                return min(border, finite[-1])
        return finite[-1]
