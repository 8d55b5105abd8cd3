"""The HTTP face: disc.json's exchanges, bad input, limits."""

from __future__ import annotations

import gc
import json
import math
import sqlite3
from dataclasses import replace
from typing import Any, cast

from treq.testing import StubTreq
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import EventLoggingObserver
from twisted.logger import formatEvent, globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.test.requesthelper import DummyRequest

from dmsg.base.buckets import MAX_ADDRESSES, RateLimit
from dmsg.discovery.entries.entry import MAX_DELEGATED, MAX_VERSION, ClientMeta, Entry, ServerMeta
from dmsg.discovery.entries.rules import Deletion, Terms
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import GRACE, HUNG_FOR, Lookups
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.service.settings import CLIENT_TTL, ENTRY_TTL, OF_PLACE, REFRESHING_TTL, DiscoverySettings
from dmsg.discovery.service.site import make_site
from dmsg.discovery.store import SQLiteStore
from dmsg.errors import DiscoveryError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.addresses import block_of
from dmsg.net.web import site as site_module
from dmsg.telemetry.metrics import Metrics
from tests.discovery.entries.test_entry import MALFORMED
from tests.support import vectors

KEY = SecKey.from_seed(b"api")


TOO_LONG = "entry validation error: entry is too long"


class Fixed(Resource):
    """One answer to everything."""

    isLeaf = True

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__()
        self.status, self.body = status, body

    def render(self, request: Any) -> bytes:
        request.setResponseCode(self.status)
        request.setHeader(b"content-type", b"application/json")
        return self.body


