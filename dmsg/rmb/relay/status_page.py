"""Status page of a relay of the bus."""

from __future__ import annotations

import heapq
import time
from typing import Protocol

from dmsg.base.memory import Memory
from dmsg.base.units import human_count, human_size
from dmsg.base.version import program_version
from dmsg.pages.history import Growth
from dmsg.pages.model import BAD, GOOD, NEARLY_FULL, Chart, Fact, Line, StatusSource, Table
from dmsg.pages.process import process_facts
from dmsg.rmb.errors import Drop
from dmsg.rmb.relay.settings import RelaySettings
from dmsg.rmb.relay.switch import Switch

SHOWN_SESSIONS = 10
"""Maximum number of sessions in each table of the page."""


class WatchedRelay(Protocol):
    """Interface that a relay implements for its status page."""

    settings: RelaySettings
    memory: Memory
    started: float

    def health(self) -> dict[str, object]:
        """Return the content of ``/health``."""


class RmbRelayStatus(StatusSource):
    """Content of a relay's status page; implements :class:`~dmsg.pages.model.StatusSource`."""

    kind = "rmb relay"
    charts = (
        Chart("Messages", "/s", (Line("received", "message_rx", rate=True), Line("sent", "message_tx", rate=True))),
        Chart(
            "Bytes",
            "bytes/s",
            (Line("received", "message_rx_bytes", rate=True), Line("sent", "message_tx_bytes", rate=True)),
        ),
        Chart("Sessions", "", (Line("connected", "sessions"),)),
        Chart("Refused, dropped or ended", "/s", (Line("all reasons", "drops", rate=True),)),
        Chart(
            "To other relays",
            "/s",
            (Line("delivered", "forwarded", rate=True), Line("failed", "not_forwarded", rate=True)),
        ),
        Chart("Buffered in memory", "bytes", (Line("all buffers", "held"),)),
    )

    def __init__(self, relay: WatchedRelay, switch: Switch) -> None:
        self._relay = relay
        self._switch = switch
        self._growth: Growth[str] = Growth()
        self._rates: dict[str, float] = {}
        self._growth_in: Growth[str] = Growth()
        self._rates_in: dict[str, float] = {}

    @property
    def key(self) -> str:
        return ", ".join(sorted(self._relay.settings.domains))

    def refresh(self) -> None:
        sent = {str(name): session.delivery.sent_count for name, session in self._switch.sessions.items()}
        self._rates = self._growth.since(time.monotonic(), sent)
        came = {str(name): session.bytes_in for name, session in self._switch.sessions.items()}
        self._rates_in = self._growth_in.since(time.monotonic(), came)

    def facts(self) -> list[Fact]:
        relay, switch = self._relay, self._switch
        status = str(relay.health()["status"])
        cache = switch.registry
        asked = cache.hits + cache.misses
        return [
            Fact("State", status, GOOD if status == "ok" else BAD, is_event=True),
            *process_facts(relay.started),
            Fact("Sessions", f"{len(switch.sessions)} of {relay.settings.max_sessions}"),
            Fact("Messages in transit to other relays", human_count(len(switch.federation))),
            Fact("Twins in the cache", human_count(len(cache))),
            Fact("Look-ups that needed the registry", f"{human_count(cache.misses)} of {human_count(asked)}"),
            Fact("Buffered for sessions", f"{human_size(relay.memory.total)} of {human_size(relay.memory.limit)}"),
            Fact("Queue", relay.settings.queue.partition(":")[0]),
            Fact("Version", f"dmsg {program_version()}"),
        ]

    def problems(self) -> list[str]:
        relay = self._relay
        found = []
        health = relay.health()
        if health["status"] == "draining":
            found.append("The relay is shutting down: new sessions are refused.")
        elif "queue" in health:
            found.append(
                f"The queue cannot store messages: {health['queue']}. Messages for absent sessions are refused."
            )
        if relay.memory.total >= NEARLY_FULL * relay.memory.limit:
            found.append("The memory for sessions is nearly used up: the messages that wait longest move to the queue.")
        if len(self._switch.sessions) >= NEARLY_FULL * relay.settings.max_sessions:
            found.append("The relay has nearly reached its limit of sessions.")
        return found

    def numbers(self) -> dict[str, float]:
        switch, asking = self._switch, self._switch.federation.asking
        names = ("message_rx", "message_tx", "message_rx_bytes", "message_tx_bytes")
        return {
            **{name: float(switch.counters[name]) for name in names},
            "sessions": float(len(switch.sessions)),
            "drops": float(sum(switch.rules.drops.values())),
            "forwarded": float(sum(asking.success.values())),
            "not_forwarded": float(sum(asking.error.values())),
            "held": float(self._relay.memory.total),
        }

    def reasons(self) -> dict[str, float]:
        return {drop.value: float(self._switch.rules.drops[drop]) for drop in Drop}

    async def tables(self) -> list[Table]:
        sessions = {str(name): session for name, session in self._switch.sessions.items()}
        sent = {name: session.delivery.sent_count for name, session in sessions.items()}
        rates = {name: self._rates.get(name, 0.0) for name in sessions}
        busiest = heapq.nlargest(SHOWN_SESSIONS, sessions, key=lambda name: (rates[name], sent[name]))
        rates_in = {name: self._rates_in.get(name, 0.0) for name in sessions}
        senders = heapq.nlargest(SHOWN_SESSIONS, sessions, key=lambda name: (rates_in[name], sessions[name].bytes_in))
        waiting = [name for name, session in sessions.items() if len(session.delivery)]
        slowest = heapq.nlargest(SHOWN_SESSIONS, waiting, key=lambda name: sessions[name].delivery.size)
        failing = sorted(self._switch.federation.asking.error.items(), key=lambda one: -one[1])[:SHOWN_SESSIONS]
        return [
            Table(
                "Sessions that send most",
                ("Session", "Rate now", "Bytes", "Messages"),
                [
                    (
                        name,
                        f"{human_size(rates_in[name])}/s",
                        human_size(sessions[name].bytes_in),
                        human_count(sessions[name].messages_in),
                    )
                    for name in senders
                ],
                "no session is connected",
            ),
            Table(
                "Sessions that receive most",
                ("Session", "Rate now", "Messages"),
                [(name, f"{human_count(rates[name])}/s", human_count(sent[name])) for name in busiest],
                "no session is connected",
            ),
            Table(
                "Sessions that confirm slowest",
                ("Session", "Messages waiting", "Bytes waiting"),
                [
                    (name, human_count(len(sessions[name].delivery)), human_size(sessions[name].delivery.size))
                    for name in slowest
                ],
                "no message waits for a session",
            ),
            Table(
                "Failed deliveries to other relays",
                ("Relay", "Messages"),
                [(name, human_count(number)) for name, number in failing],
                "none",
            ),
        ]
