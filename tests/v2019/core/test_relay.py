"""The relay's table by plain calls and by a machine that tries everything."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.v2019.core.congestion import ANSWERS_MAXIMUM, PEER_QUEUE_LIMIT, PEER_QUEUE_MAXIMUM, ROUTE_QUEUE_LIMIT
from dmsg.v2019.core.peers import RelayPeer
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.routes import MAX_CONNECTIONS_PER_KEY
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    MAX_HANDSHAKE_PAYLOAD,
    REQUEST,
    Frame,
    FrameBuffer,
    encode_frame,
)
from tests.support import Draws, vectors

KEYS = [SecKey.from_seed(bytes([number])).public for number in range(1, 6)]


class FakePort:
    """Collects what is sent; says how much waits."""

    def __init__(self) -> None:
        self.data = b""
        self.address = ""
        self.blocks: Sequence[Hashable] = ()
        self.waiting = 0
        self.left_behind = 0
        self.paused = 0
        self.closed: list[DropReason] = []
        self.keep = True

    def send(self, data: Any) -> None:
        if self.keep:
            self.data += bytes(data)
        self.waiting += len(data)

    def queued(self) -> int:
        return self.waiting

    def pause_reading(self) -> None:
        self.paused += 1

    def resume_reading(self) -> None:
        self.paused -= 1

    def close(self, reason: DropReason) -> None:
        self.closed.append(reason)

    def take(self) -> list[Frame]:
        data, self.data = self.data, b""
        return FrameBuffer().feed(data)


def feed(relay: Relay, peer: RelayPeer, *frames: Frame) -> None:
    """Pass all frames in one piece."""
    data = bytearray(b"".join(frame.encode() for frame in frames))
    assert relay.receive_frames(peer, data, len(data)) == len(data)


class RelayCase(SynchronousTestCase):
    """Four connected peers."""

    def setUp(self) -> None:
        self.congested: list[RelayPeer] = []
        self.relay = Relay(random=Draws(0x1000), on_congested=self.congested.append)  # type: ignore[arg-type]
        self.ports = [FakePort() for _ in range(4)]
        self.peers = [self.relay.add(key, port) for key, port in zip(KEYS, self.ports, strict=False)]

    def tearDown(self) -> None:
        self.relay.check()

    def open(self, source: int, target: int, own_id: int) -> int:
        """A transport; the responder's id."""
        payload = bytes(KEYS[source] + KEYS[target])
        feed(self.relay, self.peers[source], Frame(REQUEST, own_id, payload))
        (request,) = self.ports[target].take()
        feed(self.relay, self.peers[target], Frame(ACCEPT, request.id, payload))
        self.assertEqual(self.ports[source].take(), [Frame(ACCEPT, own_id, payload)])
        for port in self.ports:
            port.waiting = 0
        return request.id


