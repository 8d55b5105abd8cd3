"""Links: a closing link still sends its queue, within limits."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock, deferLater
from twisted.internet.testing import StringTransport
from twisted.test import iosim
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.errors import DropReason
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import CLOSE_LIMIT, CLOSE_TIMEOUT, HANDSHAKE_TIMEOUT
from dmsg.net.links.plain import PlainLink
from dmsg.net.links.records import RecordLink
from dmsg.net.socketopts import forget_unsent, held_bytes, queued_bytes, shed_sent_bytes
from dmsg.noise.records import OVERHEAD
from dmsg.noise.xk import XKHandshake
from tests.messaging.support import KEYS
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import asynchronous


class Frames:
    """Frames of five bytes, as the protocol above a link."""

    def __init__(self) -> None:
        self.link: Any = None
        self.frames: list[bytes] = []

    def link_up(self, link: Any) -> None:
        self.link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        whole = end - end % 5
        self.frames += [bytes(buffer[at : at + 5]) for at in range(0, whole, 5)]
        return whole

    def link_congested(self) -> None:
        """Do nothing: this event never happens here."""

    def link_relieved(self) -> None:
        """Do nothing: this event never happens here."""

    def link_lost(self, reason: Any) -> None:
        self.link = None


class ChoiceTests(SynchronousTestCase):
    """The handshake and the kind of frames are two choices."""

    @given(st.lists(st.sampled_from([1, 5, 2048, 2049, 16_383, 16_384, 65_515, 65_516, 140_000, 262_060]), max_size=12))
    def test_writes_of_any_size_arrive_in_order(self, sizes: list[int]) -> None:
        """Data sent in one turn arrives in order, although the link reuses its buffers."""
        clock = Clock()
        received: list[bytes] = []

        class Bytes(Frames):
            def frames_received(self, buffer: bytearray, end: int) -> int:
                received.append(bytes(buffer[:end]))
                return end

        ends = [Frames(), Bytes()]
        turn = TurnFlush(clock)
        client = RecordLink(clock, turn, XKHandshake(KEYS["A"], KEYS["S"].public), lambda remote: ends[0])
        server = RecordLink(clock, turn, XKHandshake(KEYS["S"]), lambda remote: ends[1])
        pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client), greet=False)
        pump.flush()
        expected = b""
        for turns in range(2):
            for number, size in enumerate(sizes):
                data = bytearray([(number + turns) % 256]) * size
                expected += data
                ends[0].link.send(memoryview(data))
                data[:] = bytes(size)  # The caller may reuse its buffer.
            self.assertLessEqual(sum(sizes), client._unwritten_size() + 1)
            clock.advance(0)
            pump.flush()
        self.assertEqual(b"".join(received), expected)
        self.assertEqual((client._unwritten_size(), client._buffers, client._writing), (0, [], []))

    def test_data_sent_during_a_write_follows_in_order(self) -> None:
        """The data are sent by the callback that reports the congestion, which has a buffer of its own."""
        clock = Clock()
        ends = [Frames(), Frames()]
        turn = TurnFlush(clock)
        client = RecordLink(clock, turn, XKHandshake(KEYS["A"], KEYS["S"].public), lambda remote: ends[0])
        server = RecordLink(clock, turn, XKHandshake(KEYS["S"]), lambda remote: ends[1])
        pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client), greet=False)
        pump.flush()
        again = [b"again" * 10_000]
        write: Any = client.transport.write  # type: ignore[union-attr]

        def send_more(data: bytes) -> None:
            if again:
                client.send(again.pop(0))
            write(data)

        self.patch(client.transport, "write", send_more)
        client.send(b"first" * 10_000)
        clock.advance(0)
        # Another link takes the free buffers.
        server.send(b"other" * 50_000)
        for _ in range(3):
            clock.advance(0)
            pump.flush()
        self.assertEqual(ends[1].frames, [b"first"] * 10_000 + [b"again"] * 10_000)
        self.assertEqual(ends[0].frames, [b"other"] * 50_000)

    def exchange(self, make: Any) -> bytes:
        """Frames both ways over two links; what was on the wire after the handshake."""
        clock = Clock()
        ends = [Frames(), Frames()]
        turn = TurnFlush(clock)
        client = make(clock, turn, XKHandshake(KEYS["A"], KEYS["S"].public), lambda remote: ends[0])
        server = make(clock, turn, XKHandshake(KEYS["S"]), lambda remote: ends[1])
        pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client), greet=False)
        pump.flush()
        self.assertEqual((server.remote, client.remote), (KEYS["A"].public, KEYS["S"].public))
        seen = []
        write = client.transport.write
        self.patch(client.transport, "write", lambda data: seen.append(bytes(data)) or write(data))
        for _ in range(3):
            ends[0].link.send(b"there")
            ends[1].link.send(b"back.")
        clock.advance(0)
        pump.flush()
        self.assertEqual(([end.frames for end in ends]), [[b"back."] * 3, [b"there"] * 3])
        return b"".join(seen)

    def test_noise_before_plain_frames(self) -> None:
        self.assertEqual(self.exchange(PlainLink), b"there" * 3)

    def test_noise_before_records(self) -> None:
        wire = self.exchange(RecordLink)
        self.assertNotIn(b"there", wire)
        self.assertEqual(len(wire), 15 + 2 + OVERHEAD)


class ClosingTests(SynchronousTestCase):
    """A link that is closed with much unsent."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.link = PlainLink(self.clock, TurnFlush(self.clock), JSONHandshake(KEYS["S"]), lambda remote: None)  # type: ignore[arg-type,return-value]
        transport: Any = StringTransport()
        transport.aborted = False
        transport.abortConnection = self.abort
        self.transport = transport
        self.link.makeConnection(self.transport)
        self.transport.registerProducer(self.link, True)
        self.waiting = 1_000_000
        self.patch(self.link, "queued", lambda: self.waiting)
        self.link.close()

    def abort(self) -> None:
        self.transport.aborted = True

    def test_a_closed_link_ends_although_the_peer_does_not_read(self) -> None:
        self.clock.advance(CLOSE_TIMEOUT - 0.1)
        self.assertFalse(self.transport.aborted)
        self.clock.advance(0.2)
        self.assertTrue(self.transport.aborted)

    def test_a_closed_link_ends_after_partial_progress(self) -> None:
        for _ in range(3):
            self.waiting -= 100_000
            self.clock.advance(CLOSE_TIMEOUT)
            self.assertFalse(self.transport.aborted)
        self.clock.advance(CLOSE_TIMEOUT)
        self.assertTrue(self.transport.aborted)

    def test_closing_has_a_deadline(self) -> None:
        passed = 0.0
        while not self.transport.aborted:
            self.waiting -= 1
            self.clock.advance(CLOSE_TIMEOUT)
            passed += CLOSE_TIMEOUT
        self.assertGreaterEqual(passed, CLOSE_LIMIT)
        self.assertLess(passed, CLOSE_LIMIT + 2 * CLOSE_TIMEOUT)


