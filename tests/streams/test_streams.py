"""The table of streams that outlive their transports, by plain calls: waiting streams, searches and evictions."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.timeouts import RESUME_TIMEOUT
from dmsg.errors import CloseReason, DmsgError, TransportRefused
from dmsg.net.streams.address import DmsgAddress
from dmsg.streams import streams as streams_module
from dmsg.streams.core.agreement import Resume
from dmsg.streams.core.budget import BUDGET, Budget
from dmsg.streams.probes import MAX_PROBES, PROBE_TIME, Probes
from dmsg.streams.streams import IDLE_MOVES, IDLE_PAUSE, PROBE_AFTER, STALL_CHECK, STALL_TIME
from dmsg.v2019.transport_streams import TransportStreams
from tests.net.test_own_pauses import let_pause
from tests.support import KEYS

A, B, C = (KEYS[name].public for name in "ABC")


class Carrier:
    """Notes what it is to close."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def leave(self, reason: int) -> None:
        self.left.append(reason)


class Transport:
    def __init__(self) -> None:
        self.carrier = Carrier()


class End:
    """End of a stream, with the methods that the table calls."""

    def __init__(self, token: bytes | None, *, initiator: bool) -> None:
        self.token = token
        self.initiator = initiator
        self.generation = self.idle_moves = 0
        self.moved_at: Any = None
        self.received = self.acknowledged = 0
        self.in_flight: deque[Any] = deque()
        self.in_flight_bytes = 0
        self.transport: Any = Transport()
        self.released = 0
        self.full = 0
        self.answers: dict[Any, Any] = {}

    def detach(self) -> None:
        self.transport = None

    def release(self) -> None:
        self.released += 1
        self.transport = None

    def queue_was_full(self) -> None:
        self.full += 1


class Stream:
    """Stream with the methods that the table calls."""

    def __init__(self, number: int = 1, peer: Any = B, *, initiator: bool = True, token: bool = True) -> None:
        self.end: Any = End(number.to_bytes(16, "big") if token else None, initiator=initiator)
        self.has_ended = False
        self.held = 0
        self.away_since: float | None = None
        self.reasons: list[int] = []
        self.carrier: Any = None
        self.probes = 0
        self.server = None
        self._peer = DmsgAddress(peer)

    @property
    def secure_end(self) -> Any:
        return self.end

    def getPeer(self) -> DmsgAddress:
        return self._peer

    def suspend(self, carrier: Any) -> None:
        self.carrier = carrier

    def carrier_closed(self, reason: int) -> None:
        self.has_ended = True
        self.reasons.append(reason)

    def probe(self) -> None:
        self.probes += 1


