"""Status page of a server."""

from __future__ import annotations

import heapq
import time
from typing import Protocol

from dmsg.base.units import human_count, human_size
from dmsg.base.version import program_version
from dmsg.errors import DropReason
from dmsg.pages.history import Growth, Quantiles
from dmsg.pages.model import BAD, GOOD, NEARLY_FULL, Chart, Fact, Line, StatusSource, Table
from dmsg.pages.process import process_facts
from dmsg.servers.admission import Admission
from dmsg.servers.registration import Registration
from dmsg.servers.relays import ServedPeer
from dmsg.servers.serving import AnyServing
from dmsg.telemetry.latencies import LATENCIES

SHOWN_CLIENTS = 10
"""Maximum number of clients in each table."""
CHARTS = (
    Chart("Frames", "/s", (Line("received", "frames", rate=True),)),
    Chart("Bytes", "bytes/s", (Line("received", "frame_bytes", rate=True),)),
    Chart("Clients", "", (Line("connected", "connections"), Line("handshakes", "handshakes"))),
    Chart(
        "New connections and transports",
        "/s",
        (Line("connections", "connections_opened", rate=True), Line("transports", "opened", rate=True)),
    ),
    Chart("Refused, dropped or ended", "/s", (Line("all reasons", "drops", rate=True),)),
    Chart("Relay delay", "ms", (Line("median", "p50"), Line("99th percentile", "p99"))),
    Chart("Buffered for slow clients", "bytes", (Line("queued", "queue_bytes"), Line("in memory", "held_bytes"))),
    Chart("Transports", "", (Line("open", "transports"),)),
)

CHARTS_OF_LINKS = (
    *(chart for chart in CHARTS if chart.title not in ("Transports", "New connections and transports")),
    Chart("New connections", "/s", (Line("connections", "connections_opened", rate=True),)),
)
"""Charts for a protocol family without transports."""