class RelayTests(RelayCase):
    """Rules one by one; the recorded ones are in test_vectors."""

    def test_frames_to_several_peers_keep_their_order(self) -> None:
        ids = {target: self.open(0, target, 2 * target) for target in (1, 2, 3)}
        frames = [
            Frame(FWD, 2 * target, bytes([0, number]) + b"x") for number, target in enumerate([1, 2, 1, 1, 3, 2, 1])
        ]
        feed(self.relay, self.peers[0], *frames)
        for target, own_id in ids.items():
            expected = [Frame(FWD, own_id, frame.payload) for frame in frames if frame.id == 2 * target]
            self.assertEqual(self.ports[target].take(), expected)

    @given(
        st.lists(
            st.tuples(st.sampled_from([FWD, ACK]), st.integers(0, 2), st.integers(0, 4), st.integers(1, 60)),
            max_size=12,
        ),
        st.lists(st.integers(1, 400), max_size=10),
        st.integers(1, 30),
    )
    def test_runs_are_forwarded_like_single_frames(self, runs: list[Any], cuts: list[int], limit: int) -> None:
        """The search for equal headers changes nothing but the speed, however the bytes and turns are cut."""
        self.setUp()
        ids = [self.open(0, 1, 10), self.open(0, 1, 12), self.open(0, 2, 14)]
        own = (10, 12, 14)
        frames = [
            Frame(kind, own[which], bytes([number & 0xFF]) * size)
            for kind, which, size, count in runs
            for number in range(count)
        ]
        stream = b"".join(frame.encode() for frame in frames)
        tail = b""
        for size in [*cuts, len(stream)]:
            piece, stream = stream[:size], stream[size:]
            tail += piece
            while True:
                buffer = bytearray(tail)
                taken = self.relay.receive_frames(self.peers[0], buffer, len(buffer), limit)
                tail = bytes(buffer[taken:])
                self.assertLessEqual(self.relay.steps, limit)
                if self.relay.steps < limit:
                    break
        self.assertEqual(tail, b"")
        for target, which in ((1, (0, 1)), (2, (2,))):
            expected = [Frame(f.type, ids[own.index(f.id)], f.payload) for f in frames if own.index(f.id) in which]
            self.assertEqual(self.ports[target].take(), expected)
        self.assertEqual(self.peers[0].frames_in, len(frames) + 3)
        for own_id in own:
            route = self.peers[0].routes[own_id]
            there = [frame for frame in frames if frame.id == own_id]
            acks = [frame for frame in there if frame.type == ACK]
            self.assertEqual((route.frames, route.acks), (len(there), len(acks)))
            self.assertEqual(route.wire, sum(len(frame.encode()) for frame in there))
            self.assertEqual(route.ack_wire, sum(len(frame.encode()) for frame in acks))

    def test_unknown_types_end_the_connection_after_earlier_frames(self) -> None:
        own_id = self.open(0, 1, 2)
        error = self.assertRaises(
            RemoteProtocolError, feed, self.relay, self.peers[0], Frame(FWD, 2, b"\0\1a"), Frame(0x7, 2, b"")
        )
        self.assertIs(error.reason, DropReason.UNKNOWN_FRAME)
        self.assertEqual(self.ports[1].take(), [Frame(FWD, own_id, b"\0\1a")])

    def test_a_lost_peer_leaves_no_route_behind(self) -> None:
        """Defect 5 of the reference."""
        for number in range(50):
            self.open(0, 1, 2 * number)
        self.relay.remove(self.peers[0])
        self.assertEqual(self.relay.route_count, 0)
        self.assertEqual(self.peers[1].routes, {})
        self.assertEqual({frame.payload[0] for frame in self.ports[1].take()}, {CloseReason.PEER_DISCONNECTED})
        self.peers[0] = self.relay.add(KEYS[0], self.ports[0])

    def test_the_transports_of_a_lost_peer_are_closed_a_few_at_a_time(self) -> None:
        """While the rest is being closed, data from the other ends is dropped, and no sender is paused."""
        for number in range(10):
            self.open(0, 1, 2 * number)
        a, b = self.peers[:2]
        self.relay.congest(a)
        self.ports[1].take()
        self.assertFalse(self.relay.remove(a, 4))
        self.relay.check()
        self.assertEqual(len(self.ports[1].take()), 4)
        self.assertEqual(self.relay.route_count, 12)
        self.ports[0].take()
        for own_id in list(b.routes):
            feed(self.relay, b, Frame(FWD, own_id, bytes(60_000)))
        self.assertEqual((self.ports[1].paused, self.relay.drops[DropReason.QUEUE_FULL]), (0, 0))
        self.assertFalse(self.relay.remove(a, 4))
        self.relay.check()
        self.assertFalse(self.relay.remove(b, 1))
        self.relay.check()
        self.assertTrue(self.relay.remove(a, 4))
        self.assertTrue(self.relay.remove(b, 4))
        self.relay.check()
        self.assertEqual((self.relay.route_count, self.relay.leaving), (0, {}))
        for number in (0, 1):
            self.peers[number] = self.relay.add(KEYS[number], self.ports[number])

    def test_the_end_of_an_old_connection_does_not_touch_the_new_one(self) -> None:
        """Defect 12 of the reference."""
        new = self.relay.add(KEYS[0], FakePort())
        self.relay.remove(self.peers[0])
        self.assertIs(self.relay.newest[KEYS[0]], new)
        feed(self.relay, self.peers[1], Frame(REQUEST, 2, bytes(KEYS[1] + KEYS[0])))
        self.assertEqual(len(new.routes), 1)

    def test_the_end_of_the_new_connection_brings_the_old_one_back(self) -> None:
        new = self.relay.add(KEYS[0], FakePort())
        self.relay.remove(new)
        self.assertIs(self.relay.newest[KEYS[0]], self.peers[0])

    def test_connections_of_one_key_are_bounded(self) -> None:
        for _ in range(MAX_CONNECTIONS_PER_KEY):
            self.relay.add(KEYS[0], FakePort())
        self.assertEqual(self.ports[0].closed, [DropReason.REPLACED])

    def test_transports_are_bounded_on_both_sides(self) -> None:
        self.relay.limits = Limits(max_transports=3, request_rate=0)
        for number in range(3):
            self.open(0, 1, 2 * number)
        refused = [Frame(CLOSE, 100, bytes([CloseReason.TOO_MANY_TRANSPORTS]))]
        # An operator may also lower the limit while more transports are open.
        for limit in (3, 2):
            self.relay.limits = Limits(max_transports=limit, request_rate=0)
            for source, target in ((0, 2), (2, 1)):
                feed(self.relay, self.peers[source], Frame(REQUEST, 100, bytes(KEYS[source] + KEYS[target])))
                self.assertEqual(self.ports[source].take(), refused)
        self.assertEqual(self.relay.drops[DropReason.TOO_MANY_TRANSPORTS], 4)

    def test_a_flood_of_requests_ends_at_the_bound(self) -> None:
        """Defects 5 and 6: every id of a peer used up at once; the next REQUEST is refused at once."""
        self.relay.limits = Limits(max_transports=32768, max_per_pair=32768, request_rate=0)
        for number in range(32768):
            feed(self.relay, self.peers[0], Frame(REQUEST, 2 * number % 65536, bytes(KEYS[0] + KEYS[1])))
        ids = [frame.id for frame in self.ports[1].take()]
        self.assertEqual(len(set(ids)), 32768)
        self.assertTrue(all(own_id & 1 for own_id in ids))
        feed(self.relay, self.peers[2], Frame(REQUEST, 2, bytes(KEYS[2] + KEYS[1])))
        (refusal,) = self.ports[2].take()
        self.assertEqual(refusal.payload[0], CloseReason.TOO_MANY_TRANSPORTS)

    def test_ids_are_not_used_again_early(self) -> None:
        seen = []
        for _ in range(100):
            own_id = self.open(0, 1, 4)
            seen.append(own_id)
            feed(self.relay, self.peers[0], Frame(CLOSE, 4, b"\0"))
            self.ports[1].take()
        self.assertEqual(len(set(seen)), 100)

    def test_an_accept_that_is_too_long_closes_the_transport(self) -> None:
        for extra, dropped in ((0, 0), (1, 1)):
            payload = bytes(MAX_HANDSHAKE_PAYLOAD + extra)
            feed(self.relay, self.peers[0], Frame(REQUEST, 2 + 2 * extra, bytes(KEYS[0] + KEYS[1])))
            (request,) = self.ports[1].take()
            feed(self.relay, self.peers[1], Frame(ACCEPT, request.id, payload))
            self.assertEqual([frame.type for frame in self.ports[0].take()], [CLOSE if extra else ACCEPT])
            self.assertEqual(self.relay.drops[DropReason.BAD_FRAME], dropped)

    def test_draining_refuses_and_closes(self) -> None:
        own_id = self.open(0, 1, 2)
        self.relay.close_all(CloseReason.SHUTTING_DOWN)
        self.assertEqual(self.ports[0].take(), [Frame(CLOSE, 2, bytes([CloseReason.SHUTTING_DOWN]))])
        self.assertEqual(self.ports[1].take(), [Frame(CLOSE, own_id, bytes([CloseReason.SHUTTING_DOWN]))])
        feed(self.relay, self.peers[0], Frame(REQUEST, 4, bytes(KEYS[0] + KEYS[1])))
        self.assertEqual(self.ports[0].take(), [Frame(CLOSE, 4, bytes([CloseReason.SHUTTING_DOWN]))])


