"""Real network on loopback, as a user of the library experiences it."""

from __future__ import annotations

import datetime
import json
import socket
from pathlib import Path
from typing import Any

import treq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import clientFromString, serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.ssl import Certificate, trustRootFromCertificates
from twisted.web.client import Agent, BrowserLikePolicyForHTTPS, HTTPConnectionPool
from twisted.web.iweb import IAgentEndpointFactory
from twisted.web.resource import Resource
from twisted.web.server import Site
from zope.interface import implementer

from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.errors import ConnectFailed, DiscoveryError, DmsgTimeout, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net import socketopts
from dmsg.net.streams.endpoints import DmsgClientEndpoint, DmsgServerEndpoint
from dmsg.net.tls_errors import UNTRUSTED
from dmsg.v2019 import strings
from dmsg.v2019.client import Client
from tests.net.support import HEALTH, LOOPBACK, EntityCase
from tests.support import Accepting, Recorder, asynchronous


class Echo(Recorder):
    """Gives back what it gets."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class NetworkTests(EntityCase):
    """Discovery, servers, clients."""

    @asynchronous
    async def test_bytes_arrive_and_are_acknowledged(self) -> None:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        bob.listen(Accepting(Echo))
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        payload = bytes(range(256)) * 8000
        await protocol.transport.send(payload)
        await self.until(lambda: len(protocol.data) == len(payload))
        self.assertEqual(protocol.data, payload)
        self.assertEqual(protocol.transport.getPeer().public_key, bob.public_key)

    @asynchronous
    async def test_entries_follow_the_state_of_entities(self) -> None:
        """Server and client entries say what is; a stopped entity withdraws its own."""
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}", "--max-connections=7")
        alice = await self.start_client(url, min_servers=1)
        lookups = alice._lookups
        entry = await lookups.entry(alice.public_key)
        self.assertEqual(entry.client.delegated_servers, (server._key.public.hex(),))
        await self.until(lambda: server.registration._posted == 6)
        (listed,) = await lookups.available_servers()
        self.assertEqual(listed.server.available_connections, 6)
        await alice.stopService()
        await self.until(lambda: server.registration._posted == 7)
        try:
            await server.registration._lookups.entry(alice.public_key)
        except EntryNotFound:
            pass
        else:
            self.fail("entry is still there")

    @asynchronous
    async def test_connect_tries_every_server_and_says_why_each_failed(self) -> None:
        url = await self.start_discovery()
        for _ in range(2):
            await self.start_server(f"--discovery={url}")
        alice, bob = await self.start_client(url), await self.start_client(url)
        await self.until(lambda: len(bob.servers) == 2)
        await bob.when_published(10)
        try:
            await alice.connect(bob.public_key, Accepting())
        except ConnectFailed as error:
            self.assertEqual(len(error.attempts), 2)
            self.assertIn("nobody listens", str(error))
        else:
            self.fail("connected")
        for key, kind in ((SecKey.generate().public, EntryNotFound), (bob.servers[0], ConnectFailed)):
            try:
                await alice.connect(key, Accepting())
            except kind:
                continue
            self.fail("connected")

    @asynchronous
    async def test_a_dead_server_is_replaced_and_the_transport_goes_through_another(self) -> None:
        url = await self.start_discovery()
        servers = [await self.start_server(f"--discovery={url}") for _ in range(3)]
        alice, bob = await self.start_client(url), await self.start_client(url)
        bob.listen(Accepting(Echo))
        await self.until(lambda: len(alice.servers) == 2 and len(bob.servers) == 2)
        by_key = {server._key.public: server for server in servers}
        gone = bob.servers[0]
        await by_key[gone].stop_for_test()
        await self.until(lambda: gone not in bob.servers and len(bob.servers) == 2)
        await bob.when_published(10)
        alice._entries.forget()
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        await protocol.transport.send(b"again")
        await self.until(lambda: protocol.data == b"again")

    @asynchronous
    async def test_clients_of_different_servers_reach_each_other(self) -> None:
        """The dialler visits the other's server for as long as it is needed."""
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        alice = await self.start_client(url, min_servers=1)
        second = await self.start_server(f"--discovery={url}")
        bob = Client(reactor, SecKey.generate(), [url], min_servers=1)
        bob._set._candidates._avoid[alice.servers[0]] = 1e12
        bob.startService()
        self.addCleanup(bob.stopService)
        await bob.when_published(10)
        self.assertEqual(bob.servers, [second._key.public])
        bob.listen(Accepting(Echo))
        connecting = [alice.connect(bob.public_key, Accepting()) for _ in range(3)]
        protocols: list[Any] = await gatherResults(connecting)
        self.assertEqual(len(second.factory.sessions), 2)  # Three connects share one visit.
        for protocol in protocols:
            protocol.transport.loseConnection()
        await self.until(lambda: alice._set._visits.sessions[second._key.public].transports == 0)
        alice._set._visits.close_idle()
        alice._set._visits.close_idle()
        await self.until(lambda: not alice._set._visits.sessions)

    @asynchronous
    async def test_discovery_that_comes_late_and_forgets(self) -> None:
        """Servers and clients keep running while discovery is away, and post their lost entries again."""
        url = await self.start_discovery()
        port = url.rpartition(":")[2]
        server = await self.start_server(f"--discovery={url}")
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        bob.listen(Accepting(Echo))
        protocol: Any = await alice.connect(bob.public_key, Accepting())
        await self.discovery.stopService()
        await protocol.transport.send(b"without discovery")
        await self.until(lambda: protocol.data == b"without discovery")
        self.assertEqual(bob.status, "online")
        from dmsg.discovery.service.service import Discovery

        again = Discovery(reactor, [f"tcp:{port}:interface=127.0.0.1"], "memory:", DiscoverySettings(rate=0))
        again.startService()
        self.addCleanup(again.stopService)
        await again.ready
        server.registration._register()
        bob._publisher.publish()
        await self.until(lambda: not server.registration.is_busy and not bob._publisher.is_busy)
        # The server is listed only after it has answered at its address.
        while not (listed := await alice._lookups.available_servers()):
            pass
        self.assertEqual(len(listed), 1)
        await self.until(lambda: bob._publisher.published == (server._key.public.hex(),))
        await alice._lookups.entry(bob.public_key)

    @asynchronous
    async def test_no_server_says_why(self) -> None:
        url = await self.start_discovery()
        client = Client(reactor, SecKey.generate(), [url])
        client.startService()
        self.addCleanup(client.stopService)
        try:
            await client.when_online(0.3)
        except DmsgTimeout as error:
            self.assertIn("discovery lists no server", str(error))
        self.assertEqual(client.status, "searching")

    @asynchronous
    async def test_stopping_fails_pending_calls(self) -> None:
        url = await self.start_discovery()
        client = Client(reactor, SecKey.generate(), [url])
        client.startService()
        waiting = [client.when_online(), client.when_published()]
        results = [deferred.addErrback(lambda failure: str(failure.value)) for deferred in waiting]
        await client.stopService()
        self.assertEqual(await gatherResults(results), ["the client is stopped"] * 2)

    @asynchronous
    async def test_dead_peers_are_found_by_the_kernel(self) -> None:
        """Keep-alive and user timeout are on at both ends."""
        server = await self.start_server()
        await self.raw_client(server)
        url = await self.start_discovery()
        registered = await self.start_server(f"--discovery={url}")
        client = await self.start_client(url, min_servers=1)
        (session,) = registered.factory.sessions
        for link in (session.link, client.sessions()[0]._link):
            handle = link.transport.getHandle()
            options = {name: handle.getsockopt(level, getattr(socket, name)) for level, name, _ in socketopts._OPTIONS}
            self.assertEqual(options, {name: value for _, name, value in socketopts._OPTIONS})

    @asynchronous
    async def test_a_port_has_a_single_listener(self) -> None:
        url = await self.start_discovery()
        client = Client(reactor, SecKey.generate(), [url])
        port = client.listen(Accepting())
        self.assertRaises(CannotListenError, client.listen, Accepting())
        await port.stopListening()  # type: ignore[misc]
        client.listen(Accepting())

    @asynchronous
    async def test_metrics_and_health(self) -> None:
        url = await self.start_discovery()
        server = await self.start_server(f"--discovery={url}", f"--metrics={LOOPBACK}")
        await self.start_client(url, min_servers=1)
        base = f"http://127.0.0.1:{server.metrics_port.getHost().port}"
        health = json.loads(await (await treq.get(f"{base}/health", persistent=False)).text())
        self.assertEqual(health, {**HEALTH, "connections": 1, "transports": 0})
        text = await (await treq.get(f"{base}/metrics", persistent=False)).text()
        self.assertIn("dmsg_server_connections 1.0", text)
        self.assertIn('dmsg_server_drops_total{reason="queue_full"} 0.0', text)
        self.assertEqual((await treq.get(f"{base}/nothing", persistent=False)).code, 404)


