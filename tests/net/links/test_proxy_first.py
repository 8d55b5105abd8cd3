"""Servers whose proxies speak the PROXY protocol."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from twisted.internet.protocol import Protocol

from dmsg.errors import DropReason
from dmsg.net.links.link import HANDSHAKE_TIMEOUT
from dmsg.net.links.trusted_proxies import TrustedProxies
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import CLOSE, OK
from tests.net.carriers.test_proxy_header import V4, version_2
from tests.net.links.support import Carried, LinkCase
from tests.support import SERVER_KEY

PROXY, WEB = "10.0.0.1", "10.0.0.2"
CLIENT = b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 443\r\n"
OTHER = b"PROXY TCP6 2001:db8::9 ::1 4711 443\r\n"


class Behind(Protocol):
    """Connection of a proxy, which sends a header and then passes on what its client sends."""

    def __init__(self, client: Any, header: bytes) -> None:
        self.client, self.header = client, header
        self.closed = False

    def connectionMade(self) -> None:
        self.write(self.header)
        self.client.makeConnection(self)

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def dataReceived(self, data: bytes) -> None:
        self.client.dataReceived(data)

    def connectionLost(self, reason: Any = None) -> None:
        self.closed = True
        self.client.connectionLost(reason)


class ProxyFirstTests(LinkCase):
    """A server that expects the header from one proxy."""

    def setUp(self) -> None:
        super().setUp()
        self.factory.proxies = TrustedProxies((ip_network(WEB),), (ip_network(PROXY),))
        self.told: list[str] = []
        self.patch(self.factory.strangers, "log_refusal", lambda address, reason, detail="": self.told.append(address))

    def come(self, header: bytes, host: str = PROXY, *, websocket: bool = False) -> tuple[Any, Any]:
        """Return the client and the server's link."""
        client = RawClient(self.key(), SERVER_KEY.public)
        inner = Carried(client, b"X-Forwarded-For: 198.51.100.7\r\n") if websocket else client
        return client, self.join(Behind(inner, header), host)

    def up(self, client: RawClient) -> bool:
        return [frame.type for frame in client.take()] == [OK]

    def test_both_versions_name_the_client_of_plain_tcp_and_of_a_websocket(self) -> None:
        for header, address in ((CLIENT, "203.0.113.9"), (version_2(0x11, V4), "203.0.113.9"), (OTHER, "2001:db8::9")):
            for websocket in (False, True):
                with self.subTest(header=header, websocket=websocket):
                    client, link = self.come(header, websocket=websocket)
                    self.assertTrue(self.up(client))
                    # The client wrote X-Forwarded-For itself, and is no proxy.
                    self.assertEqual(link.address, address)
                    link.abort(DropReason.STALLED)
                    self.network.settle()

    def test_a_header_may_come_byte_by_byte(self) -> None:
        for header in (CLIENT, version_2(0x11, V4)):
            link = self.join(Protocol(), PROXY)
            for at in range(len(header)):
                self.assertEqual(link.address, PROXY)
                link.dataReceived(header[at : at + 1])
            self.assertEqual(link.address, "203.0.113.9")
            self.assertIsNone(link.ended_for)

    def test_a_web_server_behind_the_proxy_names_the_client(self) -> None:
        client, link = self.come(b"PROXY TCP4 10.0.0.2 10.0.0.1 4711 443\r\n", websocket=True)
        self.assertTrue(self.up(client))
        self.assertEqual((link.address, self.factory.counted_as(link)), ("198.51.100.7", "198.51.100.7"))

    def test_connections_of_the_proxy_itself_and_of_unknown_clients_are_not_limited(self) -> None:
        self.factory.limits = Limits(max_per_address=1, max_connections=100)
        for header in (version_2(0, b"", command=0), b"PROXY UNKNOWN\r\n", version_2(0x31, bytes(216))) * 3:
            client, link = self.come(header)
            self.assertTrue(self.up(client))
            self.assertEqual(link.address, PROXY)

    def test_limits_count_at_the_clients_address(self) -> None:
        self.factory.limits = Limits(max_per_address=2)
        self.assertTrue(all(self.up(self.come(CLIENT)[0]) for _ in range(2)))
        client, _ = self.come(CLIENT)
        self.assertEqual([frame.type for frame in client.take()], [CLOSE])
        self.assertTrue(self.up(self.come(OTHER)[0]))
        self.assertEqual(self.told, ["203.0.113.9"])
        self.patch(self.factory, "_may_be_notified", lambda refusal, block: False)
        client, _ = self.come(CLIENT)
        self.assertTrue(client.transport is None or client.transport.closed)
        self.assertEqual(self.factory.relay.drops[DropReason.TOO_MANY_FROM_ADDRESS], 2)

    def test_nobody_else_may_send_a_header(self) -> None:
        link = self.join(Behind(Protocol(), CLIENT + bytes(99)), "198.51.100.99")
        self.assertEqual((link.address, link.ended_for), ("198.51.100.99", DropReason.HTTP_REQUEST))

    def test_a_connection_of_the_proxy_without_a_header_ends_for_a_reason_of_its_own(self) -> None:
        for header in (b"", b"GET / HTTP/1.1\r\n\r\n", CLIENT.lower(), version_2(0x41, V4)):
            with self.subTest(header=header):
                _, link = self.come(header)
                self.assertEqual(link.ended_for, DropReason.BAD_PROXY_HEADER)
        self.assertEqual(self.factory.relay.drops[DropReason.BAD_PROXY_HEADER], 4)
        self.assertEqual(set(self.told), {f"behind the proxy {PROXY}"})
        self.assertEqual((len(self.factory._counts), self.factory._unnamed), (0, set()))

    def test_an_unfinished_header_ends_with_the_time_for_the_handshake(self) -> None:
        behind = Behind(Protocol(), CLIENT[:20])
        link = self.join(behind, PROXY)
        self.network.clock.advance(HANDSHAKE_TIMEOUT)
        self.network.settle()
        self.assertTrue(behind.closed)
        self.assertEqual(link.ended_for, DropReason.HANDSHAKE_TIMEOUT)
