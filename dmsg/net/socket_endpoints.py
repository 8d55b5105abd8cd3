"""Client endpoints for TCP connections to IP addresses, and for Unix sockets.

Twisted's own endpoints import modules that most commands do not need. Between the connection and the caller's protocol,
they also keep a protocol of their own, which passes on each read.
"""

from __future__ import annotations

from typing import cast

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectingCancelledError, NoProtocol, TimeoutError
from twisted.internet.interfaces import (
    IAddress,
    IConnector,
    ILoggingContext,
    IProtocol,
    IProtocolFactory,
    IReactorTCP,
    IReactorTime,
    IReactorUNIX,
    IStreamClientEndpoint,
    ITransport,
)
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.net.own_pauses import add_fair_timeout
from dmsg.net.protocols import change_protocol


@implementer(IStreamClientEndpoint)
class _Endpoint:
    """Base of endpoints that connect with a method of the reactor."""

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; see :class:`twisted.internet.interfaces.IStreamClientEndpoint`."""
        factory = _Connecting(protocolFactory)
        try:
            self._start(factory)
        except Exception:
            return fail()
        return factory.connected

    def _start(self, factory: _Connecting) -> None:
        """Start to connect with ``factory``."""
        raise NotImplementedError


class TCPEndpoint(_Endpoint):
    """Client endpoint for an IPv4 or IPv6 address.

    :param timeout: seconds that a connection attempt may take. Pauses of this process do not count.
    :param bind_address: own IP address from which to connect.
    """

    def __init__(
        self, reactor: object, address: str, port: int, timeout: float, bind_address: str | None = None
    ) -> None:
        self._reactor = cast(IReactorTCP, reactor)
        self._address = address
        self._port = port
        self._timeout = timeout
        self._bind_address = None if bind_address is None else (bind_address, 0)

    def _start(self, factory: _Connecting) -> None:
        # The module loads Twisted's sockets, which a program that only uses an agent does not need.
        from dmsg.net.eager_connect import connect_tcp

        connect_tcp(self._reactor, self._address, self._port, factory, self._bind_address)
        if not factory.connected.called:
            add_fair_timeout(factory.connected, self._timeout, cast(IReactorTime, self._reactor), _time_out)


class UNIXEndpoint(_Endpoint):
    """Client endpoint for the path of a Unix socket."""

    def __init__(self, reactor: object, path: str) -> None:
        self._reactor = cast(IReactorUNIX, reactor)
        self._path = path

    def _start(self, factory: _Connecting) -> None:
        self._reactor.connectUNIX(self._path, factory)


def _time_out(result: IProtocol | Failure, seconds: float) -> IProtocol:
    """Replace the error of a cancelled attempt by the one that Twisted's endpoints have after their timeout."""
    if isinstance(result, Failure):
        result.trap(ConnectingCancelledError)
        raise TimeoutError from None
    return result


class _Connecting(ClientFactory):
    """Factory of one connection attempt.

    :ivar connected: Deferred that fires with the connected protocol of the caller's factory.
    """

    noisy = False

    def __init__(self, factory: IProtocolFactory) -> None:
        self._factory = factory
        self._connector: IConnector | None = None
        self.connected: Deferred[IProtocol] = Deferred(self._cancel)

    def startedConnecting(self, connector: IConnector) -> None:
        self._connector = connector

    def _cancel(self, connected: Deferred[IProtocol]) -> None:
        assert self._connector is not None
        connected.errback(ConnectingCancelledError(self._connector.getDestination()))
        self._connector.stopConnecting()

    def doStart(self) -> None:
        self._factory.doStart()

    def doStop(self) -> None:
        self._factory.doStop()

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        try:
            protocol = self._factory.buildProtocol(cast(IAddress, addr))
            if protocol is None:
                raise NoProtocol
        except Exception:
            self.connected.errback()
            return None
        return _Connected(self.connected, protocol)

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        if not self.connected.called:
            self.connected.errback(reason)


class _Connected(Protocol):
    """Protocol that gives a new connection to the caller's protocol at once."""

    def __init__(self, connected: Deferred[IProtocol], protocol: IProtocol) -> None:
        self._connected = connected
        self._protocol = protocol

    def logPrefix(self) -> str:
        """Return the name of the caller's protocol, which the transport writes in the log."""
        if ILoggingContext.providedBy(self._protocol):
            return cast(ILoggingContext, self._protocol).logPrefix()
        return type(self._protocol).__name__

    def makeConnection(self, transport: ITransport) -> None:
        change_protocol(transport, self._protocol)
        try:
            self._protocol.makeConnection(transport)
        except Exception:
            self._connected.errback()
            raise
        self._connected.callback(self._protocol)
