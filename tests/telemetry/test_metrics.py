"""Histograms of durations, beside those of prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from twisted.trial.unittest import SynchronousTestCase

from dmsg.telemetry.latencies import LATENCIES, DurationHistogram
from dmsg.telemetry.metrics import LabelledSeconds, RelaySeconds

SECONDS = (0.0, 0.0004, LATENCIES[0], 0.03, 0.03, LATENCIES[-1], 11.0)
"""Durations, among them two that are bounds of buckets, and one above all bounds."""


def samples(registry: CollectorRegistry) -> list[str]:
    """Return the samples that Prometheus scrapes, without the times at which prometheus_client made its objects."""
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_created" not in line)


class SecondsTests(SynchronousTestCase):
    def test_labelled_durations_are_those_of_prometheus_client(self) -> None:
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        labelled = LabelledSeconds("some_seconds", "Some seconds", "path")
        ours.register(labelled)
        expected = Histogram("some_seconds", "Some seconds", ["path"], buckets=LATENCIES, registry=theirs)
        for path, seconds in (("/a", SECONDS), ("/b", SECONDS[:2])):
            for each in seconds:
                labelled.labels(path).observe(each)
                expected.labels(path).observe(each)
        self.assertEqual(samples(ours), samples(theirs))

    def test_durations_of_a_relay_are_those_of_prometheus_client(self) -> None:
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        durations = DurationHistogram()
        relay = RelaySeconds("some", durations)
        ours.register(relay)
        help_text = next(iter(relay.collect())).documentation
        expected = Histogram("some_relay_seconds", help_text, buckets=LATENCIES, registry=theirs)
        for each in SECONDS:
            durations.observe(each)
            expected.observe(each)
        self.assertEqual(samples(ours), samples(theirs))
