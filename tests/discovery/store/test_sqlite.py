"""Entries in SQLite, in memory and in a file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.discovery.entries.entry import ClientMeta, Entry, EntryInvalid, ServerMeta
from dmsg.discovery.entries.rules import Deletion, Terms, target, time_order
from dmsg.discovery.store.base import OVERHEAD, StoreError, is_listable, kind, size_of
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.turn_end import at_turn_end
from dmsg.testing.disk import Disk, Operation
from dmsg.testing.sqlite_disk import sqlite_on
from tests.discovery.store.support import UNCHECKED, StoreMixin, client_entry, server_entry
from tests.support import asynchronous


class MemoryStoreTests(StoreMixin, TestCase):
    """The store in memory."""

    def setUp(self) -> None:
        self.store = SQLiteStore(":memory:")
        self.addCleanup(self.store.close)

    def test_servers_follow_from_a_seed(self) -> None:
        """A lab that is made again draws the same servers."""
        draws = []
        for seed in (1, 1, 2):
            store = SQLiteStore(":memory:", random=Random(seed))
            for number in range(20):
                self.successResultOf(store.post(server_entry(number), 0.0))
            draws.append([self.successResultOf(store.available(5, 0.0)) for _ in range(5)])
            self.successResultOf(store.close())
        self.assertEqual(draws[0], draws[1])
        self.assertNotEqual(draws[0], draws[2])


class DurableStoreTests(StoreMixin, TestCase):
    """A durable store in a file, whose changes of a reactor turn are one transaction."""

    def setUp(self) -> None:
        self.store = SQLiteStore(self.mktemp(), at_turn_end=at_turn_end(reactor), durable=True)
        self.addCleanup(self.store.close)


class TurnTests(SynchronousTestCase):
    """Changes that a durable store on a simulated disk gets in one reactor turn."""

    def setUp(self) -> None:
        self.disk, self.clock = Disk(Random(1)), Clock()
        context = sqlite_on(self.disk)
        context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        self.store = SQLiteStore("store", at_turn_end=at_turn_end(self.clock), durable=True)
        self.addCleanup(lambda: self.store.close())
        self.entries = [client_entry(key=SecKey.from_seed(b"%d" % number)) for number in range(4)]

    def stored(self) -> int:
        return self.successResultOf(self.store.count())

    def test_they_are_acknowledged_together_after_one_sync(self) -> None:
        self.disk.fail(Operation.SYNC, after=1)
        posts = [self.store.post(entry, 0.0) for entry in self.entries]
        self.assertNoResult(posts[0])
        self.clock.advance(0)
        self.assertEqual([True] * 4, [self.successResultOf(post) for post in posts])

    def test_one_that_is_refused_undoes_no_other(self) -> None:
        first, refused, second = (self.store.post(self.entries[number], 0.0) for number in (0, 0, 1))
        self.clock.advance(0)
        self.failureResultOf(refused, EntryInvalid)
        self.successResultOf(first), self.successResultOf(second)
        self.assertEqual(2, self.stored())

    def test_changes_of_one_key_are_made_in_their_order(self) -> None:
        key = SecKey.from_seed(b"0")
        entries = [client_entry(number, 1 + number, key) for number in range(4)]
        deletion = Deletion(entries[0].static, 1, 10)
        changes: list[Any] = [self.store.post(entries[number], 0.0) for number in (1, 0, 1, 3)]
        changes += [self.store.delete(deletion, 0.0), self.store.delete(deletion, 0.0)]
        changes += [self.store.post(entries[2], 0.0), self.store.post(client_entry(0, 11, key), 0.0)]
        self.clock.advance(0)
        found = [self.failureResultOf(one) if number in (0, 3, 5, 6) else None for number, one in enumerate(changes)]
        self.assertEqual(
            [EntryInvalid, EntryInvalid, EntryNotFound, EntryInvalid], [one.type for one in found if one is not None]
        )
        results = [self.successResultOf(changes[number]) for number in (1, 2, 4, 7)]
        self.assertEqual([True, False, None, True], results)
        self.assertEqual(client_entry(0, 11, key).to_json(), self.successResultOf(self.store.get(entries[0].static)))

    def test_of_one_that_fails_nothing_is_written(self) -> None:
        """An error of SQLite after a statement of the change has written, which does not end the transaction."""

        def change() -> None:
            self.store._db.execute("UPDATE total SET size = size + 1000000")
            self.store._db.execute("SELECT no_such_function()")

        first = self.store.post(self.entries[0], 0.0)
        failed = self.store._changes.make(change)
        second = self.store.post(self.entries[1], 0.0)
        self.clock.advance(0)
        self.failureResultOf(failed, sqlite3.OperationalError)
        self.successResultOf(first), self.successResultOf(second)
        self.assertLess(self.successResultOf(self.store.size()), 1_000_000)

    def test_a_process_that_stops_within_the_turn_has_acknowledged_nothing(self) -> None:
        posts = [self.store.post(entry, 0.0) for entry in self.entries]
        for post in posts:
            self.assertNoResult(post)
        self.disk.cut_power()
        self.disk.restore_power()
        self.store = SQLiteStore("store")
        self.assertEqual(0, self.stored())

    def test_times_are_corrected_after_the_changes_that_wait(self) -> None:
        post = self.store.post(self.entries[0], 100.0)
        self.successResultOf(self.store.shift_times(5.0))
        self.successResultOf(post)
        self.assertEqual(5.0, self.store._db.execute("SELECT posted FROM entries").fetchone()[0])

    def test_after_a_failed_sync_none_is_acknowledged(self) -> None:
        self.disk.fail(Operation.SYNC)
        posts = [self.store.post(entry, 0.0) for entry in self.entries]
        self.clock.advance(0)
        for post in posts:
            self.failureResultOf(post, sqlite3.Error)
        self.assertEqual(0, self.stored())
        again = self.store.post(self.entries[0], 0.0)
        self.clock.advance(0)
        self.assertTrue(self.successResultOf(again))

    def test_when_sqlite_rolls_back_none_is_acknowledged(self) -> None:
        def change() -> None:
            # SQLite does the same after some errors.
            self.store._db.execute("ROLLBACK")
            raise sqlite3.OperationalError("disk I/O error")

        first = self.store.post(self.entries[0], 0.0)
        failed = self.store._changes.make(change)
        second = self.store.post(self.entries[1], 0.0)
        self.clock.advance(0)
        for one in (first, failed, second):
            self.failureResultOf(one, sqlite3.Error)
        self.assertEqual(0, self.stored())
        again = self.store.post(self.entries[0], 0.0)
        self.clock.advance(0)
        self.successResultOf(again)

    def test_closing_commits(self) -> None:
        post = self.store.post(self.entries[0], 0.0)
        self.store.close()
        self.successResultOf(post)
        self.clock.advance(0)
        self.store = SQLiteStore("store")
        self.assertEqual(1, self.stored())


class SharedFileTests(SynchronousTestCase):
    """Changes of a reactor turn in a file that another process uses."""

    def setUp(self) -> None:
        self.clock, self.path = Clock(), self.mktemp()
        self.store = SQLiteStore(self.path, at_turn_end=at_turn_end(self.clock))
        self.addCleanup(self.store.close)
        self.entries = [client_entry(key=SecKey.from_seed(b"%d" % number)) for number in range(4)]

    def test_the_file_is_not_locked_until_the_end_of_the_turn(self) -> None:
        post = self.store.post(self.entries[0], 0.0)
        other = SQLiteStore(self.path)
        self.addCleanup(other.close)
        other._db.execute("PRAGMA busy_timeout = 0")
        self.assertTrue(self.successResultOf(other.post(self.entries[1], 0.0)))
        self.assertTrue(self.successResultOf(other.post(self.entries[0], 0.0)))
        self.clock.advance(0)
        self.failureResultOf(post, EntryInvalid)
        self.assertEqual(2, self.successResultOf(self.store.count()))

    def test_a_locked_file_fails_all_of_them(self) -> None:
        self.store._db.execute("PRAGMA busy_timeout = 0")
        other = SQLiteStore(self.path)
        self.addCleanup(other.close)
        other._db.execute("BEGIN IMMEDIATE")
        posts = [self.store.post(entry, 0.0) for entry in self.entries]
        self.clock.advance(0)
        for post in posts:
            self.failureResultOf(post, sqlite3.OperationalError)
        other._db.execute("ROLLBACK")
        self.assertEqual(0, self.successResultOf(self.store.count()))


class SQLiteStoreTests(StoreMixin, TestCase):
    """The store in a file."""

    def setUp(self) -> None:
        self.path = self.mktemp()
        self.store = SQLiteStore(self.path)
        self.addCleanup(lambda: self.store.close())

    @asynchronous
    async def test_entries_survive_reopening_the_file(self) -> None:
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

    @asynchronous
    async def test_a_locked_file_fails_without_partial_changes(self) -> None:
        """The caller gets an error, and no change is partly made."""
        await self.store.post(server_entry(1), 0.0, terms=UNCHECKED)
        self.store._db.execute("PRAGMA busy_timeout = 0")
        other = sqlite3.connect(self.path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        for question in (self.store.due(5, 1e9, 2e9), self.store.sweep(1e12, 5)):
            question.addErrback(lambda failure: failure.trap(sqlite3.Error, StoreError) and "refused")
            self.assertEqual(await question, "refused")
        other.execute("ROLLBACK")
        other.close()
        self.assertEqual(len(await self.store.due(5, 1e9, 2e9)), 1)

    @asynchronous
    async def test_an_empty_file_becomes_a_store(self) -> None:
        path = self.mktemp()
        store = SQLiteStore(path)
        self.addCleanup(store.close)
        self.assertEqual((await store.count(), await store.size(), store._fetch_one("SELECT 1 WHERE 0")), (0, 0, 0))

    @asynchronous
    async def test_triggers_of_an_earlier_version_are_replaced(self) -> None:
        """A process of the earlier version that starts later leaves the new triggers."""
        select = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"
        triggers = self.store._db.execute(select).fetchall()
        await self.store.post(client_entry(), 0.0)
        self.store._db.execute("DROP TRIGGER counts_was")
        self.store._db.execute(
            "CREATE TRIGGER counts_was AFTER UPDATE ON entries WHEN OLD.json IS NOT NULL AND NEW.json IS NULL BEGIN "
            "UPDATE counts SET number = number - 1 WHERE kind = OLD.kind; END"
        )
        await self.store.close()
        self.store = SQLiteStore(self.path)
        self.assertEqual(self.store._db.execute(select).fetchall(), triggers)
        self.store._db.execute("CREATE TRIGGER IF NOT EXISTS counts_was AFTER UPDATE ON entries BEGIN SELECT 1; END")
        await self.store.delete(Deletion(client_entry().static, 0, 2), 0.0)
        self.assertEqual(await self.store.counts(), {})

    @asynchronous
    async def test_an_entry_posted_again_changes_what_differs(self) -> None:
        """A refresh with the same values in most columns, and one with a change in each of them."""
        key = SecKey.from_seed(b"refreshed")
        server = ServerMeta("h:1", 5)
        steps: list[tuple[Entry, Terms]] = [
            (Entry("0.0.1", 0, 1, "", server=server), Terms(place="a", lasts=10.0)),
            (Entry("0.0.1", 1, 2, "", server=server), Terms(place="a", lasts=20.0)),
            (Entry("0.0.2.1", 2, 3, "", server=server), Terms(place="a", lasts=20.0)),
            (Entry("0.0.2.1", 3, 4, "", server=ServerMeta("h:2", 5)), Terms(place="a", lasts=20.0)),
            (Entry("0.0.2.1", 4, 5, "", server=ServerMeta("h:2", 0)), Terms(place="a", lasts=20.0)),
            (Entry("0.0.2.1", 5, 6, "", server=ServerMeta("h:2", 5)), Terms(False, place="a", lasts=20.0)),
            (Entry("0.0.2.1", 6, 7, "", server=ServerMeta("h:2", 5)), Terms(False, False, place="a", lasts=20.0)),
            (Entry("0.0.2.1", 7, 8, "", server=ServerMeta("h:2", 5)), Terms(False, place="b", lasts=20.0)),
            (Entry("0.0.2.1", 8, 9, "", client=ClientMeta(())), Terms(False, place="b", lasts=20.0)),
        ]
        columns = "json, posted, seen, ends, target, checked, listable, quiet, kind, place, size, sequence, time_order"
        for number, (unsigned, terms) in enumerate(steps):
            entry = replace(unsigned, static=key.public.hex()).sign(key)
            await self.store.post(entry, 100.0 + number, terms)
            body = entry.to_json()
            row = self.store._db.execute(f"SELECT {columns} FROM entries").fetchone()  # noqa: S608  # ours
            expected = (
                body,
                100.0 + number,
                100.0 + number,
                100.0 + number + terms.lasts,
                target(entry),
                1,
                int(is_listable(entry)),
                int(not terms.refreshes),
                kind(entry),
                terms.place,
                size_of(body),
                str(number),
                time_order(entry.timestamp),
            )
            self.assertEqual(row, expected)
            self.assertEqual(await self.store.counts(), {kind(entry): 1})
            self.assertEqual(await self.store.size(), size_of(body))

    def test_a_file_that_is_no_database_is_refused(self) -> None:
        path = Path(self.mktemp())
        path.write_bytes(b"not a database" * 100)
        self.assertRaises(StoreError, SQLiteStore, str(path))
        self.assertRaises(StoreError, SQLiteStore, "/nonexistent/directory/file")


class CountTests(SynchronousTestCase):
    """Counting goes along; a scan says the same."""

    @given(
        st.lists(
            st.tuples(
                st.integers(0, 4),
                st.sampled_from(["client", "server", "both", "gone"]),
                st.sampled_from(["", "1.1.1.1", "2.2.2.2"]),
            ),
            max_size=25,
        )
    )
    def test_counts_equal_a_scan_after_any_history(self, steps: list[tuple[int, str, str]]) -> None:
        path = self.mktemp()
        file = SQLiteStore(path)
        there: dict[str, tuple[str, str, int]] = {}
        keys = [SecKey.from_seed(b"counted %d" % number) for number in range(5)]
        sequences: dict[int, int] = {}
        times = dict.fromkeys(range(5), 0)
        for number, what, place in steps:
            key = keys[number]
            times[number] += 1
            static = key.public.hex()
            if what == "gone":
                if number not in sequences:
                    continue
                deletion = Deletion(static, sequences.pop(number), times[number])
                self.successResultOf(file.delete(deletion, 0.0))
                there[static] = "gone", there[static][1], OVERHEAD
                continue
            sequences[number] = sequences.get(number, -1) + 1
            entry = Entry(
                "0.0.1",
                sequences[number],
                times[number],
                static,
                None if what == "server" else ClientMeta(()),
                None if what == "client" else ServerMeta("h:1", 1),
            ).sign(key)
            self.successResultOf(file.post(entry, 1.0, Terms(place=place)))
            there[static] = what, place, len(entry.to_json()) + OVERHEAD
        expected = dict(Counter(what for what, _, _ in there.values() if what != "gone"))
        self.assertEqual(self.successResultOf(file.counts()), expected)
        self.assertEqual(self.successResultOf(file.count()), sum(expected.values()))
        scanned = file._db.execute("SELECT kind, count(*) FROM entries WHERE json IS NOT NULL GROUP BY kind").fetchall()
        self.assertEqual(dict(scanned), expected)
        sizes: Counter[str] = Counter()
        for _, place, size in there.values():
            sizes[place] += size
        self.assertEqual(dict(file._db.execute("SELECT place, size FROM places").fetchall()), sizes)
        self.assertEqual(
            dict(file._db.execute("SELECT place, sum(size) FROM entries GROUP BY place").fetchall()), sizes
        )
        self.assertEqual(self.successResultOf(file.size()), sum(sizes.values()))
        file.close()
