"""Clients behind a real nginx that closes silent connections after a second: ``make long WHICH=operate``."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor, ssl
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, connectProtocol, wrapClientTLS
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.net.carriers import transport
from dmsg.net.links.link import HANDSHAKE_TIMEOUT
from dmsg.v2019 import pings
from tests.net.test_carriers import NginxCase
from tests.support import asynchronous

READ_TIMEOUT = 1
"""Seconds after which nginx closes a connection on which the server sends nothing."""
OFTEN, NEVER = READ_TIMEOUT / 4, 3600.0
"""Seconds between the pings of a client."""
PERIODS = 3
"""Number of timeouts in a row that a client has to survive."""


class Silent(Protocol):
    """Websocket on which nothing is sent after the request."""

    def __init__(self) -> None:
        self.received = b""
        self.ended: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(  # type: ignore[union-attr]
            b"GET /dmsg HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.ended.callback(None)


class ReadTimeoutTests(NginxCase):
    """``proxy_read_timeout`` of nginx, 60 seconds by default, and a client of a websocket."""

    async def start_network(self, *, websocket_pings: float, pings_of_frames: float) -> tuple[int, Any, Any]:
        """Start a network behind nginx; return nginx's port, the client, and its session with the server.

        :param websocket_pings: seconds between the pings of the client's websocket.
        :param pings_of_frames: seconds between the PINGs of the client's session.
        """
        self.patch(transport, "PING_INTERVAL", websocket_pings)
        self.patch(pings, "PING_INTERVAL", pings_of_frames)
        url = await self.start_discovery()
        port, inside = await self.start_nginx(read_timeout=READ_TIMEOUT)
        await self.start_server(
            f"--listen=tcp:{inside}:interface=127.0.0.1",
            f"--discovery={url}",
            f"--public-address=127.0.0.1:{port}",
            f"--carrier=wss:{port}",
            "--trusted-proxy=127.0.0.1",
        )
        client = await self.start_client(url, min_servers=1)
        (session,) = client._set.sessions()
        self.assertEqual(str(session.carrier), f"wss:{port}")
        return port, client, session

    async def pass_timeout(self, port: int) -> None:
        """Wait until nginx has closed a silent connection."""
        silent = Silent()
        tcp = HostnameEndpoint(reactor, "127.0.0.1", port)
        await connectProtocol(wrapClientTLS(ssl.CertificateOptions(verify=False), tcp), silent)
        began = reactor.seconds()
        await silent.ended
        self.assertIn(b" 101 ", silent.received)
        self.assertLess(reactor.seconds() - began, HANDSHAKE_TIMEOUT, "the server has closed the connection, not nginx")

    async def survives(self, **intervals: float) -> None:
        port, client, session = await self.start_network(**intervals)
        for _ in range(PERIODS):
            await self.pass_timeout(port)
            self.assertEqual(client._set.sessions(), [session])

    @asynchronous
    async def test_pings_of_the_websocket_keep_the_connection(self) -> None:
        await self.survives(websocket_pings=OFTEN, pings_of_frames=NEVER)

    @asynchronous
    async def test_pings_of_the_session_keep_the_connection(self) -> None:
        await self.survives(websocket_pings=NEVER, pings_of_frames=OFTEN)

    @asynchronous
    async def test_without_pings_nginx_closes_the_connection(self) -> None:
        """Otherwise the other tests would show nothing."""
        _, client, session = await self.start_network(websocket_pings=NEVER, pings_of_frames=NEVER)
        await self.until(lambda: session not in client._set.sessions())
