"""Half-close of secure streams: one direction ends and the other continues, also over another transport."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from hypothesis import given, strategies as st
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHalfCloseableProtocol
from zope.interface import implementer

from dmsg.errors import CloseReason, LocalProtocolError, TransportClosed
from dmsg.streams.core.agreement import HELLO_SIZE, Hello, Offer, Proposal
from dmsg.streams.core.resumption import SecureError
from dmsg.streams.core.secure import END_OF_DATA, SecureEnd
from tests.support import KEYS, Accepting, Carrier, Producer, Recorder
from tests.v2019.secure_support import SecureCase
from tests.v2019.test_secure import pair
from tests.v2019.test_streams import ResumeCase


def able_pair(tags: bool = True) -> tuple[SecureEnd, SecureEnd]:
    """Return both attached ends of a stream that may be half-closed."""
    one, two = pair(tags=tags)
    one.half_close = two.half_close = True
    return one, two


@implementer(IHalfCloseableProtocol)
class Halves(Recorder):
    """Notes the ends of both directions, in the order of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def dataReceived(self, data: bytes) -> None:
        super().dataReceived(data)
        self.told.append(data)

    def readConnectionLost(self) -> None:
        self.told.append("no more comes")

    def writeConnectionLost(self) -> None:
        self.told.append("they know")

    def connectionLost(self, reason: Any = None) -> None:
        super().connectionLost(reason)
        self.told.append(reason.type)


class EndTests(SecureCase):
    """The end of data at a :class:`SecureEnd`, without streams."""

    def test_the_hello_says_so(self) -> None:
        hello = Hello(7, 1000, half_close=True)
        self.assertEqual((Hello.decode(hello.encode()), len(hello.encode())), (hello, HELLO_SIZE))

    def test_the_end_takes_a_position_but_no_window(self) -> None:
        for tags in (True, False):
            one, two = able_pair(tags)
            self.assertEqual(two.open_data(one.seal_data(b"x", "data")), b"x")
            self.assertIsNone(two.open_data(one.seal_end("end")))
            two.consume(1)
            self.assertEqual((two.received, two.consumed, two.remote_ended), (2, 2, True))
            self.assertEqual(one.open_ack(two.seal_ack()), (2, ["data", "end"]))
            self.assertEqual(one.acknowledged, 2)

    def test_data_is_never_mistaken_for_the_end(self) -> None:
        one, two = able_pair()
        self.assertEqual(two.open_data(one.seal_data(END_OF_DATA, None)), END_OF_DATA)
        self.assertFalse(two.remote_ended)

    def test_data_behind_the_end_is_an_error(self) -> None:
        for more in (lambda end: end.seal_data(b"x", None), lambda end: end.seal_end(None)):
            one, two = able_pair()
            two.open_data(one.seal_end(None))
            with self.assertRaises(SecureError) as caught:
                two.open_data(more(one))
            self.assertEqual(caught.exception.reason, CloseReason.BAD_FRAME)

    def test_an_end_that_was_given_out_is_not_taken_back(self) -> None:
        """The end of the data came over the old transport while the next one was agreed on; data comes in its place
        over the new one.
        """
        for data in (b"", b"x and more"):
            one, two = able_pair()
            one.token = two.token = bytes(16)
            two.open_data(one.seal_data(b"abc", None))
            proposal = Proposal(KEYS["A"], KEYS["B"].public, Hello(resume=replace(one.position(), generation=1)))
            offer = Offer(KEYS["B"], proposal.payload)
            told = Hello(0, two.offer_window(), resume=replace(two.position(), generation=1))
            result, payload = offer.accept(told)
            answer = two.answer(result, offer.hello, told)
            self.assertIsNone(two.open_data(one.seal_end(None)))
            accepted, hello = proposal.process_answer(payload)
            one.attach(Carrier(), accepted, hello, 1000)
            two.resume_over(Carrier(), answer)
            if not data:
                self.assertEqual(two.open_data(one.seal_end(None)), b"")  # The end was already announced.
                self.assertTrue(two.remote_ended)
                continue
            with self.assertRaises(SecureError) as caught:
                two.open_data(one.seal_data(data, None))
            self.assertEqual(caught.exception.reason, CloseReason.BAD_FRAME)

    def test_empty_frames_behind_the_end_still_measure(self) -> None:
        one, two = able_pair()
        two.open_data(one.seal_end(None))
        self.assertEqual(two.open_data(one.seal_data(b"", None)), b"")

    def test_older_programs_take_the_end_for_a_forged_frame(self) -> None:
        one, two = pair()
        with self.assertRaises(SecureError) as caught:
            two.open_data(one.seal_end(None))
        self.assertEqual(caught.exception.reason, CloseReason.NOT_AUTHENTIC)


class HalfCase(ResumeCase):
    """Programs that understand half-close at both ends."""

    def both(self) -> tuple[Any, Any]:
        """The programs at both ends of a stream from A to B."""
        self.listeners[7] = Accepting(Halves)
        opening = self.a.open(KEYS["B"].public, Accepting(Halves), port=7, secure=True)
        self.network.settle()
        return self.successResultOf(opening), self.listeners[7].built[-1]  # type: ignore[attr-defined]


