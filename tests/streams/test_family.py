"""Secure streams of a family of its own: nothing of 2019 is needed to carry, lose and resume one.

Its frames are (kind, payload) in a list, its close reasons have two bytes.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import StreamTransport
from dmsg.streams.carrier import ClientStream, TransportCarrier
from dmsg.streams.core.agreement import Hello, Offer, Proposal
from dmsg.streams.core.resumption import ACK, CLOSE, FWD, INITIAL_WINDOW
from dmsg.streams.core.secure import SecureEnd
from dmsg.streams.streams import Streams
from tests.support import Recorder

SERVER, ONE, TWO = (SecKey.from_seed(name) for name in (b"server", b"one", b"two"))
TOKEN = bytes(range(16))
REASON_SIZE = 2


class Line:
    """A transport."""

    carrier: Any = None
    secure: SecureEnd | None = None
    delivered = (0, 0)

    @property
    def window_open(self) -> bool:
        return self.secure is not None and self.secure.may_send

    @property
    def in_flight(self) -> tuple[()]:
        return ()


class Core:
    """The frames of one connection."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def send(self, transport: Line, data: bytes | memoryview, ticket: Any = None) -> None:
        assert transport.secure is not None
        self.frames.append((FWD, transport.secure.seal_data(data, ticket)))

    def probe(self, transport: Line, ticket: Any = None) -> None:
        self.send(transport, b"", ticket)

    def send_end(self, transport: Line, ticket: Any = None) -> None:
        assert transport.secure is not None
        self.frames.append((FWD, transport.secure.seal_end(ticket)))


class Session:
    """Session with one stream."""

    server: PubKey = SERVER.public
    writable = True

    def __init__(self, clock: Clock, streams: Streams) -> None:
        self._clock = clock
        self._streams = streams
        self.core = Core()
        self.line = Line()

    def flush(self) -> None:
        pass

    def schedule(self, stream: StreamTransport) -> None:
        self._clock.callLater(0, stream.flush)

    def consumed(self, carrier: TransportCarrier[Line], size: int) -> None:
        carrier.stream.secure_end.consume(size)

    def closed(self, carrier: TransportCarrier[Line], reason: int) -> None:
        self.core.frames.append((CLOSE, carrier.stream.secure_end.seal_close(reason, REASON_SIZE)))
        self._streams.closed(carrier.stream, reason)

    def close_left(self, transport: Line, reason: int) -> None:
        pass

    def take(self, frames: list[tuple[int, bytes]]) -> None:
        """Take what the other end has sent."""
        for kind, payload in frames:
            end, stream = self.line.secure, self.line.carrier.stream
            if end is None:
                answer = next(iter(stream.secure_end.answers.values()))
                assert answer.is_confirmed_by(kind, payload)
                tickets, unsent = stream.secure_end.resume_over(self.line, answer)
                end = stream.secure_end
                stream.requeue(unsent)
                self._streams.note_resumed(stream)
                stream.move(self.line.carrier)
                stream.acknowledged_all(tickets)
            elif end.unproven is not None:
                assert end.is_authentic(kind, payload)
                tickets, unsent = end.prove()
                stream.requeue(unsent)
                stream.acknowledged_all(tickets)
                stream.window_opened()
            if kind == FWD:
                if data := end.open_data(payload):
                    stream.data_received(data)
                self.core.frames.append((ACK, end.seal_ack()))
            elif kind == ACK:
                count, tickets = end.open_ack(payload)
                stream.acknowledged_all(tickets, count)
            else:
                reason = end.open_close(payload, REASON_SIZE)
                assert reason is not None
                self._streams.closed(stream, reason)
                stream.carrier_closed(reason)


