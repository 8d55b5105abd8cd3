"""Histograms of durations, without prometheus_client.

A server without a port for metrics then does not import prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left

LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, in seconds."""


class DurationHistogram:
    """Histogram of durations, with the bounds ``LATENCIES``.

    The histogram of ``prometheus_client`` takes locks and calls a method for each of its numbers, which costs a relay
    more in each turn than the encryption of a small frame.

    :ivar counts: number of durations in each bucket. The last bucket has the durations above all bounds of
        ``LATENCIES``.
    :ivar total: sum of all durations.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCIES) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(LATENCIES, seconds)] += 1
        self.total += seconds
