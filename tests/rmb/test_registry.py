"""Registries: the same behaviour of all of them, and what each has of its own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import treq
from twisted.internet import reactor
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.rmb.errors import RegistryRefused, RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry import cache
from dmsg.rmb.registry.cache import CachedRegistry
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.registry.file import FileRegistry
from dmsg.rmb.registry.service import RegistryService, RegistrySettings, open_registry
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin, check_relay, relay_of_websocket, relay_url
from tests.ports import port_of
from tests.rmb.network import pause
from tests.support import asynchronous, some

A, B = Identity("//Alice"), Identity("//Bob", "ed25519")


def statement(identity: Identity = A, counter: int = 1, **fields: Any) -> Twin:
    return Twin(0, identity.account, counter=counter, **fields).sign(identity)


class Behaviour:
    """Behaviour that all registries share; the test case provides the registry."""

    registry: Any

    async def make(self) -> None:
        raise NotImplementedError

    async def refused(self, twin: Twin) -> str:
        error = await self.assertFailure(self.registry.put(twin), RegistryRefused)  # type: ignore[attr-defined]
        return str(error)

    @asynchronous
    async def test_twins_are_created_and_found(self: Any) -> None:
        """Ids count up from 1; by id, by account, all in order."""
        await self.make()
        one = await self.registry.put(statement(relay="r.example", pk=b"\2" * 33, strict=True))
        two = await self.registry.put(statement(B))
        self.assertEqual((1, 2), (one.id, two.id))
        self.assertEqual(one, await self.registry.get(1))
        self.assertEqual(("r.example", b"\2" * 33, True, 1), (one.relay, one.pk, one.strict, one.counter))
        self.assertEqual(2, await self.registry.id_by_account(B.account))
        self.assertEqual([one, two], await self.registry.twins(0, 10))
        self.assertEqual([two], await self.registry.twins(1, 10))
        for missing in (0, 3, 2**32 - 1):
            await self.assertFailure(self.registry.get(missing), TwinNotFound)
        await self.assertFailure(self.registry.id_by_account(bytes(32)), TwinNotFound)

    @asynchronous
    async def test_twins_are_changed_by_their_owner(self: Any) -> None:
        """The new statement has a higher counter; both fields are replaced, and the id stays."""
        await self.make()
        await self.registry.put(statement(relay="r", pk=b"x"))
        changed = await self.registry.put(statement(counter=7, relay="s"))
        self.assertEqual((1, "s", None, 7), (changed.id, changed.relay, changed.pk, changed.counter))
        self.assertIn("counter 7 is not above 7", await self.refused(statement(counter=7, relay="t")))
        self.assertIn("counter", await self.refused(statement(counter=1, relay="r", pk=b"x")))
        forged = replace(statement(B, 9), account=A.account)
        self.assertIn("not signed by the twin's owner", await self.refused(forged))
        self.assertIn("not signed by the twin's owner", await self.refused(replace(statement(counter=9), relay="evil")))
        self.assertIn("twin 1, not 2", await self.refused(replace(statement(counter=9), id=2)))
        self.assertEqual(changed, await self.registry.get(1))

    @asynchronous
    async def test_invalid_twins_are_refused(self: Any) -> None:
        """Relays that are none, too many, too long; keys that are too long; unsigned."""
        await self.make()
        for relay in ("a b", "-x", "ftp://x", "http://", "a__b", "_", "a_b_c_d_e", "x" * 1025, "http://u@h"):
            await self.refused(statement(relay=relay))
        await self.refused(statement(pk=b"x" * 129))
        await self.refused(Twin(0, A.account, counter=1))
        await self.refused(replace(statement(), id=5))
        self.assertEqual([], await self.registry.twins(0, 10))

    @asynchronous
    async def test_watchers_learn_of_changes(self: Any) -> None:
        """Whoever watches is told of changes."""
        await self.make()
        seen: list[Twin] = []
        self.registry.watch(seen.append)
        await self.settle()
        stored = await self.registry.put(statement())
        for _ in range(500):
            if seen:
                break
            await pause(0.01)
        self.assertEqual([stored], seen)

    async def settle(self) -> None:
        """Wait until the watch has begun."""


class TableTests(Behaviour, TestCase):
    async def make(self) -> None:
        self.registry = TableRegistry(self.mktemp())
        self.addCleanup(self.registry.close)

    @asynchronous
    async def test_changes_are_listed_by_number(self) -> None:
        """A reader whose number is too high begins at the end."""
        await self.make()
        await self.registry.put(statement())
        await self.registry.put(statement(B))
        await self.registry.put(statement(counter=2))
        twins, following = self.registry.changes(0)
        self.assertEqual(([2, 1], 3), ([twin.id for twin in twins], following))
        self.assertEqual(([], 3), self.registry.changes(3))
        self.assertEqual(([], 3), self.registry.changes(50))

    def test_a_missing_database_is_one_line(self) -> None:
        path = Path(self.mktemp())
        path.write_text("no database" * 100)
        error = self.assertRaises(RegistryUnavailable, TableRegistry, str(path))
        self.assertIn("not a database", str(error))


class FileTests(Behaviour, TestCase):
    async def make(self) -> None:
        self.path = Path(self.mktemp())
        self.registry = FileRegistry(self.path, reactor)
        self.addCleanup(self.registry.close)

    @asynchronous
    async def test_edits_of_the_file_are_read(self) -> None:
        """Edits of an operator take effect; a damaged file is reported."""
        await self.make()
        entry = {"id": 5, "account": A.address, "relay": "http://127.0.0.1:8080"}
        self.path.write_text(json.dumps({"twins": [entry]}))
        self.assertEqual(A.account, (await self.registry.get(5)).account)
        self.path.write_text("{")
        os.utime(self.path, (1, 1))
        error = await self.assertFailure(self.registry.get(5), RegistryUnavailable)
        self.assertIn(str(self.path), str(error))
        self.path.write_text(json.dumps({"twins": [entry, entry]}))
        await self.assertFailure(self.registry.get(5), RegistryUnavailable)
        self.path.unlink()
        await self.assertFailure(self.registry.get(5), TwinNotFound)

    @asynchronous
    async def test_concurrent_writers_preserve_all_entries(self) -> None:
        """Neither writer loses what the other has written."""
        await self.make()
        other = FileRegistry(self.path, reactor)
        await self.registry.put(statement())
        self.assertEqual(2, (await other.put(statement(B))).id)
        self.assertEqual(2, len(await self.registry.twins(0, 10)))
        self.assertEqual(1, len(await self.registry.twins(1, 10)))


class HTTPTests(Behaviour, TestCase):
    timeout = 30

    async def make(self) -> None:
        self.service = RegistryService(reactor, ["tcp:0:interface=127.0.0.1"], ":memory:", RegistrySettings(rate=0))
        self.service.startService()
        self.url = f"http://127.0.0.1:{port_of((await self.service.ready)[0])}"
        self.registry = HTTPRegistry(reactor, self.url)
        self.addCleanup(self.stop)

    def stop(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        await self.registry.close()
        await self.service.stopService()
        await pause(0)

    async def settle(self) -> None:
        for _ in range(500):
            if some(self.service._api)._waiting:
                return
            await pause(0.01)

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        response = await treq.request(method, self.url + path, data=body, persistent=False)
        return response.code, await response.json()

    @asynchronous
    async def test_statuses_have_their_texts(self) -> None:
        """404, 400, 401, 409, 413, and what each says."""
        await self.make()
        await self.registry.put(statement())
        for method, path, body, status in (
            ("GET", "/twins/2", None, 404),
            ("GET", "/twins/99999999999999999999", None, 404),
            ("GET", "/twins/x", None, 404),
            ("GET", "/twins?account=x", None, 400),
            ("GET", "/twins?after=x", None, 400),
            ("GET", f"/twins?account={B.address}", None, 404),
            ("GET", f"/twins?account={A.address}", None, 200),
            ("POST", "/twins", b"{", 400),
            ("POST", "/twins", b"[]", 400),
            ("POST", "/twins", b"{}", 400),
            ("POST", "/twins", statement().to_json(), 409),
            ("POST", "/twins", replace(statement(counter=5), relay="x").to_json(), 401),
            ("POST", "/twins", b"x" * 9000, 413),
            ("DELETE", "/twins/1", None, 405),
            ("GET", "/changes?since=x", None, 400),
            ("GET", "/health", None, 200),
        ):
            self.assertEqual(status, (await self.ask(method, path, body))[0], (method, path))
        self.assertEqual((200, {"twins": [], "next": 1}), await self.ask("GET", "/changes"))
        response = await treq.get(self.url + "/metrics", persistent=False)
        self.assertIn('rmb_registry_refused_total{reason="refused"}', await response.text())
        through: dict[str, Any] = {"headers": {"X-Forwarded-For": "192.0.2.1"}, "persistent": False}
        response = await treq.get(self.url + "/metrics", **through)
        self.assertEqual((response.code, "rmb_registry_twins" in await response.text()), (403, False))
        response = await treq.get(self.url + "/health", **through)
        self.assertEqual(await response.json(), {"status": "ok"})

    @asynchronous
    async def test_a_service_that_lies(self) -> None:
        """Statements that the owner did not sign are not believed; nor is another twin than was asked for."""
        await self.make()
        await self.registry.put(statement())
        table = self.service._table
        some(table)._db.execute("UPDATE twins SET relay = 'evil'")
        error = await self.assertFailure(self.registry.get(1), RegistryUnavailable)
        self.assertIn("whose signature is wrong", str(error))
        self.patch(table, "get", lambda number: succeed(replace(statement(), id=7)))
        await self.assertFailure(self.registry.get(1), RegistryUnavailable)

    @asynchronous
    async def test_an_unreachable_registry_is_registry_unavailable(self) -> None:
        """RegistryUnavailable, in one line; not TwinNotFound."""
        await self.make()
        await self.service.stopService()
        error = await self.assertFailure(self.registry.get(1), RegistryUnavailable)
        self.assertIn("refused", str(error))

    @asynchronous
    async def test_random_bytes_are_never_a_5xx(self) -> None:
        """The random bytes are sent as statements and in paths."""
        import random

        await self.make()
        rng = random.Random(3)
        good = statement().to_json()
        for _ in range(100):
            body = bytearray(good)
            for _ in range(rng.randrange(1, 5)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            response = await treq.post(self.url + "/twins", data=bytes(body), persistent=False)
            self.assertLess(response.code, 500)
            await response.content()


class Counting:
    """Replacement of a registry, which counts queries and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[Deferred[Twin]] = []

    def get(self, number: int) -> Deferred[Twin]:
        self.asked.append(Deferred())
        return self.asked[-1]

    def watch(self, changed: Any) -> None:
        self.changed = changed