class StreamsCase(SynchronousTestCase):
    """A client's table, and searches that this test answers."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.table: Any = TransportStreams(self.clock, KEYS["A"], lambda port: None, lambda stream: None)
        self.searches: list[tuple[Any, Deferred[Any]]] = []
        self.cancelled = 0
        self.table.reconnect = self.reconnect

    def reconnect(self, stream: Any) -> Deferred[Any]:
        def cancel(_: Any) -> None:
            self.cancelled += 1

        searching: Deferred[Any] = Deferred(cancel)
        self.searches.append((stream, searching))
        return searching

    def add(self, number: int = 1, **options: Any) -> Any:
        stream = Stream(number, **options)
        self.table.add(stream)
        return stream

    def assert_empty(self) -> None:
        table = self.table
        self.assertEqual((table._live, table._waiting, table._waiting_of, table._searching), ({}, {}, {}, {}))
        self.assertEqual((table._progress, table._quiet, table.suspended), ({}, {}, 0))


class LossTests(StreamsCase):
    """The transport of a stream is lost."""

    def test_the_opener_searches_another_transport(self) -> None:
        one, other = self.add(1), self.add(2, initiator=False)
        for stream in (one, other):
            self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.assertEqual([stream for stream, _ in self.searches], [one])
        self.assertEqual((self.table.suspended, self.table._waiting_of), (2, {one.getPeer(): 2}))
        self.assertIs(one.end.transport, None)
        # The end has no transport, so its carrier answers without one.
        nowhere = one.carrier
        self.assertFalse(nowhere.may_send())
        self.assertEqual((nowhere.in_flight(), other.carrier.in_flight()), (1, 0))
        one.end.in_flight.extend("abc")
        self.assertEqual(nowhere.in_flight(), 3)
        self.table.note_resumed(one)
        self.searches[0][1].callback(None)
        self.assertEqual((self.table.suspended, self.table.resumed, one.has_ended), (1, 1, False))
        other.carrier.close(CloseReason.UNSPECIFIED)
        self.assertEqual(self.table.suspended, 0)
        self.table.closed(one, 0)
        self.assert_empty()

    def test_streams_without_resumption_end_with_their_transport(self) -> None:
        """The stream has no token, or the client has none, or the reason is final, or one of the ends refuses another
        transport.
        """
        for number, (options, timeout, reason, final, told) in enumerate(
            (
                ({"token": False}, 120.0, 0, False, CloseReason.PEER_DISCONNECTED),
                ({}, 0.0, 0, False, CloseReason.PEER_DISCONNECTED),
                ({}, 120.0, 0, True, 0),
                ({}, 120.0, CloseReason.REFUSED, True, CloseReason.REFUSED),
            )
        ):
            self.table.resume_timeout = timeout
            stream = self.add(number + 1, **options)
            self.table.lost(stream, reason, final=final)
            self.assertEqual((stream.reasons, stream.end.released), ([told], 1))
        self.assertEqual(self.searches, [])
        self.assert_empty()

    def test_a_full_queue_is_remembered(self) -> None:
        one, other = self.add(1), self.add(2)
        self.table.lost(one, CloseReason.QUEUE_FULL, final=False)
        self.table.lost(other, CloseReason.STALLED, final=False)
        self.assertEqual((one.end.full, other.end.full), (1, 0))

    def test_a_finished_stream_is_not_lost_again(self) -> None:
        stream = self.add()
        stream.has_ended = True
        self.table.lost(stream, 0, final=False)
        self.assertEqual((stream.reasons, self.searches, self.table.suspended), ([], [], 0))

    def test_a_search_without_result_ends_the_stream(self) -> None:
        for reason, told in ((CloseReason.STALLED,) * 2, (0, CloseReason.PEER_DISCONNECTED)):
            stream = self.add()
            self.table.lost(stream, reason, final=False)
            self.clock.advance(RESUME_TIMEOUT - 1)
            self.assertFalse(stream.has_ended)
            self.clock.advance(1)
            self.assertEqual(stream.reasons, [told])
            self.assert_empty()
            self.table._ended.clear()
        self.assertEqual(self.cancelled, 2)


class StandingTests(StreamsCase):
    """Streams whose frames are not acknowledged, from one look to the next."""

    def test_stalls_are_not_detected_early(self) -> None:
        stream = self.add()
        stream.end.in_flight.append("frame")
        stream.end.acknowledged = 10**9  # The number of acknowledged bytes exceeds the number of seconds.
        for _ in range(int(STALL_TIME // STALL_CHECK)):
            self.clock.advance(STALL_CHECK)
        self.assertEqual(self.searches, [])
        for _ in range(2):
            self.clock.advance(1.1 * STALL_CHECK)
        self.assertEqual([one for one, _ in self.searches], [stream])

    def test_another_program_s_errors_end_no_stream_that_goes_on(self) -> None:
        stream = self.add()
        self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.table.note_resumed(stream)
        self.searches[0][1].errback(DmsgError("late"))
        self.assertEqual((stream.has_ended, stream.reasons), (False, []))

    def test_a_reason_of_none_is_no_clean_end(self) -> None:
        """The reason 0 is a clean end only if the remote says so, which no server can."""
        for number, (final, told) in enumerate(((False, CloseReason.PEER_DISCONNECTED), (True, 0))):
            stream = self.add(number)
            self.table.lost(stream, CloseReason.STALLED, final=False)
            error = TransportRefused(0)
            error.final = final
            self.searches[-1][1].errback(error)
            self.assertEqual(stream.reasons, [told])


class SearchTests(StreamsCase):
    """Results of the search for another transport."""

    def setUp(self) -> None:
        super().setUp()
        self.stream = self.add()
        self.table.lost(self.stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.searching = self.searches[0][1]

    def test_a_stream_has_a_single_search(self) -> None:
        self.table.migrate(self.stream)
        self.assertEqual(len(self.searches), 1)

    def test_a_refused_resume_ends_the_stream_with_its_reason(self) -> None:
        """The reason is the remote's; 0 is a clean end if the remote says it, and no clean end if a server does."""
        for final, told in ((True, 0), (False, CloseReason.PEER_DISCONNECTED)):
            refused = TransportRefused(CloseReason.UNSPECIFIED, "over")
            refused.reason, refused.final = 0, final
            self.searches[-1][1].errback(refused)
            self.assertEqual(self.stream.reasons, [told])
            self.assert_empty()
            self.table._ended.clear()
            self.stream = self.add()
            self.table.lost(self.stream, CloseReason.PEER_DISCONNECTED, final=False)

    def test_an_internal_error_ends_the_stream_and_is_logged(self) -> None:
        self.searching.errback(ZeroDivisionError())
        self.assertEqual(self.stream.reasons, [CloseReason.NO_SUCH_STREAM])
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assert_empty()

    def test_a_failed_search_is_repeated_after_a_loss(self) -> None:
        """The search was for a better transport, and meanwhile the transport was lost."""
        self.searching.callback(None)
        self.assertEqual(len(self.searches), 2)
        self.table.note_resumed(self.stream)
        self.searches[1][1].callback(None)
        self.assertEqual(len(self.searches), 2)

    def test_finished_streams_are_not_searched_for(self) -> None:
        self.table.closed(self.stream, 0)
        self.assertEqual(self.cancelled, 1)
        self.table.migrate(self.stream)
        self.assertEqual(len(self.searches), 1)
        self.assertFalse(self.table.is_live(self.stream))

    def test_a_client_that_stops(self) -> None:
        """Streams without a transport end, searches for better ways too, and nothing begins."""
        moving = self.add(2)
        self.table.migrate(moving)
        self.assertEqual(len(self.searches), 2)
        self.table.stop()
        self.assertEqual((self.stream.reasons, self.cancelled), ([CloseReason.ABORTED], 2))
        self.assertFalse(moving.has_ended)
        self.table.migrate(moving)
        self.table.lost(moving, CloseReason.PEER_DISCONNECTED, final=False)
        self.assertEqual((len(self.searches), moving.reasons), (2, [CloseReason.PEER_DISCONNECTED]))
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assert_empty()

    def test_only_slow_streams_of_the_opener_migrate(self) -> None:
        for stream in (self.add(3, initiator=False), self.add(4, token=False)):
            self.table.migrate(stream)
        gone = self.add(5)
        gone.has_ended = True
        self.table.migrate(gone)
        ended = self.add(6)
        ended.end = None
        self.table.migrate(ended)
        self.assertEqual(len(self.searches), 1)