class TLSTests(EntityCase):
    """Discovery over HTTPS."""

    @asynchronous
    async def test_a_server_listens_with_tls(self) -> None:
        pem = Path(self.mktemp())
        certificate = self._certificate(pem)
        await self.start_discovery(f"--listen=ssl:0:interface=127.0.0.1:privateKey={pem}:certKey={pem}")
        port = self.discovery.ports[1].getHost().port
        trust = trustRootFromCertificates([Certificate.loadPEM(certificate)])
        pool = HTTPConnectionPool(reactor, persistent=False)
        agent = Agent(reactor, BrowserLikePolicyForHTTPS(trust), pool=pool)
        lookup = Lookup(reactor, f"https://localhost:{port}", http=treq.client.HTTPClient(agent))
        self.assertEqual(await lookup.available_servers(), [])
        # An untrusted certificate gives an error of one line.
        stranger = Lookup(reactor, f"https://localhost:{port}")
        try:
            await stranger.available_servers()
        except DiscoveryError as error:
            self.assertIn(UNTRUSTED, str(error))
        else:
            self.fail("believed")

    @staticmethod
    def _certificate(pem: Path) -> bytes:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256())
        )
        public = certificate.public_bytes(serialization.Encoding.PEM)
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem.write_bytes(secret + public)
        return public


