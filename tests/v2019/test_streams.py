"""Streams that move to another transport, in memory with one Clock."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import TestResult, mock

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DmsgTimeout, TransportClosed, TransportRefused
from dmsg.net.streams import stream as stream_module
from dmsg.net.streams.address import StreamLost, StreamTimeout
from dmsg.net.streams.producers import SEND_HIGH_WATER
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.streams.core.secure import SecureEnd
from dmsg.streams.streams import IDLE_MOVES, IDLE_PAUSE
from dmsg.testing.raw_client import RawClient
from dmsg.v2019 import incoming, outgoing
from dmsg.v2019.core.wire import FWD, Frame
from tests.support import KEYS, SERVER_KEY, Recorder
from tests.v2019.secure_support import SecureCase

A, B = KEYS["A"], KEYS["B"]


class ResumeCase(SecureCase):
    """A finds its way back as soon as both are connected."""

    def setUp(self) -> None:
        super().setUp()
        self.wanted: list[tuple[Any, Deferred[Any]]] = []

        def reconnect(stream: Any) -> Deferred[Any]:
            searching: Deferred[Any] = Deferred()
            self.wanted.append((stream, searching))
            return searching

        self.streams["A"].reconnect = reconnect

    def find(self) -> None:
        """Let A's streams move to a transport."""
        for name in "AB":
            if not self.sessions[name].connected:
                self.reconnect(name)
        wanted, self.wanted = self.wanted, []
        for stream, searching in wanted:
            if not searching.called:
                self.a.reopen(stream).addBoth(self._tried, stream, searching)
        self.network.settle()

    def _tried(self, result: Any, stream: Any, searching: Deferred[Any]) -> None:
        """Continue as the client does: search again until the remote itself refuses."""
        if isinstance(result, Failure) and not getattr(result.value, "final", False):
            if not searching.called:
                self.wanted.append((stream, searching))
        elif not searching.called:
            searching.callback(result)

    def assert_empty(self) -> None:
        """Assert that nothing is left of any stream."""
        for name in "AB":
            self.assertEqual(self.sessions[name].transports, 0)
            streams = self.streams[name]
            self.assertFalse(streams._live or streams._waiting or streams._searching or streams._progress)
        self.assertEqual(self.network.factory.relay.route_count, 0)


