"""HTTP at the port of a server: upgrades a connection to a websocket for a link, or sends a short answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from twisted.internet.interfaces import IReactorTime

from dmsg.errors import DropReason
from dmsg.net.carriers.requests import Request, answer
from dmsg.net.carriers.transport import TCPTransport, WebSocketTransport
from dmsg.net.links.link import Link
from dmsg.net.socketopts import write_now
from dmsg.net.websocket.upgrade import switching


class HTTPFirst:
    """Receiver of the first bytes of a connection that begins with an HTTP request.

    The handshake timeout of the link also limits the request.

    :param requested: called with the link and the X-Forwarded-For header (or None) of a websocket request; returns the
        reason to refuse the client, or None.
    """

    def __init__(self, reactor: IReactorTime, requested: Callable[[Link, bytes | None], DropReason | None]) -> None:
        self._reactor = reactor
        self._requested = requested
        self._request = Request()

    def received(self, link: Link, data: bytes) -> bool:
        """Process bytes of the request. Return True, so that the link does not pass them to the handshake."""
        request = self._request
        request.feed(data)
        upgrade = request.upgrade
        if upgrade is not None:
            refusal = self._requested(link, upgrade.headers.get(b"x-forwarded-for"))
            if refusal is not None:
                self._end(link, answer(503), refusal)
                return True
            write_now(link.transport, switching(upgrade.key))
            tcp = cast(TCPTransport, link.transport)
            link.first_bytes = None
            link.enter_websocket(WebSocketTransport(self._reactor, tcp, client=False, encrypted=False), upgrade.rest)
        elif request.answer:
            self._end(link, request.answer, DropReason.HTTP_REQUEST)
        return True

    def _end(self, link: Link, data: bytes, reason: DropReason) -> None:
        write_now(link.transport, data)
        link.close(reason)
