"""Secure transports that nobody confirms have no place when somebody else comes."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.keys import SecKey
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core import requests
from dmsg.v2019.core.state import ClientTransport, State
from dmsg.v2019.core.wire import ACCEPT, CLOSE, REQUEST, Frame
from dmsg.v2019.unconfirmed import CONFIRM_TIMEOUT, Confirmations
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import KEYS, SERVER_KEY, Accepting
from tests.v2019.secure_support import SecureCase

A, B, C = (KEYS[name].public for name in "ABC")


class TableTests(SynchronousTestCase):
    """The table of unconfirmed transports, called directly."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.late: list[ClientTransport] = []
        self.table = Confirmations(self.clock, self._late)
        self.count = 0

    def _late(self, transport: ClientTransport) -> None:
        self.table.pop(transport)
        self.late.append(transport)

    def add(self, remote: Any, factory: Any = None) -> ClientTransport:
        self.count += 1
        transport = ClientTransport(2 * self.count + 1, remote, b"", False, 0)
        transport.state = State.ANSWERED
        self.table.add(transport, factory)
        return transport

    def test_unconfirmed_transports_time_out(self) -> None:
        first = self.add(A)
        self.clock.advance(CONFIRM_TIMEOUT / 2)
        second = self.add(A)
        self.clock.advance(CONFIRM_TIMEOUT / 2)
        self.assertEqual((self.late, list(self.table)), ([first], [second]))
        factory = Accepting()
        third = self.add(B, factory)
        found = self.table.pop(third)
        assert found is not None
        self.assertEqual((found.asked_at, found.factory), (CONFIRM_TIMEOUT, factory))
        self.assertIsNone(self.table.pop(third))
        self.table.pop(second)
        self.assertEqual((len(self.table), self.table._of, len(self.table._counts)), (0, {}, 0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_pauses_of_this_process_do_not_count(self) -> None:
        let_pause(self.clock)
        first = self.add(A)
        pass_time(self.clock, 1.0)
        self.clock.advance(10 * CONFIRM_TIMEOUT)
        pass_time(self.clock, CONFIRM_TIMEOUT - 1.3)
        self.assertEqual(self.late, [])
        pass_time(self.clock, 0.5)
        self.assertEqual((self.late, self.clock.getDelayedCalls()), ([first], []))

    def test_decided_transports_are_not_evicted(self) -> None:
        """A transport is confirmed or closed in the same read. The session is notified later, and still finds the
        transport.
        """
        one, two, three = (self.add(A) for _ in range(3))
        one.state, two.state = State.OPEN, State.CLOSED
        self.assertIs(self.table.first_to_evict(), three)
        self.assertEqual((len(self.table), set(self.table)), (3, {one, two, three}))
        three.state = State.OPEN
        self.assertIsNone(self.table.first_to_evict())
        self.assertEqual(self.clock.getDelayedCalls(), [])
        for transport in (one, two, three):
            found = self.table.pop(transport)
            assert found is not None
            self.assertEqual(found.asked_at, 0.0)
            self.assertIsNone(self.table.pop(transport))
        self.assertEqual((len(self.table), len(self.table._counts)), (0, 0))

    def test_the_oldest_of_the_largest_initiator_is_evicted(self) -> None:
        """The oldest of who has most; among equals of who asked first."""
        self.assertIsNone(self.table.first_to_evict())
        one = self.add(A)
        greedy = [self.add(B) for _ in range(3)]
        last = self.add(C)
        gone = []
        while (transport := self.table.first_to_evict()) is not None:
            self.table.pop(transport)
            gone.append(transport)
        self.assertEqual(gone[:2], greedy[:2])
        self.assertEqual(set(gone[2:]), {one, greedy[2], last})
        self.assertLess(gone.index(one), gone.index(last))


class RoomTests(SecureCase):
    """A client, and a stranger that sends requests and never confirms them."""

    def ask_raw(self, raw: RawClient, key: SecKey, numbers: range) -> None:
        for number in numbers:
            payload = Proposal(key, B, Hello(7)).payload
            raw.send(Frame(REQUEST, 2 * number, payload).encode())
        self.network.settle()

    def test_a_friend_gets_in(self) -> None:
        self.patch(requests, "MAX_INCOMING", 3)
        raw = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(raw)
        self.network.settle()
        raw.take()
        self.ask_raw(raw, KEYS["C"], range(3))
        self.assertEqual([frame.type for frame in raw.take()], [ACCEPT] * 3)
        opening = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        protocol = self.successResultOf(opening)
        full = bytes((CloseReason.TOO_MANY_TRANSPORTS,))
        self.assertEqual([(frame.type, frame.id, frame.payload) for frame in raw.take()], [(CLOSE, 0, full)])
        # Confirmed transports stay, whoever else connects.
        for number in range(3, 6):
            self.ask_raw(raw, KEYS["C"], range(number, number + 1))
        self.assertFalse(cast(Any, protocol).transport.has_ended)
        self.assertEqual([frame.type for frame in raw.take()].count(ACCEPT), 3)
        self.assertEqual((self.b.core.incoming, len(self.b._incoming._unconfirmed)), (3, 2))
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual((self.b.core.incoming, len(self.b._incoming._unconfirmed)), (1, 0))

    def test_the_largest_initiator_yields_a_place(self) -> None:
        """An initiator that has proved its key keeps its place; an evicted stream may resume over another server."""
        self.patch(requests, "MAX_INCOMING", 2)
        raw = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(raw)
        for _ in range(2):
            opening = self.a.open(B, Accepting(), port=7, secure=True)
            self.network.settle()
            self.successResultOf(opening)
        raw.take()
        for rubbish in (Proposal(KEYS["C"], B, Hello(7)).payload[:-1] + b"x", bytes(KEYS["C"].public + B)):
            raw.send(Frame(REQUEST, 0, rubbish).encode())
            self.network.settle()
            self.assertNotIn(ACCEPT, [frame.type for frame in raw.take()])
            self.assertEqual(self.streams["B"].suspended, 0)
        self.ask_raw(raw, KEYS["C"], range(1, 2))
        self.assertEqual([frame.type for frame in raw.take()], [ACCEPT])
        # A second transport takes the place of the first one, which was not confirmed.
        self.ask_raw(raw, KEYS["C"], range(2, 3))
        self.assertEqual([(frame.type, frame.id) for frame in raw.take()], [(CLOSE, 2), (ACCEPT, 4)])
        self.assertEqual(self.streams["B"].suspended, 1)

    def test_confirmed_transports_are_never_evicted(self) -> None:
        self.patch(requests, "MAX_INCOMING", 1)
        first = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        second = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        self.assertEqual(self.failureResultOf(second).value.reason, CloseReason.TOO_MANY_TRANSPORTS)
        self.assertFalse(cast(Any, self.successResultOf(first)).transport.has_ended)


class OneReadTests(SecureCase):
    """Frames in one read with a REQUEST for which there is no room."""

    def setUp(self) -> None:
        super().setUp()
        self.patch(requests, "MAX_INCOMING", 2)
        self.successResultOf(self.ask())
        self.held: list[Frame] = []
        self.holding = False

        def change(frames: list[Frame]) -> list[Frame]:
            for number, frame in enumerate(frames):
                if self.holding:
                    self.held += frames[number:]
                    return frames[:number]
                self.holding = frame.type == REQUEST
            return frames

        self.tamper(change)
        self.one: Any = self.successResultOf(self.ask())
        self.one.transport.write(b"hello")
        self.network.settle()
        self.assertEqual((len(self.b._incoming._unconfirmed), self.b.core.incoming), (1, 2))

    def receive(self, *frames: Frame) -> None:
        self.holding = False
        buffer = bytearray(b"".join(frame.encode() for frame in frames))
        while buffer:
            taken = self.b.frames_received(buffer, len(buffer))
            assert taken
            del buffer[:taken]
        self.network.settle()

    def request(self, number: int) -> Frame:
        return Frame(REQUEST, number, Proposal(KEYS["A"], B, Hello(7)).payload)

    def test_a_confirmed_transport_keeps_its_place(self) -> None:
        for behind in (1, len(self.held)):
            with self.subTest(behind=behind):
                self.receive(*self.held[:behind], self.request(999), *self.held[behind:])
                self.held.clear()
                self.assertFalse(self.one.transport.has_ended)
                self.assertEqual((self.b.core.incoming, len(self.b._incoming._unconfirmed)), (2, 0))
        self.assertEqual(cast(Any, self.listeners[7]).built[-1].data, b"hello")

    def test_closed_transports_leave_the_table(self) -> None:
        live: list[int] = []
        for start in range(101, 400, 8):
            fresh = [self.request(number) for number in range(start, start + 8, 2)]
            self.receive(*(Frame(CLOSE, number, b"\0") for number in live), *fresh)
            live = [number for number in range(start, start + 8, 2) if number in self.b.core.transports]
            self.assertLessEqual(self.b.core.incoming, 2)
