"""The queue in an SQLite file, by plain calls: its limits, its commits, and a database that fails."""

from __future__ import annotations

import os
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.errors import QueueUnavailable
from dmsg.rmb.relay.queue import removals, sqlite
from dmsg.rmb.relay.queue.interface import FEDERATION, REFUSALS, QueueLimits
from dmsg.rmb.relay.queue.reserve import RESERVE, SUFFIX
from dmsg.rmb.relay.queue.sqlite import RETRY_EVERY, SQLiteQueue
from tests.rmb.support import StrictClock, fail_statements


class Watcher:
    """A relay to which a queue tells only what it drops."""

    def __init__(self, told: list[tuple[str, int]]) -> None:
        self.told = told

    def dropped(self, session: str, number: int) -> None:
        self.told.append((session, number))

    def appended_elsewhere(self, name: str) -> None:
        raise AssertionError("there is no other process")

    connected_elsewhere = appended_elsewhere


class SQLiteQueueTests(SynchronousTestCase):
    """The queue in a file."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.queue = SQLiteQueue(":memory:", self.clock, QueueLimits(messages=5, size=100, total=150))
        self.dropped: list[tuple[str, int]] = []
        self.queue.watch(Watcher(self.dropped))

    def append(self, session: str, data: bytes, until: float = 10.0) -> Deferred[Any]:
        return self.queue.append(session, data, until)

    def test_appends_are_confirmed_by_the_commit_of_their_turn(self) -> None:
        """All messages of a turn are confirmed together, at its end."""
        waiting = [self.append("1", b"x") for _ in range(3)]
        self.assertNoResult(waiting[0])
        self.clock.advance(0)
        ids = [self.successResultOf(one) for one in waiting]
        self.assertEqual(ids, [queued.id for queued in self.successResultOf(self.queue.read("1", None))])
        self.assertEqual([], self.successResultOf(self.queue.read("1", ids[-1])))
        self.queue.remove("1", ids[:2])
        self.assertEqual(1, len(self.queue))

    def test_a_twin_cannot_exceed_its_share(self) -> None:
        """The share covers all messages that a twin sent, to any number of sessions; other twins have room."""
        queue = SQLiteQueue(":memory:", self.clock, QueueLimits(100, 50, 800))

        def append(session: str, sender: int, size: int = 50) -> str:
            said: list[str] = []
            result = queue.append(session, bytes(size), 10.0, sender)
            result.addCallbacks(lambda number: said.append(""), lambda failure: said.append(str(failure.value)))
            self.clock.advance(0)
            return said[0]

        self.assertEqual([append(f"{number}:s", 1) for number in (5, 6)], ["", ""])
        self.assertIn("from twin 1 ", append("7:s", 1))
        self.assertEqual([append("8:a", 2), append("8:b", 3)], ["", ""])
        self.assertEqual(append("9", 4), "")
        self.assertEqual(append(FEDERATION, 4), "")
        self.assertIn("from twin 4 ", append(FEDERATION, 4))
        # Removed messages no longer count. Stored messages count again after a failure or a restart.
        queue.remove("5:s", [queued.id for queued in self.successResultOf(queue.read("5:s", None))])
        self.assertEqual(append("7:s", 1), "")
        self.clock.advance(0)
        queue._count()
        self.assertIn("from twin 1 ", append("7:s", 1))
        self.assertEqual(queue._from, {1: 100, 2: 50, 3: 50, 4: 100})

    def test_number_size_and_total_are_limited(self) -> None:
        """The number of messages, the size of each, and the size of all are limited."""
        for number in range(7):
            self.append("1", b"%d" % number)
        self.append("2", b"x" * 60)
        self.append("2", b"y" * 60)
        self.assertEqual([("1", 1), ("1", 1), ("2", 1)], self.dropped)
        self.assertEqual(
            [b"2", b"3", b"4", b"5", b"6"], [q.data for q in self.successResultOf(self.queue.read("1", None))]
        )
        self.assertEqual(65, self.queue.total)
        self.failureResultOf(self.append("3", b"x" * 100))

    def test_expired_messages_are_removed_and_returned(self) -> None:
        """Expired messages are removed, and returned with their sessions."""
        self.append("1", b"old", 5.0)
        self.append("2", b"new", 15.0)
        self.assertEqual([("1", b"old")], self.successResultOf(self.queue.expired(10.0)))
        self.assertEqual((1, 3), (len(self.queue), self.queue.total))

    def test_the_limit_of_all_messages_can_be_used_up(self) -> None:
        for session in ("1", "2"):
            self.append(session, bytes(75))
        failure = self.failureResultOf(self.append("3", b"x"), QueueUnavailable)
        self.assertEqual((self.queue.total, str(failure.value)), (150, REFUSALS[0]))

    def test_no_more_is_evicted_than_exceeds_the_limit(self) -> None:
        for _ in range(3):
            self.append("1", bytes(50))
        self.assertEqual((self.dropped, self.queue.total), ([("1", 1)], 100))

    def test_messages_of_the_relay_itself_have_no_share(self) -> None:
        """The share of one sender limits only messages of twins."""
        queue = SQLiteQueue(":memory:", self.clock, QueueLimits(100, 100, 800))
        for number in range(8):
            queue.append(str(number), bytes(100), 10.0)
        self.assertEqual((queue.total, queue._from), (800, {}))

    def test_a_read_ends_after_its_number_of_bytes(self) -> None:
        self.patch(sqlite, "BATCH_BYTES", 10)
        for number in range(5):
            self.append("1", b"%03d" % number)
        first = self.successResultOf(self.queue.read("1", None))
        self.assertEqual([one.data for one in first], [b"000", b"001", b"002", b"003"])
        self.assertEqual([one.data for one in self.successResultOf(self.queue.read("1", first[-1].id))], [b"004"])
        self.assertEqual(len(self.successResultOf(self.queue.expired(10.0))), 4)
        self.assertEqual(len(self.successResultOf(self.queue.expired(10.0))), 1)

    def test_empty_messages_count_as_messages(self) -> None:
        for _ in range(2):
            self.append("1", b"")
        first, second = self.successResultOf(self.queue.read("1", None))
        self.queue.remove("1", [first.id])
        self.assertEqual(self.successResultOf(self.queue.read("1", None)), [second])

    def test_messages_for_other_relays_are_taken_once(self) -> None:
        """Messages for other relays are taken once, until the relay asks for all of them again."""
        self.patch(sqlite, "BATCH", 2)
        queue = SQLiteQueue(":memory:", self.clock)
        for number in range(5):
            queue.append(FEDERATION, b"%d" % number, 10.0)

        def take() -> list[bytes]:
            return [one.data for one in self.successResultOf(queue.take_federation())]

        expected = [[b"0", b"1"], [b"2", b"3"], [b"4"], [], []]
        self.assertEqual([take() for _ in range(5)], expected)
        queue.release_federation()
        self.assertEqual([take() for _ in range(5)], expected)


class FileTests(SynchronousTestCase):
    """Content of the queue's file, and files beside it."""

    def setUp(self) -> None:
        self.clock = StrictClock()
        self.path = self.mktemp()

    def test_a_restart_counts_the_stored_messages(self) -> None:
        queue = SQLiteQueue(self.path, self.clock)
        for session, data in (("1", b"three"), ("1", b"words"), ("2", b"here")):
            queue.append(session, data, 10.0, 7)
        queue.close()
        again = SQLiteQueue(self.path, self.clock)
        self.addCleanup(again.close)
        self.assertEqual((len(again), again.total, again._from), (3, 14, {7: 14}))

    def test_only_a_queue_in_a_file_reserves_disk_space(self) -> None:
        queue = SQLiteQueue(self.path, self.clock)
        self.assertEqual(os.path.getsize(self.path + SUFFIX), RESERVE)
        queue.close()
        SQLiteQueue(":memory:", self.clock).close()
        self.assertFalse(os.path.exists(self.path + SUFFIX) or os.path.exists(":memory:" + SUFFIX))

    def test_a_file_that_cannot_be_opened_is_named(self) -> None:
        path = os.path.join(self.path, "queue")
        error = self.assertRaises(QueueUnavailable, SQLiteQueue, path, self.clock)
        self.assertIn(path, str(error))

    def test_pages_of_deleted_messages_are_free_space(self) -> None:
        queue = SQLiteQueue(self.path, self.clock)
        self.addCleanup(queue.close)
        self.assertEqual(queue._free_bytes(), 0)
        kept = queue.append("1", bytes(1_000_000), 10.0)
        self.clock.advance(0)
        queue.remove("1", [self.successResultOf(kept)])
        self.clock.advance(0)
        self.assertTrue(900_000 < queue._free_bytes() < 1_200_000, queue._free_bytes())
        fail_statements(queue).full = ("PRAGMA",)
        self.assertEqual(queue._free_bytes(), 0)

    def test_one_delivered_message_is_deleted_at_the_end_too(self) -> None:
        queue = SQLiteQueue(self.path, self.clock)
        kept = queue.append("1", b"x", 10.0)
        self.clock.advance(0)
        disk = fail_statements(queue)
        disk.full = ("DELETE",)
        queue.remove("1", [self.successResultOf(kept)])
        disk.full = ()
        queue.close()
        again = SQLiteQueue(self.path, self.clock)
        self.addCleanup(again.close)
        self.assertEqual(len(again), 0)