class HalfCloseTests(HalfCase):
    """A stream whose directions end one after the other."""

    def test_request_end_answer(self) -> None:
        one, two = self.both()
        one.transport.write(b"q" * 300_000)
        ending = one.transport.end_writing()
        self.network.settle()
        self.successResultOf(ending)
        self.assertEqual((len(two.data), two.told[-1], two.lost), (300_000, "no more comes", None))
        two.transport.write(b"answer")
        two.transport.loseWriteConnection()
        self.network.settle()
        self.assertEqual(one.told, ["they know", b"answer", "no more comes", ConnectionDone])
        self.assertEqual(two.told[-2:], ["they know", ConnectionDone])
        self.assertEqual((one.transport.unacknowledged, two.transport.unacknowledged), (0, 0))
        self.assertEqual((one.transport.acknowledged_bytes, two.transport.acknowledged_bytes), (300_000, 6))
        self.assertEqual((self.a.transports, self.b.transports), (0, 0))

    def test_writing_behind_the_end_is_ignored(self) -> None:
        one, two = self.both()
        one.transport.loseWriteConnection()
        one.transport.loseWriteConnection()
        one.transport.write(b"late")
        self.failureResultOf(one.transport.send(b"late"), TransportClosed)
        self.failureResultOf(one.transport.end_writing(), TransportClosed)
        self.network.settle()
        self.assertEqual(two.told, ["no more comes"])

    def test_a_paused_reader_gets_the_end_behind_its_data(self) -> None:
        one, two = self.both()
        two.transport.pauseProducing()
        one.transport.write(b"data")
        one.transport.loseWriteConnection()
        self.network.settle()
        self.assertEqual(two.told, [])
        two.transport.resumeProducing()
        self.assertEqual(two.told, [b"data", "no more comes"])

    def test_a_producer_may_finish_first(self) -> None:
        one, two = self.both()
        one.transport.registerProducer(Producer(), True)
        one.transport.loseWriteConnection()
        one.transport.write(b"the last")
        self.network.settle()
        self.assertEqual(two.told, [b"the last"])
        one.transport.unregisterProducer()
        self.network.settle()
        self.assertEqual(two.told, [b"the last", "no more comes"])

    def test_a_program_that_knows_no_half_close_answers_and_closes(self) -> None:
        self.listeners[7] = Accepting()
        opening = self.a.open(KEYS["B"].public, Accepting(Halves), port=7, secure=True)
        self.network.settle()
        one: Any = self.successResultOf(opening)
        two: Any = self.listeners[7].built[-1]  # type: ignore[attr-defined]
        two.transport.write(b"before")
        one.transport.loseWriteConnection()
        self.network.settle()
        self.assertEqual(two.lost.type, ConnectionDone)
        self.assertEqual((one.data, one.told[-1]), (b"before", ConnectionDone))

    def test_the_end_arrives_over_the_next_transport(self) -> None:
        """The connection of either end is lost while the end is on its way."""
        for cut in "BA":
            one, two = self.both()
            self.cut(cut)
            one.transport.write(b"x" * 100_000)
            ending = one.transport.end_writing()
            two.transport.write(b"answer")
            self.network.settle()
            self.assertNoResult(ending)
            self.find()
            self.successResultOf(ending)
            self.assertEqual((len(two.data), two.told[-1]), (100_000, "no more comes"))
            two.transport.loseWriteConnection()
            self.network.settle()
            self.assertEqual((one.data, one.told[-1]), (b"answer", ConnectionDone))

    def test_the_other_end_is_older(self) -> None:
        """The older end's hello does not announce half-close, so the whole stream ends, and not cleanly."""
        answer = Hello.__init__

        def older(hello: Hello, *arguments: Any, half_close: bool = False, **options: Any) -> None:
            answer(hello, *arguments, **options)

        with mock.patch.object(Hello, "__init__", older):
            one, two = self.both()
        self.assertFalse(one.transport.can_half_close or two.transport.can_half_close)
        self.failureResultOf(one.transport.end_writing(), TransportClosed)
        self.assertRaises(LocalProtocolError, self.a.core.send_end, next(iter(self.a.core.transports.values())))
        one.transport.write(b"all of it")
        one.transport.loseWriteConnection()
        self.network.settle()
        self.assertEqual((two.data, two.lost.type, one.lost.type), (b"all of it", ConnectionDone, ConnectionLost))

    def test_aborting_behind_the_end(self) -> None:
        one, two = self.both()
        one.transport.loseWriteConnection()
        self.network.settle()
        two.transport.abortConnection()
        self.network.settle()
        self.assertNotEqual(one.lost.type, ConnectionDone)


class HalfWalkTests(HalfCase):
    """Any order of writes, ends, pauses and losses: all bytes arrive once, and behind them their end."""

    @given(st.integers(0, 2**32))
    def test_random_walk_with_half_closes(self, seed: int) -> None:
        self.setUp()
        draw = Random(seed)
        one, two = self.both()
        sent = {one: b"", two: b""}
        for step in range(draw.randrange(5, 40)):
            action = draw.choice(("write", "write", "pump", "pump", "cut", "find", "pause", "resume", "move", "end"))
            protocol = draw.choice((one, two))
            if action == "write":
                data = b"%d." % step * draw.choice((1, 10, 1000, 40_000))
                if not protocol.transport.writing_ended:
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
            elif action == "pause":
                protocol.transport.pauseProducing()
            elif action == "resume":
                protocol.transport.resumeProducing()
            elif action == "move":
                self.streams["A"].migrate(one.transport)
            elif action == "end":
                protocol.transport.loseWriteConnection()
            else:
                self.find()
        for protocol in (one, two):
            protocol.transport.loseWriteConnection()
            protocol.transport.resumeProducing()
        for _ in range(4):
            self.network.settle()
            self.find()
        for protocol, other in ((one, two), (two, one)):
            self.assertEqual(protocol.data, sent[other])
            ends = [one for one in protocol.told if not isinstance(one, bytes)]
            # A program that was paused until both ends had ended learns only of the end of both.
            self.assertEqual(ends[-1], ConnectionDone)
            self.assertLessEqual(ends.count("no more comes"), 1)
        self.assert_empty()
