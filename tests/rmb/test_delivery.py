"""Windows, confirmations and queues, by plain calls: nothing is lost, nothing is out of order."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb import delivery, frames, uplink
from dmsg.rmb.address import Session
from dmsg.rmb.delivery import Delivery, Ledger, Message
from dmsg.rmb.errors import CallTimeout
from dmsg.rmb.frames import Frames, FrameTooLarge
from dmsg.rmb.queues import FEDERATION, Queued, QueueLimits, SQLiteQueue
from dmsg.rmb.uplink import OutboxFull, Uplink


class LedgerTests(SynchronousTestCase):
    """A sender's pings wait for what it sent."""

    def setUp(self) -> None:
        self.pongs: list[bytes] = []
        self.ledger = Ledger(self.pongs.append)

    def message(self) -> Message:
        message = Message(b"x", 0.0, self.ledger)
        self.ledger.add(message)
        return message

    def test_order(self) -> None:
        """In the order of the pings, however the messages are settled."""
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

    def test_pings_have_a_limit(self) -> None:
        """The oldest go unanswered."""
        one = self.message()
        for number in range(20):
            self.ledger.ping(b"%d" % number)
        one.settle()
        self.assertEqual([b"%d" % number for number in range(4, 20)], self.pongs)

    def test_relaxed(self) -> None:
        """Called once, when few are left."""
        called: list[int] = []
        messages = [self.message() for _ in range(delivery.FEW + 2)]
        self.ledger.relaxed = lambda: called.append(len(self.ledger))
        for message in messages:
            message.settle()
        self.assertEqual([delivery.FEW], called)


class FakeSession:
    """The connection of a session: what it got, and which pings wait."""

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

    def keep(self, session: Session, message: Message) -> Deferred[Any]:
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

    def read(self, session: Session, after: Any) -> Deferred[list[Queued]]:
        found = [Queued(number, data) for number, data in sorted(self.kept.items()) if number > (after or 0)]
        return succeed(found[:5])

    def remove(self, session: Session, ids: list[Any]) -> None:
        for number in ids:
            # as the real ones: what was confirmed while it was being kept may go a second time, on the next connection
            self.kept.pop(number, None)

    def until(self, queued: Queued) -> float | None:
        return 1e9

    def busy(self, delivery: Delivery) -> None:
        pass

    def waits(self, delivery: Delivery) -> None:
        pass


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
            ),
            max_size=80,
        )
    )
    def test_nothing_lost_nothing_twice_in_order(self, steps: list[str]) -> None:
        """On one connection nothing comes twice; over all of them everything comes, in order but for repetitions."""
        window = delivery.WINDOW_MESSAGES
        delivery.WINDOW_MESSAGES = 4
        try:
            self.play(steps)
        finally:
            delivery.WINDOW_MESSAGES = window

    def test_a_long_queue(self) -> None:
        """Of which nothing is delivered any more: read to its end, however long it is."""
        store = QueueStore()
        store.until = lambda queued: None  # type: ignore[method-assign]
        for number in range(5000):
            store.kept[number + 1] = b"x"
        current = Delivery(Session(1), FakeSession(), store)
        current.start()
        self.assertEqual(({}, False), (store.kept, current.catching_up))

    def play(self, steps: list[str]) -> None:
        store = QueueStore()
        pongs: list[bytes] = []
        ledger = Ledger(pongs.append)
        session = FakeSession()
        current = Delivery(Session(1), session, store)
        current.start()
        sent = 0
        connections = [session]

        def enqueue(message: Message) -> None:
            def kept(number: Any) -> None:
                message.settle()
                current.poke()

            store.keep(Session(1), message).addCallback(kept)

        for step in steps:
            if step == "message":
                message = Message(b"%d" % sent, 0.0, ledger)
                sent += 1
                ledger.add(message)
                if not current.offer(message):
                    enqueue(message)
            elif step == "confirm" and session.pings:
                current.confirmed(session.pings.pop(0))
            elif step == "spill":
                current.spill()
            elif step == "answer":
                store.answer()
            elif step == "slow":
                store.slow = not store.slow
            elif step == "lose":
                left = current.close()
                session = FakeSession()
                connections.append(session)
                current = Delivery(Session(1), session, store)
                for message in left:
                    enqueue(message)
                store.answer()
                current.start()
            for one in connections:
                self.assertEqual(len(one.got), len(set(one.got)))
        store.slow = False
        store.answer()
        for _ in range(sent + 5):
            current.retry()
            if session.pings:
                current.confirmed(session.pings.pop(0))
        ledger.ping(b"all")
        self.assertEqual([b"all"], pongs)
        self.assertEqual({}, store.kept)
        seen = [data for one in connections for data in one.got]
        self.assertEqual({b"%d" % number for number in range(sent)}, set(seen))
        for one in connections:
            self.assertEqual(sorted(map(int, one.got)), list(map(int, one.got)))


