"""Metrics of a relay, named as in the reference implementation, and the numbers of dropped messages by reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dmsg.base.memory import Memory
from dmsg.rmb.errors import Drop

if TYPE_CHECKING:
    from dmsg.rmb.relay.switch import Switch


class RelayMetrics:
    """Collector that reads the counters of the switch when Prometheus queries the metrics."""

    def __init__(self, switch: Switch, memory: Memory) -> None:
        self._switch = switch
        self._memory = memory
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics. prometheus_client calls this method."""
        switch, federation, cache = self._switch, self._switch.federation, self._switch.registry
        sessions = GaugeMetricFamily("relay_worker_connections", "Number of connected sessions", labels=["worker"])
        sessions.add_metric(["0"], len(switch.sessions))
        yield sessions
        for name, text in (
            ("message_rx", "Number of messages accepted for sessions of this relay"),
            ("message_tx", "Number of messages sent to sessions"),
            ("message_rx_bytes", "Bytes of messages accepted for sessions of this relay"),
            ("message_tx_bytes", "Bytes of messages sent to sessions"),
        ):
            yield CounterMetricFamily(f"relay_{name}", text, value=switch.counters[name])
        evicted = CounterMetricFamily(
            "relay_session_evictions", "Number of sessions that the relay ended, by reason", labels=["reason"]
        )
        for reason in ("closed", "back_pressure_timeout", "cancelled"):
            evicted.add_metric([reason], switch.evictions[reason])
        yield evicted
        for kind, counted in (("success", federation.asking.success), ("error", federation.asking.error)):
            metric = CounterMetricFamily(
                f"federation_message_{kind}",
                f"Number of messages to other relays that ended in {kind}",
                labels=["relay"],
            )
            for relay, number in counted.items():
                metric.add_metric([relay], number)
            yield metric
        yield CounterMetricFamily(
            "rmb_cache_hits", "Number of look-ups of twins answered from the cache", value=cache.hits
        )
        yield CounterMetricFamily(
            "rmb_cache_misses", "Number of look-ups of twins that needed the registry", value=cache.misses
        )
        yield CounterMetricFamily(
            "rmb_cache_flushes", "Number of times that the cache of twins was emptied", value=cache.flushes
        )
        yield GaugeMetricFamily("rmb_cache_entries", "Number of twins in the cache", value=len(cache))
        yield GaugeMetricFamily(
            "rmb_federation_waiting", "Number of messages in transit to other relays", value=len(federation)
        )
        yield CounterMetricFamily(
            "rmb_not_offered",
            "Number of messages not offered to other relays because too many offers were pending",
            value=federation.asking.not_offered,
        )
        yield GaugeMetricFamily(
            "rmb_queue_writable",
            "1 if the queue accepts messages, 0 if its disk is full or its Redis fails",
            value=switch.queue.trouble is None,
        )
        yield CounterMetricFamily(
            "rmb_queue_forgotten",
            "Number of delivered messages that the queue could not delete and will deliver again",
            value=switch.queue.forgotten,
        )
        yield CounterMetricFamily(
            "rmb_queue_dropped", "Number of oldest messages dropped from full queues", value=switch.dropped_oldest
        )
        held = GaugeMetricFamily(
            "rmb_held_bytes",
            "Bytes buffered in memory at the last check, by kind: sessions, look-ups, other relays",
            labels=["kind"],
        )
        for kind in ("messages", "parked", "unfinished", "registry", "federation"):
            held.add_metric([kind], self._memory.held[kind])
        yield held
        yield GaugeMetricFamily("rmb_memory_limit_bytes", "Limit of the bytes held in memory", value=self._memory.limit)
        limited = CounterMetricFamily(
            "rmb_limited",
            "Number of messages refused because their twin exceeded --limit; twin 0 stands for all further twins",
            labels=["twin"],
        )
        for twin, number in switch.limited.of_twin.items():
            limited.add_metric([str(twin)], number)
        yield limited
        drops = CounterMetricFamily(
            "rmb_drops",
            "Number of messages, connections and sessions refused, dropped or ended, by reason",
            labels=["reason"],
        )
        for drop in Drop:
            drops.add_metric([drop.value], switch.rules.drops[drop])
        yield drops

    def render(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return generate_latest(self._registry)
