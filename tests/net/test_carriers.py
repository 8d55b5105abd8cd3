"""Servers that only a websocket, or only TLS, reaches: whole entities over real TCP, behind gateways of the tests."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, connectProtocol
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, ProcessProtocol, Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.buckets import RateLimit
from dmsg.cli.carrier_text import describe_carrier
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.errors import DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.client import Client as MessagingClient
from dmsg.net.blocks import blocks_of
from dmsg.net.carriers import transport
from dmsg.net.carriers.endpoint import over_carrier
from dmsg.net.carriers.names import Carrier
from dmsg.net.carriers.websocket import WebSocketError
from dmsg.net.listening import open_port
from dmsg.net.websocket.byte_stream import NORMAL, close_frame
from dmsg.tap import messaging as messaging_tap
from dmsg.testing.raw_client import RawClient
from dmsg.v2019 import pings
from dmsg.v2019.core.wire import CLOSE, OK, PONG, encode_frame
from tests.net.links.support import Carried
from tests.net.nginx import STREAM_MODULE, part, tcp_proxy, web_server
from tests.net.support import LOOPBACK, TIMEOUT, EntityCase
from tests.support import Accepting, Recorder, asynchronous

SILENCE_TIMEOUT = 60.0
"""Seconds after which nginx, by default, and many NATs cut a connection on which nothing is sent."""


class Gateway(Protocol):
    """Connection of a gateway, which passes on what its network allows."""

    def __init__(self, factory: GatewayFactory) -> None:
        self.gateway = factory
        self.kept = b""
        self.inner: Inner | None = None

    def dataReceived(self, data: bytes) -> None:
        if self.inner is not None:
            self.inner.transport.write(data)  # type: ignore[union-attr]
            return
        self.kept += data
        if self.gateway.web_only and not self.kept.startswith(b"GET "):
            self.gateway.refused += 1
            if self.gateway.answers:
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")  # type: ignore[union-attr]
                self.transport.loseConnection()  # type: ignore[union-attr]
            return
        self.gateway.passed += 1
        if self.gateway.names:
            self.kept = self.kept.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: " + self.gateway.names + b"\r\n\r\n", 1)
        self.inner = Inner(self)
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", self.gateway.port)
        self.transport.pauseProducing()  # type: ignore[union-attr]
        connectProtocol(endpoint, self.inner).addErrback(lambda _: self.transport.loseConnection())  # type: ignore

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        if self.inner is not None and self.inner.transport is not None:
            self.inner.transport.loseConnection()


class Inner(Protocol):
    """Connection of a gateway to the server behind it."""

    def __init__(self, outer: Gateway) -> None:
        self.outer = outer

    def connectionMade(self) -> None:
        self.transport.write(self.outer.gateway.header + self.outer.kept)  # type: ignore[union-attr]
        self.outer.transport.resumeProducing()  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.outer.transport.write(data)  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.outer.transport.loseConnection()  # type: ignore[union-attr]


class GatewayFactory(Factory):
    """Gateway in front of one server.

    :ivar web_only: whether only HTTP is passed on.
    :ivar answers: whether the gateway refuses everything else in words; otherwise it says nothing.
    :ivar names: client's address that it adds to each request.
    :ivar header: what it sends to the server first.
    """

    noisy = False

    def __init__(
        self, *, web_only: bool = True, answers: bool = False, names: bytes = b"", header: bytes = b""
    ) -> None:
        self.port = 0
        self.header = header
        self.web_only, self.answers, self.names = web_only, answers, names
        self.passed = self.refused = 0

    def buildProtocol(self, addr: Any) -> Gateway:
        return Gateway(self)


class Raw(Protocol):
    """Client of HTTP that keeps the answer."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.data = b""
        self.closed = False

    def connectionMade(self) -> None:
        self.transport.write(self.request)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        self.data += data

    def connectionLost(self, reason: Failure = Failure(ConnectionDone())) -> None:
        self.closed = True


