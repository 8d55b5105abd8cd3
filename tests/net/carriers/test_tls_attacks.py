"""Strangers and clients who misuse TLS itself at a server, with OpenSSL as it is installed; and what ALPN decides."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol

from dmsg.errors import DropReason, HandshakeError
from dmsg.keys import SecKey
from dmsg.net.carriers.endpoint import carrier_endpoint
from dmsg.net.carriers.names import ALPN, SECURE_WEBSOCKET, TLS, Carrier
from dmsg.net.flush import TurnFlush
from dmsg.net.links.acceptor import FAILED_BURST
from dmsg.net.links.race import CarrierRace
from dmsg.net.links.records import record_links
from dmsg.net.tls_overhead import MAX_OVERHEAD
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.wire import ACCEPT, FWD, OK, PING, PONG, REQUEST, encode_frame
from tests.net.carriers.openssl import MISSING, TLS_1_2, OpenSSLClient
from tests.net.links.support import User
from tests.net.support import TIMEOUT
from tests.net.test_carriers import CarrierCase, NginxCase, certificate
from tests.support import asynchronous

MESSAGE = 27
"""Bytes of a KeyUpdate message."""
FLOOD = MAX_OVERHEAD // MESSAGE + 1000
"""Number of such messages that is never allowed."""


class TLSCase(CarrierCase):
    """A server that ends TLS itself."""

    if MISSING:
        skip = MISSING

    def pem(self) -> str:
        """Return the path of a certificate and its key."""
        path = self.mktemp()
        with open(path, "w") as file:
            file.write(certificate())
        return path

    async def start_tls(self) -> Any:
        return await self.start_server(f"--listen=ssl:0:privateKey={self.pem()}:interface=127.0.0.1")

    async def come(self, port: Any, client: OpenSSLClient) -> OpenSSLClient:
        """Connect, and wait for the end of TLS' handshake."""
        endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
        await connectProtocol(endpoint, client)
        self.addCleanup(lambda: client.closed or client.transport.abortConnection())  # type: ignore[union-attr]
        await self.until(lambda: client.shaken)
        return client

    async def join(self, server: Any, newest: int = 0) -> tuple[RawClient, OpenSSLClient]:
        """Connect a client of the server."""
        client = RawClient(SecKey.generate(), server._key.public)
        tls = await self.come(server.ports[-1], OpenSSLClient(client, newest))
        await self.until(lambda: client.frames)
        self.assertEqual([frame.type for frame in client.take()], [OK])
        return client, tls

    async def open_transport(self, client: RawClient, server: Any) -> RawClient:
        """Open the transport 2 of a client to a new one, and return the new one."""
        other, _ = await self.join(server)
        keys = bytes(client.key.public + other.key.public)
        client.send(encode_frame(REQUEST, 2, keys))
        await self.until(lambda: other.frames)
        other.send(encode_frame(ACCEPT, other.take()[0].id, keys))
        await self.until(lambda: client.take())
        return other


