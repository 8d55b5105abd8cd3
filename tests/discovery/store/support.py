"""Tests that each implementation of the entry store passes."""

from __future__ import annotations

import contextlib
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from zope.interface.verify import verifyObject

from dmsg.discovery.entries.entry import ClientMeta, Entry, EntryInvalid, ServerMeta
from dmsg.discovery.entries.rules import (
    TOMBSTONE_TTL,
    WRONG_TIME,
    DeletedLater,
    Deletion,
    Terms,
)
from dmsg.discovery.store.base import OVERHEAD, ROOM_AT_ONCE, DueServer, IEntryStore
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey
from tests.support import asynchronous, vectors

KEY = SecKey.from_seed(b"store")
QUIET = Terms(refreshes=False)
UNCHECKED = Terms(checked=False)


def client_entry(sequence: int = 0, timestamp: int = 1, key: SecKey = KEY) -> Entry:
    return Entry("0.0.1", sequence, timestamp, key.public.hex(), client=ClientMeta(())).sign(key)


def server_entry(number: int, sequence: int = 0, free: int = 5, version: str = "0.0.1") -> Entry:
    key = SecKey.from_seed(b"server %d" % number)
    return Entry(version, sequence, sequence + 1, key.public.hex(), server=ServerMeta("h:1", free)).sign(key)


