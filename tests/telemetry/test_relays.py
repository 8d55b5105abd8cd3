"""Events and counts of a relay, tested with the interface alone, without any family."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason
from dmsg.keys import SecKey
from dmsg.telemetry.relays import RelayTelemetry
from dmsg.telemetry.transports import CountingRelay, Observer, TransportRecord
from tests.v2019.test_telemetry import Memory

SERVER, ONE, TWO = (bytes(SecKey.from_seed(name).public) for name in (b"server", b"one", b"two"))


@dataclass
class Direction:
    """Direction of a transport whose frames have no headers."""

    frames: int = 0
    acks: int = 0
    wire: int = 0
    dropped: int = 0
    queued: int = 0
    carried: TransportRecord | None = None
    tick: int = 0
    seen: int = 0
    asked_at: float | None = None
    other: Direction | None = None

    @property
    def back(self) -> Direction:
        assert self.other is not None
        return self.other

    def user_data(self, secure: bool) -> int:
        return self.wire


@dataclass
class Relay:
    tick: int = 0
    drops: Counter[DropReason] = field(default_factory=Counter)
    route_count: int = 0
    frames: int = 0
    frame_bytes: int = 0


@dataclass
class Place:
    address: str = "192.0.2.1"


@dataclass
class Client:
    key: bytes
    port: Place = field(default_factory=Place)
    frames_in: int = 0
    bytes_in: int = 0


class RelayTests(SynchronousTestCase):
    """A transport from its request to its end."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.memory = Memory()
        self.telemetry = RelayTelemetry(self.memory, self.clock.seconds, SERVER)  # type: ignore[arg-type]
        self.relay: CountingRelay = Relay()
        self.telemetry.relay = self.relay
        self.observer: Observer = self.telemetry

    def event(self, name: str) -> dict[str, Any]:
        ((_, fields),) = [one for one in self.memory.events if one[0] == name]
        return dict(fields)

    def test_a_transport_writes_its_events(self) -> None:
        there, back = Direction(), Direction()
        there.other, back.other = back, there
        carried = self.observer.requested(Client(ONE), there, back, b"the request", TWO, True)
        there.carried = back.carried = carried
        self.clock.advance(0.5)
        self.observer.accepted(carried, b"the answer")
        opened = self.event("transport_open")
        self.assertEqual((opened["src"], opened["dst"], opened["secure"], opened["accept_ms"]), (ONE, TWO, True, 500))
        there.frames, there.wire = 3, 300
        self.observer.progress(carried, there, 3, 0)
        self.observer.ended(carried, 0x1234, "src")
        closed = self.event("transport_close")
        self.assertEqual((closed["total_ab"], closed["total_ba"], closed["frames_ab"]), (300, 0, 3))
        self.assertEqual((closed["reason"], closed["by"]), (f"reason_{0x1234}", "src"))

    def test_a_refusal_writes_an_event(self) -> None:
        self.observer.refused(Client(ONE), TWO, "rate_limited")
        self.assertEqual(self.event("transport_refuse"), {"src": ONE, "dst": TWO, "reason": "rate_limited", "n": 1})