class FamilyTests(SynchronousTestCase):
    """A stream between two clients."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.streams = [Streams(self.clock, key, self.schedule) for key in (ONE, TWO)]
        self.programs = [Recorder(), Recorder()]
        self.connect()
        hello = Hello(0, INITIAL_WINDOW, TOKEN, tags=True, half_close=True)
        proposal = Proposal(ONE, TWO.public, hello)
        offer = Offer(TWO, proposal.payload)
        theirs, payload = offer.accept(hello)
        mine, _ = proposal.process_answer(payload)
        self.ends: list[ClientStream] = []
        for number, result in enumerate((mine, theirs)):
            session, streams = self.sessions[number], self.streams[number]
            end = SecureEnd(result.hash, initiator=not number, token=TOKEN, tags=True, half_close=True)
            carrier = TransportCarrier(session, session.line)
            here, there = (ONE, TWO) if number == 0 else (TWO, ONE)
            addresses = DmsgAddress(here.public), DmsgAddress(there.public)
            stream = carrier.stream = ClientStream(self.clock, carrier, *addresses, max_frame=1000)
            end.attach(session.line, result, hello, INITIAL_WINDOW)
            stream.end = end
            streams.add(stream)
            self.ends.append(stream)
            stream.start(self.programs[number])

    def schedule(self, stream: StreamTransport) -> None:
        self.clock.callLater(0, stream.flush)

    def connect(self) -> None:
        self.sessions = [Session(self.clock, streams) for streams in self.streams]

    def settle(self) -> None:
        """Deliver everything."""
        self.clock.advance(0)
        while any(session.core.frames for session in self.sessions):
            for number, session in enumerate(self.sessions):
                frames, session.core.frames = session.core.frames, []
                self.sessions[1 - number].take(frames)
                self.clock.advance(0)

    def lose(self) -> None:
        """The connections are gone, with what was on its way."""
        for stream, streams in zip(self.ends, self.streams, strict=True):
            streams.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)

    def resume(self) -> None:
        """Make new connections, over which the stream continues."""
        self.connect()
        (mine, theirs), (one, two) = self.ends, self.sessions
        mine.secure_end.generation += 1
        hello = Hello(0, mine.secure_end.offer_window(), resume=mine.secure_end.position())
        proposal = Proposal(ONE, TWO.public, hello)
        offer = Offer(TWO, proposal.payload)
        assert offer.hello.resume is not None
        self.assertIs(self.streams[1].find_offered(offer.hello.resume, ONE.public), theirs)
        told = Hello(0, theirs.secure_end.offer_window(), resume=theirs.secure_end.position())
        result, payload = offer.accept(told)
        theirs.secure_end.answers = {two.line: theirs.secure_end.answer(result, offer.hello, told)}
        TransportCarrier(two, two.line, theirs)
        result, answer = proposal.process_answer(payload)
        carrier = TransportCarrier(one, one.line, mine)
        one.core.frames.append((FWD, mine.secure_end.attach_resumed(one.line, result, answer, hello.window)))
        self.streams[0].note_resumed(mine)
        mine.move(carrier)

    def test_data_in_flight_is_sent_again(self) -> None:
        self.ends[0].write(b"one ")
        self.settle()
        self.ends[0].write(b"two ")
        sent = self.ends[1].send(b"answer")
        self.clock.advance(0)
        self.lose()
        self.assertEqual([streams.suspended for streams in self.streams], [1, 1])
        self.ends[0].write(b"three")
        self.resume()
        self.settle()
        self.assertEqual([program.data for program in self.programs], [b"answer", b"one two three"])
        self.successResultOf(sent)
        self.assertEqual([streams.suspended for streams in self.streams], [0, 0])
        self.assertEqual([streams.resumed for streams in self.streams], [1, 1])
        self.end()

    def test_an_end_for_a_reason_of_two_bytes(self) -> None:
        self.ends[0].abort(0x1234)
        self.settle()
        assert self.programs[1].lost is not None
        self.assertEqual(self.programs[1].lost.value.close_reason, 0x1234)
        self.end()

    def end(self) -> None:
        """Assert that nothing is left of the streams."""
        for stream in self.ends:
            stream.abortConnection()
        for streams in self.streams:
            streams.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])
