"""WebSockets, by autobahn; no other module knows of it.

Its handshake, fragments and close are used as they are.  What it does for
each frame costs some 60 us, so whole messages, pings and pongs, which are
nearly all there is, pass it by (:mod:`dmsg.rmb.socket.frames`).
"""

from __future__ import annotations

import hashlib
import math
import os
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Protocol, TypeVar

from autobahn.twisted.resource import WebSocketResource
from autobahn.twisted.util import peer2str
from autobahn.twisted.websocket import (
    WebSocketClientFactory,
    WebSocketClientProtocol,
    WebSocketServerFactory,
    WebSocketServerProtocol,
)
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.internet.ssl import optionsForClientTLS
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET, Request

from dmsg.net.share import STEPS, Share
from dmsg.net.socketopts import forget_unsent, queued, tune, write_now
from dmsg.net.turn import TurnFlush
from dmsg.rmb.envelope.wire import MAX_MESSAGE
from dmsg.rmb.errors import RmbError
from dmsg.rmb.socket import frames
from dmsg.rmb.socket.door import is_key

HANDSHAKE_TIMEOUT = 10
"""Seconds for the opening handshake."""
CLOSE_TIMEOUT = 2
"""Seconds for the closing handshake."""
MAX_UNREAD_PONGS = 1024 * 1024
"""Bytes that wait to be sent by a client, above which pings are not answered; a relay reads no pings then."""
MAX_UNSENT = 64 * 1024 * 1024
"""Bytes that wait to be sent over one connection before it is dropped: more than a window of the largest messages."""
NORMAL, GOING_AWAY, BAD_DATA, TOO_LARGE, FAILED, TRY_LATER = 1000, 1001, 1003, 1009, 1011, 1013
"""Close codes, RFC 6455, section 7.4.1; 1013 is registered at IANA."""


_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455, section 1.3."""


class WebSocketFailed(RmbError):
    """A connection did not come about, or was lost; the text says why."""


class Receiver(Protocol):
    """What is above a socket."""

    def opened(self, socket: Socket) -> None:
        """The handshake is over."""

    def received(self, data: bytes) -> None:
        """A binary message."""

    def ping_received(self, payload: bytes) -> None:
        """A ping: :meth:`Socket.pong` answers it, now or later."""

    def pong_received(self, payload: bytes) -> None:
        """The answer to one of ours."""

    def lost(self, why: str) -> None:
        """The connection is gone; called once, also when it never opened."""


class _Silence:
    """In place of autobahn's logger: what peers do wrong is counted, and is no news."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self._say_nothing

    def _say_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass


class Socket:
    """What both ends of a connection can do; mixed into autobahn's protocols.

    :ivar heard: something came since this was set to False.
    """

    receiver: Receiver
    reactor: IReactorTime
    turn: TurnFlush
    state: int
    data: bytes
    transport: Any
    message_data_total_length: int
    log = _Silence()
    masked_here = False
    """What this end sends is masked: it is a client."""
    heard = True
    _frames: frames.Frames | None = None
    _out: list[bytes] | None = None
    _opened = False
    _told = False
    _timer: IDelayedCall | None = None
    _held: frozenset[str] = frozenset()
    share: Share | None = None
    _feeding: Iterator[tuple[int, bytes]] | None = None
    _waits = False
    _behind: deque[bytes]
    grew: Callable[[int], None] | None = None
    """Told of the bytes of a message that is not whole, after each read, in whatever turn it is looked at."""
    _bounded = False
    """Both ends must not wait for each other: only servers stop reading when they cannot send."""

    def connectionMade(self) -> None:
        self._give_up_after(HANDSHAKE_TIMEOUT)
        super().connectionMade()  # type: ignore[misc]

    def _give_up_after(self, seconds: float) -> None:
        self._patience_over()
        self._timer = self.reactor.callLater(seconds, self.abort)

    def _patience_over(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()

    # --- inbound ---

    def dataReceived(self, data: bytes) -> None:
        self.heard = True
        if self._frames is None:
            super().dataReceived(data)  # type: ignore[misc]
            return
        if self._feeding is not None or not (self.share is None or self.share.allows(self._owner())):
            self._behind.append(data)
            self._next_turn()
            return
        self._feed(self._frames.feed(data))

    def _owner(self) -> Hashable:
        """Whose part of a turn it uses: a twin's, by however many sessions."""
        return getattr(self.receiver, "owner", id(self))

    def _feed(self, found: Iterator[tuple[int, bytes]], limit: float = STEPS) -> None:
        share = self.share
        began = share.now() if share is not None else 0.0
        receiver = self.receiver
        self._feeding = found
        steps = 0
        try:
            for first, content in found:
                if first == frames.BINARY:
                    receiver.received(content)
                elif first == frames.PONG:
                    receiver.pong_received(content)
                elif first == frames.PING:
                    receiver.ping_received(content)
                else:
                    self._wake()
                    self._dataReceived(content)  # type: ignore[attr-defined]
                    if self.state == WebSocketServerProtocol.STATE_CLOSED:
                        # that was no frame: what is behind it is nothing either, and may be thirty thousand times that
                        self._feeding = None
                        self._behind.clear()
                        break
                steps += 1
                if steps >= limit:
                    self._next_turn()
                    break
            else:
                self._feeding = None
        except frames.FrameTooLarge as error:
            self._feeding = None
            self.close(TOO_LARGE, str(error))
        except BaseException:
            self._feeding = None
            raise
        if share is not None:
            share.used(self._owner(), share.now() - began)
        if self.grew is not None:
            self.grew(self.unfinished)

    def _next_turn(self) -> None:
        if self._waits:
            return
        self._waits = True
        self.hold("turn")
        if self.share is not None:
            self.share.wait(self)
        else:
            self.reactor.callLater(0, self.go_on)

    def go_on(self) -> None:
        """The next turn is there."""
        self._waits = False
        if self._told:
            return
        if self.share is not None and not self.share.allows(self._owner()):
            self._next_turn()
            return
        self._feed_next()
        if self._feeding is not None or self._behind:
            self._next_turn()
        else:
            self.release("turn")

    def _feed_next(self, limit: float = STEPS) -> None:
        if self._feeding is not None:
            self._feed(self._feeding, limit)
        elif self._behind and self._frames is not None:
            self._feed(self._frames.feed(self._behind.popleft()), limit)

    def _feed_all(self) -> None:
        """The connection is lost: what came before is told before."""
        while (self._feeding is not None or self._behind) and not self._told:
            self._feed_next(math.inf)

    @property
    def unfinished(self) -> int:
        """Bytes of a message that is not whole: of its frame, and of those before, which autobahn keeps."""
        before = self.message_data_total_length if getattr(self, "message_data", None) is not None else 0
        return before + (self._frames.held if self._frames is not None else 0)

    @property
    def unsent(self) -> int:
        """Bytes that wait for the other end to read."""
        return (queued(self.transport) or 0) if self.transport is not None else 0

    def onOpen(self) -> None:
        self._opened = True
        self._patience_over()
        self._behind = deque()
        self._frames = frames.Frames(not self.masked_here, MAX_MESSAGE)
        tune(self.transport)
        # some kilobytes for each session that is idle
        for name in ("http_headers", "http_request_data", "http_response_data", "_perMessageCompress"):
            if name in self.__dict__:
                self.__dict__[name] = None
        if self._bounded:
            # the HTTP channel, which is out of the way by now, had the place
            self.transport.unregisterProducer()
            self.transport.registerProducer(self, True)
        # what came behind the handshake, in the same piece; autobahn shall not begin with it
        rest, self.data = self.data, b""
        self.receiver.opened(self)
        if rest:
            self.dataReceived(rest)

    def _wake(self) -> None:
        """What autobahn keeps of a connection is there from now on."""

    # --- reading no more than can be answered ---

    @property
    def held(self) -> bool:
        """It is not read."""
        return bool(self._held)

    def hold(self, why: str) -> None:
        """Do not read, until :meth:`release` with the same word."""
        if not self._held and self.transport is not None:
            self.transport.pauseProducing()
        self._held |= {why}

    def release(self, why: str) -> None:
        """Read again, if nobody else holds it."""
        held, self._held = self._held, self._held - {why}
        if held and not self._held and self.sendable:
            self.transport.resumeProducing()

    def pauseProducing(self) -> None:
        """The other end does not read what it is sent: then its pings are not read either."""
        self.hold("unsent")

    def resumeProducing(self) -> None:
        """It does again."""
        self.release("unsent")

    def stopProducing(self) -> None:
        """The connection is gone."""

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        if isBinary:
            self.receiver.received(payload)
        else:
            self.close(BAD_DATA, "only binary messages")

    def onPing(self, payload: bytes) -> None:
        self.receiver.ping_received(payload)

    def onPong(self, payload: bytes) -> None:
        self.receiver.pong_received(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:
        self._patience_over()
        if not self._told:
            self._told = True
            why = self._why(code, reason)
            self._drop_data()
            self._out = None
            forget_unsent(self.transport)
            self.receiver.lost(why)

    def _why(self, code: int | None, reason: str | None) -> str:
        return reason or f"connection closed ({code or 'no code'})"

    # --- outbound ---

    @property
    def sendable(self) -> bool:
        """Messages can be sent."""
        return self._opened and self.state == WebSocketServerProtocol.STATE_OPEN

    def _write(self, first: int, data: bytes) -> None:
        if not self.sendable:
            return
        frame = frames.encode(first, data, os.urandom(4) if self.masked_here else None)
        if self._out is None:
            self._out = [frame]
            self.turn.add(self)
        else:
            self._out.append(frame)

    def flush(self) -> None:
        """For :class:`~dmsg.net.turn.TurnFlush`."""
        out, self._out = self._out, None
        if out and self.sendable:
            self.transport.write(b"".join(out))
            if self.unsent > MAX_UNSENT:
                self.abort()  # who sends pings and does not read the answers

    def send(self, data: bytes) -> None:
        """A binary message; it leaves at the end of the reactor turn."""
        self._write(frames.BINARY, data)

    def ping(self, payload: bytes) -> None:
        """At most 125 bytes."""
        self._write(frames.PING, payload)

    def pong(self, payload: bytes) -> None:
        """The answer to a ping; who reads none of them gets no more."""
        if not self._bounded and self.transport is not None and (queued(self.transport) or 0) > MAX_UNREAD_PONGS:
            return
        self._write(frames.PONG, payload)

    def close(self, code: int = NORMAL, why: str = "") -> None:
        """Send what there is, then say good-bye."""
        if self._opened and self.state == WebSocketServerProtocol.STATE_OPEN:
            self._wake()
            self.flush()
            self._give_up_after(CLOSE_TIMEOUT)
            self.sendCloseFrame(code, why.encode()[:100], False)  # type: ignore[attr-defined]
        elif self.state != WebSocketServerProtocol.STATE_CLOSED:
            self.abort()

    def forget(self) -> None:
        """Read nothing more, and let go of what has come of a message."""
        self.hold("over")
        self._behind.clear()
        self._feeding = None
        self._drop_data()

    def _drop_data(self) -> None:
        """Autobahn keeps it for as long as there is the object, and that is part of a circle."""
        for name in ("message_data", "frame_data", "data"):
            if name in self.__dict__:
                self.__dict__[name] = b"" if name == "data" else []
        if self._frames is not None:
            self._frames = frames.Frames(not self.masked_here, MAX_MESSAGE)

    def abort(self) -> None:
        """Drop the connection."""
        if self.transport is not None:
            self.transport.abortConnection()


class _ServerSocket(Socket, WebSocketServerProtocol):  # type: ignore[misc]
    _bounded = True


class _QuickSocket(_ServerSocket):
    """A server's end whose handshake was answered here; autobahn gets to know of it when there is something to do.

    It would parse again what Twisted has parsed, copy thirty options, and
    format all that for a log that nobody reads: three quarters of what a
    connection costs a relay.
    """

    CONFIG_ATTRS: list[str] = []
    _asleep = True

    def __init__(self) -> None:
        """Autobahn's own is called when it is woken."""

    def take_over(self, transport: Any, key: bytes) -> None:
        """Answer an upgrade with 101 and go on.  :param key: the header Sec-WebSocket-Key."""
        self.transport = transport
        self.connected = 1
        tune(transport)
        accept = b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())
        write_now(
            transport,
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n",
        )
        self.state = WebSocketServerProtocol.STATE_OPEN
        self._opened = True
        self._behind = deque()
        self._frames = frames.Frames(True, MAX_MESSAGE)
        # the HTTP channel had the place
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
        self.websocket_extensions: list[Any] = []
        self.websocket_extensions_in_use: list[Any] = []
        self.websocket_protocol_in_use = None

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._feed_all()
        if self._asleep:
            self.state = WebSocketServerProtocol.STATE_CLOSED
            self.onClose(False, None, "connection was closed uncleanly")
        else:
            super().connectionLost(reason)


class _ClientSocket(Socket, WebSocketClientProtocol):  # type: ignore[misc]
    masked_here = True

    def _why(self, code: int | None, reason: str | None) -> str:
        why = super()._why(code, reason)
        head, blank, body = bytes(getattr(self, "data", b"") or b"").partition(b"\r\n\r\n")
        if not self._opened and blank and head.startswith(b"HTTP/1.1 ") and body:
            # what the relay says of the token is in the body
            status = head[9:12].decode("latin-1")
            return f"{status}: {' '.join(body[:200].decode('utf-8', 'replace').split())}"
        return why


_OPTIONS = {
    "maxFramePayloadSize": MAX_MESSAGE,
    "maxMessagePayloadSize": MAX_MESSAGE,
    # autobahn's timers outlive their connections; Socket has its own
    "openHandshakeTimeout": 0,
    "closeHandshakeTimeout": 0,
    "tcpNoDelay": True,
    "autoPingInterval": 0,
}


_S = TypeVar("_S", bound=_ServerSocket)


def _nobody() -> None:
    """Nobody counts it."""


class UpgradeResource:
    """Turns HTTP requests into sockets."""

    def __init__(self, reactor: IReactorTime, turn: TurnFlush) -> None:
        self._factory = WebSocketServerFactory(reactor=reactor, server="")
        self._factory.setProtocolOptions(
            **_OPTIONS, utf8validateIncoming=False, webStatus=False, serveFlashSocketPolicy=False
        )
        self._factory.setProtocolOptions(allowedOrigins=["*"], allowNullOrigin=True)
        self._factory.noisy = False
        self._resource = WebSocketResource(self._factory)
        # its options, once for all connections
        options = {name: getattr(self._factory, name) for name in WebSocketServerProtocol.CONFIG_ATTRS}
        self._quick: type[_QuickSocket] = type("_Socket", (_QuickSocket,), options)
        self._turn = turn
        self._reactor = reactor
        self._share = Share(reactor)

    def upgrade(self, request: Request, receiver: Receiver) -> Any:
        """Answer ``request`` with 101; ``receiver`` gets what comes.  :returns: as ``render`` does."""

        if self._is_plain(request):
            transport: Any = request.channel.transport
            getattr(transport, "request_is_taken", _nobody)()
            channel: Any = request.channel
            channel.let_go()
            channel.transport = None
            self.take(transport, request.getHeader(b"sec-websocket-key") or b"", receiver)
            transport.resumeProducing()  # the channel had paused it while the request was looked at
            return NOT_DONE_YET

        def build(addr: IAddress | None) -> _ServerSocket:
            return self._build(_ServerSocket, receiver)

        getattr(request.channel.transport, "request_is_taken", _nobody)()
        channel = request.channel
        channel.let_go()
        self._factory.buildProtocol = build  # type: ignore[method-assign]
        return self._resource.render(request)

    def _build(self, kind: type[_S], receiver: Receiver) -> _S:
        socket = kind()
        socket.factory = self._factory
        socket.receiver, socket.turn, socket.reactor = receiver, self._turn, self._reactor
        socket.share = self._share
        return socket

    def take(self, transport: Any, key: bytes, receiver: Receiver) -> None:
        """Answer an upgrade on a TCP transport with 101.  :param key: the header Sec-WebSocket-Key, as it has to be."""
        socket = self._build(self._quick, receiver)
        transport.protocol = socket
        socket.take_over(transport, key)

    @staticmethod
    def _is_plain(request: Request) -> bool:
        """An upgrade about which there is nothing to ask; all others, and those over TLS, are autobahn's."""
        transport: Any = request.channel.transport
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


def connect(reactor: IReactorTime, url: str, query: str, receiver: Receiver, turn: TurnFlush) -> Deferred[Any]:
    """Open ``url`` with a query; ``receiver`` is told of everything.

    :param url: ``ws://HOST[:PORT]`` or ``wss://...``.
    :returns: fires with the socket when the TCP connection is there; cancelling gives it up.
    """
    factory = WebSocketClientFactory(f"{url.rstrip('/')}/?{query}", reactor=reactor)
    factory.setProtocolOptions(**_OPTIONS, serverConnectionDropTimeout=0)
    factory.noisy = False

    def build(addr: IAddress | None) -> _ClientSocket:
        socket = _ClientSocket()
        socket.factory = factory
        socket.receiver, socket.turn, socket.reactor = receiver, turn, reactor
        return socket

    factory.buildProtocol = build  # type: ignore[method-assign]
    endpoint: Any = HostnameEndpoint(reactor, factory.host, factory.port, timeout=HANDSHAKE_TIMEOUT)
    if factory.isSecure:
        endpoint = wrapClientTLS(optionsForClientTLS(factory.host), endpoint)
    connecting: Deferred[Any] = endpoint.connect(factory)
    return connecting
