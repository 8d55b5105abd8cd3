"""Limits that stand before the routes."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import UNIXAddress
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IAddress
from twisted.logger import ILogObserver, formatEvent, globalLogPublisher
from twisted.python.failure import Failure
from twisted.web.server import Site
from twisted.web.test.requesthelper import DummyRequest
from zope.interface import implementer

from dmsg.base.buckets import MAX_ADDRESSES, RateLimit
from dmsg.discovery.entries.entry import MAX_DELEGATED, MAX_VERSION, ClientMeta, Entry, ServerMeta
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.service.reached_at import MAX_REACHED, REACHED_AT, ReachedAt
from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.discovery.service.site import make_site
from dmsg.keys import SecKey
from dmsg.net.addresses import block_of
from dmsg.net.web import site as site_module
from tests.discovery.service.test_api import APICase

TOO_LONG = "entry validation error: entry is too long"


class GateTests(APICase):
    """Limits that stand before the routes."""

    def site(self, **options: Any) -> Site:
        settings = DiscoverySettings(**options)
        self.api = DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics, settings)
        return make_site(self.api, self.clock, self.metrics, settings)

    def serve(self, data: bytes, address: IAddress | None = None, **options: Any) -> bytes:
        """The answer to plain bytes.

        :param address: address at which the site listens, and that of the client.
        """
        from twisted.internet.testing import StringTransport

        site = self.site(**options)
        channel = site.buildProtocol(address)
        assert channel is not None
        transport = StringTransport(address, address)
        transport.protocol = channel  # type: ignore[attr-defined]
        channel.makeConnection(transport)
        channel.dataReceived(data)
        answer: bytes = transport.value()
        channel.connectionLost(None)
        return answer

    def test_a_body_of_ten_megabytes_is_refused(self) -> None:
        head = b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
        self.assertTrue(self.serve(head + bytes(100_000)).startswith(b"HTTP/1.1 413"))

    def test_a_chunked_body_of_ten_megabytes_is_refused(self) -> None:
        head = b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
        self.assertTrue(self.serve(head + chunk * 2 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413"))

    def test_requests_over_the_rate_are_429(self) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        answers = self.serve(request * 5, rate=1, burst=3)
        # The later requests on the same connection are not processed.
        self.assertEqual((answers.count(b"200 OK"), answers.count(b"HTTP/1.1 429")), (3, 1))
        self.assertIn(b"\r\nConnection: close\r\n", answers)

    def test_public_addresses_at_which_requests_came_are_logged_once(self) -> None:
        """Names and private addresses are not, nor more addresses than the limit, as clients may name any."""
        said: list[str] = []

        @implementer(ILogObserver)
        def keep(event: Any) -> None:
            if (text := formatEvent(event)) and REACHED_AT in text:
                said.append(text.rpartition(" ")[2])

        globalLogPublisher.addObserver(keep)
        self.addCleanup(globalLogPublisher.removeObserver, keep)
        hosts = ["x", "192.168.1.7", "1.1.1.1:9090", "1.1.1.1", "[2606:4700::7]", "1.1.1.1%" + "9" * 99]
        hosts += [f"1.1.2.{number}" for number in range(2 * MAX_REACHED)]
        self.serve(b"".join(b"GET /health HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode() for host in hosts))
        self.assertEqual(said[:3], ["1.1.1.1", "2606:4700::7", "1.1.2.0"])
        self.assertEqual(len(said), MAX_REACHED)

    def connections(self, number: int, data: bytes, **options: Any) -> list[Any]:
        """Make ``number`` clients at one address, each with a request of its own."""
        from twisted.internet.testing import StringTransport

        site = self.site(**options)
        transports = []
        for _ in range(number):
            channel: Any = site.buildProtocol(None)
            transport: Any = StringTransport()
            transport.protocol = channel
            channel.makeConnection(transport)
            channel.dataReceived(data)
            self.addCleanup(channel.connectionLost, Failure(ConnectionDone()))
            transports.append(transport)
        self.gate: Any = site.resource
        return transports

    def test_clients_of_2019_behind_one_address_are_delayed_not_refused(self) -> None:
        """Clients of 2019 do not know the status 429 and do not try again."""
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(300, request, rate=50.0, burst=100.0)
        self.assertEqual(sum(b"200 OK" in transport.value() for transport in transports), 100)
        self.clock.pump([0.1] * 45)
        self.assertEqual(sum(b"200 OK" in transport.value() for transport in transports), 300)
        self.assertEqual(self.gate._waiting_size, 0)
        # The metric counts all delayed requests, as its help text says, although none is delayed any more.
        text = self.metrics.render().decode()
        self.assertIn("\n# TYPE dmsg_discovery_delayed_total counter\ndmsg_discovery_delayed_total 200.0\n", text)

    def test_paths_below_the_2019_paths_are_delayed(self) -> None:
        """The 2019 service answers 404 for these paths, and its clients do not know the status 429."""
        for root in ("messaging-discovery", "dmsg-discovery"):
            request = f"GET /{root}/nothing HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            transports = self.connections(3, request, rate=1.0, burst=1.0)
            self.assertEqual(len(self.gate._waiting), 2)
            self.clock.advance(3.0)
            self.assertEqual(sum(b" 404 " in transport.value() for transport in transports), 3)

    def test_requests_delayed_beyond_client_timeouts_are_refused(self) -> None:
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(30, request, rate=1.0, burst=1.0)
        self.assertEqual(sum(b" 429 " in transport.value() for transport in transports), 24)

    def test_a_client_that_leaves_during_the_delay_is_dropped(self) -> None:
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(3, request, rate=1.0, burst=1.0)
        transports[1].protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(len(self.gate._waiting), 1)
        self.clock.advance(3.0)
        self.assertIn(b"200 OK", transports[2].value())
        self.assertEqual((transports[1].value(), len(self.gate._waiting), self.gate._waiting_size), (b"", 0, 0))
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_requests_that_wait_are_bounded(self) -> None:
        self.patch(site_module, "MAX_WAITING", 2)
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(5, request, rate=1.0, burst=1.0)
        self.assertEqual(sum(b" 429 " in transport.value() for transport in transports), 2)
        self.gate.stop()

    def test_a_host_that_cannot_be_one(self) -> None:
        """The host is refused at once, and also after a delay."""
        for path in ("/health", "/messaging-discovery/available_servers"):
            request = f"GET {path} HTTP/1.1\r\nHost: a..b\r\n\r\n".encode()
            transports = self.connections(3, request, rate=1.0, burst=1.0)
            self.clock.advance(3.0)
            for transport in transports:
                self.assertTrue(transport.value().startswith((b"HTTP/1.1 400", b"HTTP/1.1 429")), transport.value())
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_requests_over_a_unix_socket_need_no_host(self) -> None:
        """The address of a UNIX socket has no host that could stand for a missing or invalid Host header."""
        request = b"GET /health HTTP/1.0\r\n\r\n"
        invalid = b"GET /health HTTP/1.1\r\nHost: [\r\n\r\n" * 2
        for data, number in ((request, 1), (invalid, 2)):
            answer = self.serve(data, UNIXAddress("/run/discovery.sock"))
            self.assertEqual(answer.count(b"HTTP/1."), number, answer)
            self.assertNotIn(b"500", answer)
            self.assertNotIn(b"<html>", answer)

    def test_a_request_ends_although_its_report_fails(self) -> None:
        """The response is complete, and the connection serves the next request."""

        def failing(request: object) -> None:
            raise RuntimeError("a report that fails")

        self.patch(ReachedAt, "requested", lambda self, request: failing(request))
        answer = self.serve(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        self.assertEqual(answer.count(b"HTTP/1.1 200 OK"), 2, answer)
        self.assertNotIn(b"<html>", answer)
        self.assertEqual(2, len(self.flushLoggedErrors(RuntimeError)))

    def test_behind_a_proxy_the_poster_is_the_forwarded_address(self) -> None:
        """Else strangers could have this machine look at itself."""
        self.site(proxied=True)
        for header, client in ((b"203.0.113.9, 198.51.100.7", "198.51.100.7"), (None, "")):
            request: Any = DummyRequest([])
            if header is not None:
                request.requestHeaders.setRawHeaders(b"x-forwarded-for", [header])
            self.assertEqual(self.api.client_of(request), client)

    def test_fields_have_limits(self) -> None:
        key = SecKey.from_seed(b"fields")
        servers = tuple(SecKey.from_seed(b"%d" % number).public.hex() for number in range(MAX_DELEGATED + 1))
        for version, delegated, status in (
            ("v" * MAX_VERSION, servers[:-1], 200),
            ("v" * (MAX_VERSION + 1), (), 422),
            ("0.0.1", servers, 422),
        ):
            sequence = 0 if status == 200 else 1
            entry = Entry(version, sequence, 1 + sequence, key.public.hex(), ClientMeta(delegated)).sign(key)
            self.assertEqual(self.message("POST", "/discovery/entries", entry.to_json())[0], status)

    def test_entries_that_escaping_makes_long(self) -> None:
        """Ten of them would be more than clients take as one answer."""
        key = SecKey.from_seed(b"fat")
        fat = Entry("0.0.1", 0, 1, key.public.hex(), server=ServerMeta("<" * 5000 + ":1", 1)).sign(key)
        self.assertEqual(self.message("POST", "/discovery/entries", fat.to_json()), (422, TOO_LONG))

    def test_forged_entries_use_up_the_rate_of_their_address(self) -> None:
        """Verifying is what costs; entries that are signed have a limit of their own."""
        forged = self.client_entry().to_json().replace(b'"timestamp":1', b'"timestamp":2')

        def post(body: bytes) -> bytes:
            return b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body

        answer = self.serve(post(forged) * 10, rate=1, burst=10, post_rate=1, post_burst=20)
        self.assertEqual((answer.count(b" 401 "), answer.count(b" 429 ")), (2, 1))
        good = b"".join(post(self.client_entry(number, number + 1).to_json()) for number in range(15))
        answer = self.serve(good, rate=1, burst=3, post_rate=1, post_burst=10)
        self.assertEqual((answer.count(b" 200 "), answer.count(b" 429 ")), (10, 1))

    def test_an_ipv6_customer_is_one_address(self) -> None:
        self.assertEqual(block_of("2001:db8::1"), block_of("2001:db8:0:0:ffff::2"))
        self.assertNotEqual(block_of("2001:db8::1"), block_of("2001:db8:0:1::1"))
        self.assertEqual(block_of("::ffff:1.2.3.4"), "1.2.3.4")

    def test_reserved_memory_is_counted(self) -> None:
        limit = RateLimit(2.0, 2.0)
        self.assertEqual([limit.reserve("a", 0.0, 1.0) for _ in range(5)], [0.0, 0.0, 0.5, 1.0, None])
        self.assertEqual(limit.reserve("b", 0.0, 0.0), 0.0)
        self.assertEqual(limit.reserve("a", 1.0, 1.0), 0.5)
        limit.charge("b", 100.0, 0.0)
        self.assertTrue(limit.is_exhausted("b", 1.0))
        self.assertFalse(limit.is_exhausted("b", 2.0))

    def test_paths_that_are_not_utf_8(self) -> None:
        answer = self.serve(b"GET /discovery/entries/%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertTrue(answer.startswith(b"HTTP/1.1 400"))
        self.assertIn(b"path or host is no text", answer)
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_addresses_have_their_own_limit(self) -> None:
        limit = RateLimit(1.0, 2.0)
        self.assertEqual([limit.allow("a", 0.0) for _ in range(3)], [True, True, False])
        self.assertTrue(limit.allow("b", 0.0))
        self.assertTrue(limit.allow("a", 1.0))
        self.assertFalse(limit.allow("a", 1.0))

    def test_the_table_of_addresses_is_bounded(self) -> None:
        limit = RateLimit(1.0, 2.0)
        for number in range(MAX_ADDRESSES + 100):
            limit.allow(str(number), 0.0)
        self.assertEqual(len(limit._buckets), MAX_ADDRESSES)

    def test_a_rate_of_0_disables_the_limit(self) -> None:
        limit = RateLimit(0.0, 1.0)
        self.assertTrue(all(limit.allow("a", 0.0) for _ in range(1000)))