class Hello(Resource):
    """A web page."""

    isLeaf = True

    def render_GET(self, request: Any) -> bytes:
        return b"hello over dmsg, from " + request.path


class EndpointTests(EntityCase):
    """Any Twisted protocol runs over dmsg unchanged."""

    @asynchronous
    async def test_twisted_web_and_treq(self) -> None:
        """The test follows ``docs/howto/web``."""
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        alice, bob = await self.start_client(url, min_servers=1), await self.start_client(url, min_servers=1)
        port: Any = await DmsgServerEndpoint(bob).listen(Site(Hello()))

        @implementer(IAgentEndpointFactory)
        class ToBob:
            def endpointForURI(self, uri: Any) -> DmsgClientEndpoint:
                return DmsgClientEndpoint(alice, bob.public_key)

        agent = Agent.usingEndpointFactory(reactor, ToBob())
        response = await treq.client.HTTPClient(agent).get("http://bob/page")
        self.assertEqual((response.code, await response.text()), (200, "hello over dmsg, from /page"))
        await port.stopListening()

    @asynchronous
    async def test_endpoint_strings_connect_and_listen(self) -> None:
        url = await self.start_discovery()
        await self.start_server(f"--discovery={url}")
        escaped = url.replace(":", "\\:")
        key_file = self.mktemp()
        listening = serverFromString(reactor, f"dmsg:discovery={escaped}:key={key_file}")
        port = await listening.listen(Accepting(Echo))
        bob = strings.shared_client(reactor, url, key_file)
        self.addCleanup(self._forget)
        await bob.when_published(10)
        self.assertEqual(port.getHost().public_key, bob.public_key)
        client = clientFromString(reactor, f"dmsg:{bob.public_key}:discovery={escaped}:timeout=10")
        protocol: Any = await client.connect(Accepting())
        await protocol.transport.send(b"by string")
        await self.until(lambda: protocol.data == b"by string")
        # Each port has its own client.
        accepting = Accepting()
        other = await serverFromString(reactor, f"dmsg:80:discovery={escaped}:key={key_file}").listen(accepting)
        self.assertEqual(str(other.getHost()), f"dmsg:{bob.public_key}:80")
        client = clientFromString(reactor, f"dmsg:{bob.public_key}:80:discovery={escaped}")
        protocol = await client.connect(Accepting())
        await protocol.transport.send(b"to port 80")
        self.assertEqual(accepting.built[0].data, b"to port 80")
        self.assertEqual(protocol.transport.getPeer().port, 80)
        client = clientFromString(reactor, f"dmsg:{bob.public_key}:81:discovery={escaped}")
        try:
            await client.connect(Accepting())
        except ConnectFailed as error:
            self.assertIn("nobody listens at", str(error))
        else:
            self.fail("connected")
        await other.stopListening()
        await port.stopListening()

    def _forget(self) -> Any:
        from twisted.internet.defer import Deferred

        return Deferred.fromCoroutine(strings._clients.stop())

    def test_malformed_endpoint_strings_are_errors(self) -> None:
        key = SecKey.generate().public
        for text in (
            "dmsg:",
            "dmsg:02ab",
            f"dmsg:{key}:timeout=x",
            f"dmsg:{key}:x",
            f"dmsg:{key}:65536",
            f"dmsg:{key}:1:more=1",
        ):
            self.assertRaises((ValueError, TypeError), clientFromString, reactor, text)
        self.assertRaises(ValueError, serverFromString, reactor, "dmsg:http")
