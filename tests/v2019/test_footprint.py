"""Memory of a client for waiting streams; ended streams leave nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from twisted.internet.protocol import Factory

from dmsg.base.buffers import NO_QUEUE, NO_TABLE
from dmsg.errors import CloseReason
from dmsg.net.streams.address import StreamLost
from dmsg.streams import streams as streams_module
from dmsg.streams.streams import STALL_CHECK
from tests.support import Recorder
from tests.v2019.test_streams import ResumeCase


class Forgetful(Factory):
    """Keeps weak references to its protocols and their transports."""

    noisy = False

    def __init__(self) -> None:
        self.transports: list[Any] = []
        self.protocols: list[Any] = []

    def buildProtocol(self, addr: Any) -> Any:
        factory = self

        class Noting(Recorder):
            def connectionMade(self) -> None:
                factory.transports.append(weakref.ref(self.transport))

        protocol = Noting()
        self.protocols.append(weakref.ref(protocol))
        return protocol


class FreedTests(ResumeCase):
    """The memory of a stream is free when it ends: the cycle collector may not look for long."""

    def setUp(self) -> None:
        super().setUp()
        self.there = self.listeners[7] = Forgetful()
        self.here = Forgetful()
        self.network.settle()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def begin(self) -> tuple[Any, Any]:
        self.a.open(self.sessions["B"].core.local, self.here, port=7, secure=True)
        self.network.settle()
        one, two = (factory.transports[-1]() for factory in (self.here, self.there))
        one.write(b"x" * 100_000)
        self.network.settle()
        return one, two

    def assert_freed(self) -> None:
        self.network.settle()
        for factory in (self.here, self.there):
            alive = [ref() for ref in [*factory.transports, *factory.protocols] if ref() is not None]
            self.assertEqual(alive, [])

    def test_a_closed_stream_is_freed(self) -> None:
        one, _ = self.begin()
        one.loseConnection()
        del one, _
        self.assert_freed()

    def test_a_stream_aborted_by_the_peer_is_freed(self) -> None:
        _, two = self.begin()
        two.abortConnection()
        del _, two
        self.assert_freed()

    def test_a_stream_that_moved_and_closed_is_freed(self) -> None:
        one, _ = self.begin()
        self.cut("A")
        self.find()
        self.assertEqual(self.streams["A"].resumed, 1)
        one.loseConnection()
        del one, _
        self.assert_freed()

    def test_a_stream_that_was_given_up_is_freed(self) -> None:
        self.begin()
        self.cut("A")
        self.wanted.clear()
        self.network.clock.advance(self.resume_timeout)
        self.assert_freed()


class WaitingTests(ResumeCase):
    """Streams that have no transport."""

    def test_suspended_streams_hold_no_keys_queues_or_timers(self) -> None:
        pairs = [self.open() for _ in range(20)]
        pairs[0][0].transport.write(b"x" * 1000)
        self.network.settle()
        before = len(self.network.clock.getDelayedCalls())
        self.cut("A")
        self.assertEqual((self.streams["A"].suspended, self.streams["B"].suspended), (20, 20))
        # Each end has one timer.
        self.assertLessEqual(len(self.network.clock.getDelayedCalls()), before + 2)
        for protocol in (one for pair in pairs for one in pair):
            stream = protocol.transport
            self.assertIs(stream._outbox.waiting, NO_QUEUE)
            self.assertIs(stream._unread, NO_QUEUE)
            self.assertIs(stream.end.in_flight, NO_QUEUE)
            self.assertIs(stream._outbox.tickets, NO_TABLE)
            self.assertIs(stream.end.answers, NO_TABLE)
            self.assertIsNone(stream._deadlines)
            self.assertRaises(AssertionError, stream.end.seal_data, b"", None)
        two = [pair[1].transport for pair in pairs]
        self.assertEqual(len({id(one.getPeer()) for one in two}), 1)
        self.assertEqual(len({id(one.end._sent_hash) for one in two}), 1)
        self.assertEqual(len({id(one.end._received_hash) for one in two}), 2)
        pairs[0][1].transport.write(b"later")
        self.find()
        self.assertEqual(pairs[0][0].data, b"later")

    def test_incoming_streams_that_do_not_resume_end_first(self) -> None:
        """The streams were opened by others; the end that searches for a transport continues its search."""
        self.patch(streams_module, "CROWD", 5)
        self.patch(streams_module, "CROWD_TIME", 10.0)
        pairs = [self.open() for _ in range(8)]
        self.cut("A")
        self.network.clock.advance(STALL_CHECK)
        self.assertEqual(self.streams["B"].suspended, 8)
        for _ in range(2):
            self.network.clock.advance(STALL_CHECK)
        self.assertEqual((self.streams["A"].suspended, self.streams["B"].suspended), (8, 5))
        ended = [two.lost for _, two in pairs if two.lost is not None]
        self.assertEqual(ended, [two.lost for _, two in pairs[:3]])
        self.assertTrue(all(one.check(StreamLost) for one in ended))
        self.assertEqual(ended[0].value.close_reason, CloseReason.TOO_MANY_TRANSPORTS)
        self.find()
        self.assertEqual(self.streams["B"].suspended, 0)
        self.assertEqual([one.lost is not None for one, _ in pairs], [True] * 3 + [False] * 5)

    def test_streams_that_hold_many_bytes_end_if_their_peer_does_not_come_back(self) -> None:
        self.patch(streams_module, "CROWD_BYTES", 100_000)
        self.patch(streams_module, "CROWD_TIME", 10.0)
        pairs = [self.open() for _ in range(4)]
        self.cut("A")
        for _, two in pairs:
            two.transport.write(bytes(40_000))
        self.network.clock.advance(STALL_CHECK)
        self.assertEqual(self.streams["B"].suspended, 4)
        for _ in range(2):
            self.network.clock.advance(STALL_CHECK)
        self.assertEqual(self.streams["B"].suspended, 2)
        self.assertEqual([two.lost is not None for _, two in pairs], [True, True, False, False])
        self.find()
        self.assertEqual([len(one.data) for one, _ in pairs[2:]], [40_000] * 2)

    def test_streams_that_hold_little_do_not_end_for_those_that_hold_much(self) -> None:
        self.patch(streams_module, "CROWD_BYTES", 100_000)
        self.patch(streams_module, "CROWD_TIME", 10.0)
        pairs = [self.open() for _ in range(5)]
        self.cut("A")
        for (_, two), size in zip(pairs, (1, 60_000, 0, 20_000, 60_000), strict=True):
            two.transport.write(bytes(size))
        for _ in range(3):
            self.network.clock.advance(STALL_CHECK)
        self.assertEqual([two.lost is not None for _, two in pairs], [False, True, False, False, False])
        self.find()
        self.assertEqual([len(one.data) for one, _ in pairs], [1, 0, 0, 20_000, 60_000])

    def test_streams_that_were_just_suspended_do_not_count(self) -> None:
        """An attacker who leaves new streams all the time does not end the streams of others."""
        self.patch(streams_module, "CROWD", 2)
        self.patch(streams_module, "CROWD_BYTES", 100_000)
        self.patch(streams_module, "CROWD_TIME", 10.0)
        _, honest = self.open()
        self.cut("A")
        honest.transport.write(bytes(40_000))
        self.network.clock.advance(STALL_CHECK + 1)
        self.reconnect("A")
        others = [self.open()[1] for _ in range(3)]
        self.cut("A")
        for other in others:
            other.transport.write(bytes(60_000))
        self.network.clock.advance(STALL_CHECK + 1)
        self.assertEqual([one.lost is not None for one in (honest, *others)], [False] * 4)

    def test_the_only_stream_of_a_sleeping_peer_waits_for_the_whole_time(self) -> None:
        self.patch(streams_module, "CROWD_BYTES", 10_000)
        self.patch(streams_module, "CROWD_TIME", 10.0)
        one, two = self.open()
        self.cut("A")
        two.transport.write(bytes(40_000))
        for _ in range(3):
            self.network.clock.advance(STALL_CHECK)
        self.find()
        self.assertEqual(len(one.data), 40_000)
