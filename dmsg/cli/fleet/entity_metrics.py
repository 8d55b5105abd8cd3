"""Conversion of the answers to ``/metrics`` and ``/health`` of an entity into a row of ``dmsg top``.  No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from dmsg.base.printable import printable
from dmsg.pages.model import NEARLY_FULL

KINDS = {
    "dmsg_server_": "server",
    "dmsg_messaging_server_": "messaging",
    "dmsg_discovery_": "discovery",
    "dmsg_collector_": "collector",
    "relay_": "rmb relay",
}
"""Kinds of entities, by the prefix of their metrics."""
UNREACHABLE_SEVERITY = 100
"""Severity of an entity that does not answer."""


@dataclass
class Snapshot:
    """State of an entity at one time.

    :ivar at: time in seconds; only differences between snapshots matter.
    :ivar kind: kind of the entity, such as ``server``.
    :ivar status: status in the answer to ``/health``.
    :ivar error: reason why the entity has no metrics; empty if it has.
    :ivar health: answer to ``/health``.
    """

    at: float
    kind: str = "?"
    status: str = ""
    error: str = ""
    health: dict[str, object] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    """Value of each metric, summed over all labels."""
    buckets: dict[float, float] = field(default_factory=dict)
    """Histogram of the durations of the entity's operations: count by upper bound in seconds."""
    servers: float | None = None
    """Number of entries of servers in a discovery; None for other entities."""

    def number(self, *names: str) -> float | None:
        """Return the value of the first of these metrics that the entity has.

        :param names: names of metrics without the prefix of the kind of entity.
        """
        for name in names:
            for begin in (*KINDS, ""):
                if begin + name in self.sums:
                    return self.sums[begin + name]
        return None


def read(at: float, metrics: str, health: str) -> Snapshot:
    """Return a snapshot from the answers of an entity.

    :param at: time in seconds.
    :param metrics: answer to ``/metrics``.
    :param health: answer to ``/health``.
    :raises ValueError: the answers are not those of an entity of dmsg.
    """
    found = Snapshot(at)
    told = json.loads(health)
    if not isinstance(told, dict):
        raise ValueError("/health is not a JSON object")
    found.health = told
    found.status = printable(str(told.get("status", "?")))[:40]
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                if sample.name.endswith(("relay_seconds_bucket", "request_seconds_bucket")):
                    border = float(sample.labels["le"])
                    found.buckets[border] = found.buckets.get(border, 0.0) + sample.value
                continue
            if sample.name == "dmsg_discovery_entries_by_kind" and sample.labels.get("kind") != "client":
                found.servers = (found.servers or 0.0) + sample.value
            found.sums[sample.name] = found.sums.get(sample.name, 0.0) + sample.value
            for begin, kind in KINDS.items():
                if sample.name.startswith(begin) and found.kind == "?":
                    found.kind = kind
    if found.kind == "?":
        raise ValueError("its /metrics page is not that of a dmsg program")
    return found


@dataclass(frozen=True)
class Row:
    """Row of the table for one entity.  Rates are per second.

    :ivar worse: severity of the worst problem; 0 if there is none.
    :ivar why: description of the problems.
    """

    name: str
    kind: str
    status: str
    clients: float | None
    free: float | None
    in_rate: float | None
    byte_rate: float | None
    refused_rate: float | None
    slowest: float | None
    memory: float | None
    worse: int
    why: str


def row(name: str, now: Snapshot, before: Snapshot | None) -> Row:
    """Return the row of an entity, with rates computed from two snapshots.

    :param now: present snapshot.
    :param before: previous snapshot; None for the first.
    """
    if now.error:
        return Row(name, now.kind, "away", *(None,) * 7, UNREACHABLE_SEVERITY, now.error)

    def rate(*names: str) -> float | None:
        if before is None or before.error or now.at <= before.at:
            return None
        ends = now.number(*names), before.number(*names)
        if ends[0] is None or ends[1] is None:
            return None
        grown = ends[0] - ends[1]
        return max(0.0, grown if grown >= 0 else ends[0]) / (now.at - before.at)

    clients = now.number("connections", "worker_connections", "entries")
    free = now.number("available_connections")
    held, most = now.number("held_bytes", "rmb_held_bytes"), now.number("memory_limit_bytes", "rmb_memory_limit_bytes")
    memory = held / most if held is not None and most else None
    refused = rate("drops_total", "refused_total", "not_kept_total", "rmb_drops_total")
    worse, why = _problem(now, clients, free, memory)
    return Row(
        name,
        now.kind,
        now.status,
        clients,
        free,
        rate("frames_total", "requests_total", "files_total", "message_rx_total"),
        rate("frame_bytes_total", "bytes_total", "message_rx_bytes_total"),
        refused,
        _slowest(now, before),
        memory,
        worse,
        why,
    )


def _problem(now: Snapshot, clients: float | None, free: float | None, memory: float | None) -> tuple[int, str]:
    """Return the severity of the worst problem, and a description of all problems.

    :param clients: number of connections in use.
    :param free: number of connections that are still possible.
    :param memory: share of the memory limit in use.
    """
    found: list[tuple[int, str]] = []
    if now.status != "ok":
        found.append((90, now.status))
    # The metric is also 0 for a server without a discovery, which need not be registered. Only /health tells the
    # difference.
    if now.health.get("registered", now.number("registered") != 0) is False:
        found.append((80, "not registered"))
    if now.health.get("shared_with"):
        found.append((75, f"another server with its key is at {printable(str(now.health['shared_with']))[:60]}"))
    if now.health.get("reachable") is False:
        found.append((70, "cannot connect to its public address"))
    if now.servers == 0:
        found.append((65, "no server has an entry"))
    if memory is not None and memory >= NEARLY_FULL:
        found.append((60, f"memory {memory:.0%} used"))
    if clients is not None and free is not None and clients + free and clients / (clients + free) >= NEARLY_FULL:
        found.append((50, "nearly full"))
    found.sort(reverse=True)
    return (found[0][0], ", ".join(text for _, text in found)) if found else (0, "")


def _slowest(now: Snapshot, before: Snapshot | None) -> float | None:
    """Return the 99th percentile, in seconds, of the durations of operations between two snapshots."""
    if before is None or before.error or not now.buckets:
        return None
    grown = {border: count - before.buckets.get(border, 0.0) for border, count in now.buckets.items()}
    total = max(grown.values(), default=0.0)
    if total <= 0:
        return None
    return next((border for border, count in sorted(grown.items()) if count >= 0.99 * total), None)
