"""A relay's metrics, under the names that the reference gives them, and the reasons of drops."""

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
    """Reads what the switch counts when Prometheus asks."""

    def __init__(self, switch: Switch, memory: Memory) -> None:
        self._switch = switch
        self._memory = memory
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        switch, federation, cache = self._switch, self._switch.federation, self._switch.registry
        sessions = GaugeMetricFamily("relay_worker_connections", "Connected sessions", labels=["worker"])
        sessions.add_metric(["0"], len(switch.sessions))
        yield sessions
        for name, text in (
            ("message_rx", "Messages taken for sessions of this relay"),
            ("message_tx", "Messages sent to sessions"),
            ("message_rx_bytes", "Bytes of these"),
            ("message_tx_bytes", "Bytes of these"),
        ):
            yield CounterMetricFamily(f"relay_{name}", text, value=switch.counters[name])
        evicted = CounterMetricFamily("relay_session_evictions", "Sessions ended by the relay", labels=["reason"])
        for reason in ("closed", "back_pressure_timeout", "cancelled"):
            evicted.add_metric([reason], switch.evictions[reason])
        yield evicted
        for kind, counted in (("success", federation.asking.success), ("error", federation.asking.error)):
            metric = CounterMetricFamily(
                f"federation_message_{kind}", f"Messages to other relays, by {kind}", labels=["relay"]
            )
            for relay, number in counted.items():
                metric.add_metric([relay], number)
            yield metric
        yield CounterMetricFamily("rmb_cache_hits", "Twins that were known", value=cache.hits)
        yield CounterMetricFamily("rmb_cache_misses", "Questions to the registry", value=cache.misses)
        yield CounterMetricFamily("rmb_cache_flushes", "Times that all twins were forgotten", value=cache.flushes)
        yield GaugeMetricFamily("rmb_cache_entries", "Twins that are known", value=len(cache))
        yield GaugeMetricFamily("rmb_federation_waiting", "Messages under way to other relays", value=len(federation))
        yield CounterMetricFamily(
            "rmb_not_offered",
            "Messages that other relays were not offered: too many are",
            value=federation.asking.not_offered,
        )
        yield GaugeMetricFamily(
            "rmb_queue_writable", "1 when the queue takes messages, as it should", value=switch.queue.trouble is None
        )
        yield CounterMetricFamily(
            "rmb_queue_forgotten",
            "Delivered messages that the queue could not delete and will deliver again",
            value=switch.queue.forgotten,
        )
        yield CounterMetricFamily("rmb_queue_dropped", "Oldest messages of full queues", value=switch.dropped_oldest)
        held = GaugeMetricFamily(
            "rmb_held_bytes",
            "Bytes held in memory for sessions, lookups and other relays, at the last look",
            labels=["kind"],
        )
        for kind in ("messages", "parked", "unfinished", "registry", "federation"):
            held.add_metric([kind], self._memory.held[kind])
        yield held
        yield GaugeMetricFamily("rmb_memory_limit_bytes", "Bytes that may be held", value=self._memory.limit)
        limited = CounterMetricFamily(
            "rmb_limited", "Messages refused because their twin sends too much; 0: other twins", labels=["twin"]
        )
        for twin, number in switch.limited.of_twin.items():
            limited.add_metric([str(twin)], number)
        yield limited
        drops = CounterMetricFamily("rmb_drops", "What was refused, dropped or ended, by reason", labels=["reason"])
        for drop in Drop:
            drops.add_metric([drop.value], switch.rules.drops[drop])
        yield drops

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
