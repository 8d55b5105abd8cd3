"""A stream over a carrier that does as the test says: order, ends, deadlines, producers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DmsgTimeout, SendBufferFull, TransportClosed
from dmsg.keys import SecKey
from dmsg.net.streams import stream as stream_module
from dmsg.net.streams.address import DmsgAddress, StreamLost, StreamTimeout
from dmsg.net.streams.half_close import CLOSE_WAIT
from dmsg.net.streams.interfaces import StreamCarrier
from dmsg.net.streams.outbox import JOIN_SIZE, LARGEST_PIECE, SMALL_WRITE
from dmsg.net.streams.producers import SEND_HIGH_WATER
from dmsg.net.streams.receiving import UNREAD_PIECE, UNREAD_PIECES
from dmsg.net.streams.stream import LINGER, UNREAD_STREAMS, StreamTransport
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import Producer, Recorder

ADDRESS = DmsgAddress(SecKey.from_seed(b"stream").public, 7)
FRAME = 1000


class Carrier(StreamCarrier):
    """Notes what it is asked for; flushes when told to."""

    server = None
    confirms = True
    stream: StreamTransport

    def __init__(self, window: int = 10**9) -> None:
        self.window = window
        self.sent: list[tuple[bytes, Any]] = []
        self.waiting: list[Any] = []
        self.taken: list[int] = []
        self.closed: list[int] = []
        self.flushed = 0
        self.scheduled: list[StreamTransport] = []

    def may_send(self) -> bool:
        return len(self.waiting) < self.window

    def send(self, data: bytes | memoryview, token: Any) -> None:
        assert len(data) <= max(FRAME, JOIN_SIZE)
        self.sent.append((bytes(data), token))
        self.waiting.append(token)

    def flush(self) -> None:
        self.flushed += 1

    def in_flight(self) -> int:
        return len(self.waiting)

    def consumed(self, size: int) -> None:
        self.taken.append(size)

    def close(self, reason: int) -> None:
        self.closed.append(reason)

    def schedule(self) -> None:
        self.scheduled.append(self.stream)

    def turn(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for stream in scheduled:
            stream.flush()

    def ack(self, stream: StreamTransport, count: int = 1) -> None:
        tokens, self.waiting = self.waiting[:count], self.waiting[count:]
        stream.acknowledged_all(tokens)
        self.turn()

    @property
    def data(self) -> bytes:
        return b"".join(data for data, _ in self.sent)


class Program(Recorder):
    """A protocol whose dataReceived does something more."""

    act: Callable[[bytes], object] = staticmethod(lambda data: None)

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        self.act(data)


class StreamCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.carrier = Carrier()
        self.stream = self.carrier.stream = StreamTransport(self.clock, self.carrier, ADDRESS, ADDRESS, FRAME)
        self.program = Program()
        self.stream.start(self.program)

    def another_carrier(self) -> Carrier:
        carrier = Carrier()
        carrier.stream = self.stream
        return carrier

    @property
    def lost(self) -> Any:
        """Error with which the program was told the end of the stream; None while the stream is open."""
        reason = getattr(self.program, "lost", None)
        return None if reason is None else reason.value


class ReceivingTests(StreamCase):
    """Data arrives in order, whatever the application does meanwhile."""

    def test_data_while_data_is_delivered(self) -> None:
        """Data that arrives while the application processes data is delivered afterwards."""

        def act(data: bytes) -> None:
            if data == b"a":
                self.stream.data_received(b"b")
                self.stream.data_received(b"c")

        self.program.act = act
        self.stream.data_received(b"a")
        self.assertEqual((self.program.data, self.carrier.taken), (b"abc", [1, 1, 1]))

    def test_pausing_and_going_on_inside(self) -> None:
        def act(data: bytes) -> None:
            self.stream.pauseProducing()
            if data == b"b":
                self.stream.resumeProducing()

        self.program.act = act
        self.stream.data_received(b"a")
        for piece in (b"b", b"c", b"d"):
            self.stream.data_received(piece)
        self.assertEqual((self.program.data, self.stream.held), (b"a", 3))
        self.stream.resumeProducing()
        self.assertEqual((self.program.data, self.stream.held), (b"abc", 1))
        self.assertEqual(self.carrier.taken, [1, 1, 1])
        self.stream.resume_if_unpaused()
        self.assertEqual(self.program.data, b"abc")

    def test_many_unread_small_pieces_are_joined(self) -> None:
        """Many unread small pieces are joined into few large ones."""
        self.stream.pauseProducing()
        for _ in range(10_000):
            self.stream.data_received(b"xy")
        self.assertLess(len(self.stream._unread), UNREAD_PIECES + 20_000 / UNREAD_PIECE + 2)
        self.assertEqual(self.stream.held, 20_000)
        self.stream.data_received(bytes(UNREAD_PIECE))
        self.stream.resumeProducing()
        self.assertEqual(self.program.data, b"xy" * 10_000 + bytes(UNREAD_PIECE))
        self.assertEqual(sum(self.carrier.taken), 20_000 + UNREAD_PIECE)

    def test_the_end_while_delivering(self) -> None:
        """First all that came, then the end, and that after dataReceived came back."""

        def act(data: bytes) -> None:
            self.stream.data_received(b"b")
            self.stream.carrier_closed(CloseReason.UNSPECIFIED)
            self.assertIsNone(self.lost)
            self.program.act = lambda data: None

        self.program.act = act
        self.stream.data_received(b"a")
        self.clock.advance(0)
        self.assertEqual(self.program.data, b"ab")
        self.assertIsInstance(self.lost, ConnectionDone)
        self.assertTrue(self.stream.disconnected)

    def test_the_end_of_a_program_that_has_paused(self) -> None:
        """The application receives the data before the end, and then the end."""
        self.stream.pauseProducing()
        self.stream.data_received(b"a")
        self.stream.carrier_closed(CloseReason.PEER_DISCONNECTED)
        self.assertTrue(self.stream.has_ended)
        self.assertIsNone(self.lost)
        self.assertIn(self.stream, UNREAD_STREAMS)
        # Late data is discarded, and accounted for.
        self.stream.data_received(b"late")
        self.assertEqual(self.carrier.taken, [4])
        self.stream.resumeProducing()
        self.assertEqual(self.program.data, b"a")
        self.assertIsInstance(self.lost, StreamLost)
        self.assertEqual(self.lost.close_reason, CloseReason.PEER_DISCONNECTED)
        self.assertNotIn(self.stream, UNREAD_STREAMS)

    def test_aborting_with_unread_data_drops_it(self) -> None:
        self.stream.pauseProducing()
        self.stream.data_received(b"a")
        self.stream.carrier_closed(CloseReason.UNSPECIFIED)
        self.stream.abortConnection()
        self.assertEqual(self.program.data, b"")
        self.assertIsInstance(self.lost, ConnectionDone)
        self.assertEqual((self.stream.held, self.carrier.closed), (0, []))

    def test_an_exception_of_the_program_ends_its_stream(self) -> None:
        def act(data: bytes) -> None:
            self.stream.data_received(b"never read")
            raise ValueError("bug")

        self.program.act = act
        self.stream.data_received(b"a")
        self.clock.advance(0)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertIsInstance(self.lost, ValueError)
        self.assertEqual((self.carrier.closed, self.program.data, self.stream.held), ([CloseReason.ABORTED], b"a", 0))

    def test_aborting_while_delivering(self) -> None:
        def act(data: bytes) -> None:
            self.stream.data_received(b"b")
            self.stream.abortConnection()

        self.program.act = act
        self.stream.data_received(b"a")
        self.assertIsNone(self.lost)
        self.clock.advance(0)
        self.assertIsInstance(self.lost, ConnectionAborted)
        self.assertEqual((self.program.data, self.carrier.closed), (b"a", [CloseReason.ABORTED]))

    def test_data_before_there_is_a_program(self) -> None:
        stream = StreamTransport(self.clock, self.carrier, ADDRESS, ADDRESS, FRAME)
        stream.pauseProducing()
        stream.data_received(b"early")
        stream._paused = False
        program = Program()
        stream.start(program)
        self.assertEqual(program.data, b"early")

    @given(st.lists(st.sampled_from(["data", "pause", "resume", "resume if"]), max_size=30), st.integers(0, 3))
    def test_data_arrives_once_and_in_order_with_any_pausing(self, steps: list[str], nested: int) -> None:
        """Any pausing, and data inside of dataReceived: everything once, in order."""
        self.setUp()
        sent = 0

        def send() -> None:
            nonlocal sent
            sent += 1
            self.stream.data_received(b"%d," % sent)

        left = nested

        def act(data: bytes) -> None:
            nonlocal left
            if left:
                left -= 1
                send()
                self.stream.pauseProducing()
                send()
                self.stream.resumeProducing()

        self.program.act = act
        for step in steps:
            if step == "data":
                send()
            elif step == "pause":
                self.stream.pauseProducing()
            elif step == "resume":
                self.stream.resumeProducing()
            else:
                self.stream.resume_if_unpaused()
        self.stream.resumeProducing()
        expected = b"".join(b"%d," % number for number in range(1, sent + 1))
        self.assertEqual(self.program.data, expected)
        self.assertEqual(sum(self.carrier.taken), len(expected))


class SendingTests(StreamCase):
    """Frames, tickets, windows."""

    def test_data_is_sent_in_full_frames(self) -> None:
        """Frames have the maximum size; no data is sent twice or left out."""
        data = bytes(range(256)) * 10
        self.stream.write(data)
        self.assertEqual((self.carrier.sent, self.stream.unsent, self.stream.held), ([], True, 2560))
        self.carrier.turn()
        self.assertEqual([len(frame) for frame, _ in self.carrier.sent], [1000, 1000, 560])
        self.assertEqual((self.carrier.data, self.stream.unsent, self.stream.held), (data, False, 0))
        self.assertEqual(self.carrier.flushed, 1)
        self.assertRaises(TypeError, self.stream.write, "text")
        self.stream.write(b"")
        self.assertEqual(self.carrier.scheduled, [])

    def test_small_writes_are_one_frame(self) -> None:
        for _ in range(10):
            self.stream.write(b"x" * 50)
        self.stream.writeSequence([b"y", b"z"])
        self.carrier.turn()
        self.assertEqual([frame for frame, _ in self.carrier.sent], [b"x" * 500 + b"yz"])

    def test_data_with_a_ticket_is_not_joined(self) -> None:
        first = self.stream.send(b"a")
        self.stream.write(b"b")
        self.stream.write(b"c")
        second = self.stream.send(b"d")
        empty = self.stream.send(b"")
        self.carrier.turn()
        self.assertEqual([frame for frame, _ in self.carrier.sent], [b"a", b"bc", b"d", b""])
        self.carrier.ack(self.stream)
        self.successResultOf(first)
        self.assertNoResult(second)
        self.carrier.ack(self.stream, 2)
        self.successResultOf(second)
        self.assertNoResult(empty)
        self.carrier.ack(self.stream)
        self.successResultOf(empty)

    def test_a_send_of_many_frames(self) -> None:
        """Fires when the last is acknowledged; pieces are no larger than a window's part."""
        sending = self.stream.send(bytes(LARGEST_PIECE + 1500))
        self.assertEqual([len(data) for data, _ in self.stream._outbox.waiting], [LARGEST_PIECE, 1500])
        self.carrier.turn()
        count = len(self.carrier.sent)
        self.assertEqual(len(self.carrier.data), LARGEST_PIECE + 1500)
        self.carrier.ack(self.stream, count - 1)
        self.assertNoResult(sending)
        self.carrier.ack(self.stream)
        self.successResultOf(sending)

    def test_data_beyond_the_window_waits(self) -> None:
        """The data waits until the link has room and the window opens."""
        self.carrier.window = 2
        self.stream.write(bytes(3500))
        self.carrier.turn()
        self.assertEqual((len(self.carrier.sent), self.stream.held), (2, 1500))
        self.carrier.turn()
        self.assertEqual(len(self.carrier.sent), 2)
        self.carrier.ack(self.stream)
        self.assertEqual((len(self.carrier.sent), self.stream.held), (3, 500))
        self.carrier.window = 10
        self.stream.window_opened()
        self.carrier.turn()
        self.assertEqual((len(self.carrier.sent), self.stream.held), (4, 0))
        self.stream.window_opened()
        self.assertEqual(self.carrier.scheduled, [])

    def test_unacknowledged_data_is_sent_again(self) -> None:
        """The data is sent first on the new transport, and the ticket waits there."""
        self.carrier.window = 2
        sending = self.stream.send(b"a" * 1000 + b"b" * 1000 + b"c" * 1000)
        self.stream.write(b"d")
        self.carrier.turn()
        other = self.another_carrier()
        self.stream.suspend(other)
        self.assertEqual(self.stream.away_since, 0.0)
        self.stream.requeue(self.carrier.sent)
        self.assertEqual(self.stream.held, 3001)
        self.clock.advance(5)
        self.stream.suspend(other)
        self.assertEqual(self.stream.away_since, 0.0)
        self.stream.move(other)
        self.assertIs(self.stream.away_since, None)
        other.turn()
        self.assertEqual(other.data, b"a" * 1000 + b"b" * 1000 + b"c" * 1000 + b"d")
        other.ack(self.stream, 2)
        self.assertNoResult(sending)
        other.ack(self.stream, 2)
        self.successResultOf(sending)

    def test_data_beyond_the_send_limit_is_refused(self) -> None:
        self.patch(stream_module, "SEND_LIMIT", 5000)
        self.stream.write(bytes(3000))
        self.failureResultOf(self.stream.send(bytes(2001)), SendBufferFull)
        sending = self.stream.send(bytes(2000))
        self.assertNoResult(sending)
        self.stream.write(b"x")
        self.assertIsInstance(self.lost, ConnectionAborted)
        self.failureResultOf(sending, TransportClosed)
        self.assertEqual((self.carrier.closed, self.stream.held), ([CloseReason.ABORTED], 0))
        self.failureResultOf(self.stream.send(b"x"), TransportClosed)
        self.stream.write(b"x")
        self.assertEqual(self.stream.held, 0)

    def test_a_send_with_a_deadline(self) -> None:
        late = self.stream.send(b"x", timeout=5)
        self.carrier.turn()
        self.clock.advance(5)
        self.failureResultOf(late, DmsgTimeout)
        self.carrier.ack(self.stream)
        self.assertFalse(self.stream.has_ended)

    def test_a_probe_is_sent_on_an_idle_stream_only(self) -> None:
        """The probe is empty, and is sent only if nothing else is unacknowledged; its answer does not count as
        traffic.
        """
        self.stream.setIdleTimeout(10)
        self.clock.advance(6)
        self.stream.probe()
        self.carrier.turn()
        self.assertEqual(self.carrier.sent[0][0], b"")
        self.carrier.ack(self.stream)
        self.clock.advance(4)
        self.assertIsInstance(self.lost, StreamTimeout)
        self.stream.probe()
        self.assertEqual(len(self.carrier.sent), 1)

    def test_no_probe_is_sent_behind_waiting_data(self) -> None:
        self.carrier.window = 0
        self.stream.write(b"x")
        self.stream.probe()
        self.assertEqual(len(self.stream._outbox.waiting), 1)

    @given(st.lists(st.tuples(st.sampled_from(["write", "send", "turn", "ack"]), st.integers(0, 3000)), max_size=40))
    def test_all_writes_arrive_in_order(self, steps: list[tuple[str, int]]) -> None:
        self.setUp()
        self.carrier.window = 3
        written = b""
        sends = []
        for number, (what, size) in enumerate(steps):
            data = bytes([number]) * size
            if what == "write":
                self.stream.write(data)
                written += data
            elif what == "send":
                sends.append(self.stream.send(data))
                written += data
            elif what == "turn":
                self.carrier.turn()
            else:
                self.carrier.ack(self.stream, size % 4)
            self.assertEqual(self.stream.held, len(written) - len(self.carrier.data))
            self.assertLessEqual(len(self.carrier.waiting), 3)
        while self.carrier.waiting or self.stream.unsent:
            self.carrier.turn()
            self.carrier.ack(self.stream)
        self.assertEqual(self.carrier.data, written)
        for sending in sends:
            self.successResultOf(sending)
        self.assertEqual((self.stream._outbox.tickets, self.stream._outbox._offset), ({}, 0))