class StoreMixin:
    """Mixin of tests; the test case sets ``store``."""

    store: Any
    assertEqual: Any
    assertLessEqual: Any
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
    async def test_sequences_follow_the_iteration_rules(self) -> None:
        """The rules of disc.json hold for the iteration, whatever sequence and time the first entry has."""
        await self.refused(self.store.post(client_entry(1), 0.0), EntryInvalid, "non-zero")
        for number, case in enumerate(vectors("disc")["iterations"]):
            if case["old_sequence"] != 0:
                continue  # A first entry has sequence 0; test_entry has the other cases.
            key = SecKey.from_seed(b"iteration %d" % number)
            await self.store.post(client_entry(0, case["old_timestamp"], key), 0.0)
            second = self.store.post(client_entry(case["new_sequence"], case["new_timestamp"], key), 0.0)
            if case["result"] == "ok":
                self.assertEqual(await second, False)
            else:
                await self.refused(second, EntryInvalid, case["result"].removeprefix("error: "))

    @asynchronous
    async def test_exactly_a_single_concurrent_post_wins(self) -> None:
        """A store compares and sets in one step."""
        await self.store.post(client_entry(), 0.0)
        posts = [
            self.store.post(client_entry(1, 2 + number), 0.0).addErrback(lambda f: f.trap(EntryInvalid))
            for number in range(20)
        ]
        results = await gatherResults(posts)
        self.assertEqual(results.count(False), 1)

    @asynchronous
    async def test_a_deleted_entry_is_not_found(self) -> None:
        entry = client_entry(0, 5)
        deletion = Deletion(entry.static, 0, 6).sign(KEY)
        await self.refused(self.store.delete(deletion, 0.0), EntryNotFound)
        await self.store.post(entry, 0.0)
        await self.refused(self.store.delete(Deletion(entry.static, 1, 6), 0.0), EntryInvalid, "sequence")
        await self.refused(self.store.delete(Deletion(entry.static, 0, 5), 0.0), EntryInvalid, "timestamp")
        await self.store.delete(deletion, 0.0)
        await self.refused(self.store.get(entry.static), EntryNotFound)
        await self.refused(self.store.delete(deletion, 0.0), EntryNotFound)
        self.assertEqual(await self.store.count(), 0)

    @asynchronous
    async def test_a_refused_deletion_tells_the_owner_the_newest_time(self) -> None:
        """An owner whose clock was ahead, and is right now, cannot look up the time that a deletion has to exceed."""
        entry = client_entry(0, 10**18)
        deletion = Deletion(entry.static, 0, 10**18 + 5).sign(KEY)
        await self.store.post(entry, 0.0)
        await self.store.delete(deletion, 0.0)
        for timestamp in (5, 10**18 + 5):
            try:
                await self.store.post(client_entry(0, timestamp), 0.0)
            except DeletedLater as error:
                self.assertEqual(error.deletion, deletion.to_json())
                self.assertEqual(WRONG_TIME in str(error), True)
                self.assertEqual("2001-09-09 01:46:40 UTC" in str(error), True, error)
            else:
                self.fail("not refused")
        self.assertEqual(await self.store.post(client_entry(0, 10**18 + 6), 0.0), True)
        # A deletion after the key was used again is told the time of the newest deletion, not of this one.
        later = Deletion(entry.static, 0, 10**18 + 9).sign(KEY)
        await self.store.delete(later, 0.0)
        try:
            await self.store.post(client_entry(0, 1), 0.0)
        except DeletedLater as error:
            self.assertEqual(error.deletion, later.to_json())

    @asynchronous
    async def test_times_are_corrected_after_the_clock_was_set_back(self) -> None:
        """A server that is gone is not listed for another hour, and checks of other servers continue."""
        day, now = 86400.0, 1000.0
        talks, quiet, never = (server_entry(number) for number in range(3))
        await self.store.post(talks, now + day, Terms(checked=False))
        await self.store.record_check(talks.static, "h:1", now + day, now + day + 60.0)
        await self.store.post(quiet, now + day, Terms(checked=False, refreshes=False))
        await self.store.record_check(quiet.static, "h:1", now + day, now + day + 60.0)
        await self.store.post(never, now + day)  # Listed without a check.
        self.assertEqual(await self.store.due(9, now, now), [])
        await self.store.shift_times(now)
        for since, there in ((now, True), (now + 1.0, False)):
            self.assertEqual(len(await self.store.available(9, since)), 2 * there)
            self.assertEqual(len(await self.store.quiet(9, since)), 1 * there)
        self.assertEqual({due.json for due in await self.store.due(9, now, now)}, {talks.to_json(), quiet.to_json()})

    @asynchronous
    async def test_a_deleted_entry_cannot_be_posted_again(self) -> None:
        """Others may have a copy of the deleted entry."""
        entry = client_entry(0, 5)
        await self.store.post(entry, 0.0)
        await self.store.delete(Deletion(entry.static, 0, 6), 0.0)
        await self.refused(self.store.post(entry, 0.0), EntryInvalid, "timestamp")
        await self.refused(self.store.post(client_entry(1, 7), 0.0), EntryInvalid, "non-zero")
        self.assertEqual(await self.store.post(client_entry(0, 7), 0.0), True)
        await self.refused(self.store.delete(Deletion(entry.static, 0, 6), 0.0), EntryInvalid, "timestamp")
        self.assertEqual(await self.store.count(), 1)

    @asynchronous
    async def test_available_servers_are_random_live_and_limited(self) -> None:
        """Servers are returned in random order: live ones with free connections, at most as many as asked for."""
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
        await self.store.delete(Deletion(server_entry(1).static, 2, 100), 0.0)
        self.assertEqual(await self.store.available(10, 0.0), [])

    @asynchronous
    async def test_quiet_servers_exclude_refreshing_ones(self) -> None:
        """Servers that refresh their entries are listed elsewhere."""
        await self.store.post(server_entry(0), 0.0)
        for number in range(1, 4):
            await self.store.post(server_entry(number), float(number), QUIET)
        await self.store.post(server_entry(8, free=0), 5.0, QUIET)
        self.assertEqual(await self.store.available(10, 0.0), [server_entry(0).to_json()])
        quiet = [server_entry(number).to_json() for number in (3, 2, 1)]
        self.assertEqual(set(await self.store.quiet(10, 0.0)), set(quiet))
        self.assertEqual(len(set(await self.store.quiet(2, 0.0))), 2)
        self.assertEqual(await self.store.quiet(10, 3.5), [])
        await self.store.record_check(server_entry(1).static, "h:1", 100.0, 200.0)
        await self.store.record_check(server_entry(2).static, "h:1", None, 200.0)
        await self.store.record_check(server_entry(0).static, "h:1", 100.0, 200.0)
        self.assertEqual(await self.store.quiet(10, 3.5), [server_entry(1).to_json()])
        # This server refreshes from now on.
        await self.store.post(server_entry(1, 1), 101.0)
        self.assertEqual(await self.store.quiet(10, 3.5), [])
        await self.store.delete(Deletion(server_entry(3).static, 0, 100), 0.0)
        self.assertEqual(await self.store.quiet(10, 0.0), quiet[1:2])

    @asynchronous
    async def test_each_due_server_is_taken_once(self) -> None:
        """Two processes that share one store do not take the same server either."""
        for number in range(3):
            await self.store.post(server_entry(number), 10.0, Terms(checked=False, place=f"place {number}"))
        await self.store.post(server_entry(3), 10.0)
        await self.store.post(client_entry(), 10.0, UNCHECKED)
        await self.store.post(server_entry(4, free=0), 10.0, UNCHECKED)
        self.assertEqual(await self.store.due(10, 9.0, 1000.0), [])
        first = await self.store.due(2, 10.0, 1000.0)
        second = await self.store.due(2, 10.0, 1000.0)
        self.assertEqual((len(first), len(second)), (2, 1))
        expected = {DueServer(server_entry(number).to_json(), f"place {number}", True) for number in range(3)}
        self.assertEqual(set(first + second), expected)
        self.assertEqual(await self.store.due(10, 10.0, 1000.0), [])
        self.assertEqual(len(await self.store.due(10, 1000.0, 2000.0)), 3)

    @asynchronous
    async def test_a_refreshing_server_is_listed_after_a_check(self) -> None:
        """A server that refreshes stays listed while it posts from the checked address, and its next check is when the
        last one said.
        """
        one = server_entry(1)
        await self.store.post(one, 10.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 0.0), [])
        self.assertEqual(await self.store.listed([one.static], 0.0), [])
        await self.store.record_check(one.static, "h:1", None, 20.0)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.record_check(one.static, "h:1", 12.0, 100.0)
        self.assertEqual(await self.store.available(10, 0.0), [one.to_json()])
        self.assertEqual(await self.store.listed([server_entry(9).static, one.static], 0.0), [one.to_json()])
        await self.store.post(server_entry(1, 1), 40.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 40.0), [server_entry(1, 1).to_json()])
        self.assertEqual(await self.store.listed([one.static], 40.0), [server_entry(1, 1).to_json()])
        self.assertEqual(await self.store.listed([one.static], 40.5), [])
        self.assertEqual(await self.store.due(10, 99.0, 200.0), [])
        # The first failed check does not remove the server; the last one does.
        await self.store.record_check(one.static, "h:1", None, 100.0)
        self.assertEqual(len(await self.store.available(10, 0.0)), 1)
        await self.store.record_check(one.static, "h:1", None, 100.0, listed=False)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.post(server_entry(1, 2), 50.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.record_check(one.static, "h:1", 60.0, 300.0)
        self.assertEqual(await self.store.available(10, 0.0), [server_entry(1, 2).to_json()])
        # All connections are in use for a while.
        await self.store.post(server_entry(1, 3, free=0), 61.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.post(server_entry(1, 4), 62.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 0.0), [server_entry(1, 4).to_json()])
        # The server has moved: results of checks of its former address do not count.
        moved = Entry("0.0.1", 5, 9, one.static, server=ServerMeta("h:2", 5))
        await self.store.post(moved, 70.0, UNCHECKED)
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.record_check(one.static, "h:1", 70.0, 1000.0)
        await self.store.record_check(one.static, "h:1", None, 1000.0)
        self.assertEqual(await self.store.available(10, 0.0), [])
        self.assertEqual(await self.store.due(10, 70.0, 100.0), [DueServer(moved.to_json(), "", True)])

    @asynchronous
    async def test_a_quiet_server_is_listed_after_a_check(self) -> None:
        one = server_entry(1)
        await self.store.post(one, 10.0, Terms(refreshes=False, checked=False))
        self.assertEqual(await self.store.quiet(10, 0.0), [])
        await self.store.record_check(one.static, "h:1", 12.0, 100.0)
        self.assertEqual(await self.store.due(10, 100.0, 100.0), [DueServer(one.to_json(), "", False, True)])
        self.assertEqual(await self.store.quiet(10, 12.0), [one.to_json()])
        self.assertEqual(await self.store.available(10, 0.0), [])
        await self.store.record_check(one.static, "h:1", None, 100.0, listed=False)
        self.assertEqual(await self.store.quiet(10, 0.0), [])

    @asynchronous
    async def test_counts_by_kind(self) -> None:
        await self.store.post(client_entry(), 0.0)
        await self.store.post(server_entry(1), 0.0)
        await self.store.post(server_entry(2), 0.0)
        await self.store.post(server_entry(2, 1), 1.0)
        await self.store.delete(Deletion(server_entry(1).static, 0, 100), 0.0)
        counts = {kind: number for kind, number in (await self.store.counts()).items() if number}
        self.assertEqual(counts, {"client": 1, "server": 1})

    async def kept(self) -> dict[str, int]:
        counts = await self.store.counts()
        return {kind: number for kind, number in counts.items() if number}

    @asynchronous
    async def test_a_place_over_its_limit_loses_its_own_oldest_entries(self) -> None:
        """A place loses its oldest entries above the limit; entries of other places stay."""
        dropped: list[tuple[str, str, int]] = []
        self.store.dropped = lambda *what: dropped.append(what)
        one = len(server_entry(0).to_json()) + OVERHEAD
        greedy, modest = Terms(place="1.1.1.1", most=3 * one), Terms(place="2.2.2.2", most=3 * one)
        await self.store.post(server_entry(0), 0.0, modest)
        for number in range(1, 4):
            await self.store.post(server_entry(number), float(number), greedy)
        # A place that posts an entry again makes the entry its newest.
        await self.store.post(server_entry(1, 1), 4.0, greedy)
        self.assertEqual(dropped, [])
        await self.store.post(server_entry(5), 5.0, greedy)
        self.assertEqual(dropped, [("address", "1.1.1.1", 1)])
        await self.refused(self.store.get(server_entry(2).static), EntryNotFound)
        for number in (0, 1, 3, 5):
            await self.store.get(server_entry(number).static)
        self.assertEqual(await self.kept(), {"server": 4})
        self.assertEqual(await self.store.size(), 4 * one)
        self.assertEqual(len(await self.store.available(10, 0.0)), 4)

    @asynchronous
    async def test_the_place_with_most_entries_gives_room(self) -> None:
        """The limit of all entries together is reached."""
        one = len(server_entry(0).to_json()) + OVERHEAD
        self.store._limit = 5 * one + OVERHEAD // 2
        dropped: list[tuple[str, str, int]] = []
        self.store.dropped = lambda *what: dropped.append(what)
        for number in range(3):
            await self.store.post(server_entry(number), float(number), Terms(place="greedy"))
        for number in range(3, 6):
            await self.store.post(server_entry(number), float(number), Terms(place=f"place {number}"))
        self.assertEqual(dropped, [("total", "greedy", 1)])
        await self.refused(self.store.get(server_entry(0).static), EntryNotFound)
        self.assertEqual(await self.store.size(), 5 * one)
        # An entry that is posted from another place counts there with its size.
        await self.store.post(server_entry(1, 1), 10.0, Terms(place="place 3"))
        await self.store.post(server_entry(7), 11.0, Terms(place="place 7"))
        self.assertEqual(dropped[1:], [("total", "place 3", 1)])
        await self.refused(self.store.get(server_entry(3).static), EntryNotFound)

    @asynchronous
    async def test_blocks_around_a_place_have_so_much(self) -> None:
        """A /48 has 65536 places. If all of them together exceed the limit of a block, the place with most entries
        loses its oldest.
        """
        dropped: list[tuple[str, str, int]] = []
        self.store.dropped = lambda *what: dropped.append(what)
        one = len(server_entry(0).to_json()) + OVERHEAD

        def terms(place: str) -> Terms:
            return Terms(place=place, most=one + 1)

        await self.store.post(server_entry(100), 0.0, terms("2600:2::/64"))
        for number in range(4):
            await self.store.post(server_entry(number), float(number), terms(f"2600:1:0:{number + 1:x}::/64"))
        self.assertEqual(dropped, [])
        await self.store.post(server_entry(4), 4.0, terms("2600:1:0:5::/64"))
        self.assertEqual([(reason, place[:8]) for reason, place, _ in dropped], [("address", "2600:1:0")])
        for number in range(5, 20):
            await self.store.post(server_entry(number), float(number), terms(f"2600:1:0:{number:x}00::/64"))
        self.assertEqual(await self.store.count(), 1 + 8)
        for number in range(20, 40):
            await self.store.post(server_entry(number), float(number), terms(f"8.8.8.{number}"))
        self.assertEqual(await self.store.count(), 1 + 8 + 8)
        self.assertEqual({reason for reason, _, _ in dropped}, {"address"})
        await self.store.get(server_entry(100).static)

    @asynchronous
    async def test_the_block_with_most_entries_gives_room(self) -> None:
        """The limit of all entries together is reached: many places with few entries each count as one place with
        many.
        """
        one = len(server_entry(0).to_json()) + OVERHEAD
        self.store._limit = 30 * one + OVERHEAD // 2
        dropped: list[tuple[str, str, int]] = []
        self.store.dropped = lambda *what: dropped.append(what)
        for number in range(2):
            await self.store.post(server_entry(number), float(number), Terms(place="honest"))
        for number in range(2, 50):
            await self.store.post(server_entry(number), float(number), Terms(place=f"8.8.8.{number}"))
        self.assertEqual({place[:6] for _, place, _ in dropped}, {"8.8.8."})
        self.assertEqual(len(dropped), 20)
        # Removed entries no longer count in their block.
        for number in range(2, 50):
            with contextlib.suppress(EntryNotFound):
                await self.store.delete(Deletion(server_entry(number).static, 0, 100), 60.0)
        await self.store.sweep(1e12, 100)
        self.assertEqual(await self.store.count(), 2)
        for number in range(60, 68):
            await self.store.post(server_entry(number), 60.0, Terms(place=f"8.8.8.{number}", most=one + 1))
        self.assertEqual(await self.store.count(), 10)

    @asynchronous
    async def test_a_lowered_limit_is_reached_over_several_sweeps(self) -> None:
        """After a start with a lower limit, each sweep removes only some of the entries."""
        for number in range(ROOM_AT_ONCE + 20):
            await self.store.post(server_entry(number), float(number), Terms(place=f"p{number % 3}"))
        self.store._limit = 10 * (len(server_entry(0).to_json()) + OVERHEAD)
        await self.store.post(client_entry(), 1000.0)
        self.assertEqual(await self.store.count(), 21)
        self.assertEqual(await self.store.sweep(0.0, 10), 0)
        self.assertLessEqual(await self.store.count(), 10)
        self.assertLessEqual(await self.store.size(), self.store._limit)

    @asynchronous
    async def test_entries_expire_unless_posted_again(self) -> None:
        """A server that does not refresh expires when no check reaches it any more."""
        dropped: list[tuple[str, str, int]] = []
        self.store.dropped = lambda *what: dropped.append(what)
        await self.store.post(client_entry(), 0.0, Terms(place="p", lasts=100.0))
        await self.store.post(server_entry(1), 0.0, Terms(refreshes=False, lasts=50.0))
        await self.store.post(server_entry(2), 0.0, Terms(lasts=50.0))
        await self.store.post(server_entry(3), 0.0)
        self.assertEqual(await self.store.sweep(49.0, 10), 0)
        await self.store.post(client_entry(1, 2), 40.0, Terms(place="p", lasts=100.0))
        await self.store.record_check(server_entry(1).static, "h:1", 30.0, 60.0, 50.0)
        await self.store.record_check(server_entry(1).static, "h:1", None, 60.0, 500.0)
        self.assertEqual(await self.store.sweep(50.0, 10), 1)
        self.assertEqual(await self.store.sweep(79.0, 10), 0)
        self.assertEqual(await self.store.sweep(80.0, 10), 1)
        await self.refused(self.store.get(server_entry(1).static), EntryNotFound)
        await self.refused(self.store.get(server_entry(2).static), EntryNotFound)
        await self.store.delete(Deletion(client_entry().static, 1, 100), 100.0)
        self.assertEqual(await self.store.sweep(100.0 + TOMBSTONE_TTL - 1, 10), 0)
        self.assertEqual(await self.store.size(), 2 * OVERHEAD + len(server_entry(3).to_json()))
        self.assertEqual(await self.store.sweep(100.0 + TOMBSTONE_TTL, 10), 1)
        self.assertEqual(dropped, [("ended", "", 1), ("ended", "", 1), ("deleted", "p", 1)])
        self.assertEqual(await self.kept(), {"server": 1})
        self.assertEqual(await self.store.size(), OVERHEAD + len(server_entry(3).to_json()))

    @asynchronous
    async def test_a_sweep_removes_a_limited_number(self) -> None:
        for number in range(5):
            await self.store.post(server_entry(number), 0.0, Terms(lasts=float(number)))
        self.assertEqual([await self.store.sweep(3.0, 3), await self.store.sweep(3.0, 3)], [3, 1])
        self.assertEqual(await self.store.available(10, 0.0), [server_entry(4).to_json()])

    @asynchronous
    async def test_the_whole_range_of_numbers(self) -> None:
        """Numbers in Lua and in SQLite have smaller ranges."""
        for low, high in ((-(2**63), 0), (2**63 - 2, 2**63 - 1), (2**62, 2**62 + 1)):
            key = SecKey.from_seed(b"%d" % low)
            await self.store.post(client_entry(0, low, key), 0.0)
            await self.store.post(client_entry(1, high, key), 0.0)
