"""HTTP servers that answer with more than anybody wants, and everything here that asks one."""

from __future__ import annotations

import ctypes
import gzip
import re
import socket
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint, TCP6ServerEndpoint, serverFromString
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.ssl import CertificateOptions
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SkipTest, SynchronousTestCase, TestCase
from twisted.web.client import ResponseFailed

from dmsg.discovery.lookup.lookup import Lookup
from dmsg.errors import DiscoveryError, DmsgError
from dmsg.keys import SecKey
from dmsg.net.socketopts import outstanding_bytes
from dmsg.net.web import fetch, plain_client
from dmsg.net.web.body import read_body
from dmsg.net.web.fetch import WebClient, make_pool
from dmsg.net.web.response import MAX_HEAD, parse_json
from dmsg.rmb.errors import RegistryUnavailable
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.relay.federation.post import Poster
from dmsg.servers.admission import Hook
from tests.net.test_carriers import certificate
from tests.support import asynchronous

KEY = SecKey.from_seed(b"somebody").public
SO_ATTACH_FILTER = 26
"""Option of Linux that attaches a packet filter to a socket; the module ``socket`` does not have it."""
BPF_RETURN = 6
"""Instruction of a packet filter that ends it with a constant: the number of bytes of the packet to keep."""


class Hostile(Protocol):
    """Server that sends its text to each request; repeatedly, if the text must have no end."""

    def __init__(self, head: bytes, again: bytes) -> None:
        self._head = head
        self._again = again
        self.said = 0

    def dataReceived(self, data: bytes) -> None:
        if b"\r\n\r\n" not in data:
            return
        assert self.transport is not None
        self.transport.write(self._head)
        if self._again:
            self.transport.registerProducer(self, True)  # type: ignore[attr-defined]
            self.resumeProducing()
        elif b"content-length" not in self._head:
            self.transport.loseConnection()

    def resumeProducing(self) -> None:
        for _ in range(512):
            assert self.transport is not None
            self.transport.write(self._again)
            self.said += len(self._again)
        if self.said < 500_000_000:
            reactor.callLater(0, self._on)

    def _on(self) -> None:
        if self.transport is not None and self.transport.connected and not self._paused:  # type: ignore[attr-defined]
            self.resumeProducing()

    _paused = False

    def pauseProducing(self) -> None:
        self._paused = True

    def stopProducing(self) -> None:
        self._paused = True