class EndTests(StreamCase):
    """loseConnection, LINGER, deadlines."""

    def test_a_close_waits_for_written_data(self) -> None:
        self.stream.write(bytes(1500))
        self.stream.loseConnection()
        self.stream.loseConnection()
        self.stream.write(b"too late")
        self.carrier.turn()
        self.assertEqual((len(self.carrier.data), self.carrier.closed), (1500, []))
        self.carrier.ack(self.stream)
        self.assertEqual(self.carrier.closed, [])
        self.carrier.ack(self.stream)
        self.assertEqual(self.carrier.closed, [CloseReason.UNSPECIFIED])
        self.assertIsInstance(self.lost, ConnectionDone)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_close_without_pending_data_is_immediate(self) -> None:
        self.stream.stopProducing()
        self.carrier.turn()
        self.assertEqual(self.carrier.closed, [CloseReason.UNSPECIFIED])

    def test_each_ack_gives_a_close_more_time(self) -> None:
        self.carrier.window = 1
        self.stream.write(bytes(3000))
        self.stream.loseConnection()
        self.carrier.turn()
        for _ in range(2):
            self.clock.advance(LINGER - 1)
            self.carrier.ack(self.stream)
        self.assertFalse(self.stream.has_ended)
        self.clock.advance(LINGER - 1)
        self.assertFalse(self.stream.has_ended)
        self.clock.advance(1)
        # All data was sent, so a reader that holds back ACKs may have it.
        self.assertEqual(self.carrier.closed, [CloseReason.UNSPECIFIED])

    def test_a_repeated_ack_does_not_extend_the_linger_time(self) -> None:
        """A reader that stands still, and says so again and again, does not keep what it is sent here for ever."""
        self.carrier.window = 1
        self.stream.setIdleTimeout(3 * LINGER)
        self.stream.write(bytes(3000))
        self.carrier.turn()
        for _ in range(4):
            self.clock.advance(LINGER / 2)
            self.stream.acknowledged_all((), 0)
        self.stream.loseConnection()
        self.carrier.turn()
        self.clock.advance(LINGER / 2)
        self.stream.acknowledged_all((), 0)
        self.clock.advance(LINGER / 2)
        self.assertTrue(self.stream.has_ended)

    def test_unsent_data_at_the_linger_timeout_is_an_unclean_end(self) -> None:
        self.carrier.window = 1
        sending = self.stream.send(bytes(3000))
        self.stream.loseConnection()
        self.carrier.turn()
        self.clock.advance(LINGER)
        self.assertEqual(self.carrier.closed, [CloseReason.TIMEOUT])
        self.assertIsInstance(self.lost, StreamTimeout)
        self.assertIn("not acknowledged for 10 s", str(self.lost))
        self.failureResultOf(sending, DmsgTimeout)

    def test_the_linger_time_begins_with_the_next_transport(self) -> None:
        """LINGER begins when it has one again, and only then."""
        self.stream.write(b"x")
        self.carrier.turn()
        other = self.another_carrier()
        self.stream.loseConnection()
        self.carrier.turn()
        self.clock.advance(LINGER - 1)
        self.stream.suspend(other)
        self.clock.advance(100)
        self.assertFalse(self.stream.has_ended)
        self.stream.requeue(self.carrier.sent)
        self.stream.move(other)
        other.turn()
        self.clock.advance(LINGER - 1)
        other.ack(self.stream)
        self.assertEqual(other.closed, [CloseReason.UNSPECIFIED])
        self.assertIsInstance(self.lost, ConnectionDone)

    def test_a_remote_close_during_suspension_ends_the_stream(self) -> None:
        nowhere = self.another_carrier()
        nowhere.window = 0
        nowhere.waiting.append(None)
        self.stream.suspend(nowhere)
        self.stream.loseConnection()
        nowhere.turn()
        self.assertEqual((self.clock.getDelayedCalls(), nowhere.closed), ([], []))
        other = self.another_carrier()
        self.stream.move(other)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        other.turn()
        self.assertEqual(other.closed, [CloseReason.UNSPECIFIED])

    def test_sends_fail_in_the_order_of_their_making(self) -> None:
        failed: list[int] = []
        for number in range(50):
            self.stream.send(b"x").addErrback(lambda _, of: failed.append(of), number)
        self.stream.carrier_closed(CloseReason.SHUTTING_DOWN)
        self.assertEqual(failed, list(range(50)))

    def test_data_in_flight_at_a_remote_close_is_lost(self) -> None:
        self.carrier.window = 1
        sending = self.stream.send(bytes(2500))
        self.carrier.turn()
        self.stream.carrier_closed(CloseReason.UNSPECIFIED)
        self.assertEqual(self.stream.unacknowledged, 1500 + 1)
        self.failureResultOf(sending, TransportClosed)
        self.stream.carrier_closed(CloseReason.ABORTED)
        self.assertEqual(self.stream.unacknowledged, 1501)

    def test_read_and_write_deadlines(self) -> None:
        """Reading: in any case.  Writing: only with something written.  Each can be moved and taken back."""
        self.stream.setReadDeadline(5)
        self.clock.advance(4)
        self.stream.setReadDeadline(5)
        self.clock.advance(4)
        self.stream.setReadDeadline(None)
        self.clock.advance(10)
        self.stream.setWriteDeadline(5)
        self.clock.advance(5)
        self.assertFalse(self.stream.has_ended)
        self.stream.write(b"x")
        self.carrier.turn()
        self.stream.setDeadline(5)
        self.stream.setReadDeadline(None)
        self.clock.advance(5)
        self.assertIsInstance(self.lost, StreamTimeout)
        self.assertEqual((str(self.lost), self.carrier.closed), ("write deadline passed", [CloseReason.TIMEOUT]))
        self.stream.setReadDeadline(5)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_unread_data_is_dropped_at_a_deadline(self) -> None:
        self.stream.pauseProducing()
        self.stream.data_received(b"unread")
        self.stream.setReadDeadline(5)
        self.clock.advance(5)
        self.assertIsInstance(self.lost, StreamTimeout)
        self.stream.resumeProducing()
        self.assertEqual((self.program.data, self.stream.held), (b"", 0))

    def test_a_repeated_ack_is_no_traffic(self) -> None:
        self.stream.setIdleTimeout(10)
        for _ in range(3):
            self.clock.advance(4)
            self.stream.acknowledged_all((), 0)
        self.assertTrue(self.stream.has_ended)

    def test_acknowledged_data_counts_as_traffic_for_the_idle_limit(self) -> None:
        """Received data counts, too."""
        self.stream.setIdleTimeout(10)
        self.clock.advance(9)
        self.stream.data_received(b"x")
        self.clock.advance(9)
        self.stream.write(b"y")
        self.carrier.turn()
        self.carrier.ack(self.stream)
        self.clock.advance(9)
        self.assertFalse(self.stream.has_ended)
        self.stream.setIdleTimeout(None)
        self.clock.advance(100)
        self.stream.setIdleTimeout(10)
        self.clock.advance(9.5)
        self.assertFalse(self.stream.has_ended)
        self.clock.advance(0.5)
        self.assertEqual(str(self.lost), "idle deadline passed")

    def check_pause(self, seconds: float) -> None:
        """Check that the stream ends after ``seconds`` in which this process does not pause."""
        self.assertFalse(self.carrier.closed or self.stream.has_ended)
        pass_time(self.clock, seconds / 2)
        self.clock.advance(10 * seconds)
        pass_time(self.clock, 0.45 * seconds)
        self.assertFalse(self.carrier.closed or self.stream.has_ended)
        pass_time(self.clock, 0.1 * seconds)
        self.assertTrue(self.carrier.closed or self.stream.has_ended)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_pauses_of_this_process_do_not_count_towards_deadlines(self) -> None:
        def set_write_deadline(seconds: float) -> None:
            self.stream.write(b"x")
            self.carrier.turn()
            self.stream.setWriteDeadline(seconds)

        def linger(seconds: float) -> None:
            self.assertEqual(seconds, LINGER)
            self.carrier.window = 1
            self.stream.write(bytes(3000))
            self.stream.loseConnection()
            self.carrier.turn()
            pass_time(self.clock, 1.0)
            self.clock.advance(10 * seconds)
            self.carrier.ack(self.stream)

        def set_idle_timeout(seconds: float) -> None:
            self.stream.setIdleTimeout(seconds)
            pass_time(self.clock, 1.0)
            self.clock.advance(10 * seconds)
            pass_time(self.clock, 1.0)
            self.stream.data_received(b"x")

        def end_both_directions(seconds: float) -> None:
            self.assertEqual(seconds, CLOSE_WAIT)
            self.patch(StreamTransport, "_leaves_closing_to_remote", True)
            self.stream._end_acknowledged = self.stream._remote_end_told = True
            self.stream._close_if_both_ended()

        for begin in (
            lambda seconds: self.stream.setReadDeadline(seconds),
            set_write_deadline,
            set_idle_timeout,
            linger,
            end_both_directions,
        ):
            self.setUp()
            let_pause(self.clock)
            begin(10.0)
            self.check_pause(10.0)

    def test_pauses_of_this_process_do_not_count_towards_a_send(self) -> None:
        let_pause(self.clock)
        sending = self.stream.send(b"x", timeout=10)
        self.carrier.turn()
        self.clock.advance(100)
        pass_time(self.clock, 9.5)
        self.assertNoResult(sending)
        pass_time(self.clock, 0.6)
        self.failureResultOf(sending, DmsgTimeout)

    def test_streams_have_both_addresses(self) -> None:
        self.assertEqual((self.stream.getPeer(), self.stream.getHost()), (ADDRESS, ADDRESS))
        self.assertEqual(str(ADDRESS), f"dmsg:{ADDRESS.public_key}:7")
        self.assertEqual(str(DmsgAddress(ADDRESS.public_key)), f"dmsg:{ADDRESS.public_key}")