class _Reserve:
    """Reserve that records what the queue asks of it."""

    def __init__(self, *, room: bool = True, small_log: bool = True) -> None:
        self.calls: list[str] = []
        self._room, self._small_log = room, small_log

    def release(self) -> None:
        self.calls.append("release")

    def suffices_for(self, path: str) -> bool:
        self.calls.append("holds")
        return self._small_log

    def take(self, unused: int = 0) -> bool:
        self.calls.append("take")
        return self._room

    def remove(self) -> None:
        self.calls.append("remove")


class TroubleTests(SynchronousTestCase):
    """A database whose statements fail."""

    def setUp(self) -> None:
        self.clock = StrictClock()
        self.queue = SQLiteQueue(":memory:", self.clock)
        self.disk = fail_statements(self.queue)

    def append(self, data: bytes = b"x") -> Deferred[Any]:
        return self.queue.append("1", data, 100.0)

    def kept(self, number: int) -> list[Any]:
        waiting = [self.append() for _ in range(number)]
        self.clock.advance(0)
        return [self.successResultOf(one) for one in waiting]

    def test_a_commit_that_fails_fails_its_appends(self) -> None:
        """The appends fail even if the database cannot be read afterwards."""
        for full in (("COMMIT",), ("COMMIT", "SELECT")):
            waiting = [self.append() for _ in range(2)]
            self.disk.full = full
            self.clock.advance(0)
            for one in waiting:
                self.failureResultOf(one, QueueUnavailable)
            self.disk.full = ()
            self.clock.advance(RETRY_EVERY)
            self.assertIsNone(self.queue.trouble)
            self.assertEqual(self.kept(1), [self.queue._db.execute("SELECT max(id) FROM messages").fetchone()[0]])

    def test_a_failing_append_does_not_affect_its_turn(self) -> None:
        first = self.append()
        self.disk.full = ("INSERT",)
        self.failureResultOf(self.append(), QueueUnavailable)
        self.assertNoResult(first)
        self.clock.advance(0)
        self.successResultOf(first)
        self.assertEqual(len(self.queue), 1)

    def test_an_append_after_which_sqlite_rolls_back_fails_the_others_too(self) -> None:
        """SQLite rolls back the whole transaction when the disk is full."""
        first = self.append()
        self.disk.full, self.disk.rolls_back = ("INSERT",), True
        self.failureResultOf(self.append(), QueueUnavailable)
        self.failureResultOf(first, QueueUnavailable)
        self.assertEqual((len(self.queue), self.queue.total), (0, 0))

    def test_reads_that_fail_say_so(self) -> None:
        self.kept(1)
        self.disk.full = ("SELECT",)
        self.failureResultOf(self.queue.read("1", None), QueueUnavailable)
        self.failureResultOf(self.queue.expired(200.0), QueueUnavailable)

    def test_the_log_names_the_trouble_once(self) -> None:
        with capturedLogs() as logs:
            self.disk.full = ("INSERT", "COMMIT", "BEGIN")
            self.failureResultOf(self.append())
            for _ in range(3):
                self.clock.advance(RETRY_EVERY)
            self.disk.full = ()
            self.clock.advance(RETRY_EVERY)
            self.append()
        said = [one["log_format"].split(":")[0] for one in logs if one["log_namespace"] == sqlite.__name__]
        expected = "the queue cannot be written to; messages are refused until it can"
        self.assertEqual(said, [expected, "the queue can be written to again"])

    def test_many_delivered_messages_are_deleted_in_several_turns(self) -> None:
        self.patch(removals, "MAX_BATCH", 2)
        ids = self.kept(5)
        self.disk.full = ("DELETE",)
        self.queue.remove("1", ids)
        self.disk.full = ()
        self.disk.seen.clear()
        self.clock.advance(RETRY_EVERY)
        self.assertEqual((len(self.queue), self.queue.trouble, self.disk.seen.count("BEGIN IMMEDIATE")), (0, None, 3))

    def test_the_reserve_is_used_for_deletions_only(self) -> None:
        """The reserve is freed while delivered messages have to be deleted, and taken again before appends are
        accepted.
        """
        for deletes, calls in ((False, ["take"]), (True, ["release", "holds", "take"])):
            ids = self.kept(1)
            self.disk.full = ("DELETE",) if deletes else ("INSERT",)
            if deletes:
                self.queue.remove("1", ids)
            self.failureResultOf(self.append())
            self.disk.full = ()
            used: Any = _Reserve()
            self.queue._reserve = used
            self.queue._in_trouble("the disk is full")
            self.clock.advance(RETRY_EVERY)
            self.assertEqual((used.calls, self.queue.trouble), (calls, None))

    def test_appends_are_refused_until_the_reserve_is_back(self) -> None:
        poor: Any = _Reserve(room=False)
        self.queue._reserve = poor
        self.queue._in_trouble("the disk is full")
        self.clock.advance(RETRY_EVERY)
        self.failureResultOf(self.append(), QueueUnavailable)
        self.queue._reserve = None
        self.clock.advance(RETRY_EVERY)
        self.assertEqual(len(self.kept(1)), 1)

    def test_a_log_that_does_not_fit_into_the_reserve_is_not_moved_first(self) -> None:
        """Moving it needs as much space again."""
        for small_log, moves in ((True, 2), (False, 1)):
            (number,) = self.kept(1)
            self.disk.full = ("DELETE",)
            self.queue.remove("1", [number])
            self.disk.full = ()
            used: Any = _Reserve(small_log=small_log)
            self.queue._reserve = used
            self.disk.seen.clear()
            self.clock.advance(RETRY_EVERY)
            self.assertEqual(sum(one.startswith("PRAGMA wal_checkpoint") for one in self.disk.seen), moves)

    def test_evicted_ids_of_delivered_messages_are_counted(self) -> None:
        self.patch(removals, "MAX_REMOVALS", 3)
        ids = self.kept(5)
        self.disk.full = ("DELETE",)
        self.queue.remove("1", ids)
        self.assertEqual(self.queue.forgotten, 2)
