"""Windows, confirmations and queues, by plain calls: nothing is lost, nothing is out of order."""

from __future__ import annotations

from collections import deque
from typing import Any, cast
from unittest import mock

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgTimeout
from dmsg.net.turn_share import MAX_SHARE, TurnShare
from dmsg.rmb.errors import CallTimeout, QueueUnavailable
from dmsg.rmb.relay import backlog, delivery
from dmsg.rmb.relay.delivery import Delivery
from dmsg.rmb.relay.queue.interface import QueuedMessage
from dmsg.rmb.session import uplink
from dmsg.rmb.session.uplink import ROUND_INTERVAL, SILENT_AFTER, UNCONFIRMED_AFTER, OutboxFull, Outgoing, Uplink
from dmsg.rmb.socket import confirm
from dmsg.rmb.socket.confirm import Ledger, Message
from dmsg.rmb.socket.session_buffer import SessionBuffer
from dmsg.rmb.twins.address import Session
from tests.net.test_own_pauses import PausingClock, pass_time


class LedgerTests(SynchronousTestCase):
    """A sender's pings wait for what it sent."""

    def setUp(self) -> None:
        self.pongs: list[bytes] = []
        self.ledger = Ledger(self.pongs.append)

    def message(self) -> Message:
        message = Message(b"x", 0.0, self.ledger)
        self.ledger.add(message)
        return message

    def test_pings_are_answered_in_order(self) -> None:
        """The answers have the order of the pings, in whatever order the messages are settled."""
        self.ledger.ping(b"none")
        one, two = self.message(), self.message()
        self.ledger.ping(b"two")
        three = self.message()
        self.ledger.ping(b"three")
        two.settle()
        three.settle()
        self.assertEqual([b"none"], self.pongs)
        one.settle()
        one.settle()
        self.assertEqual([b"none", b"two", b"three"], self.pongs)

    def test_a_ping_confirms_the_messages_before_it(self) -> None:
        one, two = self.message(), self.message()
        self.assertEqual((len(self.ledger), self.ledger.size), (2, 2))
        self.ledger.ping(b"two")
        three = self.message()
        self.ledger.ping(b"three")
        one.settle()
        self.assertEqual(self.pongs, [])
        two.settle()
        self.assertEqual((self.pongs, len(self.ledger), self.ledger.size), ([b"two"], 1, 1))
        three.settle()
        self.assertEqual((self.pongs, self.ledger.size), ([b"two", b"three"], 0))

    def test_relaxed_by_bytes_too(self) -> None:
        self.patch(confirm, "RESUME_BYTES", 10)
        called: list[int] = []
        messages = []
        for size in (1, 9, 2, 8):
            messages.append(Message(bytes(size), 0.0, self.ledger))
            self.ledger.add(messages[-1])
        self.ledger.on_few_left = lambda: called.append(self.ledger.size)
        for message in messages:
            message.settle()
        self.assertEqual(called, [10])

    def test_pings_have_a_limit(self) -> None:
        """The oldest go unanswered."""
        one = self.message()
        for number in range(20):
            self.ledger.ping(b"%d" % number)
        one.settle()
        self.assertEqual([b"%d" % number for number in range(4, 20)], self.pongs)

    def test_the_callback_fires_once_when_few_are_left(self) -> None:
        """Called once, when few are left."""
        called: list[int] = []
        messages = [self.message() for _ in range(confirm.RESUME_COUNT + 2)]
        self.ledger.on_few_left = lambda: called.append(len(self.ledger))
        for message in messages:
            message.settle()
        self.assertEqual([confirm.RESUME_COUNT], called)


class SessionBufferTests(SynchronousTestCase):
    """Messages of a paused session are processed later in turns, as data from its socket."""

    def test_buffered_messages_use_only_their_share_of_a_turn(self) -> None:
        clock = Clock()
        taken: list[bytes] = []
        share = TurnShare(clock)
        share.now = lambda: 0.001 * len(taken)  # Each message costs a millisecond.
        buffer = SessionBuffer(taken.append, taken.append, lambda call: None, lambda: None, lambda: None, lambda: False)
        buffer.take_turns(share, 1)
        buffer.wait_for(self)
        for number in range(50):
            buffer.put(b"%d" % number, is_message=True)
        buffer.stop_waiting_for(self)
        clock.advance(0)
        self.assertEqual((taken, buffer.size), ([b"%d" % number for number in range(50)], 0))
        self.assertGreaterEqual(share.waited, 50 / (MAX_SHARE / 0.001 + 1))


class FakeSession:
    """Connection of a session that records its messages and its pings."""

    unsent = 0

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.pings: list[int] = []

    def send(self, data: bytes) -> None:
        self.got.append(data)

    def barrier(self, number: int) -> None:
        self.pings.append(number)


