"""Secure transports that nobody confirms have no place when somebody else comes."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.keys import SecKey
from dmsg.transport import client as client_module
from dmsg.transport.agreement import Hello, Proposal
from dmsg.transport.state import ClientTransport
from dmsg.transport.unconfirmed import CONFIRM_TIMEOUT, Confirmations
from dmsg.transport.wire import ACCEPT, CLOSE, REQUEST, Frame
from tests.support import KEYS, SERVER_KEY, Accepting, RawClient
from tests.transport.secure_support import SecureCase

A, B, C = (KEYS[name].public for name in "ABC")


class TableTests(SynchronousTestCase):
    """By plain calls."""

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
        self.table.add(transport, factory)
        return transport

    def test_time(self) -> None:
        first = self.add(A)
        self.clock.advance(CONFIRM_TIMEOUT / 2)
        second = self.add(A)
        self.clock.advance(CONFIRM_TIMEOUT / 2)
        self.assertEqual((self.late, list(self.table)), ([first], [second]))
        factory = Accepting()
        third = self.add(B, factory)
        found = self.table.pop(third)
        assert found is not None
        self.assertEqual((found.asked, found.factory), (CONFIRM_TIMEOUT, factory))
        self.assertIsNone(self.table.pop(third))
        self.table.pop(second)
        self.assertEqual((len(self.table), self.table._of, len(self.table._most)), (0, {}, 0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_who_goes_first(self) -> None:
        """The oldest of who has most; among equals of who asked first."""
        self.assertIsNone(self.table.first_to_go())
        one = self.add(A)
        greedy = [self.add(B) for _ in range(3)]
        last = self.add(C)
        gone = []
        while (transport := self.table.first_to_go()) is not None:
            self.table.pop(transport)
            gone.append(transport)
        self.assertEqual(gone[:2], greedy[:2])
        self.assertEqual(set(gone[2:]), {one, greedy[2], last})
        self.assertLess(gone.index(one), gone.index(last))


class RoomTests(SecureCase):
    """At a whole client, with a stranger who asks and never confirms."""

    def ask(self, raw: RawClient, key: SecKey, numbers: range) -> None:
        for number in numbers:
            payload = Proposal(key, B, Hello(7)).payload
            raw.send(Frame(REQUEST, 2 * number, payload).encode())
        self.network.settle()

    def test_a_friend_gets_in(self) -> None:
        self.patch(client_module, "MAX_INCOMING", 3)
        raw = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(raw)
        self.network.settle()
        raw.take()
        self.ask(raw, KEYS["C"], range(3))
        self.assertEqual([frame.type for frame in raw.take()], [ACCEPT] * 3)
        opening = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        protocol = self.successResultOf(opening)
        full = bytes((CloseReason.TOO_MANY_TRANSPORTS,))
        self.assertEqual([(frame.type, frame.id, frame.payload) for frame in raw.take()], [(CLOSE, 0, full)])
        # what is confirmed stays, whoever comes
        for number in range(3, 6):
            self.ask(raw, KEYS["C"], range(number, number + 1))
        self.assertFalse(protocol.transport.over)
        self.assertEqual([frame.type for frame in raw.take()].count(ACCEPT), 3)
        self.assertEqual((self.b._core.incoming, len(self.b._unconfirmed)), (3, 2))
        self.network.clock.advance(CONFIRM_TIMEOUT)
        self.network.settle()
        self.assertEqual((self.b._core.incoming, len(self.b._unconfirmed)), (1, 0))

    def test_where_all_are_confirmed_nobody_goes(self) -> None:
        self.patch(client_module, "MAX_INCOMING", 1)
        first = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        second = self.a.open(B, Accepting(), port=7, secure=True)
        self.network.settle()
        self.assertEqual(self.failureResultOf(second).value.reason, CloseReason.TOO_MANY_TRANSPORTS)
        self.assertFalse(self.successResultOf(first).transport.over)