class FramesTests(SynchronousTestCase):
    """Frames however the bytes are cut."""

    @given(
        st.lists(
            st.tuples(st.sampled_from([frames.BINARY, frames.PING, frames.PONG]), st.integers(0, 300)), max_size=20
        ),
        st.lists(st.integers(1, 50), min_size=1, max_size=20),
        st.booleans(),
    )
    def test_any_cut(self, messages: list[tuple[int, int]], cuts: list[int], masked: bool) -> None:
        """What goes in comes out; control frames over 125 bytes, and text, are passed on."""
        expected, stream = [], b""
        for number, (first, size) in enumerate(messages):
            data = bytes([number]) * size
            frame = frames.encode(first, data, b"\x01\x02\x03\xff" if masked else None)
            whole = first == frames.BINARY or size <= frames.MAX_CONTROL
            expected.append((first, data) if whole else (frames.OTHER, frame))
            stream += frame
        text = b"\x81\x80abcd" if masked else b"\x81\x00"
        expected.append((frames.OTHER, text))
        stream += text
        reader = Frames(masked, 1000)
        got, at, turn = [], 0, 0
        while at < len(stream):
            size = cuts[turn % len(cuts)]
            got += list(reader.feed(stream[at : at + size]))
            at, turn = at + size, turn + 1
        self.assertEqual(expected, got)

    @given(st.binary(max_size=200))
    def test_random_bytes(self, data: bytes) -> None:
        """Frames, or FrameTooLarge; what it holds is bounded by what a frame may have."""
        reader = Frames(True, 100)
        try:
            for _ in reader.feed(data):
                pass
        except FrameTooLarge:
            return
        self.assertLessEqual(len(reader._held), 100 + frames.MAX_HEADER)

    def test_large(self) -> None:
        """All three forms of length."""
        for size in (125, 126, 65535, 65536, 200_000):
            data = bytes(size)
            reader = Frames(False, 200_000)
            stream = frames.encode(frames.BINARY, data)
            got = [item for at in range(0, len(stream), 60_000) for item in reader.feed(stream[at : at + 60_000])]
            self.assertEqual([(frames.BINARY, data)], got)
        self.assertRaises(FrameTooLarge, list, Frames(False, 10).feed(frames.encode(frames.BINARY, bytes(11))))


class SQLiteQueueTests(SynchronousTestCase):
    """The queue in a file."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.queue = SQLiteQueue(":memory:", self.clock, QueueLimits(messages=5, size=100, total=150))
        self.dropped: list[tuple[str, int]] = []
        self.queue.dropped = lambda session, number: self.dropped.append((session, number))

    def append(self, session: str, data: bytes, until: float = 10.0) -> Deferred[Any]:
        return self.queue.append(session, data, until)

    def test_kept_when_committed(self) -> None:
        """What a turn appends is answered together, at its end."""
        waiting = [self.append("1", b"x") for _ in range(3)]
        self.assertNoResult(waiting[0])
        self.clock.advance(0)
        ids = [self.successResultOf(one) for one in waiting]
        self.assertEqual(ids, [queued.id for queued in self.successResultOf(self.queue.read("1", None))])
        self.assertEqual([], self.successResultOf(self.queue.read("1", ids[-1])))
        self.queue.remove("1", ids[:2])
        self.assertEqual(1, len(self.queue))

    def test_one_twin_has_its_part(self) -> None:
        """Of what one sent, and of what is for one, in however many sessions; others have room."""
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
        self.assertIn("for twin 8 ", append("8:c", 4))
        self.assertEqual(append("9", 4), "")
        self.assertEqual(append(FEDERATION, 4), "")
        self.assertIn("from twin 4 ", append(FEDERATION, 4))
        # what is gone counts no more, and what is in the file counts after a failure, or a new start
        queue.remove("5:s", [queued.id for queued in self.successResultOf(queue.read("5:s", None))])
        self.assertEqual(append("7:s", 1), "")
        self.clock.advance(0)
        queue._count()
        self.assertIn("from twin 1 ", append("7:s", 1))
        self.assertIn("for twin 8 ", append("8:c", 5))
        self.assertEqual(queue._from, {1: 100, 2: 50, 3: 50, 4: 100})

    def test_limits(self) -> None:
        """Of number, of size, of all."""
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

    def test_expired(self) -> None:
        """Taken out, with whose they were."""
        self.append("1", b"old", 5.0)
        self.append("2", b"new", 15.0)
        self.assertEqual([("1", b"old")], self.successResultOf(self.queue.expired(10.0)))
        self.assertEqual((1, 3), (len(self.queue), self.queue.total))


class FakeSocket:
    """A connection of a link."""

    heard = False

    def __init__(self) -> None:
        self.pongs: list[bytes] = []

    def pong(self, payload: bytes) -> None:
        self.pongs.append(payload)


class LinkTests(SynchronousTestCase):
    """A session's connection to a relay."""

    def test_a_late_answer_is_of_its_own_connection(self) -> None:
        """What was taken before the connection was lost confirms nothing on the next one, which counts anew."""
        clock = Clock()
        done: list[Any] = []
        uplink = Uplink(clock, ["ws://127.0.0.1:1"], lambda: "", lambda data, ready: done.append(ready), clock.seconds)
        (link,) = uplink.links
        link._stopped = False
        first, second = FakeSocket(), FakeSocket()
        link.opened(first)
        link.received(b"x")
        link.ping_received(b"before..")
        link.lost("cut")
        link.opened(second)
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
        self.uplink = Uplink(self.clock, [], lambda: "", lambda data, done: done(), self.clock.seconds)

    def test_expires(self) -> None:
        """A message whose life is over before a relay is there."""
        self.uplink.start()
        waiting = self.uplink.send(b"x", 5.0)
        later = self.uplink.send(b"y", 50.0)
        self.clock.pump([2.0] * 4)
        self.failureResultOf(waiting, CallTimeout)
        self.assertNoResult(later)
        self.assertEqual(1, len(self.uplink))
        self.uplink.stop()

    def test_full(self) -> None:
        """A limit of its number and of its size."""
        self.patch(uplink, "MAX_OUTBOX", 2)
        self.uplink.send(b"x", 5.0), self.uplink.send(b"x", 5.0)
        self.failureResultOf(self.uplink.send(b"x", 5.0), OutboxFull)
        self.patch(uplink, "MAX_OUTBOX", 9)
        self.patch(uplink, "MAX_OUTBOX_SIZE", 5)
        self.failureResultOf(self.uplink.send(b"1234", 5.0), OutboxFull)
