"""Memory of a client for its peers: limits of stalled streams, and the streams that are ended first."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.apps.splice import SplicedConnection, SpliceFactory
from dmsg.base.memory import OLD_AFTER, Memory
from dmsg.errors import CloseReason
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress, StreamLost
from dmsg.net.streams.outbox import LARGEST_PIECE
from dmsg.net.streams.stream import UNREAD_STREAMS
from dmsg.streams import streams as streams_module
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.holdings import CHECK_INTERVAL, STREAM_SIZE, StreamHoldings
from dmsg.streams.streams import PROBE_AFTER, STALL_CHECK, STALL_TIME
from tests.support import KEYS, Accepting, asynchronous, some
from tests.v2019.secure_support import SecureCase


class WindowTests(SecureCase):
    """A peer that names a window as large as can be, and acknowledges nothing."""

    def test_the_senders_own_window_opens_as_acks_come(self) -> None:
        mine, theirs = self.open()
        end = mine.transport.end
        end.peer_window = 2**32 - 1
        relay = self.network.factory.relay
        port = relay.newest[KEYS["A"].public].port
        relay.newest[KEYS["A"].public].port = _Mute(port)
        mine.transport.write(bytes(40 << 20))
        self.network.settle()
        self.assertLessEqual(end.in_flight_bytes, INITIAL_WINDOW + 65536)
        self.assertGreaterEqual(len(theirs.data), INITIAL_WINDOW)
        relay.newest[KEYS["A"].public].port = port
        mine.transport.abortConnection()

    def test_the_sender_limit_grows_as_fast_as_the_receiver_window(self) -> None:
        mine, theirs = self.open()
        mine.transport.write(bytes(8 << 20))
        self.network.settle()
        self.assertEqual(len(theirs.data), 8 << 20)
        self.assertGreater(mine.transport.end.limit, 8 << 20)


class _Mute:
    """A port through which no ACK goes."""

    def __init__(self, port: Any) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        return (lambda data: None) if name == "send" else getattr(self._port, name)


class SwallowedTests(SecureCase):
    """A server forwards all frames but those for an end that only listens."""

    def silence(self, seconds: float) -> None:
        for _ in range(int(seconds / STALL_CHECK)):
            self.network.clock.advance(STALL_CHECK)
            self.network.settle()

    def test_the_opening_end_searches_another_transport(self) -> None:
        searched: list[Any] = []

        def reconnect(stream: Any) -> Deferred[Any]:
            searched.append(stream)
            return Deferred()

        self.streams["A"].reconnect = reconnect
        mine, theirs = self.open()
        theirs.transport.write(b"a download begins")
        self.network.settle()
        relay = self.network.factory.relay
        port = relay.newest[KEYS["A"].public].port
        self.silence(3 * PROBE_AFTER)
        self.assertEqual(searched, [])  # The other end was asked, and has answered.
        relay.newest[KEYS["A"].public].port = _Mute(port)
        theirs.transport.write(b", and goes on")
        self.silence(PROBE_AFTER + STALL_TIME + 3 * STALL_CHECK)
        self.assertEqual(searched, [mine.transport])
        relay.newest[KEYS["A"].public].port = port

    def test_no_probe_is_sent_while_data_moves(self) -> None:
        mine, theirs = self.open()
        sent: list[bool] = []
        mine.transport.probe = lambda: sent.append(True)
        for _ in range(20):
            theirs.transport.write(b"x")
            self.silence(STALL_CHECK)
        self.assertEqual(sent, [])

    def test_an_idle_limit_is_of_the_application(self) -> None:
        """Requests and answers below the application do not count."""
        mine, _ = self.open()
        mine.transport.setIdleTimeout(2.5 * PROBE_AFTER)
        self.silence(2 * PROBE_AFTER)
        self.assertIsNone(mine.lost)
        self.silence(PROBE_AFTER)
        self.assertIsNotNone(mine.lost)


class SuspendedTests(SecureCase):
    """Streams that wait for their peer to come back."""

    def reason(self, protocol: Any) -> int:
        assert protocol.lost is not None and protocol.lost.check(StreamLost)
        return int(protocol.lost.value.close_reason)

    def test_of_one_peer_and_in_all(self) -> None:
        self.patch(streams_module, "MAX_SUSPENDED_OF_PEER", 3)
        self.patch(streams_module, "MAX_SUSPENDED", 4)
        theirs = [self.open()[1] for _ in range(5)]
        self.streams["C"] = self.make_streams(KEYS["C"], {})
        other = self.network.client(KEYS["C"], streams=self.streams["C"])
        for _ in range(2):
            other.open(KEYS["B"].public, Accepting(), port=7, secure=True)
            self.network.settle()
        others = self.listeners[7].built[5:]  # type: ignore[attr-defined]
        self.cut("A")
        self.assertEqual(self.streams["B"].suspended, 3)
        ended = [one for one in theirs if one.lost is not None]
        self.assertEqual([self.reason(one) for one in ended], [CloseReason.TOO_MANY_TRANSPORTS] * 2)
        self.assertEqual(ended, theirs[:2])
        other.link.transport.abortConnection()  # type: ignore[attr-defined]
        self.network.settle()
        # The limit of all streams is exceeded by one, so the stream that has waited longest ends.
        self.assertEqual(self.streams["B"].suspended, 4)
        self.assertEqual([one.lost is None for one in others], [True, True])
        self.assertIsNotNone(theirs[2].lost)
        self.network.clock.advance(self.resume_timeout)
        self.assertEqual((self.streams["B"].suspended, self.streams["B"]._waiting_of), (0, {}))


class AccountTests(SecureCase):
    """The account of a client."""

    def test_streams_that_do_not_read_are_dropped_first(self) -> None:
        memory = Memory(3 * STREAM_SIZE + 2_000_000)
        clock = self.network.clock
        held = StreamHoldings(clock, memory, lambda: self.streams["A"].all)
        held.start()
        self.addCleanup(held.stop)
        stuck, _ = self.open()
        moving, theirs = self.open()
        self.listeners[7].built[0].transport.pauseProducing()  # type: ignore[attr-defined]
        stuck.transport.write(bytes(3_000_000))
        for _ in range(int((OLD_AFTER + 2) / CHECK_INTERVAL)):
            moving.transport.write(bytes(100_000))
            self.network.settle()
            clock.advance(CHECK_INTERVAL)
            self.network.settle()
        self.assertIsNotNone(stuck.lost)
        self.assertIsNone(moving.lost)
        self.assertLess(memory.total, memory.limit)
        self.assertGreater(len(theirs.data), 300_000)

    def test_streams_may_share_a_token(self) -> None:
        """The opener chooses it: no stream is lost sight of for one that comes later with the same."""
        first, _ = self.open()
        second, _ = self.open()
        streams = self.streams["A"]
        before = second.transport.end.token
        streams.closed(second.transport, 0)
        second.transport.end.token = first.transport.end.token
        streams.add(second.transport)
        self.assertIsNone(second.transport.end.token)
        self.assertEqual(streams.all, [first.transport])
        second.transport.end.token = before  # The token belongs to a stream that has ended.
        streams.add(second.transport)
        self.assertIsNone(second.transport.end.token)
        first.transport.abortConnection()
        self.network.settle()

    def test_over_and_not_read(self) -> None:
        """Unread data of an ended stream is counted, and can be dropped."""
        mine, theirs = self.open()
        theirs.transport.pauseProducing()
        mine.transport.write(bytes(100_000))
        self.network.settle()
        mine.transport.abortConnection()
        self.network.settle()
        self.assertIsNone(theirs.lost)
        self.assertIn(theirs.transport, UNREAD_STREAMS)
        self.assertGreater(theirs.transport.held, 60_000)
        transport = theirs.transport
        transport.abortConnection()
        self.assertIsNotNone(theirs.lost)
        self.assertNotIn(transport, UNREAD_STREAMS)

    def test_a_self_paused_producer_is_resumed_at_the_end(self) -> None:
        """An echo pauses its own producer. At the end, nothing else would resume it."""
        mine, theirs = self.open()
        theirs.transport.registerProducer(theirs.transport, True)
        theirs.transport.pauseProducing()
        mine.transport.write(bytes(1000))
        self.network.settle()
        mine.transport.abortConnection()
        self.network.settle()
        self.assertEqual((len(theirs.data), theirs.transport in UNREAD_STREAMS), (1000, False))
        self.assertIsNotNone(theirs.lost)

    def test_acknowledged_parts_of_writes_are_released(self) -> None:
        """Acknowledged parts of a long write are freed; short writes are not kept separately."""
        mine, theirs = self.open()
        theirs.transport.pauseProducing()
        mine.transport.write(bytes(3_000_000))
        self.network.settle()
        self.assertLessEqual(max(len(data) for data, _ in mine.transport._outbox.waiting), LARGEST_PIECE)
        before = len(mine.transport._outbox.waiting)
        for _ in range(10_000):
            mine.transport.write(b"x")
        self.assertLess(len(mine.transport._outbox.waiting) - before, 20)
        sent = mine.transport.send(bytes(1_000_000))
        fired: list[Any] = []
        sent.addCallback(fired.append)
        theirs.transport.resumeProducing()
        self.network.settle()
        self.assertEqual((fired, len(theirs.data)), ([None], 4_010_000))
        self.assertEqual(theirs.data[3_000_000:3_010_000], b"x" * 10_000)
        mine.transport.abortConnection()
        self.network.settle()


class SpliceTests(SynchronousTestCase):
    """A forwarded connection whose other end is away makes room for one that is here."""

    def test_the_one_that_is_away_longest(self) -> None:
        factory = SpliceFactory(lambda made: _never(), max_pairs=2)
        halves = []
        for away in (5.0, 3.0):
            half = factory.buildProtocol(None)
            assert half is not None
            transport = _Transport(half)
            half.makeConnection(transport)
            transport.away_since = away
            halves.append(transport)
        self.assertEqual(factory.pair_count, 2)
        third = factory.buildProtocol(None)
        self.assertIsNotNone(third)
        self.assertEqual(([one.aborted for one in halves], factory.pair_count), ([False, True], 2))
        halves[0].away_since = None
        self.assertIsNone(factory.buildProtocol(None))
        halves[0].has_ended = True
        self.assertIsNotNone(factory.buildProtocol(None))

    def test_a_peer_with_many_connections_keeps_no_other_out(self) -> None:
        factory = SpliceFactory(lambda made: _never(), max_pairs=5)
        greedy, modest = (DmsgAddress(SecKey.generate().public, 0) for _ in range(2))

        def open_one(peer: DmsgAddress) -> _Transport | None:
            half = factory.buildProtocol(peer)
            if half is None:
                return None
            transport = _Transport(half)
            half.makeConnection(transport)
            return transport

        held = [some(open_one(greedy)) for _ in range(5)]
        self.assertIsNone(open_one(greedy))
        self.assertIsNotNone(open_one(modest))
        self.assertIsNotNone(open_one(modest))
        self.assertEqual([one.aborted for one in held], [False, False, False, True, True])
        self.assertIsNone(open_one(modest))  # With three of five it would have more than the other.
        self.assertEqual(factory.pair_count, 5)


class SpliceRoomTests(SecureCase):
    """The same with the streams of a client."""

    def test_a_stream_that_ended_unread_makes_room(self) -> None:
        mine, theirs = self.open()
        factory = SpliceFactory(lambda made: _never(), max_pairs=1)
        half = factory.buildProtocol(None)
        assert half is not None
        half.makeConnection(theirs.transport)  # It is not read until its partner is open.
        self.assertIsNone(factory.buildProtocol(None))
        mine.transport.write(b"unread")
        self.network.settle()
        mine.transport.loseConnection()
        self.network.settle()
        self.assertTrue(theirs.transport.has_ended)
        self.assertIsNotNone(factory.buildProtocol(None))


class SpliceEndTests(TestCase):
    """Real TCP: a service that answers more than is taken, and a stream that ends."""

    @asynchronous
    async def test_an_unread_spliced_connection_is_closed(self) -> None:
        gone: Deferred[None] = Deferred()
        echoes: list[Any] = []

        class Echo(Protocol):
            def connectionMade(self) -> None:
                echoes.append(self)
                self.transport.registerProducer(self.transport, True)  # type: ignore[union-attr]

            def dataReceived(self, data: bytes) -> None:
                self.transport.write(data)  # type: ignore[union-attr]

            def connectionLost(self, reason: Any = None) -> None:
                gone.callback(None)

        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(Echo))
        self.addCleanup(port.stopListening)

        class Stream(StringTransport):
            """Stream that accepts no data, because its peer has named no window."""

            has_ended = False

            def write(self, data: bytes) -> None:
                if self.has_ended:
                    return
                super().write(data)
                if self.producer is not None and len(self.value()) > 100_000:
                    self.producer.pauseProducing()

        service = TCP4ClientEndpoint(reactor, "127.0.0.1", port.getHost().port)
        half = SpliceFactory(service.connect).buildProtocol(None)
        assert isinstance(half, SplicedConnection)
        stream = Stream()
        half.makeConnection(stream)
        while half.partner is None:
            await deferLater(reactor, 0.01)
        sent = 0
        # The loop ends when neither side reads and the kernel's buffers are full. Then the service and its input are
        # both paused.
        stuck = 0
        while stuck < 500:
            if stream.producerState == "producing":
                half.dataReceived(bytes(65536))
                sent += 65536
            waits = stream.producerState == "paused" and echoes[0].transport not in reactor.getReaders()
            stuck = stuck + 1 if waits else 0
            await deferLater(reactor, 0)
        self.assertGreater(sent, 100_000)
        # When the peer closes, its consumer learns it first. Then all earlier data is delivered, and then the stream
        # ends.
        assert stream.producer is not None
        stream.has_ended = True
        stream.producer.stopProducing()
        unread = 12 << 20
        while unread > 0:
            if stream.producerState == "producing":
                half.dataReceived(bytes(65536))
                unread -= 65536
            await deferLater(reactor, 0)
        half.connectionLost(Failure(ConnectionDone()))
        await gone


class _Transport(StringTransport):
    """Transport of a stream, which may be suspended."""

    away_since: float | None = None
    has_ended = False
    aborted = False

    def __init__(self, protocol: Any) -> None:
        super().__init__()
        self._of = protocol

    def abortConnection(self) -> None:
        self.aborted = True
        self._of.connectionLost()


def _never() -> Any:
    return Deferred()