class QueueStore:
    """A queue in memory, whose appends are answered when the test says."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        self.next = 1
        self.waiting: list[tuple[Deferred[int], int]] = []
        self.slow = False
        self.reads: list[tuple[Deferred[list[QueuedMessage]], Any]] = []
        self.old_reads: list[tuple[Deferred[list[QueuedMessage]], Any]] = []
        """Reads of earlier connections."""
        self.slow_reads = False
        self.failing = 0
        """Number of appends that will fail."""
        self.told: list[str] = []

    def keep(self, session: Session, message: Message) -> Deferred[Any]:
        if self.failing:
            self.failing -= 1
            return fail(QueueUnavailable("full"))
        number = self.next
        self.next += 1
        self.kept[number] = message.data
        if not self.slow:
            return succeed(number)
        deferred: Deferred[int] = Deferred()
        self.waiting.append((deferred, number))
        return deferred

    def answer(self) -> None:
        waiting, self.waiting = self.waiting, []
        for deferred, number in waiting:
            deferred.callback(number)

    def read(self, session: Session, after: Any) -> Deferred[list[QueuedMessage]]:
        if not self.slow_reads:
            return succeed(self.found(after))
        assert not self.reads, "two reads at once"
        deferred: Deferred[list[QueuedMessage]] = Deferred()
        self.reads.append((deferred, after))
        return deferred

    def found(self, after: Any) -> list[QueuedMessage]:
        return [QueuedMessage(number, data) for number, data in sorted(self.kept.items()) if number > (after or 0)][:5]

    def answer_reads(self, *, well: bool = True) -> None:
        reads, self.reads, self.old_reads = self.old_reads + self.reads, [], []
        for deferred, after in reads:
            if well:
                deferred.callback(self.found(after))
            else:
                deferred.errback(QueueUnavailable("away"))

    def remove(self, session: Session, ids: list[Any]) -> None:
        for number in ids:
            # As in the real stores, a message that was confirmed while it was being stored may be sent a second time,
            # on the next connection.
            self.kept.pop(number, None)

    def life_end(self, queued: QueuedMessage) -> float | None:
        return 1e9

    def mark_busy(self, delivery: Delivery) -> None:
        self.told.append("busy")

    def note_waiting(self, delivery: Delivery) -> None:
        self.told.append("waits")

    def ping_later(self, delivery: Delivery) -> None:
        self.told.append("ping later")

    def count_delivered_later(self, delivery: Delivery) -> None:
        self.told.append("hand later")


class DeliveryTests(SynchronousTestCase):
    """A model of a relay's one session: messages come, confirmations come late, connections are lost."""

    @given(
        st.lists(
            st.one_of(
                st.just("message"),
                st.just("confirm"),
                st.just("spill"),
                st.just("answer"),
                st.just("lose"),
                st.just("slow"),
                st.sampled_from(
                    ["large", "late reads", "answer reads", "fail reads", "look", "stall", "round", "confirm all"]
                ),
            ),
            max_size=80,
        ),
        st.sampled_from([(4, 10**6, 3), (2, 10**6, 4096), (100, 20, 4096), (3, 30, 2)]),
    )
    def test_messages_arrive_once_and_in_order(self, steps: list[str], sizes: tuple[int, int, int]) -> None:
        """On one connection no message arrives twice; over all connections every message arrives, in order except for
        repetitions.
        """
        names = ("WINDOW_MESSAGES", "WINDOW_SIZE")
        before = [getattr(delivery, name) for name in names]
        try:
            for name, value in zip(names, sizes, strict=False):
                setattr(delivery, name, value)
            self.play(steps, sizes[2])
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(delivery, name, value)

    def test_a_long_queue_is_read_to_its_end(self) -> None:
        """The messages have expired, so none of them is delivered."""
        store = QueueStore()
        store.life_end = lambda queued: None  # type: ignore[method-assign]
        for number in range(5000):
            store.kept[number + 1] = b"x"
        current = Delivery(Session(1), FakeSession(), store)
        current.start()
        self.assertEqual(({}, False), (store.kept, current.catching_up))

    def check(self, current: Delivery) -> None:
        """Check the counts of messages and bytes. The window is at most one read larger than its limit."""
        sizes = [len(message.data) for message in current._window]
        self.assertEqual(current._size, sum(sizes))
        self.assertEqual(current._backlog.size, sum(len(message.data) for message in current._backlog.messages))
        self.assertEqual(current.size, current._size + current._backlog.size + delivery.OVERHEAD * len(current))
        self.assertEqual(len(current), len(sizes) + len(current._backlog.messages))
        # All messages of one read are sent together, here at most five.
        self.assertLessEqual(len(sizes), delivery.WINDOW_MESSAGES + 4)
        self.assertLessEqual(sum(sizes[:-5]), delivery.WINDOW_SIZE)

    def play(self, steps: list[str], backlog: int) -> None:
        store = QueueStore()
        pongs: list[bytes] = []
        ledger = Ledger(pongs.append)
        session = FakeSession()
        current = Delivery(Session(1), session, store, backlog)
        current.start()
        sent = 0
        connections = [session]

        def enqueue(message: Message) -> None:
            def kept(number: Any) -> None:
                message.settle()
                current.wake()

            store.keep(Session(1), message).addCallback(kept)

        for step in steps:
            if step in ("message", "large"):
                message = Message(b"%d" % sent if step == "message" else b"%012d" % sent, 0.0, ledger)
                sent += 1
                ledger.add(message)
                if not current.offer(message):
                    enqueue(message)
            elif step == "confirm" and session.pings:
                current.confirmed(session.pings.pop(0))
            elif step == "confirm all" and session.pings:
                last = session.pings[-1]
                session.pings.clear()
                current.confirmed(last)
            elif step == "late reads":
                store.slow_reads = not store.slow_reads
            elif step in ("answer reads", "fail reads"):
                store.answer_reads(well=step == "answer reads")
            elif step == "look":
                current.check()
            elif step == "stall":
                current.stall()
            elif step == "round":
                current.retry()
            elif step == "spill":
                current.spill()
            elif step == "answer":
                store.answer()
            elif step == "slow":
                store.slow = not store.slow
            elif step == "lose":
                left = current.close()
                store.old_reads, store.reads = store.old_reads + store.reads, []
                session = FakeSession()
                connections.append(session)
                current = Delivery(Session(1), session, store, backlog)
                self.assertEqual(len(set(map(id, left))), len(left))
                for message in left:
                    enqueue(message)
                store.answer()
                current.start()
            self.check(current)
            for one in connections:
                self.assertEqual(len(one.got), len(set(one.got)))
        store.slow = store.slow_reads = False
        store.answer()
        store.answer_reads()
        for _ in range(sent + 5):
            current.retry()
            if session.pings:
                current.confirmed(session.pings.pop(0))
        ledger.ping(b"all")
        self.assertEqual([b"all"], pongs)
        self.assertEqual({}, store.kept)
        self.check(current)
        self.assertEqual((len(current), current.closed, current.catching_up), (0, False, False))
        seen = {int(data) for one in connections for data in one.got}
        self.assertEqual(set(range(sent)), seen)
        for one in connections:
            self.assertEqual(sorted(map(int, one.got)), list(map(int, one.got)))


