"""Negotiation at the start of a connection: its errors, and data after its end."""

from __future__ import annotations

from typing import NoReturn

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.net.protocols import Negotiation


class Refused(DmsgError):
    """The other side has refused."""


class Asking(Negotiation):
    """A negotiation that ends with the first line."""

    errors = Refused

    def __init__(self) -> None:
        super().__init__(Factory.forProtocol(Protocol))
        self.seen: list[bytes] = []

    def _negotiate(self) -> None:
        self.seen.append(self._received)
        if self._received == b"no\n":
            raise Refused("no")
        if self._received.endswith(b"\n"):
            protocol = self._factory.buildProtocol(IPv4Address("TCP", "10.0.0.1", 1))
            assert protocol is not None
            self.opened.callback(protocol)

    def _raise_late(self, seconds: float) -> NoReturn:
        raise Refused(f"late after {seconds:g} s")

    def _lost_error(self, tls_error: str) -> Refused:
        return Refused(tls_error or "lost")


class NegotiationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.transport = StringTransport()
        self.asking = Asking()
        self.asking.makeConnection(self.transport)
        self.waiting: Deferred[IProtocol] = Deferred.fromCoroutine(self.asking.wait(self.clock, 2.0))

    def error(self) -> str:
        """Return the text of the error with which the negotiation has failed."""
        return str(self.failureResultOf(self.waiting, Refused).value)

    def test_pieces_are_joined(self) -> None:
        self.asking.dataReceived(b"y")
        self.assertNoResult(self.waiting)
        self.asking.dataReceived(b"es\n")
        self.assertIsInstance(self.successResultOf(self.waiting), Protocol)
        self.assertEqual(self.asking.seen, [b"y", b"yes\n"])
        self.assertFalse(self.transport.disconnected)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_refusal_ends_the_connection(self) -> None:
        self.asking.dataReceived(b"no\n")
        self.assertEqual(self.error(), "no")
        self.assertTrue(self.transport.disconnected)

    def test_data_after_the_time_limit_are_ignored(self) -> None:
        """TLS may still deliver an answer, although the connection was aborted."""
        self.clock.advance(2.5)
        self.assertEqual(self.error(), "late after 2 s")
        self.assertTrue(self.transport.disconnected)
        self.asking.dataReceived(b"yes\n")
        self.assertEqual(self.asking.seen, [])

    def test_a_lost_connection_is_an_error(self) -> None:
        self.asking.connectionLost()
        self.assertEqual(self.error(), "lost")

    def test_a_cancelled_wait_ends_the_connection(self) -> None:
        self.waiting.cancel()
        self.failureResultOf(self.waiting)
        self.assertTrue(self.transport.disconnected)
