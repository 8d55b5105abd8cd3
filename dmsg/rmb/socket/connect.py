"""Client end of a websocket: connects to a relay and performs the opening handshake."""

from __future__ import annotations

from typing import cast

from autobahn.twisted.websocket import (
    WebSocketClientFactory,
    WebSocketClientProtocol,
)
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.interfaces import IAddress, IReactorTime, IStreamClientEndpoint
from twisted.internet.ssl import optionsForClientTLS

from dmsg.base.printable import MAX_PEER_TEXT, shorten
from dmsg.net.flush import TurnFlush
from dmsg.net.outgoing import host_endpoint
from dmsg.rmb.socket.websocket import HANDSHAKE_TIMEOUT, OPTIONS, Receiver, Socket


class _ClientSocket(Socket, WebSocketClientProtocol):  # type: ignore[misc]
    masked_here = True

    def _close_reason(self, code: int | None, reason: str | None) -> str:
        why = super()._close_reason(code, reason)
        head, blank, body = bytes(getattr(self, "data", b"") or b"").partition(b"\r\n\r\n")
        if not self._opened and blank and head.startswith(b"HTTP/1.1 ") and body:
            # The body of the refusal becomes the error text, because it states why the relay refuses the token.
            status = head[9:12].decode("latin-1")
            return f"{status}: {shorten(body[:2000].decode('utf-8', 'replace'), MAX_PEER_TEXT)}"
        return why


def connect(reactor: IReactorTime, url: str, query: str, receiver: Receiver, turn: TurnFlush) -> Deferred[Socket]:
    """Open a websocket to ``url`` with a query string. All events of the socket go to ``receiver``.

    :param url: URL of the relay, ``ws://HOST[:PORT]`` or ``wss://...``.
    :returns: Deferred that fires with the socket when TCP is connected. Cancelling it cancels the connection attempt.
    """
    factory = WebSocketClientFactory(f"{url.rstrip('/')}/?{query}", reactor=reactor)
    factory.setProtocolOptions(**OPTIONS, serverConnectionDropTimeout=0)
    factory.noisy = False

    def build(addr: IAddress | None) -> _ClientSocket:
        socket = _ClientSocket()
        socket.factory = factory
        socket.receiver, socket.turn, socket.reactor = receiver, turn, reactor
        return socket

    factory.buildProtocol = build  # type: ignore[method-assign]
    endpoint: IStreamClientEndpoint = host_endpoint(reactor, factory.host, factory.port, HANDSHAKE_TIMEOUT)
    if factory.isSecure:
        endpoint = wrapClientTLS(optionsForClientTLS(factory.host), endpoint)
    return cast("Deferred[Socket]", endpoint.connect(factory))
