"""Prometheus metrics of discovery and of servers.

Each entity has a separate registry, so that several entities can run in one process. A relay does not count for this
module: its own counters are read when Prometheus sends a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dmsg.errors import DropReason

LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, in seconds."""
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
        self.seconds = Histogram(
            "dmsg_discovery_request_seconds",
            "Seconds from a request to its answer",
            ["path"],
            buckets=LATENCIES,
            registry=self._registry,
        )
        self.store_seconds = Histogram(
            "dmsg_discovery_store_seconds",
            "Seconds that the store took to answer",
            ["operation"],
            buckets=LATENCIES,
            registry=self._registry,
        )
        self.delayed = Gauge(
            "dmsg_discovery_delayed",
            "Number of requests that the rate limit delays at present, in place of refusing them",
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)


def relay_seconds(prefix: str) -> Histogram:
    """Return a histogram of the seconds, within one reactor turn, from reading clients' data to writing the forwarded
    data."""
    return Histogram(
        f"{prefix}_relay_seconds",
        "Seconds from reading data of clients to writing the forwarded data, per reactor turn",
        buckets=LATENCIES,
        registry=None,
    )


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