class CongestionTests(RelayCase):
    """A receiver that stops reading, section 7.4."""

    def fill(self, source: int, own_id: int, size: int) -> None:
        while size > 0:
            feed(self.relay, self.peers[source], Frame(FWD, own_id, bytes(min(size, 60_000))))
            size -= 60_000

    def congest(self, target: int) -> None:
        self.ports[target].keep = False
        self.relay.congest(self.peers[target])

    def test_a_source_with_one_peer_is_paused_once_and_for_a_time(self) -> None:
        self.open(0, 1, 2)
        self.congest(1)
        self.fill(0, 2, 300_000)
        self.assertEqual(self.ports[0].paused, 1)
        self.assertEqual(self.congested, [self.peers[1]])
        self.relay.stall(self.peers[1])
        self.assertEqual(self.ports[0].paused, 0)
        self.fill(0, 2, 300_000)
        self.assertEqual(self.ports[0].paused, 0)

    def test_a_source_with_other_peers_is_never_paused(self) -> None:
        """Otherwise other pairs would wait for a receiver that does not read."""
        self.open(0, 1, 2)
        own_id = self.open(0, 2, 4)
        self.congest(1)
        self.fill(0, 2, 300_000)
        self.assertEqual(self.ports[0].paused, 0)
        feed(self.relay, self.peers[0], Frame(FWD, 4, b"\0\1hello"))
        self.assertEqual(self.ports[2].take(), [Frame(FWD, own_id, b"\0\1hello")])

    def test_a_paused_source_that_gets_another_peer_is_resumed(self) -> None:
        self.open(0, 1, 2)
        self.congest(1)
        self.fill(0, 2, 100)
        self.assertEqual(self.ports[0].paused, 1)
        feed(self.relay, self.peers[2], Frame(REQUEST, 2, bytes(KEYS[2] + KEYS[0])))
        self.assertEqual(self.ports[0].paused, 0)

    def test_relief_resumes_all_sources(self) -> None:
        for source in (0, 2, 3):
            self.open(source, 1, 2)
        self.congest(1)
        for source in (0, 2, 3):
            self.fill(source, 2, 100)
            self.assertEqual(self.ports[source].paused, 1)
        self.relay.relieve(self.peers[1])
        self.assertEqual([port.paused for port in self.ports], [0, 0, 0, 0])

    def test_the_loss_of_a_congested_peer_resumes_its_sources(self) -> None:
        self.open(0, 1, 2)
        self.congest(1)
        self.fill(0, 2, 100)
        self.relay.remove(self.peers[1])
        self.assertEqual(self.ports[0].paused, 0)
        self.peers[1] = self.relay.add(KEYS[1], self.ports[1])

    def test_past_the_bound_the_route_is_closed_and_others_go_on(self) -> None:
        self.open(0, 1, 2)
        self.open(0, 2, 4)
        modest = self.open(3, 1, 2)
        self.congest(1)
        self.fill(0, 2, ROUTE_QUEUE_LIMIT + 200_000)
        frames = self.ports[0].take()
        self.assertEqual(frames[0], Frame(CLOSE, 2, bytes([CloseReason.QUEUE_FULL])))
        self.assertNotIn(2, self.peers[0].routes)
        self.assertIn(4, self.peers[0].routes)
        self.assertIn(modest, self.peers[1].routes)
        self.assertEqual(self.relay.drops[DropReason.QUEUE_FULL], 1)

    def test_one_of_many_may_have_more_than_its_share_while_there_is_room(self) -> None:
        """A tenth of what a peer may have queued is less than one transport may have."""
        for own_id in range(2, 22, 2):
            self.open(0, 1, own_id)
        self.congest(1)
        self.fill(0, 2, 1_800_000)
        self.assertGreater(self.peers[0].routes[2].queued, PEER_QUEUE_LIMIT // 10)
        self.assertEqual((len(self.peers[0].routes), self.relay.drops), (10, {}))

    def test_one_of_many_has_its_share_when_there_is_little_room(self) -> None:
        """Above the limit of a peer's queue, a route with more than its share ends. A route with less stays open."""
        for own_id in range(2, 34, 2):
            self.open(0, 1, own_id)
        self.ports[1].waiting = PEER_QUEUE_LIMIT + 1
        for queued in (PEER_QUEUE_LIMIT // 16, PEER_QUEUE_LIMIT // 16 + 1):
            there = self.peers[0].routes[2]
            there.queued, there.mark = queued - 10, self.peers[1].sent
            self.assertIs(self.relay.congestion.reserve(there, 10), queued * 16 <= PEER_QUEUE_LIMIT)

    def test_the_queue_of_a_peer_is_always_bounded(self) -> None:
        for number in range(40):
            self.open(0, 1, 2 * number)
        self.open(0, 2, 1000)
        self.congest(1)
        for _ in range(20):
            for number in range(40):
                if 2 * number in self.peers[0].routes:
                    self.fill(0, 2 * number, 60_000)
        self.assertLess(self.ports[1].waiting, PEER_QUEUE_MAXIMUM + 1000)

    def test_bytes_are_reserved_up_to_the_limits_exactly(self) -> None:
        """Bytes that are refused are not counted, so that smaller ones still have room."""
        self.open(0, 1, 2)
        self.congest(1)
        route, peer, congestion = self.peers[0].routes[2], self.peers[1], self.relay.congestion
        for limit, reserve in (
            (PEER_QUEUE_MAXIMUM, lambda size: congestion.reserve(route, size)),
            (PEER_QUEUE_MAXIMUM + ANSWERS_MAXIMUM, lambda size: congestion.reserve_answer(peer, size)),
        ):
            self.ports[1].waiting = limit - 10
            before = route.queued, peer.sent
            self.assertFalse(reserve(11))
            self.assertEqual((route.queued, peer.sent), before)
            self.assertTrue(reserve(10))
        self.ports[1].waiting = 0
        route.queued, route.mark = ROUTE_QUEUE_LIMIT - 10, peer.sent + 1
        self.assertFalse(congestion.reserve(route, 11))
        self.assertEqual(route.queued, ROUTE_QUEUE_LIMIT - 10)
        self.assertTrue(congestion.reserve(route, 10))

    def test_data_of_unaccepted_requests_is_not_queued(self) -> None:
        """Forty requests and as many windows behind them: the receiver is slow, and loses nothing for it."""
        own = self.open(2, 1, 2)
        for number in range(40):
            feed(self.relay, self.peers[0], Frame(REQUEST, 2 * number, bytes(KEYS[0] + KEYS[1])))
        self.congest(1)
        before = self.ports[1].waiting
        for number in range(40):
            if 2 * number in self.peers[0].routes:
                self.fill(0, 2 * number, 60_000)
        self.assertLess(self.ports[1].waiting - before, 10_000)
        self.assertEqual((len(self.peers[0].routes), self.relay.drops[DropReason.QUEUE_FULL]), (0, 40))
        self.assertEqual((self.ports[1].closed, own in self.peers[1].routes), ([], True))

    def test_an_initiator_cannot_accept_its_own_request(self) -> None:
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, bytes(KEYS[0] + KEYS[1])))
        feed(self.relay, self.peers[0], Frame(ACCEPT, 2, bytes(KEYS[0] + KEYS[1])))
        self.assertFalse(self.peers[0].routes[2].accepted)

    def test_a_slow_receiver_with_a_modest_sender_loses_no_data(self) -> None:
        """Data that was sent no longer counts against the route."""
        self.open(0, 1, 2)
        self.open(0, 2, 4)
        self.congest(1)
        for _ in range(200):
            self.fill(0, 2, 60_000)
            self.ports[1].waiting = min(self.ports[1].waiting, 500_000)
        self.assertIn(2, self.peers[0].routes)

    def test_a_peer_that_provokes_answers_and_reads_none_is_ended(self) -> None:
        self.relay.limits = Limits(request_rate=0)
        self.congest(0)
        answer = encode_frame(CLOSE, 99, b"\4")
        while not self.ports[0].closed:
            feed(self.relay, self.peers[0], *[Frame(FWD, 99, b"")] * 1000)
            most = PEER_QUEUE_MAXIMUM + ANSWERS_MAXIMUM + 100_000 + 1000 * len(answer)
            self.assertLess(self.ports[0].waiting, most)
            self.ports[0].waiting += 100_000  # These are other clients' frames.
        self.assertEqual(self.ports[0].closed, [DropReason.SEND_BUFFER_FULL])
        feed(self.relay, self.peers[0], Frame(FWD, 99, b""))
        self.assertEqual(self.relay.drops[DropReason.SEND_BUFFER_FULL], 1)

    def test_repeated_or_late_congestion_reports_are_ignored(self) -> None:
        """Counting begins once, and not for a peer that is gone."""
        self.open(0, 1, 2)
        self.congest(1)
        self.fill(0, 2, 300_000)
        route = self.peers[0].routes[2]
        counted = route.queued
        self.assertGreater(counted, 0)
        self.relay.congest(self.peers[1])
        self.assertEqual(route.queued, counted)
        self.relay.remove(self.peers[1])
        self.relay.congest(self.peers[1])
        self.assertFalse(self.peers[1].congested)

    def test_a_peer_that_is_slow_again(self) -> None:
        """The counts of the first congestion are forgotten, and the sources are paused as at the first time."""
        self.open(0, 1, 2)
        route = self.peers[0].routes[2]
        self.congest(1)
        self.fill(0, 2, 300_000)
        self.relay.stall(self.peers[1])
        self.assertGreater(route.queued, 200_000)
        self.relay.relieve(self.peers[1])
        self.assertEqual((self.peers[1].stalled, self.ports[0].paused), (False, 0))
        route.mark = 7
        self.ports[1].waiting = 0
        self.congest(1)
        self.assertEqual((route.queued, route.mark), (0, 0))
        self.fill(0, 2, 100)
        self.assertEqual(self.ports[0].paused, 1)


