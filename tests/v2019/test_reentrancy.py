"""Applications that do what they like in callbacks, ends that meet at bad moments: nothing hangs, nothing is left."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.errors import CloseReason, TransportClosed
from dmsg.net.flush import TurnFlush
from dmsg.net.streams.address import StreamLost
from tests.support import KEYS, Accepting, Recorder
from tests.v2019.test_streams import ResumeCase

B = KEYS["B"].public


class Talks(Recorder):
    """Protocol that sends data at once."""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"hi")


class StepCase(ResumeCase):
    """Delivers step by step."""

    def until_received(self, protocol: Recorder) -> None:
        """Deliver step by step until it has something."""
        for _ in range(50):
            self.network.clock.advance(0)
            for pump in self.network.pumps:
                pump.pump()
            if protocol.data:
                return
        self.fail("nothing came")

    def until_answered(self) -> None:
        """Deliver step by step until B has answered a request and waits for its confirmation."""
        for _ in range(50):
            self.network.clock.advance(0)
            for pump in self.network.pumps:
                pump.pump()
                if self.b._incoming._unconfirmed:
                    return
        self.fail("B was not asked")


class CallbackTests(StepCase):
    """Calls within a callback."""

    def test_cancelling_others_when_the_link_is_lost(self) -> None:
        one, _ = self.open()
        opening = [self.a.open(B, Accepting(), port=7, secure=True) for _ in range(3)]

        def cancel_all(_: Failure) -> None:
            for deferred in opening:
                deferred.cancel()

        for deferred in opening:
            deferred.addErrback(cancel_all)
        self.a.link_lost(Failure(ConnectionDone()))
        self.assertEqual((self.streams["A"].suspended, one.lost), (1, None))

    def test_losing_the_connection_while_data_is_delivered(self) -> None:
        """What has arrived in the same read is delivered, too. The peer does not send it again."""
        one, two = self.open()
        received: list[bytes] = []

        def lose(data: bytes) -> None:
            if not received:
                self.b.link_lost(Failure(ConnectionDone()))
            received.append(data)

        two.dataReceived = lose
        for data in (b"first", b"second"):
            one.transport.write(data)
            one.transport.flush()
        self.network.settle()
        self.assertEqual((received, self.streams["B"].suspended), ([b"first", b"second"], 1))

    def test_aborting_when_a_send_fires_in_a_resumption(self) -> None:
        for sender in (0, 1):
            pair = self.open()
            mine, other = pair[sender], pair[1 - sender]
            mine.transport.send(b"x" * 1000).addCallback(lambda _, mine=mine: mine.transport.abortConnection())
            # The data arrive, but the ACK does not come back.
            self.until_received(other)
            self.cut("AB"[1 - sender])
            self.find()
            for _ in range(3):
                self.network.settle()
                self.find()
            self.assertTrue(mine.lost.check(ConnectionAborted))
            self.assertEqual(other.lost.value.close_reason, CloseReason.ABORTED)
            self.assert_empty()

    def test_ending_another_stream_that_is_being_resumed(self) -> None:
        self.listeners[9] = Accepting()
        one, two = self.open()
        three, four = self.open(9)
        four.dataReceived = lambda data: two.transport.abortConnection()
        self.a.reopen(one.transport)
        self.until_answered()
        three.transport.write(b"kill")
        three.transport.flush()  # The data leave before the confirmation.
        for _ in range(3):
            self.network.settle()
            for stream in [one.transport] if self.streams["A"].suspended else []:
                give_up: Any = self.streams["A"]._give_up
                reopening: Any = self.a.reopen(stream)
                reopening.addErrback(lambda failure: give_up(one.transport, failure.value.reason))
        self.assertIsNotNone(one.lost and two.lost)
        self.assertEqual((self.a.transports, self.b.transports), (1, 1))

    def test_factories_may_decline_to_build_a_protocol(self) -> None:
        class Refuses(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> None:
                return None

        class Raises(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> Any:
                raise ValueError("a bug of the application")

        self.listeners[8], self.listeners[9] = Refuses(), Accepting(Talks)
        one = self.a.open(B, Accepting(Talks), port=8, secure=True)
        self.network.settle()
        self.assertEqual(cast(Any, self.successResultOf(one)).lost.value.close_reason, CloseReason.REFUSED)
        for factory, kind in ((Raises(), ValueError), (Refuses(), TransportClosed)):
            opening = self.a.open(B, factory, port=9, secure=True)
            self.network.settle()
            self.failureResultOf(opening, kind)
        self.wanted.clear()
        self.network.clock.advance(self.resume_timeout)
        self.network.settle()
        self.assert_empty()

    def test_an_error_in_connection_lost_affects_no_other_stream(self) -> None:
        class Bad(Recorder):
            def connectionLost(self, reason: Any = None) -> None:
                super().connectionLost(reason)
                raise ValueError("a bug of the application")

        self.listeners[7], self.listeners[9] = Accepting(Bad), Accepting()
        bad, _ = self.open(7, resumable=False)
        _, good = self.open(9, resumable=False)
        _, worse = self.open(7, resumable=False)
        bad.transport.loseConnection()
        self.network.settle()
        self.cut("B")
        self.assertIsNotNone(good.lost and worse.lost)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 2)

    def test_pausing_and_aborting_at_once(self) -> None:
        class Aborts(Recorder):
            def dataReceived(self, data: bytes) -> None:
                self.transport.pauseProducing()  # type: ignore[union-attr]
                self.transport.abortConnection()  # type: ignore[union-attr]

        class Raises(Recorder):
            def dataReceived(self, data: bytes) -> None:
                self.transport.pauseProducing()  # type: ignore[union-attr]
                raise ValueError("a bug of the application")

        self.listeners[8], self.listeners[9] = Accepting(Aborts), Accepting(Raises)
        for port in (8, 9):
            one, two = self.open(port)
            one.transport.write(b"x")
            self.network.settle()
            self.network.clock.advance(0)
            self.assertIsNotNone(two.lost)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_a_pull_producer_finishes_after_lose_connection(self) -> None:
        """TCP transports do so, too."""
        one, two = self.open()

        class Producer:
            count = 0

            def resumeProducing(self) -> None:
                self.count += 1
                one.transport.write(b"%03d" % self.count)
                if self.count == 100:
                    one.transport.unregisterProducer()

            def stopProducing(self) -> None:
                pass

        one.transport.registerProducer(Producer(), False)
        one.transport.loseConnection()
        self.network.settle()
        self.assertEqual(len(two.data), 300)
        self.assertTrue(two.lost.check(ConnectionDone))

    def test_a_push_producer_does_not_delay_the_close(self) -> None:
        """TCP transports do so, too, and LineReceiver relies on it."""
        one, two = self.open()

        class Producer:
            def pauseProducing(self) -> None:
                pass

            def resumeProducing(self) -> None:
                pass

            def stopProducing(self) -> None:
                pass

        for data in (b"bye", bytes(500_000)):
            one, two = self.open()
            one.transport.registerProducer(Producer(), True)
            one.transport.write(data)
            one.transport.loseConnection()
            self.network.settle()
            self.assertTrue(two.lost.check(ConnectionDone))
            self.assertEqual(two.data, data)

    def test_a_turn_goes_on_after_an_error(self) -> None:
        clock = Clock()
        turn = TurnFlush(clock)
        flushed: list[str] = []

        class One:
            def __init__(self, name: str) -> None:
                self.name = name

            def flush(self) -> None:
                flushed.append(self.name)
                if self.name == "bad":
                    raise ValueError("a bug of a producer")

        for _ in range(2):
            for name in ("bad", "good"):
                turn.add_stream(One(name))
            turn.add(One("link"))
            clock.advance(0)
        self.assertEqual(flushed, ["bad", "good", "link"] * 2)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 2)


class MomentTests(StepCase):
    """Ends that act while the other end is away or is just returning."""

    def test_reading_between_answer_and_confirmation(self) -> None:
        """The window in the answer is outdated, so the other end must get an update."""
        one, two = self.open()
        two.transport.pauseProducing()
        one.transport.write(bytes(2_000_000))
        self.network.settle()
        self.cut("A")
        self.reconnect("A")
        ((stream, _),) = self.wanted
        self.a.reopen(stream)
        self.until_answered()
        two.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(len(two.data), 2_000_000)

    def test_closing_a_session_with_unsent_data_is_unclean(self) -> None:
        one, two = self.open()
        one.transport.write(bytes(2_000_000))
        self.network.clock.advance(0)
        self.a.close()
        self.network.settle()
        self.assertLess(len(two.data), 2_000_000)
        self.assertTrue(two.lost.check(StreamLost) and one.lost.check(ConnectionAborted))

    def test_a_close_of_the_opener_during_suspension_arrives(self) -> None:
        """The other end hears of it."""
        one, two = self.open()
        two.transport.write(b"abc")
        self.network.settle()
        self.cut("A")
        one.transport.loseConnection()
        self.network.settle()
        self.network.clock.advance(15)
        self.find()
        self.assertTrue(two.lost.check(ConnectionDone) and one.lost.check(ConnectionDone))
        self.assert_empty()

    def test_a_lost_candidate_session_leaves_the_transport(self) -> None:
        """A session that was lost meanwhile: the stream keeps the transport that it has."""
        one, two = self.open()
        gone = self.a
        here = self.reconnect("A")
        self.assertTrue(here.connected)
        gone.connected, connected = False, gone.connected
        self.failureResultOf(gone.reopen(one.transport), TransportClosed)
        gone.connected = connected
        one.transport.write(b"as before")
        self.network.settle()
        self.assertEqual(two.data, b"as before")

    def test_tiny_pieces_for_a_reader_that_has_stopped(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        for number in range(20_000):
            one.transport.send(b"%d" % (number % 10))
        self.network.settle()
        self.assertLess(len(two.transport._unread), 200)
        two.transport.resumeProducing()
        self.assertEqual(two.data, b"0123456789" * 2000)

    def test_a_search_that_ends_just_after_the_transport_did(self) -> None:
        """The search was for a better transport; now any transport is accepted."""
        one, two = self.open()
        self.streams["A"].migrate(one.transport)
        ((_, searching),) = self.wanted
        self.cut("A")
        self.wanted.clear()
        searching.callback(None)
        self.find()
        one.transport.write(b"there")
        self.network.settle()
        self.assertEqual(two.data, b"there")

    def test_an_accepting_end_without_acks_prompts_the_opener(self) -> None:
        """The accepting end cannot search for another transport, and makes the opener do so."""
        one, two = self.open()
        silent: list[bool] = [True]
        relay = self.network.factory.relay
        port = relay.newest[KEYS["A"].public].port
        send = port.send

        class Liar:
            def __getattr__(self, name: str) -> Any:
                return (lambda data: None) if silent and name == "send" else getattr(port, name)

        relay.newest[KEYS["A"].public].port = Liar()
        sending: Deferred[None] = two.transport.send(b"x")
        self.network.settle()
        for _ in range(3):
            self.network.clock.advance(5)
            self.network.settle()
        silent.clear()
        for _ in range(2):
            self.network.clock.advance(5)
            self.network.settle()
        del send
        self.find()
        self.successResultOf(sending)
        self.assertEqual(one.data, b"x")