class FloodTests(TLSCase):
    """Messages of TLS without data."""

    @asynchronous
    async def test_key_updates_of_a_stranger_end_the_connection(self) -> None:
        server = await self.start_tls()
        for number, answer in enumerate((False, True), 1):
            with self.subTest(answer=answer):
                stranger = await self.come(server.ports[-1], OpenSSLClient())
                stranger.update_keys(FLOOD, answer=answer)
                await self.until(lambda stranger=stranger: stranger.closed)
                self.assertEqual(server.drops()[DropReason.SMALL_PIECES], number)

    @asynchronous
    async def test_key_updates_of_a_client_end_the_connection(self) -> None:
        server = await self.start_tls()
        client, tls = await self.join(server)
        other, other_tls = await self.join(server)
        tls.update_keys(FLOOD, answer=True)
        await self.until(lambda: tls.closed)
        self.assertEqual(server.drops()[DropReason.SMALL_PIECES], 1)
        self.assertTrue(client.closed)
        # Another client of the same address does not notice.
        other.send(encode_frame(PING, 0, b"abcd"))
        await self.until(lambda: other.frames)
        self.assertEqual([frame.type for frame in other.take()], [PONG])
        self.assertFalse(other_tls.closed)

    @asynchronous
    async def test_data_between_the_messages_pay_for_few(self) -> None:
        server = await self.start_tls()
        client, tls = await self.join(server)
        for _ in range(200):
            tls.update_keys(20)
            client.send(encode_frame(PING, 0, b""))
            if tls.closed:
                break
        await self.until(lambda: tls.closed)
        self.assertEqual(server.drops()[DropReason.SMALL_PIECES], 1)

    @asynchronous
    async def test_a_client_may_change_its_keys_now_and_then(self) -> None:
        server = await self.start_tls()
        client, tls = await self.join(server)
        receiver = await self.open_transport(client, server)
        times = 3 * MAX_OVERHEAD // MESSAGE
        for number in range(times):
            tls.update_keys(1, answer=number % 100 == 0)
            client.send(encode_frame(FWD, 2, b"abcd"))
            if number % 100 == 0:
                await self.until(lambda number=number: len(receiver.frames) > number)
        await self.until(lambda: len(receiver.frames) == times)
        self.assertEqual(server.drops()[DropReason.SMALL_PIECES], 0)

    @asynchronous
    async def test_a_renegotiation_is_refused(self) -> None:
        server = await self.start_tls()
        client, tls = await self.join(server, TLS_1_2)
        tls.renegotiate()
        await self.until(lambda: tls.closed)
        await self.until(lambda: not server.factory.sessions)
        self.assertTrue(client.closed)

    @asynchronous
    async def test_refused_renegotiations_end_the_connection(self) -> None:
        server = await self.start_tls()
        tls = await self.come(server.ports[-1], OpenSSLClient(newest=TLS_1_2))
        hellos = tls.refused_hellos(FLOOD)
        # The answers, one to each, are not read.
        tls.transport.pauseProducing()  # type: ignore[union-attr]
        tls.transport.write(hellos)  # type: ignore[union-attr]
        await self.until(lambda: server.drops()[DropReason.SMALL_PIECES] == 1)
        self.assertEqual(server.factory.handshakes, 0)
        tls.transport.resumeProducing()  # type: ignore[union-attr]

    @asynchronous
    async def test_an_address_that_does_so_again_and_again_is_refused(self) -> None:
        server = await self.start_tls()
        for _ in range(int(FAILED_BURST)):
            if server.drops()[DropReason.FAILED_BEFORE]:
                break
            stranger = OpenSSLClient()
            endpoint = TCP4ClientEndpoint(reactor, "127.0.0.1", server.ports[-1].getHost().port)
            await connectProtocol(endpoint, stranger)
            await self.until(lambda stranger=stranger: stranger.shaken or stranger.closed)
            if not stranger.closed:
                stranger.update_keys(FLOOD)
            await self.until(lambda stranger=stranger: stranger.closed)
        self.assertEqual(server.drops()[DropReason.FAILED_BEFORE], 1)
        self.assertLess(server.drops()[DropReason.SMALL_PIECES], 20)

    @asynchronous
    async def test_large_and_small_data_of_both_versions_arrive(self) -> None:
        server = await self.start_tls()
        for newest in (0, TLS_1_2):
            with self.subTest(newest=newest):
                client, tls = await self.join(server, newest)
                receiver = await self.open_transport(client, server)
                for size in (0, 4, 60_000) * 30:
                    client.send(encode_frame(FWD, 2, bytes(size)))
                await self.until(lambda receiver=receiver: len(receiver.frames) == 90)
                self.assertFalse(tls.closed)

    @asynchronous
    async def test_discovery_with_tls_counts_it_too(self) -> None:
        await self.start_discovery(f"--listen=ssl:0:privateKey={self.pem()}:interface=127.0.0.1")
        stranger = await self.come(self.discovery.ports[-1], OpenSSLClient())
        stranger.update_keys(FLOOD)
        await self.until(lambda: stranger.closed)
        self.assertEqual(self.discovery.metrics.refused.labels("small_pieces")._value.get(), 1)


class ALPNTests(TLSCase):
    """The protocol that a client names in TLS."""

    @asynchronous
    async def test_a_server_chooses_what_it_knows_and_accepts_all_others(self) -> None:
        server = await self.start_tls()
        for offers, chosen in ((ALPN[TLS], ALPN[TLS]), (b"http/1.1", b"http/1.1"), (b"h2", b""), (b"", b"")):
            with self.subTest(offers=offers):
                client = RawClient(SecKey.generate(), server._key.public)
                tls = await self.come(server.ports[-1], OpenSSLClient(client, offers=offers))
                self.assertEqual(tls.alpn, chosen)
                await self.until(lambda client=client: client.frames)

    @asynchronous
    async def test_web_pages_are_reached_whatever_is_offered(self) -> None:
        page = f"ssl:0:privateKey={self.pem()}:interface=127.0.0.1"
        await self.start_discovery(f"--listen={page}", f"--metrics={page}")
        for port in (self.discovery.ports[-1], self.discovery.metrics_port):
            for offers in (b"http/1.1", b"h2", b"dmsg", b""):
                with self.subTest(offers=offers):
                    await self.come(port, OpenSSLClient(offers=offers))


class RefusedNameTests(NginxCase):
    """A web server, which refuses clients of TLS that name no version of HTTP."""

    @asynchronous
    async def test_the_error_names_the_refusal_and_another_carrier_is_used(self) -> None:
        port, inside = await self.start_nginx()
        server = await self.start_server(f"--listen=tcp:{inside}:interface=127.0.0.1", "--trusted-proxy=127.0.0.1")
        key, refused, works = SecKey.generate(), Carrier(TLS, port), Carrier(SECURE_WEBSOCKET, port)

        def race(*carriers: Carrier) -> CarrierRace:
            return CarrierRace(
                reactor,
                carriers,
                lambda one: carrier_endpoint(reactor, f"127.0.0.1:{port}", one, encrypted=True, timeout=TIMEOUT),
                record_links(reactor, TurnFlush(reactor), key, server._key.public),
            )

        alone = race(refused)
        error = await self.assertFailure(alone.connect(lambda remote: User()), HandshakeError)
        self.assertEqual(str(error), "TLS failed: tlsv1 alert no application protocol")
        self.assertEqual(alone.failed, {refused: str(error)})
        both = race(refused, works)
        user = await both.connect(lambda remote: User())
        self.addCleanup(lambda: user.link.abandon())
        self.assertEqual((both.used, both.failed), (works, {refused: str(error)}))