class FetchTests(TestCase):
    """Real TCP."""

    async def serve(self, head: bytes, again: bytes = b"") -> str:
        """A server that answers so."""
        made: list[Hostile] = []

        def build() -> Hostile:
            made.append(Hostile(head, again))
            return made[-1]

        factory = Factory.forProtocol(build)
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(factory)
        self.made = made

        async def stop() -> None:
            for one in made:
                one._paused = True
                if one.transport is not None:
                    one.transport.abortConnection()  # type: ignore[attr-defined]
            await port.stopListening()
            await deferLater(reactor, 0.01)

        self.addCleanup(lambda: Deferred.fromCoroutine(stop()))
        return f"http://127.0.0.1:{port.getHost().port}"

    def askers(self, url: str) -> list[Any]:
        """Everything that asks an HTTP server, and how it says that it got nothing."""
        registry = HTTPRegistry(reactor, url)
        lookup = Lookup(reactor, url)
        poster = Poster(reactor, plain=True)
        self.addCleanup(registry.close)
        self.addCleanup(lookup.close)
        self.addCleanup(poster.close)
        return [
            (lookup.entry(KEY), DiscoveryError),
            (lookup.available_servers(), DiscoveryError),
            (Hook(reactor, url, when_down=False).ask(KEY), None),
            (registry.get(7), RegistryUnavailable),
        ]

    async def refused(self, url: str) -> None:
        """Check that no client accepts the answer, and that each fails soon and with little memory."""
        process = psutil.Process()
        before = process.memory_info().rss
        began = time.monotonic()
        for asking, error in self.askers(url):
            if error is None:
                self.assertIs(await asking, False)
                continue
            with self.assertRaises(error):
                await asking
        # The bound covers the sockets' buffers, and a little more.
        self.assertLess(max([one.said for one in self.made], default=0), 24 << 20)
        self.assertLess(time.monotonic() - began, 20)
        self.assertLess(process.memory_info().rss - before, 100 << 20)

    @asynchronous
    async def test_headers_without_an_end(self) -> None:
        await self.refused(await self.serve(b"HTTP/1.1 500 x\r\n", b"X-Y: " + b"z" * 1000 + b"\r\n"))

    @asynchronous
    async def test_a_line_without_an_end(self) -> None:
        await self.refused(await self.serve(b"HTTP/1.1 500 x\r\nX: ", b"z" * 1000))

    @asynchronous
    async def test_a_body_without_an_end(self) -> None:
        await self.refused(await self.serve(b"HTTP/1.1 500 x\r\n\r\n", b"z" * 10_000))

    @asynchronous
    async def test_compressed_bodies_are_refused(self) -> None:
        bomb = gzip.compress(bytes(50_000_000))
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
        url = await self.serve(head + bomb)
        pool = make_pool(reactor, persistent=False)
        response = await WebClient(reactor, pool, 5).get(url)
        self.assertEqual(len(await read_body(response, 1 << 20)), len(bomb))
        with self.assertRaises(DiscoveryError):
            lookup = Lookup(reactor, url)
            self.addCleanup(lookup.close)
            await lookup.entry(KEY)

    @asynchronous
    async def test_no_redirection_is_followed(self) -> None:
        elsewhere = await self.serve(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        there = self.made
        head = f"HTTP/1.1 302 Found\r\nLocation: {elsewhere}/\r\ncontent-length: 0\r\n\r\n"
        await self.refused(await self.serve(head.encode()))
        self.assertEqual(there, [])

    @asynchronous
    async def test_json_that_is_nested(self) -> None:
        for status in (200, 500):
            deep = b"[" * 200_000
            head = b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(deep))
            url = await self.serve(head + deep)
            for asking, error in self.askers(url):
                if error is not None:
                    with self.assertRaises(error):
                        await asking
                else:
                    await asking
        self.assertRaises(ValueError, parse_json, b"[" * 200_000)
        self.assertEqual(parse_json(b'{"a": [1]}'), {"a": [1]})

    @asynchronous
    async def test_the_head_has_its_own_limit(self) -> None:
        """A large body in the same read as the end of the head does not count as a part of the head."""
        body = b"x" * (3 * MAX_HEAD)
        url = await self.serve(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        pool = make_pool(reactor, persistent=False)
        response = await WebClient(reactor, pool, 5).get(url)
        self.assertEqual(await read_body(response, 1 << 20), body)
        url = await self.serve(b"HTTP/1.1 200 OK\r\n" + b"X-Y: z\r\n" * (MAX_HEAD // 4) + b"\r\n")
        with self.assertRaises((ResponseFailed, DmsgError)):
            await WebClient(reactor, make_pool(reactor, persistent=False), 5).get(url)


class Closing(Protocol):
    """Server that answers some requests of a connection, and closes the connection before it reads the next one.

    The client cannot know this, because it sends the request while the end of the connection is under way.
    """

    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    def __init__(self, answered: int, requests: list[bytes]) -> None:
        self._left = answered
        self._requests = requests
        self._got = b""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self._got += data
        head, blank, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not blank or len(body) < int(length[1] if length else 0):
            return
        self._got = b""
        self._requests.append(head.partition(b" ")[0])
        self._left -= 1
        if self._left < 0:
            self.transport.loseConnection()
        else:
            self.transport.write(self.answer)


class KeptCase(TestCase):
    """A server whose connections are kept."""

    async def serve(self, answered: int, answer: bytes = Closing.answer, *, tls: bool = False) -> str:
        """:param answered: requests of a connection before it is closed."""
        self.answered = answered
        self.requests: list[bytes] = []
        self.connections: list[Closing] = []

        def build() -> Closing:
            self.connections.append(Closing(self.answered, self.requests))
            self.connections[-1].answer = answer
            return self.connections[-1]

        kind = "tcp:0"
        if tls:
            path = Path(self.mktemp())
            path.write_text(certificate())
            kind = f"ssl:0:privateKey={path}"
        endpoint = serverFromString(reactor, f"{kind}:interface=127.0.0.1")
        port: Any = await endpoint.listen(Factory.forProtocol(build))
        self.addCleanup(port.stopListening)
        return f"http{'s' * tls}://127.0.0.1:{port.getHost().port}"


class ClosedTests(KeptCase):
    """A kept connection that the other side has closed."""

    @asynchronous
    async def test_unanswered_requests_are_sent_again(self) -> None:
        """An entry, a message of the bus; by whatever method."""
        lookup = Lookup(reactor, await self.serve(1))
        self.addCleanup(lookup.close)
        for method in ("POST", "POST", "DELETE", "GET"):
            self.assertEqual(await lookup.ask(method, "/", b"x" if method != "GET" else None), {})
        self.assertEqual(self.requests, [b"POST", b"POST", b"POST", b"DELETE", b"DELETE", b"GET", b"GET"])
        poster = Poster(reactor, plain=True)
        self.addCleanup(poster.close)
        url = await self.serve(1)
        statuses = [await Deferred.fromCoroutine(poster.post(url, b"message", only_connected=False)) for _ in range(3)]
        self.assertEqual((statuses, self.requests), ([200] * 3, [b"POST"] * 5))

    @asynchronous
    async def test_a_request_is_repeated_at_most_once(self) -> None:
        """A server that answers nothing is asked no third time, over a new connection not a second time."""
        lookup = Lookup(reactor, await self.serve(1))
        self.addCleanup(lookup.close)
        await lookup.ask("POST", "/", b"x")
        self.requests.clear()
        self.answered = 0
        with self.assertRaises(DiscoveryError) as caught:
            await lookup.ask("POST", "/", b"x")
        self.assertIn("closed before the answer", str(caught.exception))
        self.assertEqual(self.requests, [b"POST", b"POST"])
        with self.assertRaises(DiscoveryError):
            await lookup.ask("POST", "/", b"x")
        self.assertEqual(self.requests, [b"POST"] * 3)

    @asynchronous
    async def test_http_1_0_keeps_none(self) -> None:
        """Whether it says so or not."""
        url = await self.serve(9, b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        lookup = Lookup(reactor, url)
        self.addCleanup(lookup.close)
        for _ in range(3):
            await lookup.ask("POST", "/", b"x")
        self.assertEqual((len(self.connections), len(self.requests)), (3, 3))


def stop_receiving(connection: Any) -> None:
    """Let the kernel drop all that arrives for a socket, as if the other machine had vanished: without an ACK."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RETURN, 0, 0, 0))
    option = struct.pack("HP", 1, ctypes.addressof(program))
    connection.getHandle().setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, option)


class DeadTests(KeptCase):
    """A kept connection that has died silently."""

    def setUp(self) -> None:
        self.patch(plain_client, "ACK_TIMEOUT", 0.3)
        without_verification = SimpleNamespace(creatorForNetloc=lambda *_: CertificateOptions(verify=False))
        self.patch(fetch, "BrowserLikePolicyForHTTPS", lambda: without_verification)

    @asynchronous
    async def test_the_request_is_sent_over_a_new_connection(self) -> None:
        """By both HTTP clients, and long before the timeout of the request."""
        for tls in (False, True):
            lookup = Lookup(reactor, await self.serve(99, tls=tls), timeout=60.0)
            self.addCleanup(lookup.close)
            await gatherResults([lookup.ask("GET", "/") for _ in range(2)])
            for connection in self.connections:
                transport: Any = connection.transport
                stop_receiving(transport.transport if tls else transport)
                self.addCleanup(transport.abortConnection)  # It does not learn that the client has closed it.
            self.requests.clear()
            before = reactor.seconds()
            self.assertEqual(await lookup.ask("POST", "/", b"x"), {})
            took = reactor.seconds() - before
            self.assertGreaterEqual(took, 0.3)
            self.assertLess(took, 20.0)
            self.assertEqual((self.requests, len(self.connections)), ([b"POST"], 3))
            self.assertEqual(await lookup.ask("GET", "/"), {})

    @asynchronous
    async def test_a_slow_server_is_asked_once(self) -> None:
        """Its kernel acknowledges the request, so the client waits for the answer."""
        for tls in (False, True):
            checked: list[int] = []

            def count(transport: object, checked: list[int] = checked) -> int:
                checked.append(outstanding_bytes(transport))
                return checked[-1]

            self.patch(plain_client, "outstanding_bytes", count)
            lookup = Lookup(reactor, await self.serve(99, tls=tls), timeout=60.0)
            self.addCleanup(lookup.close)
            await lookup.ask("GET", "/")
            (connection,) = self.connections
            connection.answer = b""
            asking = lookup.ask("GET", "/")
            while not checked:
                await deferLater(reactor, 0.01)
            self.assertEqual(checked, [0])
            assert connection.transport is not None
            connection.transport.write(Closing.answer)
            self.assertEqual((await asking, self.requests), ({}, [b"GET"] * 2))


class AddressTests(TestCase):
    """Entities that are named by an address of IPv6."""

    @asynchronous
    async def test_discovery_is_reached_at_an_ipv6_address(self) -> None:
        factory = Factory.forProtocol(lambda: Hostile(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", b""))
        try:
            port = await TCP6ServerEndpoint(reactor, 0, interface="::1").listen(factory)
        except CannotListenError as error:
            raise SkipTest(f"there is no IPv6 here: {error}") from None
        self.addCleanup(port.stopListening)
        lookup = Lookup(reactor, f"http://[::1]:{port.getHost().port}", timeout=5)
        self.addCleanup(lookup.close)
        self.assertEqual(await lookup.available_servers(), [])


class PoolTests(SynchronousTestCase):
    """Connections that are kept for the next question."""

    def test_connections_freed_after_close_are_not_pooled(self) -> None:
        """The answer to a question may be used, and all be closed, before its connection is free."""
        clock = Clock()
        pool: Any = make_pool(clock)

        class Quiet:
            state = "QUIESCENT"
            _parser = SimpleNamespace(response=SimpleNamespace(version=(b"HTTP", 1, 1)))
            transport = StringTransport()

        kept, late = Quiet(), Quiet()
        late.transport = StringTransport()
        pool._putConnection("here", kept)
        self.assertEqual(len(clock.getDelayedCalls()), 1)
        for call in clock.getDelayedCalls():
            call.cancel()
        pool._connections.clear()
        pool._timeouts.clear()
        self.successResultOf(pool.closeCachedConnections())
        pool._putConnection("here", late)
        self.assertEqual((clock.getDelayedCalls(), late.transport.disconnecting), ([], True))