class PausedTests(SynchronousTestCase):
    """Links of a process that pauses."""

    def setUp(self) -> None:
        self.clock = PausingClock()
        turn = TurnFlush(self.clock)
        self.failures: list[Any] = []
        self.users = [Frames(), Frames()]
        self.client = RecordLink(self.clock, turn, XKHandshake(KEYS["A"], KEYS["S"].public), lambda _: self.users[0])
        self.server = RecordLink(
            self.clock,
            turn,
            XKHandshake(KEYS["S"]),
            lambda _: self.users[1],
            on_failure=lambda _, failure: self.failures.append(failure),
        )
        self.ends = [iosim.makeFakeServer(self.server), iosim.makeFakeClient(self.client)]
        self.pump = iosim.connect(self.server, self.ends[0], self.client, self.ends[1], greet=False)

    def test_a_pause_in_the_handshake_does_not_count(self) -> None:
        pass_time(self.clock, HANDSHAKE_TIMEOUT - 1.0)
        self.clock.advance(10 * HANDSHAKE_TIMEOUT)
        self.assertIsNone(self.server.ended_for)
        self.pump.flush()
        self.assertEqual([user.link for user in self.users], [self.client, self.server])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_peer_that_stays_silent_after_a_pause_is_dropped(self) -> None:
        pass_time(self.clock, 1.0)
        self.clock.advance(10 * HANDSHAKE_TIMEOUT)
        pass_time(self.clock, HANDSHAKE_TIMEOUT - 1.1)
        self.assertIsNone(self.server.ended_for)
        pass_time(self.clock, 0.5)
        self.assertEqual(self.server.ended_for, DropReason.HANDSHAKE_TIMEOUT)
        (failure,) = self.failures
        self.assertEqual(str(failure.value), "handshake took too long")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_pause_while_a_link_closes_does_not_count(self) -> None:
        self.pump.flush()
        waiting = [1_000_000]
        aborted: list[float] = []
        self.patch(self.server, "queued", lambda: waiting[0])
        self.patch(self.ends[0], "abortConnection", lambda: aborted.append(self.clock.seconds()))
        self.server.close()
        self.clock.advance(10 * CLOSE_LIMIT)
        self.assertEqual(aborted, [])
        waiting[0] -= 1
        pass_time(self.clock, CLOSE_TIMEOUT)
        self.assertEqual(aborted, [])
        pass_time(self.clock, CLOSE_TIMEOUT + 0.1)
        self.assertEqual(len(aborted), 1)