class ProducerTests(StreamCase):
    def test_a_push_producer(self) -> None:
        """Paused above the mark, once; resumed below half of it."""
        producer = Producer()
        self.carrier.window = 0
        self.stream.registerProducer(cast(Any, producer), True)
        self.assertRaises(RuntimeError, self.stream.registerProducer, producer, True)
        self.stream.write(bytes(SEND_HIGH_WATER))
        self.assertEqual(producer.told, [])
        self.stream.write(bytes(SMALL_WRITE))
        self.stream.write(bytes(SMALL_WRITE))
        self.assertEqual(producer.told, ["pause"])
        self.carrier.window = 1
        while self.stream.held > SEND_HIGH_WATER // 2 + FRAME:
            self.carrier.turn()
            self.carrier.ack(self.stream)
            self.stream.window_opened()
        self.assertEqual(producer.told, ["pause"])
        self.carrier.window = 10**9
        self.stream.window_opened()
        self.carrier.turn()
        self.assertEqual(producer.told, ["pause", "resume"])

    def test_a_producer_may_finish(self) -> None:
        """The producer was paused when the connection was to be closed; closing waits for it, as over TCP."""
        producer = Producer()
        self.carrier.window = 0
        self.stream.registerProducer(cast(Any, producer), True)
        self.stream.write(bytes(SEND_HIGH_WATER + 1))
        self.stream.loseConnection()
        self.carrier.window = 10**9
        self.carrier.turn()
        self.stream.write(b"the rest")
        self.carrier.turn()
        self.assertEqual(self.carrier.closed, [])
        self.stream.unregisterProducer()
        self.carrier.turn()
        self.carrier.ack(self.stream, 10**6)
        self.assertEqual(self.carrier.closed, [CloseReason.UNSPECIFIED])
        self.assertTrue(self.carrier.data.endswith(b"the rest"))

    def test_a_pull_producer(self) -> None:
        """A pull producer is asked for data whenever the queue is empty."""
        producer = Producer()
        self.stream.registerProducer(cast(Any, producer), False)
        self.assertEqual(producer.told, ["resume"])
        self.carrier.window = 0
        self.stream.write(b"x")
        self.carrier.turn()
        self.assertEqual(producer.told, ["resume"])
        self.carrier.window = 1
        self.stream.window_opened()
        self.carrier.turn()
        self.assertEqual(producer.told, ["resume", "resume"])
        self.stream.loseConnection()
        self.carrier.ack(self.stream)
        self.assertEqual(self.carrier.closed, [])

    def test_the_end_stops_producers(self) -> None:
        """Producers whose stop fails, and producers that are registered later, are stopped, too."""

        class Broken(Producer):
            def stopProducing(self) -> None:
                super().stopProducing()
                raise ValueError("bug")

        producer, late = Broken(), Producer()
        self.stream.registerProducer(cast(Any, producer), True)
        self.stream.abortConnection()
        self.assertEqual(producer.told, ["stop"])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertIsInstance(self.lost, ConnectionAborted)
        self.stream.registerProducer(cast(Any, late), True)
        self.assertEqual(late.told, ["stop"])