class RelayMachine(RuleBasedStateMachine):
    """Any order of connections, frames and congestion keeps the tables in order."""

    @initialize()
    def start(self) -> None:
        self.relay = Relay(limits=Limits(max_transports=6))
        self.peers: list[tuple[RelayPeer, FakePort]] = []
        self.left: list[RelayPeer] = []

    @rule(which=st.integers(0, 3))
    def connect(self, which: int) -> None:
        if len(self.peers) < 8:
            port = FakePort()
            self.peers.append((self.relay.add(KEYS[which], port), port))

    @rule(which=st.integers(0, 7), most=st.integers(1, 9))
    def disconnect(self, which: int, most: int) -> None:
        if which < len(self.peers):
            peer, _ = self.peers.pop(which)
            if not self.relay.remove(peer, most):
                self.left.append(peer)

    @rule(which=st.integers(0, 7), most=st.integers(1, 4))
    def go_on(self, which: int, most: int) -> None:
        if which < len(self.left) and self.relay.remove(self.left[which], most):
            del self.left[which]

    @rule(
        which=st.integers(0, 7),
        kind=st.sampled_from([REQUEST, ACCEPT, CLOSE, FWD, ACK, 0, 7]),
        own_id=st.integers(0, 12),
        whom=st.integers(0, 4),
        assigned=st.integers(0, 5),
        size=st.integers(0, 300),
    )
    def frame(self, which: int, kind: int, own_id: int, whom: int, assigned: int, size: int) -> None:
        if which >= len(self.peers):
            return
        peer, _ = self.peers[which]
        ids = sorted(peer.routes)
        if ids and assigned:
            own_id = ids[assigned % len(ids)]
        payload = bytes(peer.key + KEYS[whom]) if kind == REQUEST else bytes(size)
        data = bytearray(Frame(kind, own_id, payload).encode() * (size % 40 + 1 if kind in (FWD, ACK) else 1))
        try:
            self.relay.receive_frames(peer, data, len(data))
        except RemoteProtocolError:
            self.peers.pop(which)
            self.relay.remove(peer)

    @rule(which=st.integers(0, 7), what=st.sampled_from(["congest", "relieve", "stall"]))
    def congestion(self, which: int, what: str) -> None:
        if which < len(self.peers):
            getattr(self.relay, what)(self.peers[which][0])

    @invariant()
    def tables_agree(self) -> None:
        if not hasattr(self, "relay"):
            return
        self.relay.check()
        for peer, port in self.peers:
            assert port.paused == (1 if peer.paused_by is not None else 0)


RelayMachine.TestCase.settings = settings(stateful_step_count=40)


class RelayMachineTests(SynchronousTestCase):
    """Runs the machine under trial."""

    def test_frames_in_any_order_preserve_the_invariants(self) -> None:
        RelayMachine.TestCase("runTest").runTest()


class FrameVectorTests(SynchronousTestCase):
    """frames.json."""

    def test_frames_match_the_vectors(self) -> None:
        for case in vectors("frames")["frames"]:
            if "frame" not in case:
                continue
            data = bytes.fromhex(case["frame"])
            if len(data) != case["total"]:
                continue
            (frame,) = FrameBuffer().feed(data)
            self.assertEqual((frame.type, frame.id, len(frame.payload)), (case["type"], case["id"], case["len_field"]))
            self.assertEqual(frame.encode(), data)

    def test_cut_streams_match_the_vectors(self) -> None:
        for case in vectors("frames")["read_frame"]:
            frames = FrameBuffer().feed(bytes.fromhex(case["stream"]))
            if case["result"] == "ok":
                self.assertEqual(frames[0].encode().hex(), case["frame"])
            else:
                self.assertEqual(frames, [])
