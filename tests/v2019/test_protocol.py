"""Server and client protocols joined in memory, with one Clock."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import EventLoggingObserver, StringTransport
from twisted.logger import globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import (
    CloseReason,
    DmsgTimeout,
    DropReason,
    SendBufferFull,
    TransportClosed,
    TransportRefused,
)
from dmsg.keys import SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links import records as records_module
from dmsg.net.links.acceptor import MAX_NOTIFIED
from dmsg.net.links.records import RecordLink
from dmsg.net.streams.address import DmsgAddress, StreamLost, StreamTimeout
from dmsg.net.streams.producers import SEND_HIGH_WATER
from dmsg.noise.xk import XKHandshake
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import WINDOW_BYTES
from dmsg.v2019.protocol import STALL_GRACE, ServerFactory
from dmsg.v2019.session import ClientSession
from tests.net.test_own_pauses import let_pause, pass_time
from tests.support import KEYS, SERVER_KEY, Accepting, MemoryNetwork, Producer, Recorder


class NetworkCase(SynchronousTestCase):
    """A server and the clients A and B; B accepts."""

    def setUp(self) -> None:
        self.network = MemoryNetwork()
        self.accepting = Accepting()
        self.a = self.network.client(KEYS["A"])
        self.b = self.network.client(KEYS["B"], self.accepting)

    def open(self, factory: Any = None) -> tuple[Any, Any]:
        """A transport from A to B: both protocols."""
        opening = self.a.open(KEYS["B"].public, factory or Accepting())
        self.network.settle()
        return self.successResultOf(opening), self.accepting.built[-1]


class TransportTests(NetworkCase):
    """Transports as an application uses them."""

    def test_bytes_both_ways(self) -> None:
        one, two = self.open()
        one.transport.write(b"to b")
        two.transport.writeSequence([b"to", b" a"])
        self.network.settle()
        self.assertEqual((one.data, two.data), (b"to a", b"to b"))

    def test_transports_have_both_addresses(self) -> None:
        one, two = self.open()
        a, b = DmsgAddress(KEYS["A"].public), DmsgAddress(KEYS["B"].public)
        self.assertEqual((one.transport.getHost(), one.transport.getPeer()), (a, b))
        self.assertEqual((two.transport.getHost(), two.transport.getPeer()), (b, a))

    def test_send_fires_after_the_peer_has_the_data(self) -> None:
        one, two = self.open()
        sending = one.transport.send(b"x" * 200_000)
        self.assertNoResult(sending)
        self.network.settle()
        self.successResultOf(sending)
        self.assertEqual(two.data, b"x" * 200_000)

    def test_sends_do_not_wait_for_each_other(self) -> None:
        """The reference's stop-and-wait is not copied: all leave in one turn, in one record."""
        one, two = self.open()
        sendings = [one.transport.send(b"%d" % number) for number in range(50)]
        before = self.a.link._sealer.sequence  # type: ignore[attr-defined]
        self.network.settle()
        self.assertEqual(self.a.link._sealer.sequence, before + 1)  # type: ignore[attr-defined]
        for sending in sendings:
            self.successResultOf(sending)
        self.assertEqual(two.data, b"".join(b"%d" % number for number in range(50)))

    def test_an_empty_send_measures_without_delivery(self) -> None:
        one, two = self.open()
        sending = one.transport.send(b"")
        self.network.settle()
        self.successResultOf(sending)
        self.assertEqual(two.received, [])

    def test_send_with_a_deadline(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        one.transport.write(bytes(70_000))
        sending = one.transport.send(b"x", timeout=3)
        self.network.settle()
        self.network.clock.advance(3)
        self.failureResultOf(sending, DmsgTimeout)
        two.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(len(two.data), 70_001)

    def test_small_writes_are_joined(self) -> None:
        one, two = self.open()
        for _ in range(1000):
            one.transport.write(b"tiny")
        self.network.settle()
        self.assertEqual(two.received, [b"tiny" * 1000])

    def test_requests_without_a_listener_are_refused(self) -> None:
        self.open()
        refused = self.b.open(KEYS["A"].public, Accepting())
        self.network.settle()
        error = self.failureResultOf(refused, TransportRefused).value
        self.assertEqual(error.reason, CloseReason.REFUSED)

    def test_requests_to_absent_clients_fail(self) -> None:
        refused = self.a.open(KEYS["C"].public, Accepting())
        self.network.settle()
        self.assertEqual(self.failureResultOf(refused, TransportRefused).value.reason, CloseReason.NO_SUCH_PEER)

    def test_a_pause_of_this_process_withdraws_no_request(self) -> None:
        """The answer has arrived, but this process has not read it when its timers run."""
        let_pause(self.network.clock)
        quiet = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        opening = self.a.open(KEYS["C"].public, Accepting(), timeout=2)
        self.network.settle()
        self.network.clock.advance(20)
        pass_time(self.network.clock, 1.9)
        self.assertNoResult(opening)
        pass_time(self.network.clock, 0.2)
        self.failureResultOf(opening, DmsgTimeout)

    def test_requests_without_an_answer_time_out(self) -> None:
        quiet = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        opening = self.a.open(KEYS["C"].public, Accepting(), timeout=2)
        self.network.settle()
        self.network.clock.advance(2)
        self.failureResultOf(opening, DmsgTimeout)
        self.network.settle()
        self.assertEqual((self.a.transports, self.network.factory.relay.route_count), (0, 0))

    def test_cancelling_an_open(self) -> None:
        opening = self.a.open(KEYS["B"].public, Accepting())
        opening.addErrback(lambda failure: None)
        opening.cancel()
        self.network.settle()
        self.assertEqual((self.a.transports, self.b.transports), (0, 0))

    def test_a_client_can_open_a_transport_to_itself(self) -> None:
        mine = Accepting()
        both = self.network.client(KEYS["C"], mine)
        opening = both.open(KEYS["C"].public, Accepting())
        self.network.settle()
        one, two = self.successResultOf(opening), mine.built[0]
        cast(Any, one).transport.write(b"self")
        self.network.settle()
        self.assertEqual(two.data, b"self")
        cast(Any, one).transport.loseConnection()
        self.network.settle()
        self.assertEqual(both.transports, 0)


class EndTests(NetworkCase):
    """Ways in which a transport ends."""

    def test_lose_connection_delivers_written_data(self) -> None:
        one, two = self.open()
        one.transport.write(b"x" * 2_000_000)
        sending = one.transport.send(b"last")
        one.transport.loseConnection()
        self.assertTrue(one.transport.disconnecting)
        self.network.settle()
        self.successResultOf(sending)
        self.assertEqual(len(two.data), 2_000_004)
        for side in (one, two):
            self.assertTrue(side.lost.check(ConnectionDone))
        self.assertEqual((self.a.transports, self.b.transports, self.network.factory.relay.route_count), (0, 0, 0))

    def test_lose_connection_waits_no_longer_than_the_linger(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        one.transport.write(bytes(100_000))
        one.transport.write(bytes(100_000))
        one.transport.loseConnection()
        self.network.settle()
        self.assertIsNone(one.lost)
        self.network.clock.advance(10)
        self.network.settle()
        self.assertTrue(one.lost.check(ConnectionDone))
        self.assertIsNone(two.lost)
        two.transport.resumeProducing()
        self.assertEqual(len(two.data), 200_000)
        self.assertTrue(two.lost.check(ConnectionDone))

    def test_a_send_of_more_than_a_window_waits_for_all_acks(self) -> None:
        """The send still waits if everything that fits the window was acknowledged before the rest was sent."""
        one, two = self.open()
        sending = one.transport.send(bytes(3 * WINDOW_BYTES))
        two.transport.pauseProducing()
        self.network.settle()
        self.assertNoResult(sending)
        two.transport.resumeProducing()
        self.network.settle()
        self.successResultOf(sending)

    def test_unsent_data_is_an_unclean_end(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        one.transport.write(bytes(2 * WINDOW_BYTES))
        one.transport.loseConnection()
        self.network.settle()
        self.network.clock.advance(10)
        self.network.settle()
        two.transport.resumeProducing()
        self.assertTrue(one.lost.check(StreamTimeout))
        self.assertEqual(two.lost.value.close_reason, CloseReason.TIMEOUT)

    def test_aborting_ends_both_sides(self) -> None:
        one, two = self.open()
        sending = one.transport.send(bytes(10))
        one.transport.abortConnection()
        self.network.settle()
        self.failureResultOf(sending, TransportClosed)
        self.assertTrue(one.lost.check(ConnectionAborted))
        self.assertTrue(two.lost.check(StreamLost))
        self.assertEqual(two.lost.value.close_reason, CloseReason.ABORTED)

    def test_calls_after_the_end_fail(self) -> None:
        one, two = self.open()
        one.transport.loseConnection()
        self.network.settle()
        one.transport.write(b"x")
        one.transport.loseConnection()
        one.transport.abortConnection()
        self.failureResultOf(one.transport.send(b"x"), TransportClosed)
        self.network.settle()
        self.assertEqual(two.data, b"")

    def test_a_remote_close_fails_pending_sends(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        one.transport.write(bytes(70_000))
        sending = one.transport.send(bytes(10))
        self.network.settle()
        two.transport.abortConnection()
        self.network.settle()
        self.failureResultOf(sending, TransportClosed)
        self.assertTrue(one.lost.check(StreamLost))

    def test_a_lost_link_ends_its_transports(self) -> None:
        one, two = self.open()
        sending = one.transport.send(b"x")
        self.a.link.transport.loseConnection()  # type: ignore[attr-defined]
        self.network.settle()
        self.failureResultOf(sending, TransportClosed)
        self.assertEqual(one.lost.value.close_reason, CloseReason.PEER_DISCONNECTED)
        self.assertEqual(two.lost.value.close_reason, CloseReason.PEER_DISCONNECTED)
        self.successResultOf(self.a.lost)
        self.failureResultOf(self.a.open(KEYS["B"].public, Accepting()), TransportClosed)

    def test_a_lost_link_fails_pending_opens(self) -> None:
        quiet = RawClient(KEYS["C"], SERVER_KEY.public)
        self.network.join(quiet)
        self.network.settle()
        opening = self.a.open(KEYS["C"].public, Accepting())
        self.network.settle()
        self.a.link.transport.loseConnection()  # type: ignore[attr-defined]
        self.network.settle()
        self.failureResultOf(opening, TransportClosed)
        self.assertEqual(self.a.transports, 0)

    def test_a_bug_of_the_application_ends_its_own_transport_only(self) -> None:
        class Broken(Recorder):
            def dataReceived(self, data: bytes) -> None:
                raise ValueError("a bug")

        healthy, other = self.open()
        self.accepting.protocol = Broken
        one, two = self.open()
        one.transport.write(b"x")
        self.network.settle()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertTrue(two.lost.check(ValueError))
        self.assertEqual(one.lost.value.close_reason, CloseReason.ABORTED)
        healthy.transport.write(b"still here")
        self.network.settle()
        self.assertEqual(other.data, b"still here")

    def test_a_factory_that_fails_refuses(self) -> None:
        def broken() -> Protocol:
            raise ValueError("a bug")

        self.accepting.protocol = broken
        opening = self.a.open(KEYS["B"].public, Accepting())
        self.network.settle()
        self.failureResultOf(opening, TransportRefused)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_closing_a_session_closes_its_transports(self) -> None:
        one, two = self.open()
        self.a.close()
        self.network.settle()
        self.assertTrue(two.lost.check(StreamLost))
        self.assertIsNotNone(one.lost)


class FlowTests(NetworkCase):
    """Producers and consumers, windows and withheld ACKs."""

    def test_a_paused_reader_stops_the_sender(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        for _ in range(100):
            one.transport.write(bytes(50_000))
        self.network.settle()
        buffered = sum(len(data) for data in two.transport._unread)
        self.assertLess(buffered, WINDOW_BYTES + 130_000)
        self.assertEqual(two.data, b"")
        two.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(len(two.data), 5_000_000)

    def test_a_push_producer_is_paused_and_resumed(self) -> None:
        one, two = self.open()
        producer = Producer()
        one.transport.registerProducer(producer, True)
        two.transport.pauseProducing()
        one.transport.write(bytes(WINDOW_BYTES + 2 * SEND_HIGH_WATER))
        self.network.settle()
        self.assertEqual(producer.told, ["pause"])
        two.transport.resumeProducing()
        self.network.settle()
        self.assertEqual(producer.told, ["pause", "resume"])
        two.transport.abortConnection()
        self.network.settle()
        self.assertEqual(producer.told, ["pause", "resume", "stop"])

    def test_a_pull_producer_is_asked_when_there_is_room(self) -> None:
        one, two = self.open()

        class Pull(Producer):
            left = 20

            def resumeProducing(self) -> None:
                if self.left:
                    self.left -= 1
                    one.transport.write(bytes(30_000))
                else:
                    one.transport.unregisterProducer()
                    one.transport.loseConnection()

        one.transport.registerProducer(Pull(), False)
        self.network.settle()
        self.assertEqual(len(two.data), 600_000)
        self.assertTrue(two.lost.check(ConnectionDone))

    def test_a_second_producer_is_refused(self) -> None:
        one, _ = self.open()
        one.transport.registerProducer(Producer(), True)
        self.assertRaises(RuntimeError, one.transport.registerProducer, Producer(), True)

    def test_a_sender_that_never_waits_is_stopped(self) -> None:
        one, two = self.open()
        two.transport.pauseProducing()
        block = bytes(16 * 1024 * 1024)
        for _ in range(4):
            one.transport.write(block)
        self.failureResultOf(one.transport.send(block), SendBufferFull)
        one.transport.write(block)
        self.assertTrue(one.lost.check(ConnectionAborted))

    def test_pausing_inside_data_received(self) -> None:
        class Sipping(Recorder):
            def dataReceived(self, data: bytes) -> None:
                super().dataReceived(data)
                assert self.transport is not None
                self.transport.pauseProducing()  # type: ignore[attr-defined]

        self.accepting.protocol = Sipping
        one, two = self.open()
        for number in range(5):
            one.transport.send(b"%d" % number)
        self.network.settle()
        self.assertEqual(two.data, b"0")
        for number in range(1, 5):
            two.transport.resumeProducing()
            self.assertEqual(len(two.data), number + 1)

    def test_a_pause_of_this_process_is_not_the_stall_of_a_client(self) -> None:
        """The server has not written during the pause, so the client still has its time."""
        one, _ = self.open()
        relay, clock = self.network.factory.relay, self.network.clock
        let_pause(clock)
        peer = relay.newest[bytes(KEYS["B"].public)]
        relay.congest(peer)
        one.transport.write(b"data")
        self.network.settle()
        self.assertEqual((len(peer.pausing), peer.stalled), (1, False))
        pass_time(clock, 0.1)
        clock.advance(60.0)
        self.assertEqual((len(peer.pausing), peer.stalled), (1, False))
        pass_time(clock, STALL_GRACE)
        self.assertEqual((len(peer.pausing), peer.stalled), (0, True))

    def test_the_stall_of_one_transport_does_not_hold_another(self) -> None:
        slow_one, slow_two = self.open()
        one, two = self.open()
        slow_two.transport.pauseProducing()
        slow_one.transport.write(bytes(5_000_000))
        one.transport.write(b"quick")
        self.network.settle()
        self.assertEqual(two.data, b"quick")


class HandshakeTests(SynchronousTestCase):
    """Connections that never become one."""

    def setUp(self) -> None:
        self.network = MemoryNetwork(max_handshakes=5, handshake_timeout=10.0)
        self.drops = self.network.factory.relay.drops

    def _silent(self) -> tuple[Any, StringTransport]:
        link = self.network.factory.buildProtocol(None)
        assert link is not None
        transport = StringTransport()
        link.makeConnection(transport)
        return link, transport

    def test_silence_is_ended_and_counted(self) -> None:
        link, transport = self._silent()
        self.network.clock.advance(9.9)
        self.assertFalse(transport.disconnecting or transport.disconnected)
        self.network.clock.advance(0.1)
        self.assertEqual(self.drops[DropReason.HANDSHAKE_TIMEOUT], 1)
        self.assertEqual(self.network.factory.handshakes, 0)

    def test_51_bytes_of_a_bad_key(self) -> None:
        """Section 7.1a: the reference's process ends."""
        link, transport = self._silent()
        link.dataReceived(b"\0\x31" + bytes(49))
        self.assertEqual(self.drops[DropReason.HANDSHAKE_FAILED], 1)
        link.connectionLost()
        self.assertEqual(sum(self.drops.values()), 1)
        self.network.client(KEYS["A"])

    def test_silent_connections_do_not_exclude_others(self) -> None:
        """Section 7.2: there each delays every other client by ten seconds."""
        silent = [self._silent() for _ in range(20)]
        self.assertEqual(self.drops[DropReason.HANDSHAKE_EVICTED], 15)
        self.network.client(KEYS["A"])
        self.assertEqual(self.network.factory.handshakes, 4)
        for link, _ in silent:
            link.connectionLost()
        self.assertEqual(self.network.factory.handshakes, 0)
        self.assertEqual(self.drops[DropReason.HANDSHAKE_ABANDONED], 4)

    def test_of_the_place_with_most(self) -> None:
        """A slow client elsewhere keeps its place, and in a place of many the one that has spoken goes last."""
        factory = self.network.factory
        links = []
        for number, host in enumerate(("198.51.100.7", *["203.0.113.1"] * 4)):
            link = factory.buildProtocol(IPv4Address("TCP", host, 1000 + number))
            link.makeConnection(StringTransport())
            links.append(link)
        spoken = XKHandshake(KEYS["A"], SERVER_KEY.public)
        links[1].dataReceived(spoken.data_to_send())
        self.assertTrue(links[1].has_spoken)
        for number in range(3):
            factory.buildProtocol(IPv4Address("TCP", "203.0.113.1", 2000 + number))
        self.assertEqual(self.drops[DropReason.HANDSHAKE_EVICTED], 3)
        self.assertEqual([link.ended_for is None for link in links], [True, True, False, False, False])

    def test_of_many_places_alike(self) -> None:
        """A client that has sent a valid request keeps its place before all others, at whatever address."""
        factory = self.network.factory
        slow = factory.buildProtocol(IPv4Address("TCP", "198.51.100.7", 1))
        slow.makeConnection(StringTransport())
        slow.dataReceived(XKHandshake(KEYS["A"], SERVER_KEY.public).data_to_send())
        silent = []
        for number in range(30):
            link = factory.buildProtocol(IPv4Address("TCP", f"203.0.113.{number}", 1))
            link.makeConnection(StringTransport())
            silent.append(link)
        self.assertIsNone(slow.ended_for)
        self.assertEqual([link.ended_for is None for link in silent], [False] * 26 + [True] * 4)

    def test_connections_are_bounded(self) -> None:
        self.network.factory.limits = Limits(max_connections=1)
        observer = EventLoggingObserver.createWithCleanup(cast(Any, self), globalLogPublisher)
        first = self.network.client(KEYS["A"])
        told = min(MAX_NOTIFIED, self.network.factory._counts._max_handshakes)
        for number in range(told):
            self.assertIsNotNone(self.network.factory.buildProtocol(None), number)
        self.assertIsNone(self.network.factory.buildProtocol(None))
        self.assertEqual(self.drops[DropReason.TOO_MANY_CONNECTIONS], told + 1)
        self.assertEqual(self.drops[DropReason.HANDSHAKE_EVICTED], 0)
        said = [event for event in observer if "server is full" in event.get("log_format", "")]
        self.assertEqual(len(said), 1)
        self.assertEqual(self.network.factory.available_connections, 0)
        first.close()
        self.network.settle()
        self.network.client(KEYS["B"])

    def test_draining_notifies_clients(self) -> None:
        accepting = Accepting()
        a = self.network.client(KEYS["A"])
        self.network.client(KEYS["B"], accepting)
        opening = a.open(KEYS["B"].public, Accepting())
        self.network.settle()
        one = self.successResultOf(opening)
        drained = self.network.factory.drain()
        self.assertNoResult(drained)
        self.network.settle()
        self.successResultOf(drained)
        self.assertEqual(cast(Any, one).lost.value.close_reason, CloseReason.SHUTTING_DOWN)
        self.assertIsNone(self.network.factory.buildProtocol(None))
        self.assertEqual(self.drops[DropReason.DRAINING], 1)

    def test_a_link_ends_before_its_nonces_repeat(self) -> None:
        accepting = Accepting()
        a = self.network.client(KEYS["A"])
        self.network.client(KEYS["B"], accepting)
        opening = a.open(KEYS["B"].public, Accepting())
        self.network.settle()
        one = self.successResultOf(opening)
        a.link._sealer.sequence = 2**32 - records_module.NONCE_RESERVE  # type: ignore[attr-defined]
        cast(Any, one).transport.write(b"last words")
        self.network.settle()
        self.assertEqual(accepting.built[0].data, b"last words")
        self.assertFalse(a.connected)

    def test_no_ok_frame(self) -> None:
        """The reference's client waits for ever."""
        clock = Clock()
        turn = TurnFlush(clock)
        link = RecordLink(
            clock,
            turn,
            XKHandshake(KEYS["A"], SERVER_KEY.public),
            lambda remote: ClientSession(clock, turn, KEYS["A"].public, remote),
        )
        transport = StringTransport()
        link.makeConnection(transport)
        clock.advance(10)
        self.assertEqual(link.ended_for, DropReason.HANDSHAKE_TIMEOUT)


class KeyTests(SynchronousTestCase):
    """Connections with one and the same key."""

    def test_the_newest_wins_and_outlives_the_older(self) -> None:
        network = MemoryNetwork()
        first, second = Accepting(), Accepting()
        old = network.client(KEYS["B"], first)
        a = network.client(KEYS["A"])
        on_old = a.open(KEYS["B"].public, Accepting())
        network.settle()
        network.client(KEYS["B"], second)
        on_new = a.open(KEYS["B"].public, Accepting())
        network.settle()
        self.assertEqual((len(first.built), len(second.built)), (1, 1))
        cast(Any, self.successResultOf(on_old)).transport.write(b"old")
        cast(Any, self.successResultOf(on_new)).transport.write(b"new")
        network.settle()
        self.assertEqual((first.built[0].data, second.built[0].data), (b"old", b"new"))
        old.close()
        network.settle()
        again = a.open(KEYS["B"].public, Accepting())
        network.settle()
        self.successResultOf(again)
        self.assertEqual(len(second.built), 2)

    def test_a_server_needs_no_secret_of_its_clients(self) -> None:
        factory = ServerFactory(Clock(), SecKey.generate())
        self.assertEqual(factory.available_connections, factory.limits.max_connections)