class HandingTests(SynchronousTestCase):
    """A client of the reference does not recognise repeated messages. So messages that were written to its connection
    are not sent again.
    """

    def setUp(self) -> None:
        self.pongs: list[bytes] = []
        self.ledger = Ledger(self.pongs.append)
        self.store = QueueStore()
        self.session = FakeSession()
        self.current = Delivery(Session(1), self.session, self.store, 2)
        self.current.lazy = True

    def message(self, data: bytes = b"x", *, durable: bool = False) -> Message:
        self.ledger.durable = durable
        message = Message(data, 0.0, self.ledger)
        self.ledger.add(message)
        return message

    def answer(self) -> None:
        """Answer the ping that checks whether the session answers pings."""
        self.assertEqual(self.session.pings, [0])
        self.current.confirmed(0)
        self.assertTrue(self.current.is_trusted)

    def test_messages_handed_to_a_connection_count_as_delivered(self) -> None:
        """The sender is told at once, and no message is left for the next connection."""
        self.current.start()
        self.answer()
        messages = [self.message() for _ in range(3)]
        for message in messages:
            self.assertTrue(self.current.offer(message))
        self.ledger.ping(b"all of it")
        self.session.unsent = 1
        self.assertFalse(self.current.count_delivered())
        self.assertEqual([message.settled for message in messages], [True, True, False])
        self.session.unsent = 0
        self.assertTrue(self.current.count_delivered())
        self.assertEqual((self.pongs, self.current.close()), ([b"all of it"], []))

    def test_messages_not_handed_over_are_sent_again(self) -> None:
        self.current.start()
        self.answer()
        messages = [self.message() for _ in range(3)]
        for message in messages:
            self.current.offer(message)
        self.session.unsent = 2
        self.assertEqual(self.current.close(), messages[1:])
        self.assertEqual([message.settled for message in messages], [True, False, False])

    def test_messages_before_the_first_pong_are_stored(self) -> None:
        """Before the first pong, it is unknown whether the client is still connected."""
        self.current.start()
        message = self.message()
        self.current.offer(message)
        self.assertTrue(self.current.count_delivered())
        self.assertEqual((message.settled, self.current.close()), (False, [message]))

    def test_a_handed_message_leaves_the_queue(self) -> None:
        """The message leaves the queue at once, or as soon as the session has answered a ping."""
        self.store.kept.update({1: b"one", 2: b"two"})
        self.current.start()
        self.assertEqual(self.session.got, [b"one", b"two"])
        self.current.count_delivered()
        self.assertEqual(len(self.store.kept), 2)
        self.answer()
        self.current.count_delivered()
        self.assertEqual(self.store.kept, {})
        self.store.kept[3] = b"three"
        self.current.wake()
        self.current.count_delivered()
        self.assertEqual((self.store.kept, self.current.close()), ({}, []))

    def test_messages_are_stored_when_a_session_stops_answering(self) -> None:
        """From then on, the queue stores unconfirmed messages, and all new messages at once."""
        self.current.start()
        self.answer()
        self.current.offer(self.message(b"1"))
        self.current.count_delivered()
        self.current.stall()
        self.assertFalse(self.current.is_trusted)
        self.current.offer(self.message(b"2"))
        self.assertEqual(list(self.store.kept.values()), [b"1", b"2"])
        self.current.request_confirmation()
        self.current.confirmed(2)
        self.assertEqual(self.store.kept, {})
        self.assertTrue(self.current.is_trusted)

    def test_messages_are_stored_only_before_the_first_pong(self) -> None:
        """The messages are from a client that does not send them again."""
        self.current.start()
        self.store.slow = True
        self.current.offer(self.message(b"1", durable=True))
        self.assertEqual(list(self.store.kept.values()), [b"1"])
        self.answer()
        self.current.count_delivered()
        self.store.answer()
        self.assertEqual(self.store.kept, {})
        self.current.offer(self.message(b"2", durable=True))
        self.assertEqual(self.store.kept, {})

    def test_messages_are_stored_while_a_session_does_not_read(self) -> None:
        """Messages are stored until the session's connection has taken the earlier data."""
        self.current.start()
        self.answer()
        self.session.unsent = 1
        for durable in (True, False, True):
            self.current.offer(self.message(b"%d" % durable, durable=durable))
        self.ledger.durable = True
        self.assertFalse(self.current.count_delivered())
        self.assertEqual(list(self.store.kept.values()), [b"1"])
        self.session.unsent = 0
        self.assertTrue(self.current.count_delivered())
        self.assertEqual((self.store.kept, self.current.close()), ({}, []))

    def test_sent_messages_are_handed_over_at_the_end_of_the_turn(self) -> None:
        """The end of a turn writes everything, so one look is enough for all messages of the turn."""
        self.current.start()
        self.answer()
        self.assertEqual(self.store.told.count("hand later"), 1)  # The answer shows that the client answers at all.
        self.current.count_delivered()
        for looks in (2, 3):
            for _ in range(2):
                self.current.offer(self.message())
            self.assertEqual(self.store.told.count("hand later"), looks)
            self.assertTrue(self.current.count_delivered())

    def test_a_session_that_recognises_repeated_messages_is_not_handed(self) -> None:
        self.current.lazy = False
        self.current.start()
        self.current.offer(self.message())
        self.current.confirmed(1)
        self.assertNotIn("hand later", self.store.told)

    def test_a_small_message_is_not_handed_before_a_large_one(self) -> None:
        """The connection sends in order."""
        self.current.start()
        self.answer()
        large, small = self.message(bytes(10)), self.message(b"x")
        for message in (large, small):
            self.current.offer(message)
        self.session.unsent = 6
        self.assertFalse(self.current.count_delivered())
        self.assertEqual((large.settled, small.settled), (False, False))

    def test_confirmed_messages_count_as_handed(self) -> None:
        """A pong may come before the look at the connection, or behind it."""
        for looks in (False, True):
            self.setUp()
            self.current.start()
            self.answer()
            messages = [self.message(b"%d" % number) for number in range(4)]
            for message in messages:
                self.current.offer(message)
            self.session.unsent = 3
            if looks:
                self.current.count_delivered()
            self.current.confirmed(1)
            self.session.unsent = 2
            self.current.count_delivered()
            self.assertEqual([message.settled for message in messages], [True, True, False, False], looks)
            self.assertEqual(self.current.close(), messages[2:])

    def test_only_messages_that_are_not_handed_are_written_down(self) -> None:
        """A message that the connection has must not come again from the queue."""
        self.current.start()
        self.answer()
        messages = [self.message(b"%d" % number, durable=True) for number in range(8)]
        for message in messages:
            self.current.offer(message)
        self.session.unsent = 6
        self.assertFalse(self.current.count_delivered())
        self.current.confirmed(2)
        self.session.unsent = 3
        self.assertFalse(self.current.count_delivered())
        self.assertEqual([message.settled for message in messages[:5]], [True] * 5)
        self.assertEqual(list(self.store.kept.values()), [b"5", b"6", b"7"])
        self.session.unsent = 0
        self.assertTrue(self.current.count_delivered())
        self.assertEqual((self.store.kept, self.current.close()), ({}, []))