def certificate() -> str:
    """Return a self-signed certificate and its key for 127.0.0.1, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + made.public_bytes(serialization.Encoding.PEM)).decode()


class CarrierCase(EntityCase):
    """A server behind a gateway at its public address, and two clients."""

    async def start_gateway(self, gateway: GatewayFactory, description: str = LOOPBACK) -> int:
        """Listen, and return the port."""
        port: Any = await open_port(reactor, description, gateway)
        self.addCleanup(port.stopListening)
        return int(port.getHost().port)

    async def start_behind(self, url: str, gateway: GatewayFactory, *options: str, tap: Any = None) -> Any:
        """Start a server whose public address is the gateway's."""
        outside = await self.start_gateway(gateway)
        more = {} if tap is None else {"tap": tap}
        web_only, gateway.web_only = gateway.web_only, False
        server = await self.start_server(
            f"--discovery={url}", f"--public-address=127.0.0.1:{outside}", *options, **more
        )
        gateway.port = server.ports[0].getHost().port
        await self.listed(url)
        # Discovery has the server's proof, so only clients are behind the gateway from now on.
        gateway.web_only = web_only
        return server

    async def listed(self, url: str) -> None:
        """Wait until discovery lists a server."""
        lookup = Lookup(reactor, url)
        while not await lookup.available_servers():
            await deferLater(reactor, 0.01)
        await lookup.close()

    async def transfer(self, alice: Any, bob: Any) -> None:
        """Send two megabytes each way."""
        accepting = Accepting(Recorder)
        bob.listen(accepting)
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        there, back = bytes(range(256)) * 8000, bytes(reversed(range(256))) * 8000
        (other,) = await self.until(lambda: accepting.built)
        sent = protocol.transport.send(there)
        await other.transport.send(back)
        await sent
        await self.until(lambda: len(other.data) == len(there) and len(protocol.data) == len(back))
        self.assertEqual(other.data, there)
        self.assertEqual(protocol.data, back)


class WebsocketTests(CarrierCase):
    """Networks that let only HTTP through."""

    @asynchronous
    async def test_a_websocket_reaches_a_server_where_plain_tcp_gets_no_answer(self) -> None:
        url, gateway = await self.start_discovery(), GatewayFactory()
        server = await self.start_behind(url, gateway)
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        await self.transfer(alice, bob)
        (session,) = alice._set.sessions()
        said = "by ws; tcp failed: no answer before the one by ws"
        self.assertEqual(describe_carrier(session.carrier, session.carriers_failed), said)
        self.assertEqual(len(server.factory.sessions), 2)
        self.assertEqual(server.drops()[DropReason.REPLACED], 0)
        self.assertGreaterEqual(gateway.refused, 2)

    @asynchronous
    async def test_a_gateway_that_answers_plain_tcp_in_http_does_not_stop_the_websocket(self) -> None:
        url, gateway = await self.start_discovery(), GatewayFactory(answers=True)
        await self.start_behind(url, gateway)
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        await self.transfer(alice, bob)
        (session,) = alice._set.sessions()
        self.assertEqual(session.carrier.kind, "ws")
        self.assertEqual([carrier.kind for carrier in session.carriers_failed], ["tcp"])

    @asynchronous
    async def test_channels_of_the_messaging_system_go_through_a_websocket(self) -> None:
        url, gateway = await self.start_discovery(), GatewayFactory()
        await self.start_behind(url, gateway, tap=messaging_tap)
        alice = await self.start_client(url, family=MessagingClient, min_servers=1)
        bob = await self.start_client(url, family=MessagingClient, min_servers=1)
        await self.transfer(alice, bob)

    @asynchronous
    async def test_plain_tcp_is_used_where_it_works(self) -> None:
        url, gateway = await self.start_discovery(), GatewayFactory(web_only=False)
        await self.start_behind(url, gateway)
        alice = await self.start_client(url, min_servers=1)
        self.assertEqual([session.carrier.kind for session in alice._set.sessions()], ["tcp"])


class PingIntervalTests(SynchronousTestCase):
    """Default intervals of pings, behind the proxies and NATs of others."""

    def test_pings_are_more_frequent_than_timeouts_of_proxies(self) -> None:
        self.assertLess(transport.PING_INTERVAL, SILENCE_TIMEOUT)
        # The next PING is sent an interval after the PONG, so the wait for a slow PONG comes on top.
        self.assertLess(pings.PING_INTERVAL + pings.PING_TIMEOUT, SILENCE_TIMEOUT)


