"""Client side of a websocket upgrade: sends the HTTP request, and checks the answer."""

from __future__ import annotations

import os
from base64 import b64encode
from typing import NoReturn, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.printable import shorten
from dmsg.errors import DropReason, HandshakeError
from dmsg.net.carriers.requests import PATH
from dmsg.net.carriers.transport import IUnpacks, TCPTransport, WebSocketTransport
from dmsg.net.protocols import Negotiation, change_protocol
from dmsg.net.websocket.byte_stream import StreamError
from dmsg.net.websocket.upgrade import MAX_HEAD, accept_of


class WebSocketError(HandshakeError):
    """Error: the server did not accept the websocket."""

    def __init__(self, text: str) -> None:
        super().__init__(text, DropReason.BAD_WEBSOCKET)


@implementer(IStreamClientEndpoint)
class WebSocketEndpoint:
    """Client endpoint that opens a websocket through another endpoint, and connects a protocol inside the websocket.

    :param host: value of the Host header, with the port unless it is the default port.
    :param encrypted: whether the protocol writes ciphertext, see
        :class:`~dmsg.net.carriers.transport.WebSocketTransport`.
    :param timeout: seconds to wait for the answer to the request.
    """

    def __init__(
        self, reactor: IReactorTime, endpoint: IStreamClientEndpoint, host: str, *, encrypted: bool, timeout: float
    ) -> None:
        self._reactor = reactor
        self._endpoint = endpoint
        self._host = host
        self._encrypted = encrypted
        self._timeout = timeout

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect the factory's protocol. The Deferred fails with :class:`WebSocketError`, or with an error of the
        other endpoint."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, wanted: IProtocolFactory) -> IProtocol:
        factory = Factory.forProtocol(lambda: _Upgrade(self._reactor, self._host, wanted, self._encrypted))
        factory.noisy = False
        upgrade = cast(_Upgrade, await self._endpoint.connect(factory))
        return await upgrade.wait(self._reactor, self._timeout)


class _Upgrade(Negotiation):
    """Protocol that requests a websocket, and then passes the connection on to the protocol inside the websocket."""

    errors = WebSocketError

    def __init__(self, reactor: IReactorTime, host: str, wanted: IProtocolFactory, encrypted: bool) -> None:
        super().__init__(wanted)
        self._reactor = reactor
        self._host = host
        self._encrypted = encrypted
        self._key = b64encode(os.urandom(16))

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(
            b"GET " + PATH + b" HTTP/1.1\r\nHost: " + self._host.encode("idna") + b"\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Key: " + self._key + b"\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )

    def _negotiate(self) -> None:
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end and len(head) <= MAX_HEAD:
            return
        self._check(head, bool(end))
        self._enter(rest)

    def _raise_late(self, seconds: float) -> NoReturn:
        raise WebSocketError(f"the request for a websocket was not answered within {seconds:g} s")

    def _lost_error(self, tls_error: str) -> WebSocketError:
        return WebSocketError(tls_error or "the connection was closed instead of becoming a websocket")

    def _check(self, head: bytes, whole: bool) -> None:
        lines = head.split(b"\r\n")
        status = lines[0].split(b" ")
        if not whole or len(status) < 2 or not status[0].startswith(b"HTTP/1."):
            raise WebSocketError("the answer to the request for a websocket is not HTTP")
        if status[1] != b"101":
            text = shorten(b" ".join(status[1:]).decode("latin-1"))
            raise WebSocketError(f"there is no websocket: the web server answered {text}")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        if headers.get(b"sec-websocket-accept") != accept_of(self._key):
            raise WebSocketError("the answer to the request for a websocket has a wrong Sec-WebSocket-Accept")

    def _enter(self, rest: bytes) -> None:
        transport = self.transport
        assert transport is not None
        protocol = self._factory.buildProtocol(transport.getPeer())
        if protocol is None:
            raise WebSocketError("connected, but the attempt was cancelled meanwhile")
        carrier = WebSocketTransport(
            self._reactor, cast(TCPTransport, transport), client=True, encrypted=self._encrypted
        )
        # A link parses the websocket frames itself, so that it can stop parsing when its time in the reactor turn is
        # used up.
        below = protocol if IUnpacks.providedBy(protocol) else _Unpacking(protocol, carrier)
        change_protocol(transport, below)
        protocol.makeConnection(carrier)  # type: ignore[arg-type]  # has what a transport has
        self.opened.callback(protocol)
        if rest:
            below.dataReceived(rest)


class _Unpacking(Protocol):
    """Protocol that parses websocket frames, and passes their payload on to another protocol."""

    def __init__(self, protocol: IProtocol, carrier: WebSocketTransport) -> None:
        self._protocol = protocol
        self._carrier = carrier

    def dataReceived(self, data: bytes) -> None:
        reader, view, start = self._carrier.reader, memoryview(data), 0
        try:
            while start < len(view):
                piece, start = reader.read(view, start, len(view))
                if piece:
                    self._protocol.dataReceived(bytes(piece))
        except StreamError:
            self._carrier.abortConnection()
            return
        self._carrier.answer()
        if reader.closed:
            self._carrier.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._carrier.stop()
        self._protocol.connectionLost(reason)