class KeepingTests(SynchronousTestCase):
    """Messages of the window and the backlog in the queue, and messages that the queue could not store."""

    def setUp(self) -> None:
        self.broken: list[None] = []
        self.pongs: list[bytes] = []
        self.ledger = Ledger(self.pongs.append, lambda: self.broken.append(None))
        self.store = QueueStore()
        self.session = FakeSession()
        self.current = Delivery(Session(1), self.session, self.store, 2)
        self.current.start()

    def message(self, data: bytes = b"x", owner: Ledger | None = None) -> Message:
        message = Message(data, 0.0, self.ledger if owner is None else owner)
        (self.ledger if owner is None else owner).add(message)
        return message

    def test_a_window_that_cannot_be_stored_is_stored_later(self) -> None:
        """The round comes by again; nobody has to send it again meanwhile."""
        message = self.message()
        self.assertTrue(self.current.offer(message))
        self.store.failing = 1
        self.current.spill()
        self.assertEqual((message.queue_id, message.keeping, message.settled, self.broken), (None, False, False, []))
        self.current.spill()
        self.assertEqual((message.queue_id, message.settled), (1, True))
        self.current.spill()
        self.assertEqual(list(self.store.kept), [1])
        self.current.confirmed(1)
        self.assertEqual(self.store.kept, {})

    def test_messages_lost_before_the_queue_are_reported(self) -> None:
        """After the connection has ended, only the sender has the message and sends it again."""
        message = self.message()
        self.current.offer(message)
        self.store.slow = True
        self.current.spill()
        ((deferred, number),) = self.store.waiting
        self.assertEqual(self.current.close(), [])
        del self.store.kept[number]
        deferred.errback(QueueUnavailable("full"))
        self.assertEqual((self.broken, message.settled), ([None], False))

    def test_a_backlog_that_cannot_be_stored_is_reported(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        for _ in range(4):
            self.assertTrue(self.current.offer(self.message()))
        self.assertEqual(self.store.told.count("waits"), 1)
        self.assertEqual((self.current.size, len(self.current)), (4 + 4 * delivery.OVERHEAD, 4))
        self.store.failing = 3
        self.current.stall()
        self.assertTrue(self.current.stalled)
        self.assertFalse(self.current.offer(self.message()))
        self.assertEqual(len(self.broken), 2)  # One of the three messages was in the window, and is stored later.

    def test_messages_wait_for_appends_under_way(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        for number in range(3):
            self.current.offer(self.message(b"%d" % number))
        self.store.slow = True
        self.current.stall()
        self.assertTrue(self.current.catching_up)
        self.current.confirmed(1)
        self.assertFalse(self.current.stalled)
        self.assertTrue(self.current.offer(self.message(b"3")))
        self.assertEqual(self.session.got, [b"0"])
        self.store.answer()
        while self.session.pings[-1] > self.current._confirmed_count:
            self.current.confirmed(self.session.pings[-1])
        self.assertEqual(self.session.got, [b"0", b"1", b"2", b"3"])
        self.assertRaises(ValueError, self.current.confirmed, 5)

    def test_a_read_that_answers_after_the_end(self) -> None:
        """The result is ignored; the next connection reads the messages."""
        self.store.slow_reads = True
        self.store.kept[1] = b"kept"
        self.current.wake()
        self.current.close()
        self.store.answer_reads()
        self.assertEqual((self.session.got, self.store.kept), ([], {1: b"kept"}))

    def test_a_read_that_fails_is_made_again_in_the_round(self) -> None:
        self.store.slow_reads = True
        self.store.kept[1] = b"kept"
        self.current.wake()
        self.store.answer_reads(well=False)
        self.assertEqual((self.session.got, self.store.reads), ([], []))
        self.current.retry()
        self.store.answer_reads()
        self.assertEqual(self.session.got, [b"kept"])

    def test_messages_stored_during_a_read_are_read_too(self) -> None:
        """The delivery needs no second notification for these messages."""
        self.store.slow_reads = True
        self.store.kept[1] = b"one"
        self.current.wake()
        self.store.kept[2] = b"two"
        self.current.wake()
        while self.store.reads:
            self.store.answer_reads()
        self.assertEqual((self.session.got, self.current.catching_up), ([b"one", b"two"], False))

    def test_the_queue_is_read_after_the_window_is_stored(self) -> None:
        """An earlier read would return messages that are being stored, and they would be sent twice."""
        self.current.offer(self.message(b"window"))
        self.store.slow = True
        self.current.spill()
        self.store.kept[9] = b"later"
        self.current.wake()
        self.assertEqual(self.session.got, [b"window"])
        self.store.answer()
        self.assertEqual(self.session.got, [b"window", b"later"])

    def test_a_read_that_was_too_early(self) -> None:
        """The read found no message; a message was appended before its answer came."""
        self.store.slow_reads = True
        self.current.wake()
        ((early, _),) = self.store.reads
        self.store.reads.clear()
        self.store.kept[1] = b"one"
        self.current.wake()
        self.assertEqual(self.store.reads, [])
        early.callback([])
        self.store.answer_reads()
        self.assertEqual(self.session.got, [b"one"])

    def test_the_backlog_waits_for_the_queue(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 2)
        for data in (b"1", b"2", b"backlog"):
            self.current.offer(self.message(data))
        self.store.slow_reads = True
        self.store.kept[1] = b"queue"
        self.current.wake()
        self.current.confirmed(self.session.pings[-1])
        self.assertEqual(self.session.got, [b"1", b"2"])
        for _ in range(5):
            self.store.answer_reads()
            if self.session.pings[-1] > self.current._confirmed_count:
                self.current.confirmed(self.session.pings[-1])
        self.assertEqual(self.session.got, [b"1", b"2", b"queue", b"backlog"])

    def test_a_lost_connection_stops_reading_the_queue(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        for _ in range(2):
            self.current.offer(self.message())
        self.store.slow = self.store.slow_reads = True
        self.current.stall()
        self.current.close()
        self.store.answer()
        self.assertEqual((self.store.reads, self.session.got), ([], [b"x"]))

    def test_the_backlog_counts_messages_left_in_the_queue(self) -> None:
        """A read takes some of it; one that finds nothing says that there is nothing."""
        self.patch(delivery, "WINDOW_MESSAGES", 6)
        self.store.kept.update(dict.fromkeys(range(1, 9), b"kept"))
        self.current._backlog.stored_count = 7
        self.current.wake()
        self.assertEqual((len(self.session.got), self.current._backlog.stored_count), (8, 0))
        self.current._backlog.stored_count = 3
        self.current._batch_read([])
        self.assertEqual(self.current._backlog.stored_count, 0)
        self.current._backlog.stored_count = 3
        self.current.closed = False
        self.patch(Delivery, "_read", lambda current: None)
        self.current._batch_read([QueuedMessage(99, b"one")])
        self.assertEqual(self.current._backlog.stored_count, 2)

    def test_expired_messages_are_removed_and_not_sent(self) -> None:
        self.store.life_end = lambda queued: None if queued.data == b"old" else 1e9  # type: ignore[method-assign]
        self.store.kept.update({1: b"old", 2: b"new"})
        self.current.wake()
        self.assertEqual((self.session.got, list(self.store.kept)), ([b"new"], [2]))
        self.current.confirmed(1)
        self.assertEqual(self.store.kept, {})

    def hold(self) -> list[str]:
        """Return the calls for the buffer of the ledger's session."""
        told: list[str] = []

        class Holder:
            def wait_for(self, backlog: object) -> None:
                told.append("held")

            def stop_waiting_for(self, backlog: object) -> None:
                told.append("free")

        self.ledger.buffer = Holder()  # type: ignore[assignment]
        return told

    def test_senders_resume_when_half_of_the_backlog_is_delivered(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        held = self.hold()
        self.current._backlog._most_messages = 4
        for _ in range(5):
            self.current.offer(self.message())
        self.assertEqual(held, ["held"])
        for number in (1, 2):
            self.current.confirmed(number)
        self.assertEqual((len(self.current._backlog.messages), held), (2, ["held"]))
        self.current.confirmed(3)
        self.assertEqual((len(self.current._backlog.messages), held), (1, ["held", "free"]))

    def test_senders_of_stored_messages_are_held(self) -> None:
        """The bytes in the queue count."""
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        self.ledger.durable = True
        held = self.hold()
        self.assertTrue(self.current.offer(self.message()))
        self.assertFalse(self.current.offer(self.message()))
        self.assertEqual((self.current._backlog.stored_count, held), (1, []))
        self.assertFalse(self.current.offer(self.message()))
        self.assertEqual((self.current._backlog.stored_count, held), (2, ["held"]))

    def test_senders_to_an_unconfirming_session_are_held(self) -> None:
        """Senders are held while too much waits, except for answers that the session itself has asked for."""
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        held = self.hold()
        for _ in range(3):
            self.assertTrue(self.current.offer(self.message()))
        self.current.stall()
        self.assertEqual((self.current._backlog.stored_count, held), (2, ["held", "free"]))
        answer = self.message()
        self.patch(Message, "is_answer", True)
        self.assertFalse(self.current.offer(answer))
        self.assertEqual(held, ["held", "free"])
        self.patch(Message, "is_answer", False)
        self.assertFalse(self.current.offer(self.message()))
        self.current.stall()
        self.assertEqual(held, ["held", "free", "held"])
        while self.session.pings[-1] > self.current._confirmed_count:
            self.current.confirmed(self.session.pings[-1])
        self.assertEqual((len(self.session.got), held[3:], self.store.kept), (3, ["free"], {}))

    def test_bytes_in_the_queue_count_towards_the_limit(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        held = self.hold()
        current = Delivery(Session(1), self.session, self.store, 100, 10)
        current.start()
        current.offer(self.message())
        current.stall()
        current.offer(self.message(bytes(9)))
        self.assertEqual(held, [])
        current.offer(self.message(b"x"))
        self.assertEqual((held, current._backlog.stored_size), (["held"], 10))
        current.close()
        self.assertEqual(held, ["held", "free"])

    def test_senders_are_held_and_let_go(self) -> None:
        """Senders are held from two waiting messages on, until at most one waits. Messages of other relays, which
        cannot be held, are accepted up to twice that number.
        """
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        held = self.hold()
        for _ in range(2):
            self.current.offer(self.message())
        self.assertEqual(held, [])
        self.current.offer(self.message())
        self.current.offer(self.message())
        self.assertEqual(held, ["held"])
        stranger = Ledger(self.pongs.append)
        self.assertTrue(self.current.offer(self.message(owner=stranger)))
        self.assertFalse(self.current.offer(self.message(owner=stranger)))
        self.assertEqual(len(self.store.kept), 5)
        self.assertEqual(held, ["held"])
        for number in range(1, 6):
            self.current.confirmed(number)
        self.assertEqual(held, ["held", "free"])

    def test_a_large_backlog_pauses_senders_too(self) -> None:
        self.patch(delivery, "WINDOW_SIZE", 10)
        self.patch(backlog, "BACKLOG_SIZE", 20)
        current = Delivery(Session(1), self.session, self.store)
        current.start()
        self.assertTrue(current.offer(self.message(bytes(11))))
        self.assertFalse(current._backlog.reaches_limit(1))
        self.assertTrue(current.offer(self.message(bytes(19))))
        self.assertFalse(current._backlog.reaches_limit(1))
        self.assertTrue(current.offer(self.message(bytes(1))))
        self.assertTrue(current._backlog.reaches_limit(1))
        self.assertTrue(current.offer(self.message(bytes(20))))
        self.assertFalse(current.offer(self.message(bytes(1))))
        self.assertEqual((current.size, self.session.got), (11 + delivery.OVERHEAD, [bytes(11)]))

    def test_how_many_wait_before_senders_are_held(self) -> None:
        """The backlog and what is behind it in the queue."""
        with mock.patch.object(backlog, "BACKLOG_SIZE", 16):
            current = Delivery(Session(1), self.session, self.store, 6)
        for waiting, behind, size, held, let_go in (
            (5, 0, 0, False, False),
            (6, 0, 0, True, False),
            (3, 2, 0, False, False),
            (3, 3, 0, True, False),
            (1, 1, 0, False, True),
            (2, 1, 0, False, False),
            (1, 0, 7, False, True),
            (1, 0, 8, False, False),
            (1, 0, 15, False, False),
            (1, 0, 16, True, False),
        ):
            current._backlog.messages = deque([self.message()] * waiting)
            current._backlog.stored_count, current._backlog.size = behind, size
            self.assertEqual(
                (current._backlog.reaches_limit(1), not current._backlog.reaches_limit(2)),
                (held, let_go),
                (waiting, behind, size),
            )
        for waiting, size, too_long in ((11, 31, False), (12, 0, True), (1, 32, True)):
            with mock.patch.object(backlog, "BACKLOG_SIZE", 16):
                current._backlog.messages, current._backlog.size = deque([self.message()] * waiting), size
                self.assertEqual(current._backlog.is_too_long, too_long, (waiting, size))
        for count, size, full in ((2, 9, False), (3, 0, True), (1, 10, True)):
            with mock.patch.multiple(delivery, WINDOW_MESSAGES=3, WINDOW_SIZE=10):
                current._window, current._size = deque([self.message()] * count), size
                self.assertEqual(current._is_full, full, (count, size))

    def test_the_queue_is_read_before_new_messages_are_sent(self) -> None:
        """The queue may contain older messages."""
        current = Delivery(Session(1), self.session, self.store)
        self.store.kept[1] = b"kept"
        self.assertTrue(current.offer(self.message(b"new")))
        self.assertEqual(self.session.got, [])
        current.start()
        self.assertEqual(self.session.got, [b"kept", b"new"])

    def test_undelivered_messages_are_returned_at_the_end(self) -> None:
        """Messages that are not stored are returned in order, and the counts are zero."""
        self.patch(delivery, "WINDOW_MESSAGES", 2)
        messages = [self.message(b"%d" % number) for number in range(4)]
        self.current.offer(messages[0])
        self.current.spill()
        for message in messages[1:]:
            self.current.offer(message)
        self.assertEqual(self.current.close(), messages[1:])
        self.assertEqual((len(self.current), self.current.size, self.current.closed), (0, 0, True))

    def test_long_waiting_messages_are_stored(self) -> None:
        """A message is stored at the second check that finds it waiting."""
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        for _ in range(2):
            self.current.offer(self.message())
        self.current.check()
        self.current.check()
        self.assertEqual(self.store.kept, {})
        self.current.check()
        self.assertEqual(len(self.store.kept), 2)

    def test_a_single_ping_follows_the_messages(self) -> None:
        """One ping at a time is sent, because a session may log each of them."""
        self.current.offer(self.message())
        self.current.offer(self.message())
        self.assertEqual(self.session.pings, [1])
        self.current.confirmed(1)
        self.assertEqual(self.session.pings, [1, 2])
        self.current.confirmed(2)
        self.assertEqual((self.session.pings, self.current._barrier), ([1, 2], False))
        self.current.lazy = True
        self.current.offer(self.message())
        self.assertEqual((self.session.pings, self.store.told[-1]), ([1, 2], "ping later"))
        self.assertTrue(self.current.has_few_unconfirmed)
        with mock.patch.object(delivery, "WINDOW_SIZE", 4):
            self.assertTrue(self.current.has_few_unconfirmed)
        with mock.patch.object(delivery, "WINDOW_SIZE", 3):
            self.assertFalse(self.current.has_few_unconfirmed)
        with mock.patch.object(delivery, "FEW_IN_WINDOW", 1):
            self.assertFalse(self.current.has_few_unconfirmed)
        self.current.request_confirmation()
        self.assertEqual((self.session.pings, self.store.told[-1]), ([1, 2, 3], "busy"))
        self.current.confirmed(3)
        self.current.request_confirmation()
        self.assertEqual((self.session.pings, self.current._barrier), ([1, 2, 3], False))
        for _ in range(delivery.FEW_IN_WINDOW):
            self.current.offer(self.message())
        self.assertFalse(self.current.has_few_unconfirmed)
        self.current.since = 5.0
        for old in (3, 2):
            self.current.confirmed(old)
            self.assertEqual(self.current.since, 5.0)
        self.current.confirmed(4)
        self.assertIsNone(self.current.since)

    def test_messages_that_are_not_resent_are_stored_before_delivery(self) -> None:
        """The sender does not repeat the message, so it is stored before it is confirmed, and delivered as well."""
        self.patch(delivery, "WINDOW_MESSAGES", 2)
        self.ledger.durable = True
        first, second, third = (self.message(b"%d" % number) for number in range(3))
        self.assertTrue(self.current.offer(first))
        self.assertEqual((first.queue_id, first.settled, self.session.got), (1, True, [b"0"]))
        self.assertTrue(self.current.offer(second))
        self.assertFalse(self.current.offer(third))
        self.current.confirmed(2)
        self.assertEqual(self.store.kept, {})

    def test_a_session_that_catches_up_is_read_for_up_to_its_window(self) -> None:
        """The messages of a read are sent together, so the window may exceed its limit. Even so, no further read
        follows while the window is full.
        """
        self.patch(delivery, "WINDOW_MESSAGES", 2)
        self.store.kept.update(dict.fromkeys(range(1, 13), b"kept"))
        self.current.wake()
        self.assertEqual((len(self.session.got), self.current.sent_count), (5, 5))
        for confirmed, sent in ((3, 5), (4, 10)):
            self.current.confirmed(confirmed)
            self.assertEqual(self.current.sent_count, sent)

    def test_a_long_queue_is_read_without_nesting(self) -> None:
        """A queue that answers at once would exhaust the stack."""
        self.patch(delivery, "WINDOW_MESSAGES", 100)
        self.store.kept.update(dict.fromkeys(range(1, 51), b"kept"))
        inside = deepest = 0
        got = Delivery._batch_read

        def count(current: Delivery, batch: list[QueuedMessage]) -> None:
            nonlocal inside, deepest
            inside += 1
            deepest = max(deepest, inside)
            got(current, batch)
            inside -= 1

        self.patch(Delivery, "_batch_read", count)
        self.current.wake()
        self.assertEqual((len(self.session.got), deepest), (50, 1))

    def test_a_read_is_repeated_when_a_message_goes_to_the_queue_meanwhile(self) -> None:
        """The relay stores the message that was not taken; what comes later must not overtake it."""
        self.current.offer(self.message(b"window"))
        self.store.slow_reads = True
        self.current.wake()
        ((early, _),) = self.store.reads
        self.store.reads.clear()
        self.ledger.durable = True
        self.assertFalse(self.current.offer(self.message(b"not taken")))
        early.callback([])
        self.assertEqual(len(self.store.reads), 1)
        self.assertTrue(self.current.offer(self.message(b"later", Ledger(self.pongs.append))))
        self.assertEqual(self.session.got, [b"window"])

    def test_new_messages_wait_behind_a_backlog_being_stored(self) -> None:
        """The backlog goes first, even if a read that is under way finds nothing."""
        self.patch(delivery, "WINDOW_MESSAGES", 2)
        self.current.offer(self.message(b"window"))
        self.store.slow_reads = self.store.slow = True
        self.current.wake()
        self.current.offer(self.message(b"backlog"))
        ((early, _),) = self.store.reads
        self.store.reads.clear()
        self.current.stall()
        early.callback([])
        self.current.confirmed(1)
        self.assertTrue(self.current.offer(self.message(b"later")))
        self.assertEqual(self.session.got, [b"window"])
        self.store.slow = False
        self.store.answer()
        while self.store.reads or self.session.pings[-1] > self.current._confirmed_count:
            self.store.answer_reads()
            self.current.confirmed(self.session.pings[-1])
        self.assertEqual(self.session.got, [b"window", b"backlog", b"later"])

    def test_a_message_confirmed_during_its_append_leaves_the_queue(self) -> None:
        message = self.message()
        self.current.offer(message)
        self.store.slow = True
        self.current.spill()
        self.current.confirmed(1)
        self.store.answer()
        self.assertEqual((self.store.kept, self.current._skip), ({}, set()))

    def test_a_message_leaves_the_queue_once(self) -> None:
        """The ledger keeps no id of a message, however long the session is connected."""
        removed: list[int] = []
        remove = self.store.remove

        def count(session: Session, ids: list[Any]) -> None:
            removed.extend(ids)
            remove(session, ids)

        self.patch(self.store, "remove", count)
        for number in range(1, 4):
            self.current.offer(self.message())
            self.current.spill()
            self.current.confirmed(number)
        self.assertEqual((removed, self.current._skip, self.store.kept), ([1, 2, 3], set(), {}))
        self.current.lazy = True
        self.current.offer(self.message())
        self.current.spill()
        self.current.count_delivered()
        self.current.confirmed(4)
        self.assertEqual((removed, self.current._skip), ([1, 2, 3, 4], set()))

    def test_a_message_in_the_batch_that_is_being_read_does_not_come_twice(self) -> None:
        """The message was confirmed after the queue had read it."""
        self.current.offer(self.message(b"once"))
        self.current.spill()
        self.store.slow_reads = True
        self.current.wake()
        ((reading, _),) = self.store.reads
        self.store.reads.clear()
        batch = self.store.found(None)
        self.current.confirmed(1)
        reading.callback(batch)
        self.store.answer_reads()
        self.assertEqual((self.session.got, self.store.kept, self.current._skip), ([b"once"], {}, set()))

    def test_a_backlog_that_moves_on_stays_in_memory(self) -> None:
        """The window confirms as much in each second as comes."""
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        for _ in range(3):
            self.current.offer(self.message())
        for number in range(10):
            self.current.check()
            for one in (1, 2):
                self.current.confirmed(2 * number + one)
                self.current.offer(self.message())
        self.assertEqual((self.store.kept, len(self.current)), ({}, 3))

    def test_a_message_that_waits_for_long_is_stored_although_others_come(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        current = Delivery(Session(1), self.session, self.store, 100)
        current.start()
        current.offer(self.message())
        for stored in (0, 0, 4):
            current.offer(self.message())
            current.check()
            self.assertEqual(len(self.store.kept), stored)

    def test_few_messages_are_unconfirmed(self) -> None:
        """With few unconfirmed messages, a session that logs pings is pinged later."""
        for number in range(1, delivery.FEW_IN_WINDOW + 2):
            self.current.offer(self.message())
            self.assertIs(self.current.has_few_unconfirmed, number < delivery.FEW_IN_WINDOW, number)

    def test_senders_resume_below_half_of_the_limit(self) -> None:
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        current = Delivery(Session(1), self.session, self.store, 12)
        current.start()
        told = self.hold()
        for number in range(13):
            self.assertIs(current.is_crowded, False, number)
            current.offer(self.message())
        self.assertEqual((current.is_crowded, told), (True, ["held"]))
        for number in range(1, 8):
            self.assertEqual(told, ["held"], number)
            current.confirmed(number)
        self.assertEqual((len(current), told), (6, ["held", "free"]))

    def test_senders_go_on_when_half_of_the_bytes_are_read_back(self) -> None:
        """The bytes are those of messages in the queue of a session that reads again."""
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        current = Delivery(Session(1), self.session, self.store, 1000, 100)
        current.start()
        for _ in range(13):
            current.offer(self.message(bytes(10)))
        current.stall()
        told = self.hold()
        self.assertFalse(current.offer(self.message(bytes(10))))
        self.store.kept[99] = bytes(10)
        self.assertEqual((current._backlog.stored_size, told), (130, ["held"]))
        sizes = []
        for number in range(1, 15):
            current.confirmed(min(number, current.sent_count))
            sizes.append(current._backlog.stored_size)
            self.assertEqual(told[1:], ["free"] if sizes[-1] < 50 else [], sizes)
        self.assertEqual((current._backlog.stored_size, len(self.session.got)), (0, 14))


class FakeSocket:
    """A connection of a link."""

    has_received = False
    aborted = 0

    def __init__(self) -> None:
        self.pongs: list[bytes] = []

    def ping(self, payload: bytes) -> None:
        """Do nothing: no answer arrives."""

    def send(self, data: bytes) -> None:
        """Do nothing: the relay confirms nothing."""

    def abort(self) -> None:
        self.aborted += 1

    def pong(self, payload: bytes) -> None:
        self.pongs.append(payload)


class LinkTests(SynchronousTestCase):
    """A session's connection to a relay."""

    def test_a_pause_of_this_process_ends_no_connection(self) -> None:
        """The checks run before the relay's answer is read."""
        for is_unconfirmed in (False, True):
            clock = PausingClock()
            uplink = Uplink(clock, ["ws://127.0.0.1:1"], lambda: "", lambda data, ready: None, clock.seconds)
            (link,) = uplink.links
            link._stopped = False
            socket = FakeSocket()
            link.opened(cast(Any, socket))
            uplink._pauses.begin()
            uplink._round.start(ROUND_INTERVAL, now=False)
            self.addCleanup(uplink._round.stop)
            if is_unconfirmed:
                link.send(Outgoing(b"x", 1e9))
            limit = UNCONFIRMED_AFTER if is_unconfirmed else SILENT_AFTER

            def pass_rounds(seconds: float) -> None:
                for _ in range(round(seconds / ROUND_INTERVAL)):
                    socket.has_received = is_unconfirmed
                    clock.advance(ROUND_INTERVAL)

            pass_rounds(limit - 4.0)
            clock.advance(10 * limit)
            pass_rounds(2.0)
            self.assertEqual(socket.aborted, 0)
            pass_rounds(4.0)
            self.assertGreaterEqual(socket.aborted, 1)

    def test_pauses_of_this_process_do_not_count_while_a_relay_is_awaited(self) -> None:
        clock = PausingClock()
        uplink = Uplink(clock, [], lambda: "", lambda data, ready: None, clock.seconds)
        online = uplink.when_online(10.0)
        clock.advance(100.0)
        pass_time(clock, 9.5)
        self.assertNoResult(online)
        pass_time(clock, 0.6)
        self.failureResultOf(online, DmsgTimeout)

    def test_a_late_pong_confirms_only_its_own_connection(self) -> None:
        """The pong of a former connection confirms nothing on the new one, which counts from zero."""
        clock = Clock()
        done: list[Any] = []
        uplink = Uplink(clock, ["ws://127.0.0.1:1"], lambda: "", lambda data, ready: done.append(ready), clock.seconds)
        (link,) = uplink.links
        link._stopped = False
        first, second = FakeSocket(), FakeSocket()
        link.opened(cast(Any, first))
        link.received(b"x")
        link.ping_received(b"before..")
        link.lost("cut")
        link.opened(cast(Any, second))
        link.received(b"y")
        link.ping_received(b"now.....")
        done[0](True)
        self.assertEqual(([], []), (first.pongs, second.pongs))
        done[1](True)
        self.assertEqual(([], [b"now....."]), (first.pongs, second.pongs))


class UplinkTests(SynchronousTestCase):
    """The outbox, without relays."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.uplink = Uplink(self.clock, [], lambda: "", lambda data, done: done(True), self.clock.seconds)

    def test_a_message_expires_in_the_outbox(self) -> None:
        """A message whose life is over before a relay is there."""
        self.uplink.start()
        waiting = self.uplink.send(b"x", 5.0)
        later = self.uplink.send(b"y", 50.0)
        self.clock.pump([2.0] * 4)
        self.failureResultOf(waiting, CallTimeout)
        self.assertNoResult(later)
        self.assertEqual(1, len(self.uplink))
        self.uplink.stop()

    def test_the_outbox_is_bounded(self) -> None:
        """A limit of its number and of its size."""
        self.patch(uplink, "MAX_OUTBOX", 2)
        self.uplink.send(b"x", 5.0), self.uplink.send(b"x", 5.0)
        self.failureResultOf(self.uplink.send(b"x", 5.0), OutboxFull)
        self.patch(uplink, "MAX_OUTBOX", 9)
        self.patch(uplink, "MAX_OUTBOX_SIZE", 5)
        self.failureResultOf(self.uplink.send(b"1234", 5.0), OutboxFull)