class APICase(SynchronousTestCase):
    """Discovery without sockets."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.store: Any = SQLiteStore(":memory:")
        self.now = 0.0
        self.metrics = Metrics()
        self.api = DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics)
        self.http = StubTreq(self.api.resource())

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        response = self.successResultOf(
            cast(Any, self.http).request(method, f"http://discovery{path}", data=body, allow_redirects=False)
        )
        return response.code, self.successResultOf(response.content())

    def message(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        status, answer = self.request(method, path, body)
        value = json.loads(answer)
        self.assertEqual(value["code"], status)
        return status, value["message"]

    def client_entry(self, sequence: int = 0, timestamp: int = 1) -> Entry:
        return Entry("0.0.1", sequence, timestamp, KEY.public.hex(), client=ClientMeta(())).sign(KEY)

    def server_entry(self, name: bytes, free: int = 1, version: str = "0.0.1") -> Entry:
        key = SecKey.from_seed(name)
        return Entry(version, 0, 1, key.public.hex(), server=ServerMeta("h:1", free, None)).sign(key)

    def old_server_entry(self, name: bytes) -> Entry:
        """As a program of 2019 signs it: its port is in the JSON."""
        key = SecKey.from_seed(name)
        return Entry("0.0.1", 0, 1, key.public.hex(), server=ServerMeta("h:1", 1)).sign(key)


class GoVectorTests(APICase):
    """What the 2019 service answered its client, code and body."""

    def test_exchanges(self) -> None:
        replayed = 0
        for case in vectors("disc")["http"]:
            status = case.get("status")
            body = bytes.fromhex(case["body_hex"]) if "body_hex" in case else case.get("body", "").encode()
            name = case["name"]
            if status is None:
                # its handler panicked on x >= p: here that is bad input like any other
                answered, text = self.message(case["method"], case["path"], body or None)
                self.assertEqual(
                    (answered, text), (500, "something unexpected happened") if body else (400, "error bad input")
                )
                continue
            answered, answer = self.request(case["method"], case["path"], body or None)
            if "still lists it" in name or name == "available_servers, POST":
                # bettered: a key that posted a client entry is not a server any more
                self.assertEqual((answered, answer), (200, b"[]"), name)
                continue
            if case["path"].startswith("/discovery/") or name == "available_servers, trailing slash":
                continue  # paths that the 2019 service does not know
            self.assertEqual(answered, status, name)
            if status == 200 and case["response"][:1] in "{[":
                self.assertEqual(answer.decode(), case["response"], name)
            elif status not in (301, 404) or case["response"].startswith("{"):
                self.assertEqual(answer.decode(), case["response"], name)
            replayed += 1
        self.assertGreater(replayed, 75)


class SeedPathTests(APICase):
    """Paths and codes of the seed documents."""

    def test_health_says_whether_entries_are_taken(self) -> None:
        """A read that failed once is over when the next one succeeds; a full disk only when an entry is taken again."""
        body = self.client_entry().to_json()
        self.store = SQLiteStore(self.mktemp())
        self.addCleanup(self.store.close)
        self.http = StubTreq(DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics).resource())

        def fails(*_: object) -> Any:
            return fail(sqlite3.OperationalError("database or disk is full"))

        post, get = self.store.post, self.store.get
        self.patch(self.store, "get", fails)
        self.assertEqual(self.message("GET", f"/discovery/entries/{KEY.public}")[0], 503)
        self.assertEqual(self.request("GET", "/health")[0], 200)
        self.patch(self.store, "get", get)
        self.patch(self.store, "post", fails)
        self.assertEqual(self.message("POST", "/discovery/entries", body)[0], 503)
        self.assertEqual(self.request("GET", "/health")[0], 503)
        self.patch(self.store, "post", post)
        self.assertEqual(self.message("POST", "/discovery/entries", body)[0], 200)
        self.assertEqual(self.request("GET", "/health")[0], 200)

    def test_life_of_an_entry(self) -> None:
        entry = self.client_entry()
        path = f"/discovery/entries/{entry.static}"
        self.assertEqual(self.message("GET", path), (404, "entry of public key is not found"))
        self.assertEqual(self.message("POST", "/discovery/entries", entry.to_json())[0], 200)
        self.assertEqual(self.request("GET", path), (200, entry.to_json()))
        self.assertEqual(self.request("GET", path.upper().replace("/DISCOVERY/ENTRIES", "/discovery/entries"))[0], 200)
        self.assertEqual(self.message("POST", "/discovery/entries", entry.to_json())[0], 422)
        self.assertEqual(self.message("POST", "/discovery/entries", self.client_entry(1, 2).to_json())[0], 200)
        deletion = Deletion(entry.static, 1, 3).sign(KEY)
        self.assertEqual(self.message("DELETE", path, deletion.to_json()), (200, "deleted the entry"))
        self.assertEqual(self.message("DELETE", path, deletion.to_json())[0], 404)
        self.assertEqual(self.message("POST", "/discovery/entries", entry.to_json())[0], 422)

    def test_wrong_signatures(self) -> None:
        forged = self.client_entry().to_json().replace(b'"timestamp":1', b'"timestamp":2')
        self.assertEqual(self.message("POST", "/discovery/entries", forged), (401, "invalid signature"))

    def test_an_entry_cannot_be_replayed_to_delete_it(self) -> None:
        """W1 of today's Go service."""
        entry = self.client_entry()
        self.request("POST", "/discovery/entries", entry.to_json())
        path = f"/discovery/entries/{entry.static}"
        _, public = self.request("GET", path)
        self.assertEqual(self.message("DELETE", path, public)[0], 400)
        self.assertEqual(self.request("GET", path)[0], 200)

    def test_a_deletion_of_another_key(self) -> None:
        self.request("POST", "/discovery/entries", self.client_entry().to_json())
        other = SecKey.generate()
        deletion = Deletion(other.public.hex(), 0, 3).sign(other)
        self.assertEqual(self.message("DELETE", f"/discovery/entries/{KEY.public}", deletion.to_json())[0], 422)

    def test_available_servers(self) -> None:
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        entry = self.server_entry(b"s")
        self.request("POST", "/discovery/entries", entry.to_json())
        self.request("POST", "/discovery/entries", self.server_entry(b"full", 0).to_json())
        status, body = self.request("GET", "/discovery/available_servers")
        self.assertEqual((status, body), (200, b"[" + entry.to_json() + b"]"))
        self.now = 121.0
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        self.assertEqual(self.request("GET", f"/discovery/entries/{entry.static}")[0], 200)

    def test_a_server_of_2019_stays_on_the_list_as_long_as_it_is_there(self) -> None:
        """It posts once.  An old mark in its entry, left by another program, does not count."""
        for name, version in ((b"old", "0.0.1"), (b"marked", "0.0.1+relay1")):
            key = SecKey.from_seed(name)
            entry = Entry(version, 0, 1, key.public.hex(), server=ServerMeta("8.8.8.8:1", 1)).sign(key)
            self.assertEqual(self.request("POST", "/messaging-discovery/entry/", entry.to_json())[0], 200)
        self.now = 100.0
        live = self.server_entry(b"live", version="0.0.1+relay1")
        self.request("POST", "/discovery/entries", live.to_json())
        servers = json.loads(self.request("GET", "/discovery/available_servers")[1])
        self.assertEqual(servers[0]["static"], live.static)
        self.assertEqual(len(servers), 3)
        old = SecKey.from_seed(b"old").public.hex()
        self.successResultOf(self.store.seen(old, "8.8.8.8:1", 110.0, 1000.0))
        self.now = 140.0
        servers = json.loads(self.request("GET", "/messaging-discovery/available_servers")[1])
        self.assertEqual([server["static"] for server in servers], [live.static, old])
        self.now = 240.0
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)

    def posted(self, path: str, entry: Entry) -> Terms:
        """As the store is told."""
        told: list[Terms] = []
        post = self.store.post

        def note(entry: Entry, now: float, terms: Terms) -> Any:
            told.append(terms)
            return post(entry, now, terms)

        self.patch(self.store, "post", note)
        self.assertEqual(self.request("POST", path, entry.to_json())[0], 200)
        return told[0]

    def test_how_long_entries_are_kept(self) -> None:
        """By what their owners say, who are believed on the path of the seed document."""
        seed, old = "/discovery/entries", "/messaging-discovery/entry/"
        for number, (path, version, kind, lasts) in enumerate(
            (
                (seed, "0.0.1", "client", ENTRY_TTL),
                (seed, "0.0.1+refresh1", "client", CLIENT_TTL),
                (old, "0.0.1+refresh1", "client", ENTRY_TTL),
                (seed, "0.0.1", "server", ENTRY_TTL),
                (seed, "0.0.1+relay1", "server", REFRESHING_TTL),
                (old, "0.0.1+relay1", "server", ENTRY_TTL),
                (seed, "0.0.1+relay1", "both", ENTRY_TTL),
                (seed, "0.0.1+refresh1.relay1", "both", REFRESHING_TTL),
            )
        ):
            key = SecKey.from_seed(b"kept %d" % number)
            client = None if kind == "server" else ClientMeta(())
            server = None if kind == "client" else ServerMeta("h:1", 1)
            entry = Entry(version, 0, 1, key.public.hex(), client, server).sign(key)
            self.assertEqual(self.posted(path, entry).lasts, lasts, (path, version, kind))

    def test_whose_entries_they_are(self) -> None:
        """A block of IPv6 is one; who is beside discovery has no limit of its own: it may be a proxy."""
        for poster, place, most in (
            ("1.2.3.4", "1.2.3.4", OF_PLACE),
            ("2600:1:2:3:4::5", "2600:1:2:3::/64", OF_PLACE),
            ("10.0.0.1", "10.0.0.1", math.inf),
            ("127.0.0.1", "127.0.0.1", math.inf),
        ):
            self.api.client_of = cast(Any, lambda request, poster=poster: poster)
            key = SecKey.from_seed(poster.encode())
            terms = self.posted("/discovery/entries", Entry("0.0.1", 0, 1, key.public.hex(), ClientMeta(())).sign(key))
            self.assertEqual((terms.place, terms.most, terms.checked), (place, most, True))

    def test_servers_are_looked_at_before_they_are_listed(self) -> None:
        told: list[None] = []
        api = DiscoveryAPI(
            self.clock,
            self.store,
            lambda: self.now,
            self.metrics,
            looks=lambda: told.append(None),
        )
        self.http = StubTreq(api.resource())
        self.request("POST", "/discovery/entries", self.client_entry().to_json())
        self.assertEqual(told, [])
        entry = self.server_entry(b"new", version="0.0.1+relay1")
        self.request("POST", "/discovery/entries", entry.to_json())
        self.assertEqual(len(told), 1)
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        self.successResultOf(self.store.seen(entry.static, "h:1", 0.0, 100.0))
        self.assertEqual(self.request("GET", "/discovery/available_servers")[0], 200)

    def test_servers_that_are_never_taken_off_the_list(self) -> None:
        api = DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics, DiscoverySettings(server_ttl=0.0))
        self.http = StubTreq(api.resource())
        self.request("POST", "/messaging-discovery/entry/", self.old_server_entry(b"old").to_json())
        self.request("POST", "/discovery/entries", self.server_entry(b"new", version="0.0.1+relay1").to_json())
        self.now = 1e9
        self.assertEqual(len(json.loads(self.request("GET", "/discovery/available_servers")[1])), 2)

    def test_the_paths_of_later_documents(self) -> None:
        """The same service under its later name."""
        entry = self.old_server_entry(b"s")
        self.assertEqual(self.request("POST", "/dmsg-discovery/entry/", entry.to_json())[0], 200)
        self.assertEqual(self.request("GET", f"/dmsg-discovery/entry/{entry.static}"), (200, entry.to_json()))
        status, body = self.request("GET", "/dmsg-discovery/available_servers")
        self.assertEqual((status, body), (200, b"[" + entry.to_json() + b"]"))

    def test_bad_input_is_4xx_and_stores_nothing(self) -> None:
        observer = EventLoggingObserver.createWithCleanup(cast(Any, self), globalLogPublisher)
        for body in MALFORMED:
            self.assertEqual(self.message("POST", "/discovery/entries", body)[0], 400, body[:60])
            self.assertEqual(self.message("DELETE", f"/discovery/entries/{KEY.public}", body)[0], 400, body[:60])
        self.assertEqual(self.message("GET", "/discovery/entries/02" + "f" * 64)[0], 404)
        for key in ("x", "02", "0" * 66, "%00", "..%2f"):
            status = self.request("GET", f"/discovery/entries/{key}")[0]
            self.assertIn(status, (400, 404), key)
        self.assertEqual(self.successResultOf(self.store.count()), 0)
        self.assertFalse([event for event in observer if event.get("log_failure") is not None])

    def test_unknown_paths_and_methods(self) -> None:
        self.assertEqual(self.message("GET", "/nothing")[0], 404)
        self.assertEqual(self.message("PUT", "/discovery/entries")[0], 405)
        self.assertEqual(self.request("HEAD", "/discovery/available_servers")[0], 404)

    def test_health_and_metrics(self) -> None:
        self.request("POST", "/discovery/entries", self.client_entry().to_json())
        self.request("POST", "/discovery/entries", b"x")

        def ask(path: str, **headers: str) -> tuple[int, bytes]:
            response = self.successResultOf(cast(Any, self.http).get(f"http://127.0.0.1{path}", headers=headers))
            return response.code, self.successResultOf(response.content())

        self.assertEqual(json.loads(ask("/health")[1]), {"status": "ok", "entries": 1})
        # from elsewhere: by a proxy, or by a name that somebody else lets lead here
        for headers in ({"X-Forwarded-For": "192.0.2.1"}, {"Host": "discovery.example.org"}):
            self.assertEqual(json.loads(ask("/health", **headers)[1]), {"status": "ok"})
            status, answer = ask("/metrics", **headers)
            self.assertEqual((status, b"dmsg_discovery" in answer), (403, False))
        text = ask("/metrics")[1].decode()
        self.assertIn('dmsg_discovery_posts_total{kind="first"} 1.0', text)
        self.assertIn('dmsg_discovery_refused_total{reason="undecodable"} 1.0', text)
        self.assertIn("dmsg_discovery_entries 1.0", text)

    def test_who_has_an_entry_is_not_sent_it_again(self) -> None:
        def ask(tag: str) -> tuple[int, bytes, str]:
            response = self.successResultOf(cast(Any, self.http).get(url, headers={"If-None-Match": tag}))
            return response.code, self.successResultOf(response.content()), response.headers.getRawHeaders("etag")[0]

        url = f"http://discovery/discovery/entries/{KEY.public}"
        entry = self.client_entry()
        self.request("POST", "/discovery/entries", entry.to_json())
        status, body, tag = ask('"other"')
        self.assertEqual((status, body), (200, entry.to_json()))
        self.assertEqual(ask(tag), (304, b"", tag))
        later = self.client_entry(1, 2)
        self.request("POST", "/discovery/entries", later.to_json())
        self.assertEqual(ask(tag)[:2], (200, later.to_json()))

    def test_a_store_that_fails_is_503(self) -> None:
        self.store.get = lambda static: fail(OSError("disk"))
        self.assertEqual(self.message("GET", f"/discovery/entries/{KEY.public}")[0], 503)
        self.assertEqual(len(self.flushLoggedErrors(OSError)), 1)