class CloseTests(CarrierCase):
    """Close frames."""

    @asynchronous
    async def test_a_client_that_closes_while_much_is_unsent_leaves_the_server(self) -> None:
        server = await self.start_server()
        client = RawClient(SecKey.generate(), server._key.public)
        carried = Carried(client, b"")
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", server.ports[0].getHost().port), carried)
        self.addCleanup(lambda: carried.closed or carried.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.frames)
        carried.transport.pauseProducing()  # type: ignore[union-attr]
        (session,) = server.factory.sessions
        session.link.send(encode_frame(PONG, 0, bytes(60_000)) * 200)
        session.link.flush()
        self.assertTrue(session.link.congested)
        carried.transport.write(close_frame(NORMAL, b"abcd"))  # type: ignore[union-attr]
        await self.until(lambda: session.link.in_websocket.reader.closed)
        carried.transport.resumeProducing()  # type: ignore[union-attr]
        # The client itself does not close TCP.
        await self.until(lambda: carried.closed)
        self.assertEqual(len(server.factory.sessions), 0)
        self.assertEqual(len(client.frames), 201)


class SecureTests(CarrierCase):
    """Servers behind a proxy with TLS."""

    async def start_tls(self, gateway: GatewayFactory) -> int:
        path = self.mktemp()
        with open(path, "w") as file:
            file.write(certificate())
        return await self.start_gateway(gateway, f"ssl:0:privateKey={path}:interface=127.0.0.1")

    @asynchronous
    async def test_a_proxy_with_tls_on_another_port_carries_websockets(self) -> None:
        url = await self.start_discovery()
        outer, blocked = GatewayFactory(names=b"203.0.113.9, 198.51.100.7"), GatewayFactory()
        port = await self.start_tls(outer)
        server = await self.start_behind(url, blocked, f"--carrier=wss:{port}", "--trusted-proxy=127.0.0.1")
        outer.port, blocked.port = server.ports[0].getHost().port, 1
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        await self.transfer(alice, bob)
        self.assertEqual([str(session.carrier) for session in alice._set.sessions()], [f"wss:{port}"])
        # The proxy is trusted, so the last address that it names counts, and no other.
        self.assertEqual({session.link.address for session in server.factory.sessions}, {"198.51.100.7"})

    @asynchronous
    async def test_a_server_is_reached_and_proved_at_a_port_with_tls_alone(self) -> None:
        for kind, web_only in (("wss", True), ("tls", False)):
            with self.subTest(kind=kind):
                url = await self.start_discovery()
                gateway = GatewayFactory(web_only=web_only)
                port = await self.start_tls(gateway)
                server = await self.start_server(
                    f"--discovery={url}", f"--public-address=127.0.0.1:{port}", f"--carrier={kind}:{port}"
                )
                gateway.port = server.ports[0].getHost().port
                await self.listed(url)
                alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
                await self.transfer(alice, bob)
                self.assertEqual([str(session.carrier) for session in alice._set.sessions()], [f"{kind}:{port}"])

    @asynchronous
    async def test_an_address_named_by_a_stranger_is_not_believed(self) -> None:
        url, gateway = await self.start_discovery(), GatewayFactory(names=b"198.51.100.7")
        server = await self.start_behind(url, gateway)
        await self.start_client(url, min_servers=1)
        self.assertEqual({session.link.address for session in server.factory.sessions}, {"127.0.0.1"})


_NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class NginxCase(CarrierCase):
    """Runs nginx."""

    if _NGINX is None:
        skip = "nginx is not installed"

    def free_port(self) -> int:
        """Return a port on which nothing listens."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            return int(free.getsockname()[1])

    async def start_nginx(self, *, stream: bool = False, read_timeout: int = 60) -> tuple[int, int]:
        """Start nginx; return its port, and the port at which it looks for the server.

        :param stream: whether it is a proxy of TCP, and no web server.
        :param read_timeout: seconds after which the web server closes a connection on which the server sends nothing.
        """
        assert _NGINX is not None
        home = Path(self.mktemp()).absolute()
        port, inside = self.free_port(), self.free_port()
        home.mkdir()
        pem = home / "pem"
        pem.write_text(certificate())
        listen, server = f"127.0.0.1:{port}", f"127.0.0.1:{inside}"
        if stream:
            text = tcp_proxy(home, listen, server)
        else:
            parts = f"proxy_read_timeout {read_timeout}s;\n", part("server", {"127.0.0.1:8080": server})
            text = web_server(home, listen, pem, *parts)
        (home / "conf").write_text(text)
        ended: Deferred[None] = Deferred()
        nginx = reactor.spawnProcess(Ended(ended), _NGINX, ["nginx", "-c", str(home / "conf"), "-p", str(home)])
        self.addCleanup(lambda: ended)
        self.addCleanup(nginx.signalProcess, "TERM")
        await self.until((home / "pid").exists)
        return port, inside


class NginxTests(NginxCase):
    """nginx as a web server, as contrib/nginx configures it."""

    @asynchronous
    async def test_nginx_with_tls_carries_links(self) -> None:
        # Discovery looks at the server once, so nginx has to listen before.
        url = await self.start_discovery()
        port, inside = await self.start_nginx()
        server = await self.start_server(
            f"--listen=tcp:{inside}:interface=127.0.0.1",
            f"--discovery={url}",
            f"--public-address=127.0.0.1:{port}",
            f"--carrier=wss:{port}",
            "--trusted-proxy=127.0.0.1",
        )
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        await self.transfer(alice, bob)
        self.assertEqual([str(session.carrier) for session in alice._set.sessions()], [f"wss:{port}"])
        self.assertEqual({session.link.address for session in server.factory.sessions}, {"127.0.0.1"})

    async def come(self, server: Any, port: int, source: str, key: PubKey | None = None) -> RawClient:
        """Connect a client through nginx from an address, and wait for the server's first frame or the end."""
        client = RawClient(SecKey.generate(), key or server._key.public)
        tcp = TCP4ClientEndpoint(reactor, "127.0.0.1", port, bindAddress=(source, 0))
        endpoint = over_carrier(reactor, tcp, "127.0.0.1", port, Carrier("wss", port), encrypted=True, timeout=TIMEOUT)
        with contextlib.suppress(WebSocketError):  # The server may refuse the request itself.
            await endpoint.connect(Factory.forProtocol(lambda: client))
            self.addCleanup(lambda: client.closed or client.transport.abortConnection())  # type: ignore[union-attr]
            await self.until(lambda: client.frames or client.closed)
        return client

    @asynchronous
    async def test_clients_behind_nginx_are_limited_by_their_own_addresses(self) -> None:
        port, inside = await self.start_nginx()
        server = await self.start_server(
            f"--listen=tcp:{inside}:interface=127.0.0.1", "--trusted-proxy=127.0.0.1", "--max-per-address=2"
        )
        came = [await self.come(server, port, source) for source in ("127.0.0.2",) * 3 + ("127.0.0.3",)]
        self.assertEqual([one.frames[0].type for one in came], [OK, OK, CLOSE, OK])
        self.assertEqual(server.drops()[DropReason.TOO_MANY_FROM_ADDRESS], 1)
        # A client whose handshakes fail is refused, and nobody else is.
        # The rate is so low that a slow machine gains no further attempt during the test.
        server.factory._failures = RateLimit(0.001, 3.0, blocks_of)
        for _ in range(3):
            await self.come(server, port, "127.0.0.4", SecKey.generate().public)
        refused = await self.come(server, port, "127.0.0.4")
        self.assertEqual(refused.frames, [])
        await self.until(lambda: server.drops()[DropReason.FAILED_BEFORE] == 1)
        for source in ("127.0.0.5", "127.0.0.1"):
            self.assertEqual((await self.come(server, port, source)).frames[0].type, OK)


