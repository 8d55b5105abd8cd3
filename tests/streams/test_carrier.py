"""State of a stream while its transports change; tests.net.streams.test_stream has the behaviour of every stream."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.net.streams.address import StreamTimeout
from dmsg.net.streams.stream import LINGER
from dmsg.streams.carrier import ClientStream, NoCarrier
from tests.net.streams.test_stream import ADDRESS, FRAME, Carrier


class Program(Protocol):
    lost: Any = None

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.lost = reason.value


class Table:
    """Table of streams that have no transport."""

    def __init__(self) -> None:
        self.over: list[int] = []
        self.scheduled: list[Any] = []

    def closed(self, stream: Any, reason: int) -> None:
        self.over.append(reason)

    def schedule(self, stream: Any) -> None:
        self.scheduled.append(stream)


class ClientStreamTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.carrier = Carrier()
        self.stream = ClientStream(self.clock, self.carrier, ADDRESS, ADDRESS, FRAME)
        self.carrier.stream = self.stream
        self.program = Program()
        self.stream.start(self.program)

    def secured(self) -> Any:
        end: Any = SimpleNamespace(in_flight=deque(), in_flight_bytes=0, initiator=True, consume=lambda size: False)
        self.stream.end = end
        return end

    def test_a_deadline_to_write_while_nothing_carries_the_stream(self) -> None:
        """The placeholder of the transport reports unsent data, so that the stream is not closed meanwhile."""
        end = self.secured()
        nowhere = NoCarrier(Table(), self.stream)
        self.assertEqual(nowhere.in_flight(), 1)
        self.stream.suspend(nowhere)
        self.stream.setWriteDeadline(5)
        self.clock.advance(5)
        self.assertFalse(self.stream.has_ended)
        end.in_flight_bytes = 1
        self.stream.setWriteDeadline(5)
        self.clock.advance(5)
        self.assertIsInstance(self.program.lost, StreamTimeout)

    def test_without_an_ack_a_plain_stream_ends_well_and_a_secure_one_does_not(self) -> None:
        """A reader that has stopped holds back the ACKs of 2019; those of a secure stream say what has arrived."""
        for secure in (False, True):
            self.setUp()
            end = self.secured() if secure else None
            self.stream.write(b"x")
            self.carrier.turn()
            if end is not None:
                end.in_flight.append((b"x", None, b"x"))
                end.in_flight_bytes = 1
            self.stream.loseConnection()
            self.carrier.turn()
            self.clock.advance(LINGER)
            self.assertIsInstance(self.program.lost, StreamTimeout if secure else ConnectionDone)
            self.assertEqual(self.carrier.closed, [CloseReason.TIMEOUT if secure else CloseReason.UNSPECIFIED])

    def test_the_placeholder_of_a_transport_refuses_data(self) -> None:
        """The placeholder names the server that carried the stream last, accepts no data, and reports the end to the
        table.
        """
        self.secured()
        table = Table()
        first = NoCarrier(table, self.stream)
        self.stream.suspend(first)
        self.stream.write(b"x")
        self.assertEqual((table.scheduled, first.may_send(), self.stream.server), ([self.stream], False, None))
        self.stream.abortConnection()
        self.assertEqual(table.over, [CloseReason.ABORTED])
