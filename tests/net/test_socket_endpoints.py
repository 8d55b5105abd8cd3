"""Client endpoints for TCP connections and UNIX sockets."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import (
    ConnectBindError,
    ConnectingCancelledError,
    ConnectionRefusedError,
    NoProtocol,
    TimeoutError,
)
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.net.socket_endpoints import TCPEndpoint, UNIXEndpoint
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import asynchronous


class _Named(Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.ended: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Any = None) -> None:
        self.ended.callback(None)


class _Says(Protocol):
    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"hello")
        self.transport.loseConnection()


class EndpointTests(TestCase):
    """Real sockets."""

    @asynchronous
    async def test_the_protocol_itself_gets_the_connection(self) -> None:
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(_Says))
        self.addCleanup(port.stopListening)
        protocol: Any = await TCPEndpoint(reactor, "127.0.0.1", port.getHost().port, 5).connect(
            Factory.forProtocol(_Named)
        )
        self.assertIs(protocol.transport.protocol, protocol)
        self.assertTrue(protocol.transport.logstr.startswith("_Named"))
        await protocol.ended
        self.assertEqual(protocol.received, b"hello")

    @asynchronous
    async def test_a_connection_over_loopback_is_open_at_once(self) -> None:
        for interface in ("127.0.0.1", "::1"):
            port = cast(Any, reactor).listenTCP(0, Factory.forProtocol(_Says), interface=interface)
            self.addCleanup(port.stopListening)
            endpoint = TCPEndpoint(reactor, interface, port.getHost().port, 5, bind_address=interface)
            protocol: Any = self.successResultOf(endpoint.connect(Factory.forProtocol(_Named)))
            await protocol.ended
            self.assertEqual(protocol.received, b"hello")

    @asynchronous
    async def test_a_protocol_that_fails_ends_the_connection(self) -> None:
        ended: Deferred[None] = Deferred()

        class Fails(Protocol):
            def connectionMade(self) -> None:
                raise ZeroDivisionError

            def connectionLost(self, reason: Any = None) -> None:
                ended.callback(None)

        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Protocol))
        self.addCleanup(port.stopListening)
        connecting = TCPEndpoint(reactor, "127.0.0.1", port.getHost().port, 5).connect(Factory.forProtocol(Fails))
        await self.assertFailure(connecting, ZeroDivisionError)
        await ended
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    @asynchronous
    async def test_an_address_to_which_the_socket_cannot_be_bound(self) -> None:
        with self.assertRaises(ConnectBindError):
            await TCPEndpoint(reactor, "127.0.0.1", 9, 5, bind_address="192.0.2.1").connect(Factory.forProtocol(_Named))

    @asynchronous
    async def test_a_unix_socket(self) -> None:
        path = self.mktemp()[-80:].replace("/", "-")
        port = cast(Any, reactor).listenUNIX(path, Factory.forProtocol(_Says))
        self.addCleanup(port.stopListening)
        protocol: Any = await UNIXEndpoint(reactor, path).connect(Factory.forProtocol(_Named))
        await protocol.ended
        self.assertEqual(protocol.received, b"hello")

    @asynchronous
    async def test_a_refused_connection(self) -> None:
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(_Says))
        number = port.getHost().port
        await port.stopListening()
        with self.assertRaises(ConnectionRefusedError):
            await TCPEndpoint(reactor, "127.0.0.1", number, 5).connect(Factory.forProtocol(_Named))


class AttemptTests(SynchronousTestCase):
    """A reactor in memory."""

    def test_address_and_options(self) -> None:
        memory = MemoryReactorClock()
        for address in ("192.0.2.1", "2001:db8::1"):
            TCPEndpoint(memory, address, 80, 2.5, bind_address="192.0.2.9").connect(Factory.forProtocol(_Named))
            host, port, _, timeout, bind = memory.tcpClients.pop()
            self.assertEqual((host, port, timeout, bind), (address, 80, None, ("192.0.2.9", 0)))

    def test_an_attempt_that_takes_too_long_is_stopped(self) -> None:
        """A pause of the process does not count."""
        memory = MemoryReactorClock()
        let_pause(memory)
        connecting = TCPEndpoint(memory, "192.0.2.1", 80, 5).connect(Factory.forProtocol(_Named))
        memory.advance(60.0)
        pass_time(memory, 4.85)
        self.assertNoResult(connecting)
        self.assertFalse(memory.connectors[0].stoppedConnecting)
        pass_time(memory, 0.25)
        self.failureResultOf(connecting, TimeoutError)
        self.assertTrue(memory.connectors[0].stoppedConnecting)
        self.assertEqual(memory.getDelayedCalls(), [])

    def test_a_cancelled_attempt_is_stopped(self) -> None:
        memory = MemoryReactorClock()
        connecting = TCPEndpoint(memory, "192.0.2.1", 80, 5).connect(Factory.forProtocol(_Named))
        connecting.cancel()
        self.failureResultOf(connecting, ConnectingCancelledError)
        self.assertTrue(memory.connectors[0].stoppedConnecting)

    def test_a_factory_without_a_protocol(self) -> None:
        memory = MemoryReactorClock()
        none: Any = Factory()
        none.buildProtocol = lambda _: None
        connecting = TCPEndpoint(memory, "192.0.2.1", 80, 5).connect(none)
        factory = memory.tcpClients[0][2]
        self.assertIsNone(factory.buildProtocol(None))
        self.failureResultOf(connecting, NoProtocol)

    def test_a_reactor_without_sockets(self) -> None:
        self.failureResultOf(TCPEndpoint(Clock(), "192.0.2.1", 80, 5).connect(Factory()), AttributeError)