class EndedTests(StreamsCase):
    """The reasons of ended streams are kept for a while."""

    def resume(self, stream: Any, generation: int = 1) -> Resume:
        return Resume(stream.end.token, generation, 0, bytes(32))

    def test_ended_tokens_are_remembered_for_a_time(self) -> None:
        stream = self.add(1, initiator=False)
        self.table.closed(stream, CloseReason.TIMEOUT)
        for _ in range(int(RESUME_TIMEOUT // STALL_CHECK)):
            self.assertEqual(self.table.find_offered(self.resume(stream), B), CloseReason.TIMEOUT)
            self.clock.advance(STALL_CHECK)
        for _ in range(2):
            self.clock.advance(STALL_CHECK)
        self.assertIsNone(self.table.find_offered(self.resume(stream), B))
        self.assert_empty()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_offered_resumes_match_the_state(self) -> None:
        stream, own = self.add(1, initiator=False), self.add(2)
        self.assertIs(self.table.find_offered(self.resume(stream), B), stream)
        self.assertIs(self.table.find_offered(self.resume(stream, 0), B), None)
        self.assertIs(self.table.find_offered(self.resume(stream), C), None)
        self.assertIs(self.table.find_offered(self.resume(own), B), None)
        self.table.closed(stream, 7)
        self.assertEqual(self.table.find_offered(self.resume(stream), B), 7)
        for stranger in (A, C):
            self.assertIs(self.table.find_offered(self.resume(stream), stranger), None)
        self.clock.advance(RESUME_TIMEOUT + STALL_CHECK)
        self.assertIs(self.table.find_offered(self.resume(stream), B), None)

    def test_so_many_are_remembered(self) -> None:
        self.patch(streams_module, "MAX_ENDED", 3)
        streams = [self.add(number) for number in range(5)]
        for stream in streams:
            self.table.closed(stream, 7)
        self.assertEqual([self.table.find_offered(self.resume(one), B) for one in streams], [None, None, 7, 7, 7])

    def test_a_used_token_cannot_be_reused(self) -> None:
        first = self.add(1)
        second = self.add(1)
        self.assertEqual((second.end.token, self.table.all), (None, [first]))
        self.table.closed(first, 7)
        third = self.add(1)
        self.assertEqual((third.end.token, self.table.all), (None, []))

    def test_a_late_transport_of_an_ended_stream_is_closed(self) -> None:
        stream = self.add()
        carrier = stream.end.transport.carrier
        self.table.closed(stream, 7)
        self.assertEqual((carrier.left, stream.end.released), ([7], 1))


class RoomTests(StreamsCase):
    """Limits of the number of streams without a transport, per peer and in total."""

    def test_suspended_streams_of_one_peer_are_limited(self) -> None:
        self.patch(streams_module, "MAX_SUSPENDED_OF_PEER", 2)
        friend = self.add(1, peer=C)
        streams = [friend, *(self.add(number) for number in (2, 3, 4))]
        for stream in streams:
            self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.assertEqual([stream.has_ended for stream in streams], [False, True, False, False])
        self.assertEqual(self.table._waiting_of, {friend.getPeer(): 1, streams[1].getPeer(): 2})

    def test_suspended_streams_are_limited_in_total(self) -> None:
        self.patch(streams_module, "MAX_SUSPENDED", 2)
        streams = [self.add(number, peer=KEYS[name].public) for number, name in enumerate("BCA")]
        for stream in streams:
            self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.assertEqual([stream.has_ended for stream in streams], [True, False, False])


class WatchTests(StreamsCase):
    """Streams that have stalled."""

    def look(self, seconds: float) -> None:
        for _ in range(round(seconds / STALL_CHECK)):
            self.clock.advance(STALL_CHECK)

    def test_missing_acks_start_a_search(self) -> None:
        one, other, moves = self.add(1), self.add(2, initiator=False), self.add(3)
        carrier = other.end.transport.carrier
        for stream in (one, other, moves):
            stream.end.in_flight.append("x")
        for acknowledged in range(int(STALL_TIME / STALL_CHECK) + 2):
            moves.end.acknowledged = -acknowledged  # Any change of the number counts as progress.
            self.look(STALL_CHECK)
        self.assertEqual([stream for stream, _ in self.searches], [one])
        self.assertEqual((carrier.left, self.table.suspended), ([CloseReason.STALLED], 1))
        self.assertIsNotNone(one.end.transport, "it keeps its way until there is another")

    def test_a_pause_of_this_process_is_no_stall(self) -> None:
        """Neither if it is long, nor if the ACK arrives during a short one just before a check."""
        let_pause(self.clock)
        stream = self.add()
        stream.end.in_flight.append("x")
        self.look(STALL_TIME)
        self.clock.advance(10 * STALL_TIME)
        self.assertEqual(self.searches, [])
        stream.end.acknowledged += 1
        self.look(STALL_TIME)
        self.assertEqual(self.searches, [])
        self.look(STALL_CHECK)
        self.assertEqual([one for one, _ in self.searches], [stream])

    def test_a_search_that_finds_no_other_server_leaves_the_one_that_stalls(self) -> None:
        """It may be the only server, and have lost a single frame. Only a new transport brings this frame again."""
        stream = self.add()
        carrier = stream.end.transport.carrier
        stream.end.in_flight.append("x")
        self.look(STALL_TIME + STALL_CHECK)
        self.assertEqual((len(self.searches), carrier.left), (1, []))
        self.look(STALL_TIME)
        self.assertEqual((len(self.searches), carrier.left, self.table.suspended), (1, [], 0))
        self.look(STALL_CHECK)
        self.assertEqual((len(self.searches), carrier.left), (1, [CloseReason.STALLED]))
        self.assertEqual((self.table.suspended, self.table.is_live(stream)), (1, True))

    def test_suspended_streams_do_not_count_as_stalled(self) -> None:
        stream = self.add()
        stream.end.in_flight.append("x")
        self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.look(STALL_TIME + 2 * STALL_CHECK)
        self.assertEqual((len(self.searches), self.table._progress), (1, {}))

    def test_the_opener_probes_a_silent_stream(self) -> None:
        """The end that opened it asks, again and again, as long as nothing comes."""
        one, other, hears = self.add(1), self.add(2, initiator=False), self.add(3)
        for number in range(int(2 * PROBE_AFTER / STALL_CHECK) + 1):
            hears.end.received = -number
            self.look(STALL_CHECK)
        self.assertEqual((one.probes, other.probes, hears.probes), (2, 0, 0))
        one.end.acknowledged += 1
        self.look(PROBE_AFTER)
        self.assertEqual(one.probes, 2)
        self.look(STALL_CHECK)
        self.assertEqual(one.probes, 3)

    def test_the_watch_runs_while_streams_exist(self) -> None:
        stream = self.add()
        self.look(STALL_CHECK)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)
        self.table.closed(stream, 0)
        self.look(RESUME_TIMEOUT + 2 * STALL_CHECK)
        self.assertEqual((self.clock.getDelayedCalls(), self.table._ended), ([], {}))


class ProbesTests(SynchronousTestCase):
    """Streams that are only to be measured."""

    def test_the_peer_with_most_probes_loses_its_oldest(self) -> None:
        probes = Probes(Clock())
        friend, enemy = (DmsgAddress(KEYS[name].public) for name in "AB")
        first = probes.buildProtocol(friend)
        others = [probes.buildProtocol(enemy) for _ in range(MAX_PROBES + 2)]
        self.assertEqual(list(probes.open), [first, *others[3:]])
        for probed in list(probes.open):
            probed.end()

    def test_so_many_and_so_long(self) -> None:
        clock = Clock()
        probes = Probes(clock)
        built = [probes.buildProtocol(None) for _ in range(MAX_PROBES)]
        self.assertEqual(len(probes.open), MAX_PROBES)
        probes.buildProtocol(None)
        self.assertEqual((len(probes.open), built[0] in probes.open), (MAX_PROBES, False))
        built[1].connectionLost()
        built[1].connectionLost()
        self.assertEqual(len(probes.open), MAX_PROBES - 1)
        built[2].dataReceived(b"what has no place there")
        self.assertEqual(len(clock.getDelayedCalls()), MAX_PROBES - 2)
        clock.advance(PROBE_TIME)
        self.assertEqual((probes.open, clock.getDelayedCalls()), ({}, []))


class PauseTests(StreamsCase):
    """A way on which nothing goes is left ever more slowly."""

    def test_pauses_between_idle_moves_grow(self) -> None:
        stream = self.add()
        pauses = [self.table.before_moving(stream) for _ in range(IDLE_MOVES + 12)]
        self.assertEqual(pauses[: IDLE_MOVES + 1], [0.0] * (IDLE_MOVES + 1))
        for number, pause in enumerate(pauses[IDLE_MOVES + 1 :], 1):
            self.assertAlmostEqual(pause, min(IDLE_PAUSE, 0.1 * 1.5**number))
        self.assertEqual(pauses[-1], IDLE_PAUSE)
        stream.end.received += 1
        self.assertEqual(self.table.before_moving(stream), 0.0)


class OptionTests(StreamsCase):
    """Options of the table."""

    def test_each_table_can_have_its_own_budget(self) -> None:
        budget = Budget(5)
        table = TransportStreams(self.clock, KEYS["A"], lambda port: None, lambda stream: None, budget=budget)
        self.assertIs(table.budget, budget)
        self.assertIs(self.table.budget, BUDGET)
        self.assertIs(self.table.receipts, False)

    def test_a_stream_may_be_away_for_less_than_a_second(self) -> None:
        self.table.resume_timeout = 0.5
        stream = self.add()
        self.table.lost(stream, CloseReason.PEER_DISCONNECTED, final=False)
        self.assertEqual((self.table.suspended, stream.has_ended), (1, False))
        self.clock.advance(0.5)
        self.assertTrue(stream.has_ended)

    def test_only_the_peer_of_a_stream_can_resume_it(self) -> None:
        """Whichever of the two keys is the greater."""
        for number, (peer, stranger) in enumerate(((B, C), (C, B))):
            stream = self.add(number + 1, peer=peer, initiator=False)
            resume = Resume(stream.end.token, 1, 0, bytes(32))
            self.assertIs(self.table.find_offered(resume, stranger), None)
            self.assertIs(self.table.find_offered(resume, peer), stream)
