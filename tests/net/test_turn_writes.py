"""Data that a connection writes in a turn, on real TCP."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase
from zope.interface import implementer

from dmsg.net.turn_writes import send_at_turn_end
from tests.support import asynchronous


class _Collector(Protocol):
    def __init__(self) -> None:
        self.data = bytearray()  # Sixteen megabytes of bytes would be copied with each piece.
        self.first: Deferred[bytes] = Deferred()
        self.ended: Deferred[bytearray] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.data += data
        if not self.first.called:
            self.first.callback(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.ended.callback(self.data)


class _Sender(Protocol):
    polled = 0

    def connectionMade(self) -> None:
        transport: Any = self.transport
        counted = transport.startWriting

        def count() -> None:
            self.polled += 1
            counted()

        transport.startWriting = count
        send_at_turn_end(transport, reactor)


@implementer(IPushProducer)
class _Failing:
    def pauseProducing(self) -> None:
        pass

    def resumeProducing(self) -> None:
        raise RuntimeError("it fails")

    def stopProducing(self) -> None:
        pass


class TurnWritesTests(TestCase):
    async def _connect(self) -> tuple[Any, _Collector]:
        accepted: Deferred[_Collector] = Deferred()

        class Accepting(Factory):
            noisy = False

            def buildProtocol(self, address: object) -> Protocol:
                made = _Collector()
                accepted.callback(made)
                return made

        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Accepting())
        self.addCleanup(port.stopListening)
        sender = await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port), _Sender())
        return sender, await accepted

    @asynchronous
    async def test_a_small_answer_is_sent_without_a_poll_for_it(self) -> None:
        sender, receiver = await self._connect()
        sender.transport.write(b"one ")
        sender.transport.writeSequence([b"and", b" two"])
        self.assertEqual(await receiver.first, b"one and two")
        self.assertEqual(sender.polled, 0)
        sender.transport.loseConnection()
        await receiver.ended

    @asynchronous
    async def test_more_than_the_socket_accepts_arrives_whole_and_before_the_end(self) -> None:
        sender, receiver = await self._connect()
        data = bytes(range(256)) * 65536
        sender.transport.write(data)
        sender.transport.loseConnection()
        self.assertEqual(await receiver.ended, data)
        self.assertGreater(sender.polled, 0)

    @asynchronous
    async def test_a_producer_that_fails_ends_its_connection(self) -> None:
        sender, receiver = await self._connect()
        sender.transport.registerProducer(_Failing(), True)
        sender.transport.write(bytes(sender.transport.bufferSize + 1))
        await receiver.ended
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_other_transports_are_not_changed(self) -> None:
        transport = StringTransport()
        send_at_turn_end(transport, reactor)
        transport.write(b"now")
        self.assertEqual(transport.value(), b"now")