class ResumeTests(ResumeCase):
    """Unacknowledged data is sent again, and no data arrives twice."""

    def test_a_stream_resumes_when_either_end_loses_its_server(self) -> None:
        one, two = self.open()
        expected = b""
        for name in "ABAB":
            one.transport.write(name.encode() * 100_000)
            two.transport.write(b"back" * 50_000)
            expected += name.encode() * 100_000
            self.network.clock.advance(0)
            for pump in self.network.pumps:
                pump.pump()
            self.cut(name)
            self.assertIsNone(one.lost or two.lost)
            one.transport.write(b"while it is away")
            expected += b"while it is away"
            self.find()
        self.assertEqual((two.data, one.data), (expected, b"back" * 200_000))
        self.assertEqual(self.streams["A"].resumed, 4)
        one.transport.loseConnection()
        self.network.settle()
        self.assertTrue(two.lost.check(ConnectionDone) and one.lost.check(ConnectionDone))
        self.assert_empty()

    def test_sends_wait_and_fire(self) -> None:
        one, two = self.open()
        self.cut("B")
        sending = one.transport.send(b"x" * 300_000)
        late = one.transport.send(b"y", timeout=2)
        self.assertTrue(one.transport.confirms and two.transport.confirms)
        self.network.settle()
        self.assertNoResult(sending)
        self.network.clock.advance(2)
        self.failureResultOf(late, DmsgTimeout)
        self.find()
        self.successResultOf(sending)
        self.assertEqual(two.data, b"x" * 300_000 + b"y")

    def test_a_move_is_no_traffic(self) -> None:
        """A stream on which nothing goes is idle, whatever becomes of its servers."""
        one, two = self.open()
        one.transport.setIdleTimeout(20)
        two.transport.setIdleTimeout(20)
        self.network.clock.advance(15)
        self.cut("A")
        self.find()
        self.assertEqual(self.streams["A"].resumed, 1)
        self.network.clock.advance(5.1)
        self.network.settle()
        self.assertTrue(one.lost.check(StreamTimeout) and two.lost.check(StreamTimeout, StreamLost))

    def test_a_send_after_the_end_fails_with_its_reason(self) -> None:
        one, _ = self.open()
        one.transport.setReadDeadline(1)
        self.network.clock.advance(1)
        error = self.failureResultOf(one.transport.send(b"x"), TransportClosed).value
        self.assertIs(error.reason, CloseReason.TIMEOUT)

    def test_a_client_that_stops(self) -> None:
        """The end of a client is an end of the data only on streams that its application has closed."""
        one, two = self.open()
        closed, its_peer = self.open()
        for mine in (one, closed):
            mine.transport.write(b"all")
        self.network.settle()
        closed.transport.loseConnection()
        self.a.close()
        self.network.settle()
        one.lost.trap(ConnectionAborted)
        two.lost.trap(StreamLost)
        self.assertEqual((two.data, two.lost.value.close_reason), (b"all", CloseReason.ABORTED))
        closed.lost.trap(ConnectionDone)
        its_peer.lost.trap(ConnectionDone)

    def test_a_limit_on_time(self) -> None:
        one, two = self.open()
        sending = one.transport.send(b"x")
        self.cut("A")
        self.network.clock.advance(self.resume_timeout)
        self.network.settle()
        self.failureResultOf(sending, TransportClosed)
        for protocol in (one, two):
            self.assertEqual(protocol.lost.value.close_reason, CloseReason.PEER_DISCONNECTED)
        self.reconnect("A")
        self.assert_empty()

    def test_a_limit_on_bytes(self) -> None:
        self.patch(stream_module, "SEND_LIMIT", 1_000_000)
        one, _ = self.open()
        self.cut("B")
        for _ in range(11):
            one.transport.write(bytes(100_000))
        self.network.settle()
        self.assertTrue(one.lost.check(ConnectionAborted))

    def test_producers_are_paused_meanwhile(self) -> None:
        one, two = self.open()
        self.cut("B")
        told: list[str] = []

        class Producer:
            def pauseProducing(self) -> None:
                told.append("pause")

            def resumeProducing(self) -> None:
                told.append("resume")

            def stopProducing(self) -> None:
                told.append("stop")

        one.transport.registerProducer(Producer(), True)
        one.transport.write(bytes(SEND_HIGH_WATER + 1))
        self.assertEqual(told, ["pause"])
        self.find()
        self.assertEqual((told, len(two.data)), (["pause", "resume"], SEND_HIGH_WATER + 1))

    def test_closing_a_suspended_stream(self) -> None:
        one, two = self.open()
        self.cut("B")
        one.transport.write(b"last words")
        one.transport.loseConnection()
        self.network.settle()
        self.assertIsNone(one.lost)
        self.find()
        self.assertEqual(two.data, b"last words")
        self.assertTrue(two.lost.check(ConnectionDone) and one.lost.check(ConnectionDone))
        self.assert_empty()

    def test_the_other_end_was_closed_meanwhile(self) -> None:
        """The other end keeps the reason for a while and returns it."""
        for abort, kind in ((False, ConnectionDone), (True, StreamLost)):
            one, two = self.open()
            self.cut("A")
            two.transport.abortConnection() if abort else two.transport.loseConnection()
            self.network.settle()
            self.assertIsNotNone(two.lost)
            self.find()
            self.assertTrue(one.lost.check(kind), one.lost)
            self.assert_empty()

    def test_resuming_a_forgotten_stream_ends_it(self) -> None:
        one, _ = self.open()
        self.cut("A")
        self.streams["B"]._live.clear()
        self.reconnect("A")
        stream, searching = self.wanted.pop()
        refused = self.a.reopen(stream)
        self.network.settle()
        error = self.failureResultOf(refused, TransportRefused).value
        self.assertEqual((error.reason, error.final), (CloseReason.NO_SUCH_STREAM, True))
        searching.errback(error)
        self.assertEqual(one.lost.value.close_reason, CloseReason.NO_SUCH_STREAM)

    def test_a_server_that_says_so_is_not_believed(self) -> None:
        """The other end's answer is encrypted; what a server makes up is one way less, and no end."""
        one, two = self.open()
        self.cut("A")
        self.reconnect("A")
        stream, searching = self.wanted.pop()
        refused = self.a.reopen(stream)
        (transport,) = self.a.core.transports.values()
        frame = Frame(3, transport.id, bytes((CloseReason.NO_SUCH_STREAM,))).encode()
        self.a.frames_received(bytearray(frame), len(frame))
        self.assertFalse(self.failureResultOf(refused, TransportRefused).value.final)
        self.wanted.append((stream, searching))
        one.transport.write(b"on it goes")
        self.find()
        self.assertEqual(two.data, b"on it goes")

    def test_moving_while_all_is_well(self) -> None:
        """Data in flight on the old transport arrives once, over the new one."""
        one, two = self.open()
        for turn in range(5):
            one.transport.write(b"%d" % turn * 100_000)
            two.transport.write(b"%d" % turn * 100_000)
            self.network.clock.advance(0)
            self.streams["A"].migrate(one.transport)
            self.find()
        expected = b"".join(b"%d" % turn * 100_000 for turn in range(5))
        self.assertEqual((one.data, two.data), (expected, expected))
        self.assertEqual((self.a.transports, self.b.transports), (1, 1))

    def test_a_resumption_that_is_never_confirmed_can_be_repeated(self) -> None:
        one, two = self.open()
        self.cut("A")
        end: SecureEnd = one.transport.end
        end.generation += 1
        proposal = Proposal(A, B.public, Hello(0, 1000, resume=end.position()))
        quiet = RawClient(A, SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        quiet.send(Frame(1, 2, proposal.payload).encode())
        self.network.settle()
        two.transport.write(b"not lost")
        self.network.settle()
        self.network.clock.advance(11)
        self.find()
        self.assertEqual(one.data, b"not lost")

    def test_a_replayed_resumption_has_no_effect(self) -> None:
        """The generation has to grow."""
        one, two = self.open()
        requests: list[bytes] = []

        def look(frames: list[Frame]) -> list[Frame]:
            requests.extend(frame.payload for frame in frames if frame.type == 1)
            return frames

        self.tamper(look)
        self.streams["A"].migrate(one.transport)
        self.find()
        (request,) = requests
        liar = RawClient(A, SERVER_KEY.public)
        self.network.join(liar)
        self.network.settle()
        liar.send(Frame(1, 2, request).encode())
        self.network.settle()
        # The ephemeral key was used before, so the handshake is not computed.
        self.assertEqual(liar.take()[-1].payload, bytes((CloseReason.NOT_AUTHENTIC,)))
        self.streams["B"].handshake_limits._seen.clear()
        liar.send(Frame(1, 4, request).encode())
        self.network.settle()
        self.assertEqual(liar.take()[-1].payload, bytes((CloseReason.NO_SUCH_STREAM,)))
        one.transport.write(b"as before")
        self.network.settle()
        self.assertEqual(two.data, b"as before")

    def test_transports_that_end_at_once_are_retried_with_backoff(self) -> None:
        """A relay ends each transport as soon as it is resumed. The client retries with a growing delay."""
        one, _ = self.open()
        streams = self.streams["A"]
        pauses = [streams.before_moving(one.transport) for _ in range(30)]
        self.assertEqual(pauses[: IDLE_MOVES + 1], [0.0] * (IDLE_MOVES + 1))
        self.assertEqual(pauses, sorted(pauses))
        self.assertEqual((pauses[IDLE_MOVES + 1] > 0.0, pauses[-1]), (True, IDLE_PAUSE))
        one.transport.write(b"something")
        self.network.settle()
        self.assertEqual(streams.before_moving(one.transport), 0.0)

    def test_only_the_peer_can_resume_a_stream(self) -> None:
        one, two = self.open()
        thief = KEYS["C"]
        end: SecureEnd = one.transport.end
        end.generation += 5
        proposal = Proposal(thief, B.public, Hello(0, 1000, resume=end.position()))
        client = RawClient(thief, SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        client.send(Frame(1, 2, proposal.payload).encode())
        self.network.settle()
        self.assertEqual(client.take()[-1].payload, bytes((CloseReason.NO_SUCH_STREAM,)))
        self.assertIsNone(two.lost)

    def test_diverged_ends_end_the_stream(self) -> None:
        one, two = self.open()
        one.transport.write(b"x")
        self.network.settle()
        two.transport.end._received_hash.update(b"y")
        self.cut("A")
        self.find()
        self.assertEqual(one.lost.value.close_reason, CloseReason.HASH_MISMATCH)
        self.assertIsNotNone(two.lost or two.transport.end.transport is None)

    def test_a_lying_server_is_left(self) -> None:
        """The stream moves to another transport, and no false data is delivered."""
        one, two = self.open()
        lied: list[bool] = []

        def lie(frames: list[Frame]) -> list[Frame]:
            if lied or not any(frame.type == FWD for frame in frames):
                return frames
            lied.append(True)
            return [Frame(f.type, f.id, f.payload[::-1]) if f.type == FWD else f for f in frames]

        self.tamper(lie)
        one.transport.write(b"true")
        self.network.settle()
        self.assertEqual(two.data, b"")
        self.find()
        self.assertEqual(two.data, b"true")

    def test_a_stalled_server_is_replaced(self) -> None:
        """A server that is there and does nothing: another way is looked for."""
        one, two = self.open()
        silent: list[bool] = [True]
        self.tamper(lambda frames: [] if silent else frames)
        one.transport.write(b"x")
        self.network.settle()
        for _ in range(5):
            self.network.clock.advance(5)
            self.network.settle()
        self.assertEqual([stream for stream, _ in self.wanted], [one.transport])
        silent.clear()
        self.cut("B")
        self.find()
        self.assertEqual(two.data, b"x")

    def test_applications_may_write_and_close_in_callbacks(self) -> None:
        """Writing and closing from within callbacks breaks nothing."""

        class Rude(Recorder):
            def dataReceived(self, data: bytes) -> None:
                super().dataReceived(data)
                assert self.transport is not None
                self.transport.write(b"answer")
                self.transport.loseConnection()
                self.transport.write(b"too late")

            def connectionLost(self, reason: Any = None) -> None:
                super().connectionLost(reason)
                assert self.transport is not None
                self.transport.write(b"too late")
                self.transport.loseConnection()
                self.transport.abortConnection()  # type: ignore[attr-defined]

        self.listeners[7].protocol = Rude
        one, two = self.open()
        one.transport.write(b"x")
        self.cut("A")
        self.find()
        self.assertEqual(one.data, b"answer")
        self.assertIsNotNone(one.lost and two.lost)
        self.assert_empty()


class WalkTests(ResumeCase):
    """Any order of writes, pauses and losses: every byte arrives once, in order."""

    @given(st.integers(0, 2**32))
    def test_random_walk_of_stream_losses(self, seed: int) -> None:
        self.setUp()
        draw = Random(seed)
        one, two = self.open()
        sent = {one: b"", two: b""}
        for step in range(draw.randrange(5, 40)):
            action = draw.choice(("write", "write", "write", "pump", "pump", "cut", "find", "pause", "resume", "move"))
            protocol = draw.choice((one, two))
            if action == "write":
                data = b"%d." % step * draw.choice((1, 10, 1000, 40_000))
                sent[protocol] += data
                protocol.transport.write(data)
            elif action == "pump":
                self.network.clock.advance(draw.choice((0, 0, 0.01)))
                for pump in self.network.pumps:
                    if draw.random() < 0.7:
                        pump.pump()
            elif action == "cut":
                name = draw.choice("AB")
                if self.sessions[name].connected:
                    self.sessions[name].link.transport.abortConnection()  # type: ignore[attr-defined]
                    for pump in self.network.pumps:
                        pump.pump()
            elif action == "pause":
                protocol.transport.pauseProducing()
            elif action == "resume":
                protocol.transport.resumeProducing()
            elif action == "move":
                self.streams["A"].migrate(one.transport)
            else:
                self.find()
        for protocol in (one, two):
            protocol.transport.resumeProducing()
        for _ in range(4):
            self.network.settle()
            self.find()
        self.assertEqual((one.lost, two.lost), (None, None))
        self.assertEqual(two.data, sent[one])
        self.assertEqual(one.data, sent[two])
        one.transport.loseConnection()
        self.network.settle()
        self.assertTrue(one.lost.check(ConnectionDone) and two.lost.check(ConnectionDone))
        self.assert_empty()


def speaking(tags: bool) -> Any:
    """A hello of a program that knows of tags, or does not."""

    def make(*some: Any, **more: Any) -> Hello:
        hello = Hello(*some, **more)
        return replace(hello, tags=hello.tags and tags)

    return make


class OlderTests(SynchronousTestCase):
    """An end from before 0.2 does not speak of tags: both hash the data then, also after a move."""

    def test_an_older_end_resumes_without_tags(self) -> None:
        for older in (outgoing, incoming):
            case = ResumeTests("test_a_stream_resumes_when_either_end_loses_its_server")
            with mock.patch.object(older, "Hello", speaking(False)):
                result = TestResult()
                case.run(result)
            self.assertTrue(result.wasSuccessful(), str(result.errors + result.failures))
            self.assertEqual(result.testsRun, 1)

    def test_agreed_options_are_the_common_ones(self) -> None:
        for mine, theirs in ((True, True), (True, False), (False, True), (False, False)):
            case = ResumeCase()
            case.setUp()
            with (
                mock.patch.object(outgoing, "Hello", speaking(mine)),
                mock.patch.object(incoming, "Hello", speaking(theirs)),
            ):
                one, two = case.open()
            ends = one.transport.end, two.transport.end
            self.assertEqual([end._tags for end in ends], [mine and theirs] * 2)
            one.transport.write(b"x" * 100_000)
            case.network.settle()
            self.assertEqual((len(two.data), ends[0].acknowledged), (100_000, 100_000))
            case.tearDown()
