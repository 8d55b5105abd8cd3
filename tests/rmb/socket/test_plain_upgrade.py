"""The first bytes of a connection: which are answered without an HTTP channel, and that this makes no difference."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hypothesis import example, given, strategies as st
from twisted.internet import reactor
from twisted.internet.endpoints import clientFromString, serverFromString, wrapClientTLS
from twisted.internet.protocol import Factory
from twisted.internet.ssl import CertificateOptions
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http import HTTPChannel, Request
from twisted.web.server import Site

from dmsg.base.buckets import RateLimit
from dmsg.net.web.guard import WHOLE_WITHIN, Guard
from dmsg.net.websocket import frames
from dmsg.net.websocket.upgrade import Upgrade, plain_upgrade
from dmsg.rmb.errors import Drop
from dmsg.rmb.socket.plain_upgrade import PlainUpgradeFactory
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from tests.net.test_own_pauses import let_pause, pass_time
from tests.rmb.test_relay import Lines, SocketPairCase
from tests.support import asynchronous

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
HEAD = (
    b"GET /?a.b.c HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: " + KEY + b"\r\nSec-WebSocket-Version: 13\r\n"
)
PLAIN = HEAD + b"\r\n"


def as_twisted_reads_it(data: bytes) -> Any:
    """The request that Twisted makes of these bytes, None if it makes none."""
    seen: list[Request] = []

    class Seen(Request):
        def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
            super().requestReceived(command, path, version)

        def process(self) -> None:
            seen.append(self)

    channel = HTTPChannel()
    channel.requestFactory = Seen
    transport = StringTransportWithDisconnection()
    transport.protocol = channel
    channel.makeConnection(transport)
    channel.dataReceived(data)
    return seen[0] if seen else None


class PlainTests(SynchronousTestCase):
    """Twisted reads a plain upgrade in the same way."""

    def test_upgrade_requests_of_known_clients_are_recognised(self) -> None:
        found = plain_upgrade(PLAIN)
        assert found is not None
        self.assertEqual((found.target, found.key, found.headers[b"host"]), (b"/?a.b.c", KEY, b"relay"))
        behind = plain_upgrade(PLAIN + b"\r\n\r\n")
        self.assertEqual((found.rest, behind and behind.rest), (b"", b"\r\n\r\n"))

    def test_other_requests_go_to_the_site(self) -> None:
        for data in (
            PLAIN[:-1],
            PLAIN.replace(b"/?", b"?"),
            PLAIN.replace(b"/?", b"/\t?"),
            PLAIN.replace(b"GET", b"POST"),
            PLAIN.replace(b"1.1", b"1.0"),
            PLAIN.replace(b"Host: relay\r\n", b""),
            PLAIN.replace(b"websocket", b"h2c"),
            PLAIN.replace(b"Connection: Upgrade", b"Connection: close"),
            PLAIN.replace(b"13", b"8"),
            PLAIN.replace(KEY, b"short"),
            HEAD + b"Origin: http://x\r\n\r\n",
            HEAD + b"Content-Length: 5\r\n\r\n",
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
            HEAD + b"Sec-WebSocket-Key: " + KEY + b"\r\n\r\n",
            HEAD + b" folded\r\n\r\n",
            HEAD + b"no colon\r\n\r\n",
            HEAD + b"Name : x\r\n\r\n",
            HEAD + b"X: a\nb: c\r\n\r\n",
            HEAD + b"X: " + b"x" * 8192 + b"\r\n\r\n",
        ):
            self.assertIsNone(plain_upgrade(data), data)

    @given(
        st.lists(
            st.one_of(
                st.binary(max_size=30),
                st.sampled_from([b"X-Forwarded-For: 1.2.3.4", b"host: b", b"Cookie:a=b", b"Accept: */*", b":"]),
            ),
            max_size=4,
        ),
        st.binary(max_size=20),
        st.integers(0, 6),
    )
    @example([b"X:\ty \t"], b"/?a", 0)
    def test_the_same_as_twisted(self, more: list[bytes], target: bytes, where: int) -> None:
        lines = PLAIN[:-4].split(b"\r\n")
        if target:
            lines[0] = b"GET " + target + b" HTTP/1.1"
        lines[1 + min(where, len(lines) - 1) : 1] = more
        data = b"\r\n".join(lines) + b"\r\n\r\n"
        found = plain_upgrade(data)
        if found is None or found.rest:
            return
        request = as_twisted_reads_it(data)
        self.assertIsNotNone(request, data)
        self.assertEqual((request.method, request.uri, request.clientproto), (b"GET", found.target, b"HTTP/1.1"))
        for name, value in found.headers.items():
            raw = b",".join(request.requestHeaders.getRawHeaders(name)).split(b",")
            self.assertEqual([item.strip() for item in raw], [item.strip() for item in value.split(b",")], data)


class PlainUpgradeTests(SynchronousTestCase):
    """Upgrades in memory."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.taken: list[Upgrade] = []
        self.willing = True
        resource: Any = type("R", (), {"isLeaf": True, "render": lambda _, request: request.uri})()
        self.factory = PlainUpgradeFactory(
            Site(resource, reactor=self.clock), self.clock, self.take, 60, Guard(self.clock)
        )
        self.door = self.factory.buildProtocol(None)
        self.transport = StringTransportWithDisconnection()
        self.transport.protocol = self.door
        self.door.makeConnection(self.transport)

    def take(self, upgrade: Upgrade, transport: Any) -> bool:
        self.assertIs(transport, self.transport)
        if self.willing:
            self.taken.append(upgrade)
        return self.willing

    def test_a_plain_upgrade(self) -> None:
        self.door.dataReceived(PLAIN)
        self.assertEqual(len(self.taken), 1)
        self.assertEqual((self.transport.value(), self.clock.getDelayedCalls()), (b"", []))
        # The site no longer counts the connection of a session.
        self.assertEqual(len(self.factory.guard), 0)

    def test_refused_upgrades_go_to_the_site(self) -> None:
        self.willing = False
        self.door.dataReceived(PLAIN)
        self.assertTrue(self.transport.value().startswith(b"HTTP/1.1 200 OK\r\n"))
        self.assertTrue(self.transport.value().endswith(b"/?a.b.c"))

    def test_any_other_request_byte_by_byte(self) -> None:
        for byte in b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n":
            self.door.dataReceived(bytes((byte,)))
        self.assertTrue(self.transport.value().endswith(b"/metrics"))
        self.transport.loseConnection()
        self.assertEqual(self.taken, [])

    def test_a_request_that_drips(self) -> None:
        for byte in b"GET /metrics HTTP/1.1"[: int(WHOLE_WITHIN)]:
            self.assertTrue(self.transport.connected)
            self.door.dataReceived(bytes((byte,)))
            self.clock.advance(1)
        self.assertFalse(self.transport.connected)
        self.assertEqual(len(self.factory.guard), 0)

    def test_unparsable_requests_end_the_connection_without_traceback(self) -> None:
        """An exception of Twisted's parser ends the connection, and writes no traceback to the log."""
        self.door.dataReceived(b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n")
        self.assertFalse(self.transport.connected)
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_silent_connections_time_out(self) -> None:
        self.clock.advance(59)
        self.assertTrue(self.transport.connected)
        self.clock.advance(1)
        self.assertFalse(self.transport.connected)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_pause_of_this_process_is_not_the_silence_of_others(self) -> None:
        let_pause(self.clock)
        pass_time(self.clock, 30.0)
        self.clock.advance(600)
        self.assertTrue(self.transport.connected)
        self.door.dataReceived(PLAIN)
        self.assertEqual((len(self.taken), self.clock.getDelayedCalls()), (1, []))


def certificate(path: Path) -> None:
    """A key and its certificate, for one day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "relay")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1)
    )
    pem = made.sign(key, SHA256()).public_bytes(Encoding.PEM)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + pem)


class RelayUpgradeTests(SocketPairCase):
    """A real relay: whatever way an upgrade comes in, it is the same session."""

    async def connected(self, *pieces: bytes, endpoint: Any = None) -> Lines:
        """Send these pieces over a connection, one after the other; return the received lines."""
        endpoint = endpoint or clientFromString(reactor, f"tcp:127.0.0.1:{self.one.port}")
        raw: Lines = await endpoint.connect(Factory.forProtocol(Lines))
        self.addCleanup(lambda: raw.transport.abortConnection())  # type: ignore[union-attr]
        for piece in pieces:
            raw.transport.write(piece)  # type: ignore[union-attr]
            await self.until(lambda: True)
        await self.until(lambda: b"\r\n\r\n" in raw.data)
        return raw

    def request(self, raw: Any, sid: str) -> bytes:
        query = token.make(raw.identity, Session(raw.session.twin, sid), int(self.now()))
        return PLAIN.replace(b"a.b.c", query.encode())

    @asynchronous
    async def test_whole_in_pieces_and_with_a_frame_behind(self) -> None:
        a, _ = await self.pair()
        ping = frames.encode(frames.PING, b"are you there", bytes(4))
        for number, cut in enumerate((None, 1, 30, "frame")):
            data = self.request(a, f"s{number}")
            if cut == "frame":
                raw = await self.connected(data + ping)
            elif cut is None:
                raw = await self.connected(data)
                raw.transport.write(ping)  # type: ignore[union-attr]
            else:
                raw = await self.connected(data[: int(cut)], data[int(cut) :])
                raw.transport.write(ping)  # type: ignore[union-attr]
            self.assertTrue(raw.data.startswith(b"HTTP/1.1 101 "), raw.data)
            await self.until(lambda raw=raw: raw.data.endswith(b"are you there"))
        self.assertEqual(len(self.one.switch.sessions), 6)

    @asynchronous
    async def test_a_refused_upgrade_is_counted_once(self) -> None:
        a, _ = await self.pair()
        site = self.one.ports[0].factory.site.resource
        site._connects = RateLimit(0.001, 3)
        bad = PLAIN.replace(b"a.b.c", token.make(self.identities["B"], a.session, int(self.now())).encode())
        before = self.drops(Drop.BAD_TOKEN)
        for status, request in ((b"401", bad), (b"101", None), (b"101", None), (b"429", None), (b"429", None)):
            raw = await self.connected(request or self.request(a, f"r{status.decode()}"))
            self.assertEqual(raw.data[9:12], status)
        self.assertEqual((self.drops(Drop.BAD_TOKEN) - before, self.drops(Drop.RATE_LIMITED)), (1, 2))

    @asynchronous
    async def test_an_upgrade_with_a_body(self) -> None:
        """The request is refused, and its data is freed."""
        a, _ = await self.pair()
        head = self.request(a, "body").replace(b"Upgrade: websocket", b"Upgrade: websocket\r\nContent-Length: 100000")
        for origin in (b"", b"Origin: x\r\n"):
            raw = await self.connected(head[:-2] + origin + b"\r\n" + bytes(100_000))
            self.assertEqual(raw.data[9:12], b"400")
        self.assertEqual(self.drops(Drop.BAD_UPGRADE), 2)
        raw = await self.connected(self.request(a, "origin")[:-2] + b"Origin: http://x\r\n\r\n")
        self.assertEqual(raw.data[9:12], b"101")
        await self.until(lambda: not self.one.ports[0].factory.site.unanswered.held)

    @asynchronous
    async def test_upgrades_work_over_tls(self) -> None:
        a, _ = await self.pair()
        path = Path(self.mktemp())
        certificate(path)
        factory = self.one.ports[0].factory
        port = await serverFromString(reactor, f"ssl:0:interface=127.0.0.1:privateKey={path}").listen(factory)
        self.addCleanup(port.stopListening)
        plain = clientFromString(reactor, f"tcp:127.0.0.1:{port.getHost().port}")
        raw = await self.connected(
            self.request(a, "tls"), endpoint=wrapClientTLS(CertificateOptions(verify=False), plain)
        )
        self.assertTrue(raw.data.startswith(b"HTTP/1.1 101 "), raw.data)
        raw.transport.write(frames.encode(frames.PING, b"over tls", bytes(4)))  # type: ignore[union-attr]
        await self.until(lambda: raw.data.endswith(b"over tls"))