class HoldingTests(TestCase):
    """Memory of a real transport apart from its unsent data."""

    @asynchronous
    async def test_sent_parts_of_a_long_piece_are_released(self) -> None:
        """Twisted keeps a piece until nearly all of it is sent. The link counts this memory, and frees it."""
        theirs: Deferred[Any] = Deferred()

        class Deaf(Protocol):
            def connectionMade(self) -> None:
                self.transport.pauseProducing()  # type: ignore[union-attr]
                theirs.callback(self)

        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Deaf))
        self.addCleanup(port.stopListening)
        mine = await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port), Protocol())
        deaf = await theirs
        size = 32 << 20
        mine.transport.write(bytes(size))
        while not queued_bytes(mine.transport) or queued_bytes(mine.transport) == size:
            await deferLater(reactor, 0.01)
        unsent = queued_bytes(mine.transport)
        assert unsent is not None
        self.assertLess(unsent, held_bytes(mine.transport))
        self.assertEqual(held_bytes(mine.transport), size)
        if mine.transport.offset > size // 2:
            shed_sent_bytes(mine.transport)
            self.assertEqual(held_bytes(mine.transport), unsent)
        mine.transport.dataBuffer, mine.transport.offset = bytes(1 << 20), 900_000
        shed_sent_bytes(mine.transport)
        self.assertEqual((held_bytes(mine.transport), queued_bytes(mine.transport)), ((1 << 20) - 900_000,) * 2)
        mine.transport.offset = 100_000  # A part of what is left was sent when the connection was lost.
        forget_unsent(mine.transport)
        self.assertEqual((held_bytes(mine.transport), queued_bytes(mine.transport)), (0, 0))
        lost: list[Deferred[None]] = [Deferred(), Deferred()]
        for one, done in zip((mine, deaf), lost, strict=True):
            one.connectionLost = lambda reason, done=done: done.callback(None)
        mine.transport.abortConnection()
        deaf.transport.resumeProducing()
        for done in lost:
            await done

    @asynchronous
    async def test_a_client_that_closes_with_unread_data_loses_nothing_it_sent(self) -> None:
        """A close with unread data would reset the connection, and the kernel would drop what it has not sent."""
        ends = [Frames(), Frames()]
        lost: list[Deferred[None]] = [Deferred(), Deferred()]
        for end, done in zip(ends, lost, strict=True):
            self.patch(end, "link_lost", lambda reason, done=done: done.callback(None))
        turn = TurnFlush(reactor)

        def serve() -> RecordLink:
            link = RecordLink(reactor, turn, XKHandshake(KEYS["S"]), lambda remote: ends[1])
            link.is_server_side = True
            return link

        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(serve))
        self.addCleanup(port.stopListening)
        client = RecordLink(
            reactor,
            turn,
            XKHandshake(KEYS["A"], KEYS["S"].public),
            lambda remote: ends[0],
        )
        await connectProtocol(TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port), client)
        while ends[0].link is None or ends[1].link is None:
            await deferLater(reactor, 0)
        server = ends[1].link
        client.pause_reading()
        server.pause_reading()
        server.send(b"there" * 10_000)
        client.send(b"back." * 200_000)
        client.close()
        while client.queued():
            await deferLater(reactor, 0)
        for _ in range(3):  # By then a socket without unsent bytes would be closed.
            await deferLater(reactor, 0)
        server.resume_reading()
        await lost[0]
        await lost[1]
        self.assertEqual(len(ends[1].frames), 200_000)


class IdleTests(SynchronousTestCase):
    """Memory of links that wait."""

    def test_the_attributes_of_links_share_their_names(self) -> None:
        """With more than thirty names, Python gives each link a dictionary of 1.5 KiB."""
        clock = Clock()
        turn = TurnFlush(clock)
        client = RecordLink(clock, turn, XKHandshake(KEYS["A"], KEYS["S"].public), lambda remote: Frames())
        server = RecordLink(clock, turn, XKHandshake(KEYS["S"]), lambda remote: Frames())
        pump = iosim.connect(server, iosim.makeFakeServer(server), client, iosim.makeFakeClient(client), greet=False)
        pump.flush()
        self.assertTrue(client._up and server._up)
        for link in (client, server):
            self.assertLess(len(vars(link)), 25)
            self.assertEqual(link._held, ())

    def test_an_empty_queue_of_received_data_is_given_back(self) -> None:
        clock = Clock()

        class Once(Frames):
            """User that leaves its first frame for the next turn."""

            def frames_received(self, buffer: bytearray, end: int) -> int:
                if not self.frames:
                    self.frames.append(b"")
                    self.link.note_frames_left()
                    return 0
                return super().frames_received(buffer, end)

        user = Once()
        link = PlainLink(clock, TurnFlush(clock), JSONHandshake(KEYS["A"]), lambda remote: user)
        user.link = link
        link._up = True
        link._user = user
        link.dataReceived(b"frame")
        link.dataReceived(b"later")
        self.assertEqual(len(link._held), 1)
        clock.pump([0, 0, 0])
        self.assertEqual((user.frames[1:], link._held), ([b"frame", b"later"], ()))