class WatchedServer(Protocol):
    """Interface of a server that its status page uses."""

    started: float
    listens_as: str
    factory: AnyServing
    registration: Registration
    reachable: bool | None

    def health(self) -> dict[str, object]:
        """Return the content of ``/health``."""

    def gauges(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each gauge, by name."""

    def counters(self) -> dict[str, tuple[str, float]]:
        """Return the help text and the value of each counter, by name."""

    def drops(self) -> dict[DropReason, int]:
        """Return the number of dropped frames and refused clients, by reason."""

    def client_name(self, key: bytes) -> str:
        """Return the name of a client on the page."""


class ServerStatus(StatusSource):
    """Content of the status page of a server, for all protocol families."""

    def __init__(self, server: WatchedServer, kind: str) -> None:
        self._server = server
        self.kind = kind
        self._quantiles = Quantiles((*LATENCIES, float("inf")))
        self._growth: Growth[ServedPeer] = Growth()
        self._rates: dict[ServedPeer, float] = {}
        has_transports = "transports" in server.gauges()
        self.charts = CHARTS if has_transports else CHARTS_OF_LINKS

    @property
    def key(self) -> str:
        return self._server.listens_as.rpartition(" ")[2]

    def refresh(self) -> None:
        peers = self._server.factory.relay.peers
        self._rates = self._growth.since(time.monotonic(), {peer: peer.bytes_in for peer in peers})

    def facts(self) -> list[Fact]:
        server, health = self._server, self._server.health()
        gauges = _values(server.gauges())
        connections, free = gauges["connections"], gauges["available_connections"]
        status = str(health["status"])
        held, most = gauges["held_bytes"], gauges["memory_limit_bytes"]
        reachable = {True: "yes", False: "no", None: "not checked yet"}[server.reachable]
        registration = server.registration
        registered = "yes" if registration.is_registered else "no" if registration.is_wanted else "no discovery set"
        admission = server.factory.admission
        facts = [
            Fact("State", status, GOOD if status == "ok" else BAD, is_event=True),
            *process_facts(server.started),
            Fact("Clients", f"{connections:.0f} of {connections + free:.0f}"),
        ]
        if "transports" in gauges:
            facts.append(Fact("Transports", human_count(gauges["transports"])))
        return [
            *facts,
            Fact("Registered in discovery", registered, BAD if registered == "no" else "", is_event=True),
            Fact("Reaches its own address", reachable, BAD if reachable == "no" else "", is_event=True),
            Fact("Public address", server.registration.address or "none", is_event=True),
            Fact("Admission rules", _admission(admission), is_event=True),
            Fact("Buffered for clients", f"{human_size(held)} of {human_size(most)}"),
            Fact("Congested clients", human_count(gauges["congested"])),
            Fact("Version", f"dmsg {program_version()}"),
        ]

    def problems(self) -> list[str]:
        server = self._server
        health = server.health()
        gauges = _values(server.gauges())
        connections, free = gauges["connections"], gauges["available_connections"]
        found = []
        if health["status"] == "draining":
            found.append("The server is shutting down: its clients move to other servers, and new clients are refused.")
        if server.registration.is_wanted and not server.registration.is_registered:
            found.append(
                "Discovery did not accept the server's last entry: once the previous entry expires, clients do not "
                "find this server."
            )
        if server.registration.shared_with is not None:
            found.append(
                f"Another server, at {server.registration.shared_with}, posts the entry of the same key: stop one of "
                "them, or give it a key of its own."
            )
        if server.reachable is False:
            found.append("The server cannot connect to its own public address: check that clients can.")
        if health["status"] == "full":
            found.append(
                f"The server is full: {connections:.0f} clients are connected, and further clients are refused."
            )
        elif connections + free and connections / (connections + free) >= NEARLY_FULL:
            found.append(
                f"The server is nearly full: {connections:.0f} of {connections + free:.0f} clients are connected."
            )
        if gauges["held_bytes"] >= NEARLY_FULL * gauges["memory_limit_bytes"]:
            found.append(
                "The memory for slow clients is nearly used up; the client with most buffered data will lose it first."
            )
        return found

    def numbers(self) -> dict[str, float]:
        server = self._server
        found = _values(server.gauges())
        counters = _values(server.counters())
        found |= {name: counters[name] for name in ("frames", "frame_bytes", "connections_opened")}
        found["opened"] = counters.get("transports_opened", 0.0)
        found["drops"] = float(sum(server.drops().values()))
        for name, seconds in zip(("p50", "p99"), self._quantiles.since(self._buckets(), 0.5, 0.99), strict=False):
            found[name] = seconds * 1000
        return found

    def _buckets(self) -> list[float]:
        """Return the number of reactor turns in each bucket of the latency histogram."""
        return [float(number) for number in self._server.factory.relay_seconds.counts]

    def reasons(self) -> dict[str, float]:
        return {reason.value: float(number) for reason, number in self._server.drops().items()}

    async def tables(self) -> list[Table]:
        peers = list(self._server.factory.relay.peers)
        rates = {peer: self._rates.get(peer, 0.0) for peer in peers}
        busiest = heapq.nlargest(SHOWN_CLIENTS, peers, key=lambda peer: (rates[peer], peer.bytes_in))
        slowest = heapq.nlargest(
            SHOWN_CLIENTS, (peer for peer in peers if peer.congested or peer.port.queued()), key=self._waiting
        )
        return [
            Table(
                "Clients that send most",
                ("Client", "Rate now", "Bytes", "Frames"),
                [
                    (
                        self._server.client_name(peer.key),
                        f"{human_size(rates[peer])}/s",
                        human_size(peer.bytes_in),
                        human_count(peer.frames_in),
                    )
                    for peer in busiest
                ],
                "no client is connected",
            ),
            Table(
                "Clients that read slowest",
                ("Client", "Queued", "State"),
                [
                    (self._server.client_name(peer.key), human_size(self._waiting(peer)), _slow(peer))
                    for peer in slowest
                ],
                "no data waits for a client",
            ),
        ]

    @staticmethod
    def _waiting(peer: ServedPeer) -> int:
        return peer.port.queued()


def _values(counts: dict[str, tuple[str, float]]) -> dict[str, float]:
    """Return the values of gauges or counters by name, without their help texts."""
    return {name: value for name, (_, value) in counts.items()}


def _slow(peer: ServedPeer) -> str:
    if getattr(peer, "stalled", False):
        return "reads nothing"
    return "congested" if peer.congested else "reading"


def _admission(admission: Admission) -> str:
    words = [name for name in ("allow", "deny") if getattr(admission, name, None) is not None]
    if admission.hook is not None:
        words.append("hook")
    return ", ".join(words) or "everybody"
