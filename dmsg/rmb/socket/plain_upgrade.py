"""Fast path for new connections to a relay: parses a plain websocket upgrade without Twisted's HTTP channel.

Most of the cost of a twin's connection is that Twisted parses a request that is always the same. So this module checks
the first read of a connection. A complete ``GET`` with only ordinary headers becomes a websocket directly.  Any other
connection is passed to the site, with all bytes read so far.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IProtocol,
    IPushProducer,
    IReactorTime,
    ITCPTransport,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.server import Site
from zope.interface import Attribute

from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.web.guard import Guard, GuardedConnection
from dmsg.net.websocket.upgrade import Upgrade, plain_upgrade


class SocketTransport(ITCPTransport, IConsumer, IPushProducer):
    """TCP transport of a websocket, or of a connection that may become one."""

    protocol: IProtocol = Attribute("Protocol that receives the data.")


class PlainUpgradeProtocol(GuardedConnection, Protocol):
    """Protocol of a new connection until its first read shows whether it is a plain upgrade or another request.

    A connection that becomes a session no longer counts as one of the site.
    """

    _inner_protocol: IProtocol | None = None
    _silence: FairTimeout | None = None

    def __init__(self, factory: PlainUpgradeFactory, address: IAddress | None) -> None:
        self._factory = factory
        self._address = address

    def connectionMade(self) -> None:
        self._factory.guard.add(self)
        # A request calls these methods of its transport to report its progress to the guard, which closes connections
        # with slow requests.
        for name in ("request_is_whole", "request_is_answered", "request_is_taken"):
            setattr(self.transport, name, getattr(self, name))
        # The TCP connection below a TLS wrapper cannot be taken from the wrapper, so the site handles these requests.
        if isinstance(self.transport, ProtocolWrapper):
            self._open()
        else:
            factory = self._factory
            self._silence = FairTimeout(factory.reactor, factory.first_byte_timeout, self._first_byte_late)

    def _first_byte_late(self) -> None:
        self._silence = None
        self.transport.abortConnection()

    def _cancel(self) -> None:
        self.stop_waiting()
        silence, self._silence = self._silence, None
        stop_timeout(silence)

    def request_is_taken(self) -> None:
        """Remove the connection from the guard, which limits only connections that are not sessions. This connection
        becomes a session."""
        self._cancel()
        self._factory.guard.remove(self)

    def dataReceived(self, data: bytes) -> None:
        if self._inner_protocol is None:
            self._cancel()
            upgrade = plain_upgrade(data)
            if upgrade is not None and self._factory.take(upgrade, self.transport):
                self.request_is_taken()
                if upgrade.rest:
                    self.transport.protocol.dataReceived(upgrade.rest)
                return
            self._open()
        assert self._inner_protocol is not None
        self.deliver(data, self._inner_protocol)

    def _open(self) -> None:
        behind = self._factory.site.buildProtocol(self._address)
        assert behind is not None and self.transport is not None
        self._inner_protocol = behind
        behind.makeConnection(self.transport)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._cancel()
        self._factory.guard.remove(self)
        if self._inner_protocol is not None:
            self._inner_protocol.connectionLost(reason)


class PlainUpgradeFactory(Factory):
    """Factory that handles plain upgrades itself, and passes all other connections to a site.

    :param take: function that makes a websocket of an upgraded connection. If it returns False, the site handles the
        request.
    :param first_byte_timeout: seconds to wait for the first byte of a connection. Pauses of this process do not count.
    """

    noisy = False

    def __init__(
        self,
        site: Site,
        reactor: IReactorTime,
        take: Callable[[Upgrade, SocketTransport], bool],
        first_byte_timeout: float,
        guard: Guard,
    ) -> None:
        """:param guard: limits connections that are not sessions, or are not sessions yet."""
        self.site = site
        self.guard = guard
        self.reactor = reactor
        self.take = take
        self.first_byte_timeout = first_byte_timeout

    def doStart(self) -> None:
        super().doStart()  # type: ignore[no-untyped-call]
        self.site.doStart()

    def doStop(self) -> None:
        super().doStop()  # type: ignore[no-untyped-call]
        self.site.doStop()

    def buildProtocol(self, addr: IAddress | None) -> PlainUpgradeProtocol:
        return PlainUpgradeProtocol(self, addr)