class GateTests(APICase):
    """Limits that stand before the routes."""

    def serve(self, data: bytes, **options: Any) -> bytes:
        """The answer to plain bytes."""
        from twisted.internet.testing import StringTransport

        site = make_site(self.api, self.clock, self.metrics, DiscoverySettings(**options))
        channel = site.buildProtocol(None)
        assert channel is not None
        transport = StringTransport()
        transport.protocol = channel  # type: ignore[attr-defined]
        channel.makeConnection(transport)
        channel.dataReceived(data)
        answer: bytes = transport.value()
        channel.connectionLost(None)
        return answer

    def test_ten_megabytes(self) -> None:
        head = b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n"
        self.assertTrue(self.serve(head + bytes(100_000)).startswith(b"HTTP/1.1 413"))

    def test_ten_megabytes_in_chunks(self) -> None:
        head = b"POST /discovery/entries HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
        self.assertTrue(self.serve(head + chunk * 2 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413"))

    def test_rate_limit(self) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        answers = self.serve(request * 5, rate=1, burst=3)
        # what came behind it over the same connection is not even looked at
        self.assertEqual((answers.count(b"200 OK"), answers.count(b"HTTP/1.1 429")), (3, 1))
        self.assertIn(b"\r\nConnection: close\r\n", answers)

    def connections(self, number: int, data: bytes, **options: Any) -> list[Any]:
        """So many clients at one address, each with a request of its own."""
        from twisted.internet.testing import StringTransport

        site = make_site(self.api, self.clock, self.metrics, DiscoverySettings(**options))
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
        """They know no 429 and do not ask again."""
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(300, request, rate=50.0, burst=100.0)
        self.assertEqual(sum(b"200 OK" in transport.value() for transport in transports), 100)
        self.clock.pump([0.1] * 45)
        self.assertEqual(sum(b"200 OK" in transport.value() for transport in transports), 300)
        self.assertEqual(self.gate.delayed, 200)
        self.assertEqual(self.gate._waiting_size, 0)

    def test_whatever_is_below_the_paths_of_2019_is_delayed(self) -> None:
        """Its service says 404 there, and a client that gets 429 does not know what that is."""
        for root in ("messaging-discovery", "dmsg-discovery"):
            request = f"GET /{root}/nothing HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            transports = self.connections(3, request, rate=1.0, burst=1.0)
            self.assertEqual(self.gate.delayed, 2)
            self.clock.advance(3.0)
            self.assertEqual(sum(b" 404 " in transport.value() for transport in transports), 3)

    def test_who_waits_longer_than_clients_wait_is_refused(self) -> None:
        request = b"GET /messaging-discovery/available_servers HTTP/1.1\r\nHost: x\r\n\r\n"
        transports = self.connections(30, request, rate=1.0, burst=1.0)
        self.assertEqual(sum(b" 429 " in transport.value() for transport in transports), 24)

    def test_a_client_that_left_while_it_waited(self) -> None:
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
        """At once and delayed."""
        for path in ("/health", "/messaging-discovery/available_servers"):
            request = f"GET {path} HTTP/1.1\r\nHost: a..b\r\n\r\n".encode()
            transports = self.connections(3, request, rate=1.0, burst=1.0)
            self.clock.advance(3.0)
            for transport in transports:
                self.assertTrue(transport.value().startswith((b"HTTP/1.1 400", b"HTTP/1.1 429")), transport.value())
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_behind_a_proxy_the_poster_is_who_it_names(self) -> None:
        """Else strangers could have this machine look at itself."""
        site = make_site(self.api, self.clock, self.metrics, DiscoverySettings(proxied=True))
        gate: Any = site.resource
        for header, client in ((b"203.0.113.9, 198.51.100.7", "198.51.100.7"), (None, "")):
            request = DummyRequest([])
            if header is not None:
                request.requestHeaders.setRawHeaders(b"x-forwarded-for", [header])
            self.assertEqual(gate.client_of(request), client)

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

    def test_forged_entries_use_up_what_the_address_may_ask(self) -> None:
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

    def test_what_is_reserved_is_counted(self) -> None:
        limit = RateLimit(2.0, 2.0)
        self.assertEqual([limit.reserve("a", 0.0, 1.0) for _ in range(5)], [0.0, 0.0, 0.5, 1.0, None])
        self.assertEqual(limit.reserve("b", 0.0, 0.0), 0.0)
        self.assertEqual(limit.reserve("a", 1.0, 1.0), 0.5)
        limit.charge("b", 100.0, 0.0)
        self.assertTrue(limit.owes("b", 1.0))
        self.assertFalse(limit.owes("b", 2.0))

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

    def test_no_limit(self) -> None:
        limit = RateLimit(0.0, 1.0)
        self.assertTrue(all(limit.allow("a", 0.0) for _ in range(1000)))


class LookupTests(APICase):
    """The client of discovery against the service."""

    def test_closing_ends_what_is_asked(self) -> None:
        cancelled: list[Deferred[Any]] = []

        class Silent:
            def request(self, *args: Any, **options: Any) -> Deferred[Any]:
                return Deferred(cancelled.append)

        lookup = Lookup(self.clock, "http://discovery", http=Silent())
        waiting = lookup.entry(KEY.public)
        self.successResultOf(lookup.close())
        self.failureResultOf(waiting, DiscoveryError)
        self.assertEqual(len(cancelled), 1)

    def setUp(self) -> None:
        super().setUp()
        self.lookup = Lookup(self.clock, "http://discovery", http=self.http)

    def test_update_makes_and_iterates(self) -> None:
        for expected in (0, 1, 2):
            entry = self.successResultOf(self.lookup.update(KEY, lambda blank: self.with_client(blank)))
            self.assertEqual(entry.sequence, expected)
        self.assertEqual(self.successResultOf(self.lookup.entry(KEY.public)), entry)

    @staticmethod
    def with_client(blank: Entry) -> Entry:
        from dataclasses import replace

        return replace(blank, client=ClientMeta(()))

    def asked(self) -> list[str]:
        """Methods of the requests from now on."""
        found: list[str] = []
        inner = cast(Any, self.http).request

        def request(method: str, *args: Any, **options: Any) -> Any:
            found.append(method)
            return inner(method, *args, **options)

        self.patch(self.lookup, "_http", type("HTTP", (), {"request": staticmethod(request)})())
        return found

    def test_who_posted_last_need_not_ask_first(self) -> None:
        asked = self.asked()
        for sequence in range(3):
            entry = self.successResultOf(self.lookup.update(KEY, self.with_client))
            self.assertEqual(entry.sequence, sequence)
        self.assertEqual(asked, ["GET", "POST", "POST", "POST"])

    def test_unless_somebody_else_has_written(self) -> None:
        """Another program with this key, or a discovery that has forgotten everything: what is there is read again."""
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        other = Lookup(self.clock, "http://discovery", http=self.http)
        self.successResultOf(other.update(KEY, lambda blank: replace(self.with_client(blank), version="0.0.1+other1")))
        asked = self.asked()
        entry = self.successResultOf(self.lookup.update(KEY, self.with_client))
        self.assertEqual((entry.sequence, entry.version), (2, "0.0.1+other1"))
        self.store._db.execute("DELETE FROM entries")
        self.assertEqual(self.successResultOf(self.lookup.update(KEY, self.with_client)).sequence, 0)
        self.assertEqual(asked, ["POST", "GET", "POST"] * 2)

    def test_an_update_that_loses_a_race_is_tried_again(self) -> None:
        """Another writer of the same key came between GET and POST."""
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        raced: list[Any] = []

        def make(blank: Entry) -> Entry:
            if not raced:
                raced.append(blank)
                self.successResultOf(self.lookup.update(KEY, self.with_client))
            return self.with_client(blank)

        self.assertEqual(self.successResultOf(self.lookup.update(KEY, make)).sequence, 2)

    def test_delete_and_post_again(self) -> None:
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        self.successResultOf(self.lookup.delete(KEY))
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)
        self.failureResultOf(self.lookup.delete(KEY), EntryNotFound)
        self.assertEqual(self.successResultOf(self.lookup.update(KEY, self.with_client)).sequence, 0)

    def life(self, days: float, half: str = "client") -> int:
        """A program with this key and a clock that is ahead posts its entry and stops; by how much the entry is."""
        now = 1_800_000_000 * 10**9
        lookup = Lookup(self.clock, "http://discovery", http=self.http, date=lambda: now + round(days * 86400 * 10**9))
        content: Any = {"client": ClientMeta(())} if half == "client" else {"server": ServerMeta("h:1", 5)}
        posted: Entry = self.successResultOf(lookup.update(KEY, lambda blank: replace(blank, **content)))
        self.assertEqual(posted.sequence, 0)
        self.assertTrue(self.successResultOf(lookup.withdraw(KEY, half)))
        return posted.timestamp - now

    def test_a_clock_that_was_ahead_locks_nobody_out(self) -> None:
        """After a clean stop, whatever the clock was: a day, a year, and a server's as a client's."""
        log = EventLoggingObserver.createWithCleanup(cast(Any, self), globalLogPublisher)
        for half in ("client", "server"):
            ahead = self.life(1, half)
            self.assertEqual(self.life(0, half), ahead + 2)  # behind the entry came its deletion
            self.assertIn("a clock that was 1 d 0 h ahead of this machine's", str([formatEvent(one) for one in log]))
            ahead = self.life(366, half)
            self.assertEqual([self.life(0, half) - ahead, self.life(-1, half) - ahead], [2, 4])

    def test_only_its_own_signature_moves_the_date_of_a_key(self) -> None:
        """A discovery that lies cannot have an entry dated in the far future, where it would stay the newest."""
        far = 9 * 10**18
        forged = Deletion(KEY.public.hex(), 0, far).sign(SecKey.from_seed(b"other"))
        other = SecKey.from_seed(b"other")
        for body in (forged.to_json(), Deletion(other.public.hex(), 0, far).sign(other).to_json(), b"7", b"{}"):
            asked: list[bytes] = []

            class Lies:
                def request(self, method: str, url: str, *, data: Any, body: bytes = body, **options: Any) -> Any:
                    status = 422 if method == "POST" else 404
                    if data is not None:
                        asked.append(data)  # noqa: B023  # used in this turn of the loop only
                    says = Fixed(status, b'{"message":"no","code":422,"deletion":%s}' % body)
                    return cast(Any, StubTreq(says)).request(method, url, data=data)

            lookup = Lookup(self.clock, "http://discovery", http=Lies(), date=lambda: 1000)
            self.failureResultOf(lookup.update(KEY, self.with_client), DiscoveryError)
            self.assertEqual({json.loads(one)["timestamp"] for one in asked}, {1000}, body)

    def test_an_earlier_discovery_does_not_say_when(self) -> None:
        """Then the message names what the owner can look at."""
        self.life(1)
        self.store._db.execute("UPDATE entries SET deletion = NULL")
        lookup = Lookup(self.clock, "http://discovery", http=self.http, date=lambda: 1_800_000_000 * 10**9)
        said = str(self.failureResultOf(lookup.update(KEY, self.with_client), DiscoveryError).value)
        self.assertIn("is the clock of this machine right?", said)
        self.assertIn("forgets the deletion after a day", said)

    def test_what_does_not_verify_is_not_used(self) -> None:
        """A discovery that lies: another's entry, a changed one, no entry at all."""
        entry = self.client_entry()
        changed = entry.to_json().replace(b'"timestamp":1', b'"timestamp":2')
        other = self.server_entry(b"other").to_json()
        for body in (changed, other, b"{}", b"[", b"null"):
            self.store.get = lambda static, body=body: succeed(body)
            self.failureResultOf(self.lookup.entry(KEY.public), DiscoveryError)

    def test_servers_that_do_not_verify_are_left_out(self) -> None:
        good, bad = self.server_entry(b"good"), self.server_entry(b"bad")
        for entry in (good, bad):
            self.successResultOf(self.lookup.post(entry))
        changed = bad.to_json().replace(b"h:1", b"h:2")
        self.store._db.execute("UPDATE entries SET json = ? WHERE static = ?", (changed, bad.static))
        self.assertEqual(self.successResultOf(self.lookup.available_servers()), [good])

    def test_errors_name_what_is_wrong(self) -> None:
        forged = self.client_entry().to_json()
        error = self.failureResultOf(self.lookup.post(Entry("0.0.1", 5, 1, KEY.public.hex(), ClientMeta(())).sign(KEY)))
        self.assertEqual(error.value.status, 422)
        self.assertIn("non-zero sequence", str(error.value))
        self.assertTrue(forged)

    def test_the_newest_of_several(self) -> None:
        """One shows an older entry, one hangs: neither is believed before who has the newest."""
        old, new = (Entry("0.0.1", number, 1 + number, KEY.public.hex(), ClientMeta(())).sign(KEY) for number in (0, 1))

        class Says(Lookup):
            def __init__(self, clock: Any, *entries: Entry, hangs: bool = False) -> None:
                super().__init__(clock, "http://says")
                self.entries, self.hangs, self.asked, self.cancelled = entries, hangs, 0, 0

            def answer(self, value: Any) -> Any:
                self.asked += 1
                if self.hangs:
                    return Deferred(self.gave_up)
                return succeed(value) if value else fail(EntryNotFound("it has none"))

            def gave_up(self, _: Any) -> None:
                self.cancelled += 1

            def entry(self, key: Any) -> Any:
                return self.answer(self.entries[0] if self.entries else None)

            def available_servers(self) -> Any:
                return self.answer(list(self.entries))

        lying, honest, hanging = Says(self.clock, old), Says(self.clock, new), Says(self.clock, hangs=True)
        both = Lookups([lying, Says(self.clock), honest])
        self.assertEqual(self.successResultOf(both.entry(KEY.public)), new)
        lookups = Lookups([hanging, lying, honest])
        asking = lookups.entry(KEY.public)
        self.assertNoResult(asking)
        self.clock.advance(GRACE)
        self.assertEqual(self.successResultOf(asking), new)
        self.assertEqual((hanging.asked, hanging.cancelled), (1, 1))
        # it is asked again, and not waited for, for a while
        self.assertEqual(self.successResultOf(lookups.entry(KEY.public)), new)
        self.assertEqual((hanging.asked, hanging.cancelled), (2, 2))
        self.clock.advance(HUNG_FOR)
        asking = lookups.entry(KEY.public)
        self.assertNoResult(asking)
        asking.cancel()
        self.failureResultOf(asking)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.failureResultOf(Lookups([Says(self.clock), Says(self.clock)]).entry(KEY.public), EntryNotFound)
        first = self.server_entry(b"s")
        second = replace(first, sequence=1, timestamp=2).sign(SecKey.from_seed(b"s"))
        several = Lookups([Says(self.clock, first), Says(self.clock, second), hanging])
        listing = several.available_servers()
        self.clock.advance(GRACE)
        self.assertEqual(self.successResultOf(listing), [second])

    def test_a_change_is_not_held_up(self) -> None:
        """One discovery takes it and never answers: it is told the next change too, and the others do not wait."""

        class Hangs(Lookup):
            def __init__(self, clock: Any) -> None:
                super().__init__(clock, "http://hangs")
                self.asked: list[Deferred[Any]] = []
                self.cancelled = 0

            def update(self, key: Any, make: Any) -> Any:
                self.asked.append(Deferred(self.gave_up))
                return self.asked[-1]

            def withdraw(self, key: Any, half: str, features: Any = ()) -> Any:
                return self.update(key, None)

            def gave_up(self, _: Any) -> None:
                self.cancelled += 1

        hanging = Hangs(self.clock)
        lookups = Lookups([hanging, self.lookup])
        changing = lookups.update(KEY, self.with_client)
        self.assertNoResult(changing)
        self.assertEqual(self.successResultOf(self.lookup.entry(KEY.public)).sequence, 0)
        self.clock.advance(GRACE)
        self.successResultOf(changing)
        self.assertEqual((len(hanging.asked), hanging.cancelled), (1, 0))
        # for a while it is told, and not waited for
        self.successResultOf(lookups.update(KEY, self.with_client))
        self.assertEqual((len(hanging.asked), hanging.cancelled), (2, 1))
        hanging.asked[1].errback(DiscoveryError("late, and no"))
        self.successResultOf(lookups.withdraw(KEY, "client"))
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)
        self.assertEqual((len(hanging.asked), hanging.cancelled), (3, 1))
        self.successResultOf(lookups.close())
        self.assertEqual((hanging.cancelled, lookups._changing), (2, {}))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_question_that_is_let_go(self) -> None:
        """Nobody waits for it any more, nobody will answer: what collects it raises nothing behind everybody's back."""

        class Silent:
            def request(self, *_: Any, **__: Any) -> Any:
                return Deferred()

        for many in (1, 2):
            lookups = Lookups([Lookup(self.clock, "http://silent", http=Silent()) for _ in range(many)])
            lookups.available_servers()
            del lookups
            gc.collect()
            self.assertEqual(self.flushLoggedErrors(), [])

    def test_several_discoveries(self) -> None:
        """One that is away does not matter; writes go to all."""

        class Away:
            def request(self, *_: Any, **__: Any) -> Any:
                return fail(OSError("refused"))

        away = Lookup(self.clock, "http://away", http=Away())
        lookups = Lookups([away, self.lookup])
        self.successResultOf(lookups.update(KEY, self.with_client))
        self.assertEqual(self.successResultOf(lookups.entry(KEY.public)).static, KEY.public.hex())
        self.failureResultOf(lookups.entry(SecKey.generate().public), DiscoveryError)
        self.assertEqual(self.successResultOf(lookups.available_servers()), [])
        self.failureResultOf(Lookups([away]).available_servers(), DiscoveryError)
        self.successResultOf(lookups.delete(KEY))
