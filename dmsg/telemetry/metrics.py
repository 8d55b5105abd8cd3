"""Prometheus metrics of discovery and of servers.

Each entity has a separate registry, so that several entities can run in one process. A relay does not update these
metrics. Instead, its own counters are read when Prometheus sends a request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dmsg.errors import DropReason
from dmsg.telemetry.latencies import LATENCIES, DurationHistogram

_BOUNDS = [*map(str, LATENCIES), "+Inf"]
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Metrics of a discovery."""

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.posted = Counter(
            "dmsg_discovery_posts",
            "Number of entries written, by kind: first entry of a key, next entry, deletion",
            ["kind"],
            registry=self._registry,
        )
        self.refused = Counter(
            "dmsg_discovery_refused", "Number of requests refused, by reason", ["reason"], registry=self._registry
        )
        self.entries = Gauge("dmsg_discovery_entries", "Number of entries stored", registry=self._registry)
        self.entries_bytes = Gauge(
            "dmsg_discovery_entries_bytes", "Size of the stored entries in bytes", registry=self._registry
        )
        self.dropped = Counter(
            "dmsg_discovery_dropped",
            "Number of entries and tombstones removed by discovery, by reason",
            ["reason"],
            registry=self._registry,
        )
        self.kinds = Gauge(
            "dmsg_discovery_entries_by_kind",
            "Number of entries stored, by kind: client, server, both",
            ["kind"],
            registry=self._registry,
        )
        self.requests = Counter(
            "dmsg_discovery_requests",
            "Number of requests answered, by path and status",
            ["path", "status"],
            registry=self._registry,
        )
        self.seconds = LabelledSeconds("dmsg_discovery_request_seconds", "Seconds from a request to its answer", "path")
        self.store_seconds = LabelledSeconds(
            "dmsg_discovery_store_seconds", "Seconds that the store took to answer", "operation"
        )
        self._registry.register(self.seconds)
        self._registry.register(self.store_seconds)
        self.delayed = Counter(
            "dmsg_discovery_delayed",
            "Number of requests that the rate limit delayed instead of refusing them",
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)


class RelaySeconds(Collector):
    """Histogram of the seconds, within one reactor turn, from reading clients' data to writing the forwarded data."""

    def __init__(self, prefix: str, seconds: DurationHistogram) -> None:
        """:param prefix: prefix of the histogram's name.
        :param seconds: durations that the relay counts.
        """
        self._seconds = seconds
        self._name = f"{prefix}_relay_seconds"

    def collect(self) -> Iterable[Metric]:
        """Yield the metric for prometheus_client."""
        help_text = "Seconds from reading data of clients to writing the forwarded data, per reactor turn"
        family = HistogramMetricFamily(self._name, help_text)
        _add(family, self._seconds)
        yield family


class LabelledSeconds(Collector):
    """Histograms of durations, one for each value of a label."""

    def __init__(self, name: str, documentation: str, label: str) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._of: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)

    def labels(self, value: str) -> DurationHistogram:
        """Return the histogram for a value of the label. Each value has a histogram of its own, so there must be few
        values."""
        return self._of[value]

    def collect(self) -> Iterable[Metric]:
        """Yield the metric for prometheus_client."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        for value, seconds in self._of.items():
            _add(family, seconds, [value])
        yield family


def _add(family: HistogramMetricFamily, seconds: DurationHistogram, labels: Sequence[str] = ()) -> None:
    """Add the numbers of a histogram to a metric of prometheus_client."""
    buckets = list(zip(_BOUNDS, map(float, accumulate(seconds.counts)), strict=True))
    family.add_metric(labels, buckets, seconds.total)


class ServerStatistics(Protocol):
    """Interface to the counters of a server."""

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each gauge, by name."""

    def counters(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each counter, by name."""

    def drops(self) -> dict[DropReason, int]:
        """Return the number of drops for each reason."""

    def by_connections(self) -> dict[str, int]:
        """Return the number of IP addresses for each range of numbers of connections per address."""


class ServerMetrics:
    """Metrics of a server. They are read from the server's own counters when Prometheus sends a request."""

    content_type = CONTENT_TYPE

    def __init__(
        self, server: ServerStatistics, prefix: str = "dmsg_server", collectors: Iterable[Collector] = ()
    ) -> None:
        """Register the server's counters.

        :param prefix: prefix of all names.
        :param collectors: further metrics of the server.
        """
        self._prefix = prefix
        self._server = server
        self._registry = CollectorRegistry()
        self._registry.register(self)
        for collector in collectors:
            self._registry.register(collector)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics for prometheus_client."""
        for name, (text, value) in self._server.gauges().items():
            yield GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)
        for name, (text, value) in self._server.counters().items():
            yield CounterMetricFamily(f"{self._prefix}_{name}", text, value=value)
        drops = CounterMetricFamily(
            f"{self._prefix}_drops",
            "Number of connections, requests and frames refused or ended, by reason",
            labels=["reason"],
        )
        counted = self._server.drops()
        for reason in DropReason:
            drops.add_metric([reason.value], counted.get(reason, 0))
        yield drops
        addresses = GaugeMetricFamily(
            f"{self._prefix}_addresses",
            "Number of addresses, by the number of their connections",
            labels=["connections"],
        )
        for connections, number in self._server.by_connections().items():
            addresses.add_metric([connections], number)
        yield addresses

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)