class ProxyProtocolTests(CarrierCase):
    """Servers behind proxies of TCP, which name clients by the PROXY protocol."""

    @asynchronous
    async def test_links_through_a_proxy_have_the_addresses_of_their_clients(self) -> None:
        url, gateway = (
            await self.start_discovery(),
            GatewayFactory(web_only=False, header=b"PROXY TCP4 203.0.113.9 127.0.0.1 4711 443\r\n"),
        )
        # Discovery and the server itself connect through the gateway, too.
        outside = await self.start_gateway(gateway)
        with socket.create_server(("127.0.0.1", 0)) as free:
            gateway.port = int(free.getsockname()[1])
        server = await self.start_server(
            f"--listen=tcp:{gateway.port}:interface=127.0.0.1",
            f"--discovery={url}",
            f"--public-address=127.0.0.1:{outside}",
            "--proxy-protocol=127.0.0.1",
        )
        await self.listed(url)
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        await self.transfer(alice, bob)
        self.assertEqual({session.link.address for session in server.factory.sessions}, {"203.0.113.9"})
        # A client that comes to the port itself is taken for the proxy, whose header is missing.
        raw = Raw(b"\0")
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", gateway.port), raw)
        await self.until(lambda: raw.closed)
        self.assertEqual(server.drops()[DropReason.BAD_PROXY_HEADER], 1)


class NginxStreamTests(NginxCase):
    """nginx as a proxy of TCP, as contrib/nginx configures it."""

    if not STREAM_MODULE.exists():
        skip = "nginx has no module for streams"

    async def come(self, server: Any, port: int, source: str) -> RawClient:
        """Connect a client through nginx from an address, and wait for the server's first frame."""
        client = RawClient(SecKey.generate(), server._key.public)
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port, bindAddress=(source, 0)), client)
        self.addCleanup(lambda: client.closed or client.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.frames)
        return client

    @asynchronous
    async def test_clients_have_their_own_addresses_and_limits(self) -> None:
        port, inside = await self.start_nginx(stream=True)
        server = await self.start_server(
            f"--listen=tcp:{inside}:interface=127.0.0.1", "--proxy-protocol=127.0.0.1", "--max-per-address=2"
        )
        came = [await self.come(server, port, source) for source in ("127.0.0.2",) * 3 + ("127.0.0.3",)]
        self.assertEqual([one.frames[0].type for one in came], [OK, OK, CLOSE, OK])
        links = {session.link.address for session in server.factory.sessions}
        self.assertEqual(links, {"127.0.0.2", "127.0.0.3"})


class Ended(ProcessProtocol):
    """Process whose end fires a Deferred."""

    def __init__(self, ended: Deferred[None]) -> None:
        self.ended = ended

    def errReceived(self, data: bytes) -> None:
        """Keep quiet: nginx warns that it does not run as root, or that its log cannot be opened."""

    def processEnded(self, reason: Failure) -> None:
        self.ended.callback(None)


class BrowserTests(CarrierCase):
    """HTTP requests at the port of a server."""

    async def ask(self, server: Any, request: bytes) -> bytes:
        """Return the whole answer."""
        raw = Raw(request)
        endpoint = HostnameEndpoint(reactor, "127.0.0.1", server.ports[0].getHost().port)
        await connectProtocol(endpoint, raw)
        await self.until(lambda: raw.closed)
        return raw.data

    @asynchronous
    async def test_requests_that_are_no_upgrade_get_an_answer_and_are_counted(self) -> None:
        server = await self.start_server()
        for request, status in (
            (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
            (b"GET /index.php HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
            (b"GET /dmsg HTTP/1.1\r\nHost: a\r\n\r\n", b"426"),
            (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", b"405"),
            (b"SSH-2.0-OpenSSH_9.9\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nA: " + b"a" * 9000 + b"\r\n\r\n", b"431"),
        ):
            with self.subTest(request=request[:20]):
                answer = await self.ask(server, request)
                self.assertEqual(answer.split(b" ")[1], status)
                head, _, body = answer.partition(b"\r\n\r\n")
                self.assertIn(b"Content-Length: %d\r\n" % len(body), head)
        self.assertIn(b"relays encrypted", await self.ask(server, b"GET / HTTP/1.0\r\n\r\n"))
        self.assertEqual((await self.ask(server, b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")).partition(b"\r\n\r\n")[2], b"")
        self.assertEqual(server.drops()[DropReason.HTTP_REQUEST], 8)
        self.assertEqual(server.factory.handshakes, 0)

    @asynchronous
    async def test_a_web_page_cannot_open_a_websocket(self) -> None:
        """A browser sends Origin; its user did not ask to be a client."""
        server = await self.start_server()
        request = (
            b"GET /dmsg HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nOrigin: http://b\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self.assertEqual((await self.ask(server, request)).split(b" ")[1], b"426")
