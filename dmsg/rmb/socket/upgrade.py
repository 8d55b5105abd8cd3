"""Server end of a websocket: answers HTTP upgrade requests, and turns their connections into websockets."""

from __future__ import annotations

from typing import TypeVar, cast

from autobahn.twisted.resource import WebSocketResource
from autobahn.twisted.util import peer2str
from autobahn.twisted.websocket import (
    WebSocketServerFactory,
    WebSocketServerProtocol,
)
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET, Request

from dmsg.net.flush import TurnFlush
from dmsg.net.socketopts import tune, write_now
from dmsg.net.turn_share import TurnShare
from dmsg.net.web.channel import BoundedChannel
from dmsg.net.websocket.upgrade import is_key, switching
from dmsg.rmb.socket.plain_upgrade import SocketTransport
from dmsg.rmb.socket.websocket import OPTIONS, Receiver, Socket


class _ServerSocket(Socket, WebSocketServerProtocol):  # type: ignore[misc]
    _bounded = True


class _QuickSocket(_ServerSocket):
    """Server end whose handshake this module answers itself. Autobahn's constructor runs only if autobahn is needed.

    Autobahn would parse again what Twisted has parsed, copy thirty options, and format all of it for a log that nobody
    reads. This would be three quarters of the cost of a connection to a relay.
    """

    CONFIG_ATTRS: list[str] = []
    _asleep = True

    def __init__(self) -> None:
        """Do nothing. Autobahn's constructor is called later, if the socket needs autobahn."""

    def take_over(self, transport: SocketTransport, key: bytes) -> None:
        """Answer an upgrade with status 101 and begin to read frames.

        :param key: value of the header Sec-WebSocket-Key.
        """
        self.transport = transport
        self.connected = 1
        tune(transport)
        write_now(transport, switching(key))
        self.state = WebSocketServerProtocol.STATE_OPEN
        self._opened = True
        self._begin_frames()
        # The HTTP channel is still registered as the producer, so it is unregistered first.
        transport.unregisterProducer()
        transport.registerProducer(self, True)
        self.receiver.opened(self)

    def _wake(self) -> None:
        if not self._asleep:
            return
        self._asleep = False
        state = self.state
        WebSocketServerProtocol.__init__(self)
        self.peer = peer2str(self.transport)
        self._connectionMade()
        self.state = state
        self.inside_message = False
        self.current_frame = None  # type: ignore[assignment]  # as autobahn does
        self.websocket_version = 13
        self.websocket_protocols: list[str] = []
        self.websocket_extensions: list[object] = []
        self.websocket_extensions_in_use: list[object] = []
        self.websocket_protocol_in_use = None

    def _ended(self, reason: Failure) -> None:
        if self._asleep:
            self.state = WebSocketServerProtocol.STATE_CLOSED
            self.onClose(False, None, "connection was closed uncleanly")
        else:
            super()._ended(reason)


_S = TypeVar("_S", bound=_ServerSocket)


def _do_nothing() -> None:
    """Do nothing. Replaces a method of :class:`~dmsg.net.web.guard.GuardedConnection` on a transport without a
    guard."""


class UpgradeResource:
    """Web resource that turns HTTP upgrade requests into sockets."""

    def __init__(self, reactor: IReactorTime, turn: TurnFlush) -> None:
        self._factory = WebSocketServerFactory(reactor=reactor, server="")
        self._factory.setProtocolOptions(
            **OPTIONS, utf8validateIncoming=False, webStatus=False, serveFlashSocketPolicy=False
        )
        self._factory.setProtocolOptions(allowedOrigins=["*"], allowNullOrigin=True)
        self._factory.noisy = False
        self._resource = WebSocketResource(self._factory)
        # The options become class attributes, so that the connections need no copies of them.
        options = {name: getattr(self._factory, name) for name in WebSocketServerProtocol.CONFIG_ATTRS}
        self._quick: type[_QuickSocket] = type("_Socket", (_QuickSocket,), options)
        self._turn = turn
        self._reactor = reactor
        self._share = TurnShare(reactor)

    def upgrade(self, request: Request, receiver: Receiver) -> bytes | int:
        """Answer ``request`` with status 101. All events of the socket go to ``receiver``.

        :returns: value that the resource's ``render`` must return.
        """

        if self._is_plain(request):
            transport = cast(SocketTransport, request.channel.transport)
            getattr(transport, "request_is_taken", _do_nothing)()
            self._release(request)
            request.channel.transport = None
            self.take(transport, request.getHeader(b"sec-websocket-key") or b"", receiver)
            # The HTTP channel paused the transport while it processed the request, so it is resumed here.
            transport.resumeProducing()
            return NOT_DONE_YET

        def build(addr: IAddress | None) -> _ServerSocket:
            return self._build(_ServerSocket, receiver)

        getattr(request.channel.transport, "request_is_taken", _do_nothing)()
        self._release(request)
        self._factory.buildProtocol = build  # type: ignore[method-assign]
        rendered: bytes | int = self._resource.render(request)
        return rendered

    @staticmethod
    def _release(request: Request) -> None:
        channel = request.channel
        # The type is certain, because RelaySite.make_site gives each request such a channel.
        assert isinstance(channel, BoundedChannel)
        channel.drop_buffer()

    def _build(self, kind: type[_S], receiver: Receiver) -> _S:
        socket = kind()
        socket.factory = self._factory
        socket.receiver, socket.turn, socket.reactor = receiver, self._turn, self._reactor
        socket.share = self._share
        return socket

    def take(self, transport: SocketTransport, key: bytes, receiver: Receiver) -> None:
        """Answer an upgrade on a TCP transport with status 101.

        :param key: value of the header Sec-WebSocket-Key, which the caller has checked.
        """
        socket = self._build(self._quick, receiver)
        transport.protocol = socket
        socket.take_over(transport, key)

    @staticmethod
    def _is_plain(request: Request) -> bool:
        """Whether the upgrade has only ordinary headers and does not use TLS. Autobahn handles all other upgrades."""
        transport = cast("SocketTransport | None", request.channel.transport)
        if transport is None or any(isinstance(one, ProtocolWrapper) for one in (transport, transport.protocol)):
            return False
        headers = request.requestHeaders
        once = (b"host", b"sec-websocket-key", b"sec-websocket-version")
        return (
            request.method == b"GET"
            and request.clientproto == b"HTTP/1.1"
            and all(len(headers.getRawHeaders(name, ())) == 1 for name in once)
            and request.getHeader(b"sec-websocket-version") == b"13"
            and is_key(request.getHeader(b"sec-websocket-key") or b"")
            and not headers.hasHeader(b"origin")
        )
