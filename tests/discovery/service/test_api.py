"""The HTTP face: disc.json's exchanges, bad input, limits."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any, cast

from treq.testing import StubTreq
from twisted.internet.defer import fail
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import EventLoggingObserver, StringTransport
from twisted.logger import globalLogPublisher
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta
from dmsg.discovery.entries.rules import Deletion, Terms
from dmsg.discovery.service.api import DiscoveryAPI
from dmsg.discovery.service.server_quota import MAX_PER_POSTER
from dmsg.discovery.service.settings import (
    CLIENT_TTL,
    ENTRY_TTL,
    MAX_ENTRY_BYTES_PER_ADDRESS,
    REFRESHING_TTL,
    DiscoverySettings,
)
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.keys import SecKey
from dmsg.net.turn_end import at_turn_end
from dmsg.telemetry.metrics import Metrics
from tests.discovery.entries.test_entry import MALFORMED
from tests.support import vectors

KEY = SecKey.from_seed(b"api")


TOO_LONG = "entry validation error: entry is too long"


class Fixed(Resource):
    """Resource that always returns the same answer."""

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
        """Return an entry as a program of 2019 signs it: its port is in the JSON."""
        key = SecKey.from_seed(name)
        return Entry("0.0.1", 0, 1, key.public.hex(), server=ServerMeta("h:1", 1)).sign(key)


class GoVectorTests(APICase):
    """Recorded answers of the 2019 service to its client: status and body."""

    def test_answers_match_the_2019_service(self) -> None:
        replayed = 0
        for case in vectors("disc")["http"]:
            status = case.get("status")
            body = bytes.fromhex(case["body_hex"]) if "body_hex" in case else case.get("body", "").encode()
            name = case["name"]
            if status is None:
                # The handler of 2019 panicked on x >= p. This service treats it as any other bad input.
                answered, text = self.message(case["method"], case["path"], body or None)
                self.assertEqual(
                    (answered, text), (500, "something unexpected happened") if body else (400, "error bad input")
                )
                continue
            answered, answer = self.request(case["method"], case["path"], body or None)
            if "still lists it" in name or name == "available_servers, POST":
                # This service is better: a key that posts a client entry is no longer a server.
                self.assertEqual((answered, answer), (200, b"[]"), name)
                continue
            if case["path"].startswith("/discovery/") or name == "available_servers, trailing slash":
                continue  # The service of 2019 does not know these paths.
            self.assertEqual(answered, status, name)
            if status == 200 and case["response"][:1] in "{[":
                self.assertEqual(answer.decode(), case["response"], name)
            elif status not in (301, 404) or case["response"].startswith("{"):
                self.assertEqual(answer.decode(), case["response"], name)
            replayed += 1
        self.assertGreater(replayed, 75)


class SlowStoreTests(APICase):
    """POSTs that arrive before the store has decided about the first one."""

    def setUp(self) -> None:
        super().setUp()
        self.store = SQLiteStore(self.mktemp(), at_turn_end=at_turn_end(self.clock))
        self.addCleanup(lambda: self.store.close())
        self.api = DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics)
        self.api.client_of = cast(Any, lambda request: "8.8.8.8")
        self.http = StubTreq(self.api.resource())

    def start(self, method: str, path: str, body: bytes) -> Any:
        """Return the Deferred of a request."""
        return cast(Any, self.http).request(method, f"http://discovery{path}", data=body)

    def post_servers(self, numbers: range) -> list[Any]:
        names = [b"%d" % number for number in numbers]
        return [self.start("POST", "/discovery/entries", self.server_entry(name).to_json()) for name in names]

    def finish(self, *requests: Any) -> list[int]:
        self.clock.advance(0)
        self.http.flush()
        return [self.successResultOf(one).code for one in requests]

    def test_together_they_do_not_exceed_the_quota(self) -> None:
        posts = self.post_servers(range(MAX_PER_POSTER + 2))
        self.assertEqual(self.finish(*posts), [200] * MAX_PER_POSTER + [429] * 2)

    def test_a_post_that_the_store_refuses_frees_its_place(self) -> None:
        first = self.post_servers(range(1))
        again = self.post_servers(range(1))
        self.assertEqual(self.finish(*first, *again), [200, 422])
        posts = self.post_servers(range(1, MAX_PER_POSTER + 1))
        self.assertEqual(self.finish(*posts), [200] * (MAX_PER_POSTER - 1) + [429])

    def test_servers_of_clients_that_disconnect_count(self) -> None:
        """Also those of requests that only Klein understands: their Host header has a strange character."""
        site = Site(self.api.resource(), reactor=self.clock)
        for number in range(MAX_PER_POSTER):
            channel: Any = site.buildProtocol(None)
            channel.makeConnection(StringTransport())
            body, host = self.server_entry(b"%d" % number).to_json(), b"x_" if number % 2 else b"x"
            head = b"POST /discovery/entries HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n" % (host, len(body))
            channel.dataReceived(head + body)
            channel.connectionLost(Failure(ConnectionDone()))
        self.clock.advance(0)
        self.assertEqual(self.successResultOf(self.store.count()), MAX_PER_POSTER)
        self.assertEqual(self.finish(*self.post_servers(range(99, 100))), [429])


class SeedPathTests(APICase):
    """Paths and codes of the seed documents."""

    def test_health_says_whether_entries_are_taken(self) -> None:
        """A read that failed once is over when the next one succeeds; a full disk only when an entry is taken again."""
        body = self.client_entry().to_json()
        self.store = SQLiteStore(self.mktemp())
        self.addCleanup(self.store.close)
        self.http = StubTreq(DiscoveryAPI(self.clock, self.store, lambda: self.now, self.metrics).resource())

        def fails(name: str) -> Any:
            def method(*_: object) -> Any:
                return fail(sqlite3.OperationalError("database or disk is full"))

            method.__name__ = name
            return method

        post, get = self.store.post, self.store.get
        self.patch(self.store, "get", fails("get"))
        self.assertEqual(self.message("GET", f"/discovery/entries/{KEY.public}")[0], 503)
        self.assertEqual(self.request("GET", "/health")[0], 200)
        self.patch(self.store, "get", get)
        self.patch(self.store, "post", fails("post"))
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

    def test_entries_with_wrong_signatures_are_refused(self) -> None:
        forged = self.client_entry().to_json().replace(b'"timestamp":1', b'"timestamp":2')
        self.assertEqual(self.message("POST", "/discovery/entries", forged), (401, "invalid signature"))

    def test_replaying_an_entry_does_not_delete_the_entry(self) -> None:
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

    def test_available_servers_are_listed(self) -> None:
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        entry = self.server_entry(b"s")
        self.request("POST", "/discovery/entries", entry.to_json())
        self.request("POST", "/discovery/entries", self.server_entry(b"full", 0).to_json())
        status, body = self.request("GET", "/discovery/available_servers")
        self.assertEqual((status, body), (200, b"[" + entry.to_json() + b"]"))
        self.now = 121.0
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        self.assertEqual(self.request("GET", f"/discovery/entries/{entry.static}")[0], 200)

    def test_a_reachable_server_of_2019_stays_listed(self) -> None:
        """The server posts once.  An old mark in its entry, left by another program, does not count."""
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
        self.successResultOf(self.store.record_check(old, "8.8.8.8:1", 110.0, 1000.0))
        self.now = 140.0
        servers = json.loads(self.request("GET", "/messaging-discovery/available_servers")[1])
        self.assertEqual([server["static"] for server in servers], [live.static, old])
        self.now = 240.0
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)

    def posted(self, path: str, entry: Entry) -> Terms:
        """Return the terms that the store receives for a posted entry."""
        told: list[Terms] = []
        post = self.store.post

        def note(entry: Entry, now: float, terms: Terms) -> Any:
            told.append(terms)
            return post(entry, now, terms)

        self.patch(self.store, "post", note)
        self.assertEqual(self.request("POST", path, entry.to_json())[0], 200)
        return told[0]

    def test_entries_live_as_long_as_their_owner_asks(self) -> None:
        """On the path of the seed document, the owner's own statement decides."""
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

    def test_entries_count_against_the_posting_block(self) -> None:
        """A block of IPv6 is one; who is beside discovery has no limit of its own: it may be a proxy."""
        for poster, place, most in (
            ("1.2.3.4", "1.2.3.4", MAX_ENTRY_BYTES_PER_ADDRESS),
            ("2600:1:2:3:4::5", "2600:1:2:3::/64", MAX_ENTRY_BYTES_PER_ADDRESS),
            ("10.0.0.1", "10.0.0.1", math.inf),
            ("127.0.0.1", "127.0.0.1", math.inf),
        ):
            self.api.client_of = cast(Any, lambda request, poster=poster: poster)
            key = SecKey.from_seed(poster.encode())
            terms = self.posted("/discovery/entries", Entry("0.0.1", 0, 1, key.public.hex(), ClientMeta(())).sign(key))
            self.assertEqual((terms.place, terms.most, terms.checked), (place, most, True))

    def test_servers_are_checked_before_they_are_listed(self) -> None:
        told: list[None] = []
        api = DiscoveryAPI(
            self.clock,
            self.store,
            lambda: self.now,
            self.metrics,
            checks=lambda: told.append(None),
        )
        self.http = StubTreq(api.resource())
        self.request("POST", "/discovery/entries", self.client_entry().to_json())
        self.assertEqual(told, [])
        entry = self.server_entry(b"new", version="0.0.1+relay1")
        self.request("POST", "/discovery/entries", entry.to_json())
        self.assertEqual(len(told), 1)
        self.assertEqual(self.message("GET", "/discovery/available_servers")[0], 404)
        self.successResultOf(self.store.record_check(entry.static, "h:1", 0.0, 100.0))
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

    def test_bad_input_is_4xx_and_not_stored(self) -> None:
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
        # The request comes through a proxy, or by a host name that somebody else has pointed here.
        for headers in ({"X-Forwarded-For": "192.0.2.1"}, {"Host": "discovery.example.org"}):
            self.assertEqual(json.loads(ask("/health", **headers)[1]), {"status": "ok"})
            status, answer = ask("/metrics", **headers)
            self.assertEqual((status, b"dmsg_discovery" in answer), (403, False))
        text = ask("/metrics")[1].decode()
        self.assertIn('dmsg_discovery_posts_total{kind="first"} 1.0', text)
        self.assertIn('dmsg_discovery_refused_total{reason="undecodable"} 1.0', text)
        self.assertIn("dmsg_discovery_entries 1.0", text)

    def test_unchanged_entries_are_not_sent_again(self) -> None:
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