class CacheTests(SynchronousTestCase):
    """cache::memory; single flight, negative answers, staleness."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.behind = Counting()
        self.cache = CachedRegistry(cast(Any, self.behind), self.clock, limit=3)

    def known(self, number: int = 1) -> Twin:
        twin = replace(statement(), id=number)
        got = self.cache.get(number)
        self.behind.asked[-1].callback(twin)
        self.assertEqual(twin, self.successResultOf(got))
        return twin

    def test_twins_are_cached_for_five_minutes(self) -> None:
        """After five minutes the registry is asked again."""
        twin = self.known()
        self.assertEqual(twin, self.successResultOf(self.cache.get(1)))
        self.assertEqual(twin, self.cache.get_cached(1))
        self.assertEqual(1, len(self.behind.asked))
        self.clock.advance(cache.TTL)
        self.assertIsNone(self.cache.get_cached(1))
        self.assertNoResult(self.cache.get(1))
        self.assertEqual(2, len(self.behind.asked))

    def test_concurrent_lookups_share_a_query(self) -> None:
        """Concurrent look-ups of one twin need a single query."""
        waiting = [self.cache.get(1) for _ in range(10)]
        self.assertEqual(1, len(self.behind.asked))
        self.behind.asked[0].callback(replace(statement(), id=1))
        self.assertEqual({1}, {self.successResultOf(one).id for one in waiting})

    def test_absent_twins_are_cached_briefly(self) -> None:
        """An absent twin is remembered for a short time. A change in the registry takes effect at once."""
        got = self.cache.get(1)
        self.behind.asked[0].errback(TwinNotFound("1"))
        self.failureResultOf(got, TwinNotFound)
        self.failureResultOf(self.cache.get(1), TwinNotFound)
        self.assertEqual(1, len(self.behind.asked))
        self.behind.changed(replace(statement(), id=1))
        self.assertEqual(1, self.successResultOf(self.cache.get(1)).id)
        self.cache.flush()
        got = self.cache.get(1)
        self.behind.asked[1].errback(TwinNotFound("1"))
        self.failureResultOf(got, TwinNotFound)
        self.clock.advance(cache.NEGATIVE_TTL)
        self.cache.get(1)
        self.assertEqual(3, len(self.behind.asked))

    def test_stale_entries_are_served_while_the_registry_is_down(self) -> None:
        """A look-up that is not in the cache fails with an error about the registry."""
        twin = self.known()
        self.clock.advance(cache.TTL + 1)
        got = self.cache.get(1)
        self.behind.asked[1].errback(RegistryUnavailable("away"))
        self.assertEqual(twin, self.successResultOf(got))
        self.assertEqual(twin, self.successResultOf(self.cache.get(1)))
        self.assertEqual(2, len(self.behind.asked))
        other = self.cache.get(2)
        self.behind.asked[2].errback(RegistryUnavailable("away"))
        self.failureResultOf(other, RegistryUnavailable)
        self.clock.advance(cache.MAX_STALE_AGE)
        got = self.cache.get(1)
        self.behind.asked[3].errback(RegistryUnavailable("away"))
        self.failureResultOf(got, RegistryUnavailable)

    def test_the_cache_is_bounded(self) -> None:
        """The one that was not asked for longest is forgotten; questions have a limit."""
        for number in (1, 2, 3):
            self.known(number)
        self.cache.get(1)
        self.known(4)
        self.assertEqual([True, False, True], [self.cache.get_cached(number) is not None for number in (1, 2, 3)])
        self.patch(cache, "MAX_QUERIES", 1)
        self.cache.get(10)
        self.failureResultOf(self.cache.get(11), RegistryUnavailable)


class NamesTests(SynchronousTestCase):
    """Relays as the registry names them."""

    def test_relay_names_become_urls(self) -> None:
        """Bare domains are https; URLs have their port."""
        self.assertEqual("https://relay.example/", relay_url("relay.example"))
        self.assertEqual("http://127.0.0.1:8080/", relay_url("http://127.0.0.1:8080"))
        for url, name in (
            ("wss://relay.example", "relay.example"),
            ("wss://relay.example:443/", "relay.example"),
            ("wss://relay.example:444", "https://relay.example:444"),
            ("ws://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("ws://[::1]:8080", "http://[::1]:8080"),
        ):
            self.assertEqual(name, relay_of_websocket(url))
            check_relay(name)
        for url in ("http://x", "ws://", "ws://x/y", "wss://u@x", "ws://x:99999", "x", "ws://x?y"):
            self.assertRaises(ValueError, relay_of_websocket, url)

    def test_registry_descriptions_are_parsed(self) -> None:
        """Values of --registry."""
        for text in ("", "x", "file:", "ftp://x", "http://", "tfchain:"):
            self.assertRaises(RegistryUnavailable, open_registry, text, Clock())
        self.assertIsInstance(open_registry(f"file:{self.mktemp()}", Clock()), FileRegistry)
