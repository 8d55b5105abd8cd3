"""The server under those who do not behave: silent, slow, flooding, random."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.policing import DESTINATION_BURST
from dmsg.errors import DropReason, KeyFormatError, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.messaging.core import congestion
from dmsg.messaging.core.channels import MAX_LINKS_PER_KEY
from dmsg.messaging.core.congestion import HOLD_AT, PAUSE_CHECK_INTERVAL, STALLED_AFTER
from dmsg.messaging.core.destinations import PEER_QUEUE_MAXIMUM
from dmsg.messaging.core.dialect import Dialect, dialect_of
from dmsg.messaging.core.peers import RelayPeer
from dmsg.messaging.core.policing import Kind, Limits
from dmsg.messaging.core.relay import Relay
from dmsg.messaging.core.state import TRANSITIONS, Input, State
from dmsg.messaging.core.table import ClientConnection
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    ID_COUNT,
    OPEN_BODY_SIZE,
    OPEN_CHANNEL,
    SEND,
    FrameBuffer,
    Profile,
    decode_open,
    encode_frame,
)
from dmsg.messaging.protocol import ServerFactory
from dmsg.messaging.session import MAX_UNREAD_OF_CLOSED, STALL_TIMEOUT
from dmsg.servers.serving import CLOSED_AT_ONCE
from tests.messaging.support import KEYS, Network
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import Accepting

LISTED = [SecKey.from_seed(b"relay %d" % number) for number in range(6)]


class FakePort:
    """Keeps what is sent; holds it back when told to."""

    def __init__(self, profile: Profile) -> None:
        self.sent = bytearray()
        self.blocks: Sequence[Hashable] = ()
        self.waiting = 0
        self.stuck = False
        self.paused = False
        self.closed: DropReason | None = None
        self._frames = FrameBuffer(profile)

    def send(self, data: Any) -> None:
        self.sent += data
        if self.stuck:
            self.waiting += len(data)

    def queued(self) -> int:
        return self.waiting

    def flush(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def close(self, reason: DropReason) -> None:
        self.closed = reason

    def take(self) -> list[tuple[int, bytes]]:
        frames = self._frames.feed(bytes(self.sent))
        self.sent.clear()
        return [(int(kind), bytes(body)) for kind, body in frames]


class RelayCase(SynchronousTestCase):
    """A relay without links."""

    profile = Profile.SEED

    def setUp(self) -> None:
        self.now = 0.0
        self.relay = Relay(self.profile, now=lambda: self.now)
        self.ports: dict[RelayPeer, FakePort] = {}

    def peer(self, number: int) -> Any:
        port = FakePort(self.profile)
        peer = self.relay.add(LISTED[number].public, port)
        self.ports[peer] = port
        return peer

    def say(self, peer: RelayPeer, *frames: tuple[int, bytes]) -> None:
        data = bytearray(b"".join(encode_frame(self.profile, *frame) for frame in frames))
        self.assertEqual(self.relay.receive_frames(peer, data, len(data)), len(data))
        self.relay.check()

    def channel(self, one: RelayPeer, two: RelayPeer, number: int = 0) -> int:
        """Open one; its id at ``two``."""
        self.say(one, (OPEN_CHANNEL, bytes((number,)) + two.key + bytes(49)))
        there = self.ports[two].take()[-1][1][0]
        self.say(two, (CHANNEL_OPENED, bytes((there,)) + bytes(49)))
        self.ports[one].take()
        return there


class CornerTests(RelayCase):
    """Events that are counted once, and slow receivers."""

    def test_a_link_that_is_ended_is_counted_once(self) -> None:
        peer = self.peer(0)
        for _ in range(2):
            self.relay._end_peer(peer, DropReason.QUEUE_FULL)
        self.assertEqual(
            (self.relay.drops, self.ports[peer].closed), ({DropReason.QUEUE_FULL: 1}, DropReason.QUEUE_FULL)
        )

    def test_two_ids_are_of_skywire(self) -> None:
        for two_ids in (True, None):
            Relay(Profile.SKYWIRE, two_ids=two_ids)
        self.assertRaises(ValueError, Relay, Profile.SEED, two_ids=True)
        self.assertEqual(dialect_of("seed", False, False), Dialect())
        for options in ({"acks": True}, {"two_ids": True}):
            self.assertRaises(ValueError, Dialect, **options)
        for acks in (None, False, True):
            self.assertEqual(dialect_of("skywire", acks, False), Dialect(Profile.SKYWIRE, acks))

    def test_a_link_cannot_open_channels_to_itself(self) -> None:
        peers = [self.peer(number) for number in range(3)]
        for one in peers:
            for other in peers:
                reason = self.relay._destinations._refusal(one, other, self.relay.limits, 0.0)
                self.assertIs(reason, DropReason.REFUSED if one is other else None)

    def test_an_answer_that_is_too_short_closes_the_channel(self) -> None:
        one, two = self.peer(0), self.peer(1)
        self.say(one, (OPEN_CHANNEL, b"\0" + two.key + bytes(49)))
        ((_, offer),) = self.ports[two].take()
        self.say(two, (CHANNEL_OPENED, offer[:1] + bytes(48)))
        self.assertEqual(self.relay.drops, {DropReason.BAD_FRAME: 1})
        self.assertEqual([frame for frame, _ in self.ports[one].take()], [CHANNEL_CLOSED])

    def test_a_repeated_close_is_counted_and_not_forwarded(self) -> None:
        one, two = self.peer(0), self.peer(1)
        there = self.channel(one, two)
        self.say(one, *[(CLOSE_CHANNEL, b"\0")] * 2)
        self.assertEqual(self.ports[two].take(), [(CLOSE_CHANNEL, bytes((there,)))])
        self.assertEqual(self.relay.drops, {DropReason.NO_SUCH_TRANSPORT: 1})

    def test_malformed_frames_are_counted_and_ignored(self) -> None:
        """Unknown types, bodies of no byte, a CloseChannel with two: each is counted, and nothing ends."""
        one, two = self.peer(0), self.peer(1)
        self.channel(one, two)
        self.assertEqual((self.relay.channels_opened, self.relay.channel_count), (1, 1))
        self.say(one, (SEND + 1, b"x"), (SEND + 1, b""), (CLOSE_CHANNEL, b""))
        self.assertEqual(self.relay.drops, {DropReason.UNKNOWN_FRAME: 3})
        self.say(one, (CLOSE_CHANNEL, b"\0\0"))
        self.assertEqual((self.relay.drops[DropReason.BAD_FRAME], len(one.ends)), (1, 1))
        for size in (-1, 1):
            with self.assertRaises(KeyFormatError):
                decode_open((bytes((5,)) + two.key + bytes(50))[: OPEN_BODY_SIZE + size])

    def test_provoked_stray_frames_are_not_charged(self) -> None:
        one = self.peer(0)
        self.relay.limits = Limits(open_rate=1.0)
        end: Any = object()
        while self.relay._allows_stray(one, None, 0.0):
            pass
        one.provoked.add(2, 0.0)
        allowed = [self.relay._allows_stray(one, there, 0.0) for there in (end, None, None, None)]
        self.assertEqual(allowed, [False, True, True, False])

    def test_a_new_relay_has_zero_counters(self) -> None:
        peer = self.peer(0)
        self.assertEqual((self.relay.steps, peer.frames_in, peer.bytes_in), (0, 0, 0))

    def test_channels_to_a_congested_client_are_refused(self) -> None:
        """Congested, and more than half of what may be queued is."""
        one, two = self.peer(0), self.peer(1)
        for congested in (False, True):
            for waiting in (PEER_QUEUE_MAXIMUM // 2, PEER_QUEUE_MAXIMUM // 2 + 1):
                two.congested, self.ports[two].waiting = congested, waiting
                refused = congested and waiting > PEER_QUEUE_MAXIMUM // 2
                self.assertIs(
                    self.relay._destinations._refusal(one, two, self.relay.limits, 0.0),
                    DropReason.QUEUE_FULL if refused else None,
                )

    def test_as_many_channels_of_a_pair_as_may_be(self) -> None:
        one, two = self.peer(0), self.peer(1)
        self.relay.limits = Limits(max_per_pair=2)
        for number, refused in ((0, False), (1, False), (2, True)):
            reason = self.relay._destinations._refusal(one, two, self.relay.limits, 0.0)
            self.assertIs(reason, DropReason.TOO_MANY_PER_PAIR if refused else None)
            self.say(one, (OPEN_CHANNEL, bytes((number,)) + two.key + bytes(49)))
        self.channel(two, self.peer(2), 9)
        self.relay.limits = Limits(max_per_pair=1)
        self.assertIs(self.relay._destinations._refusal(one, two, self.relay.limits, 0.0), DropReason.TOO_MANY_PER_PAIR)

    def test_a_lost_link_drops_its_pending_frames(self) -> None:
        one, two, three = self.peer(0), self.peer(1), self.peer(2)
        for source in (one, three):
            self.channel(source, two)
        self.ports[two].stuck = True
        self.relay.congestion.congest(two)
        for source in (one, three):
            self.say(source, (SEND, b"\0" + bytes(500)))
        self.assertEqual((len(two.waiting), self.relay.congestion.total > 1000), (2, True))
        self.relay.congestion.gone(two)
        self.assertEqual((len(two.waiting), self.relay.congestion.total), (0, 0))

    def test_progress_is_counted_from_the_first_that_waits(self) -> None:
        one, two = self.peer(0), self.peer(1)
        self.channel(one, two)
        self.ports[two].stuck = True
        self.relay.congestion.congest(two)
        for self.now in (5.0, 9.0):
            self.say(one, (SEND, b"\0" + bytes(500)))
            self.assertEqual(two.progress_at, 5.0)


class ForwardingTests(RelayCase):
    """The fast path says what the slow one would."""

    @given(st.integers(0, 2**32), st.sampled_from(Profile), st.integers(1, 30))
    def test_sends_arrive_in_order(self, seed: int, profile: Profile, limit: int) -> None:
        """The result does not depend on the number of turns."""
        self.profile = profile
        self.setUp()
        random = Random(seed)
        source, *others = [self.peer(number) for number in range(4)]
        there = {}
        for number in range(5):
            other = random.choice(others)
            there[number] = (other, self.channel(source, other, number))
        expected: dict[RelayPeer, list[tuple[int, bytes]]] = {other: [] for other in others}
        frames = []
        for _ in range(random.randrange(1, 12)):
            number, size = random.randrange(7), random.choice((3, 3, 20, 400))
            for _ in range(random.choice((1, 2, 40))):
                body = random.randbytes(size - 1)
                frames.append((SEND, bytes((number,)) + body))
                if number in there:
                    other, theirs = there[number]
                    expected[other].append((SEND, bytes((theirs,)) + body))
        data = bytearray(b"".join(encode_frame(profile, *frame) for frame in frames))
        while data:
            taken = self.relay.receive_frames(source, data, len(data), limit)
            self.assertTrue(0 < self.relay.steps <= limit)
            del data[:taken]
        for other in others:
            self.assertEqual(self.ports[other].take(), expected[other])


class SlowReaderTests(RelayCase):
    """A receiver that is slower than its sender does not end any channel, and other receivers are served."""

    def setUp(self) -> None:
        super().setUp()
        self.paused: list[Any] = []
        self.relay.congestion._on_paused = self.paused.append

    def stick(self, peer: RelayPeer) -> None:
        port = self.ports[peer]
        port.stuck, port.waiting = True, 300_000
        self.relay.congest(peer)

    def take(self, peer: RelayPeer) -> int:
        """Take all data for a peer; return the number of bytes in Send frames."""
        port = self.ports[peer]
        port.waiting = 0
        self.relay.relieve(peer)
        if port.waiting > 256 * 1024:
            self.relay.congest(peer)
        self.relay.check()
        return sum(len(body) - 1 for frame, body in port.take() if frame == SEND)

    def send(self, peer: RelayPeer, number: int, size: int) -> None:
        while size > 0:
            self.say(peer, (SEND, bytes((number,)) + bytes(min(size, 60_000))))
            size -= 60_000

    def test_a_close_behind_a_backlog_is_sent_once(self) -> None:
        a, b = self.peer(0), self.peer(1)
        there = self.channel(a, b, 0)
        self.stick(b)
        self.say(a, (SEND, b"\0data"), (CLOSE_CHANNEL, b"\0"))
        self.ports[b].waiting = 0
        self.relay.relieve(b)
        expected = [(SEND, bytes((there,)) + b"data"), (CLOSE_CHANNEL, bytes((there,)))]
        self.assertEqual(self.ports[b].take(), expected)

    def test_pieces_of_a_backlog_keep_their_order(self) -> None:
        """Joining small pieces does not change the order of bytes."""
        a, b = self.peer(0), self.peer(1)
        there = self.channel(a, b, 0)
        self.stick(b)
        sent = [bytes((number,)) * size for number, size in enumerate((10, 50_000, 10, 10, 50_000, 10))]
        for piece in sent:
            self.say(a, (SEND, b"\0" + piece))
        self.ports[b].waiting = 0
        self.relay.relieve(b)
        self.assertEqual(self.ports[b].take(), [(SEND, bytes((there,)) + piece) for piece in sent])

    def test_a_source_with_one_more_channel_is_held_too(self) -> None:
        """The source is released when its backlog is half of the limit."""
        a, b, c = (self.peer(number) for number in range(3))
        self.channel(a, b, 0)
        self.channel(a, c, 1)
        self.stick(b)
        self.send(a, 0, HOLD_AT - 100_000)
        self.assertFalse(self.ports[a].paused)
        self.send(a, 0, 200_000)
        self.assertTrue(self.ports[a].paused)
        self.assertEqual(self.paused, [a])
        while self.ports[a].paused:
            self.take(b)
        self.assertLessEqual(self.relay.congestion.total, HOLD_AT // 2)
        self.assertEqual(self.relay.drops, {})

    def test_a_held_sender_with_other_receivers_is_released_in_turn(self) -> None:
        a, b, c = (self.peer(number) for number in range(3))
        self.channel(a, b, 0)
        self.channel(a, c, 1)
        self.stick(b)
        self.send(a, 1, 100)
        self.send(a, 0, HOLD_AT + 100_000)
        self.assertTrue(self.ports[a].paused)
        self.now += PAUSE_CHECK_INTERVAL
        self.relay.let_read(a)
        self.assertFalse(self.ports[a].paused)
        self.send(a, 0, 500_000)
        self.assertFalse(self.ports[a].paused)
        self.now += PAUSE_CHECK_INTERVAL
        self.send(a, 0, 60_000)
        self.assertTrue(self.ports[a].paused)

    def test_a_held_sender_with_a_single_receiver_is_read_once_a_second(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.channel(a, b, 0)
        self.stick(b)
        self.send(a, 0, HOLD_AT + 100_000)
        reads = 0
        for _ in range(50):
            self.now += PAUSE_CHECK_INTERVAL
            b.progress_at = self.now  # The peer reads something, but little.
            self.relay.let_read(a)
            if not self.ports[a].paused:
                reads += 1
                self.send(a, 0, 60_000)
        self.assertTrue(4 <= reads <= 6, reads)

    def test_backlogs_are_served_in_turn(self) -> None:
        """A short one is not behind a long one, and what is said of a channel is behind its data."""
        a, b, c = (self.peer(number) for number in range(3))
        at = self.channel(a, b, 0)
        other = self.channel(c, b, 5)
        self.stick(b)
        self.send(a, 0, 900_000)
        self.send(c, 5, 10_000)
        self.say(c, (CLOSE_CHANNEL, b"\5"))
        self.ports[b].waiting = 0
        self.relay.relieve(b)
        self.assertEqual(self.relay.congestion.total, 0)
        frames = [(frame, body[0]) for frame, body in self.ports[b].take()]
        self.assertEqual(frames[-1], (SEND, at))
        self.assertLess(frames.index((SEND, other)), 4)
        self.assertEqual(frames[frames.index((SEND, other)) + 1], (CLOSE_CHANNEL, other))

    def test_pending_data_is_delivered_before_channel_closed(self) -> None:
        """ChannelClosed comes last, and the id is not used again before it."""
        a, b = self.peer(0), self.peer(1)
        at = self.channel(a, b, 0)
        self.stick(b)
        self.send(a, 0, 300_000)
        self.say(a, (CHANNEL_CLOSED, b"\0"))
        self.assertEqual((a.ends, b.ends), ({}, {}))
        self.assertIn(at, b.draining)
        for _ in range(200):
            self.assertNotEqual(self.relay._destinations.choose(b), at)
        self.ports[b].waiting = 0
        self.relay.relieve(b)
        frames = [(frame, body[0]) for frame, body in self.ports[b].take()]
        self.assertEqual((frames.count((SEND, at)), frames[-1]), (5, (CHANNEL_CLOSED, at)))
        self.assertEqual(b.draining, {})

    def test_a_receiver_that_does_not_read_loses_its_channels(self) -> None:
        a, b, c = (self.peer(number) for number in range(3))
        self.channel(a, b, 0)
        self.channel(a, c, 1)
        self.stick(b)
        self.send(a, 0, HOLD_AT + 100_000)
        for _ in range(int(STALLED_AFTER / PAUSE_CHECK_INTERVAL) + 2):
            self.now += PAUSE_CHECK_INTERVAL
            self.relay.let_read(a)
            self.relay.check()
            if not self.ports[a].paused:
                self.send(a, 0, 60_000)
        self.assertEqual(self.relay.drops[DropReason.QUEUE_FULL], 1)
        self.assertEqual((sorted(a.ends), self.relay.congestion.total), ([1], 0))
        self.assertIn((CHANNEL_CLOSED, b"\0"), self.ports[a].take())

    def test_a_pause_of_this_process_closes_no_channel(self) -> None:
        """During the pause, the receiver has read what was sent to it."""
        clock = PausingClock()
        self.relay = ServerFactory(clock, LISTED[0]).relay
        for number in (0, 2):  # The second measurement begins after the first one has ended.
            a, b = self.peer(number), self.peer(number + 1)
            self.channel(a, b, 0)
            self.stick(b)
            self.send(a, 0, HOLD_AT + 100_000)
            pass_time(clock, PAUSE_CHECK_INTERVAL / 2)
            self.assertTrue(self.ports[a].paused)
            clock.advance(4 * STALLED_AFTER)
            pass_time(clock, 1.0)
            self.assertEqual((self.relay.drops, sorted(a.ends)), ({}, [0]))
            while self.relay.congestion.total:
                self.take(b)
            pass_time(clock, 1.0)
            self.assertEqual(clock.getDelayedCalls(), [])
        a, b = self.peer(4), self.peer(5)
        self.channel(a, b, 0)
        self.stick(b)
        self.send(a, 0, HOLD_AT + 100_000)
        for _ in range(int(STALLED_AFTER) + 1):
            pass_time(clock, 1.0)
            self.send(a, 0, 60_000)
        self.assertEqual((self.relay.drops[DropReason.QUEUE_FULL], sorted(a.ends)), (1, []))

    def test_all_backlogs_together_have_a_limit(self) -> None:
        self.patch(congestion, "BACKLOG_TOTAL", 3_000_000)
        a, b, c = (self.peer(number) for number in range(3))
        self.channel(a, b, 0)
        self.channel(a, c, 1)
        self.stick(b)
        self.send(a, 1, 100)
        for _ in range(40):
            if not self.ports[a].paused:
                self.send(a, 0, 100_000)
            self.now += PAUSE_CHECK_INTERVAL
            self.relay.let_read(a)
            self.send(a, 1, 100)
        self.assertLess(self.relay.congestion.total, 4_000_000)
        self.assertTrue(self.ports[a].paused)

    def test_a_lost_reader_frees_memory(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.channel(a, b)
        self.stick(b)
        self.send(a, 0, 600_000)
        self.relay.remove(b)
        self.relay.check()
        self.assertEqual(self.relay.congestion.total, 0)
        self.assertEqual(self.ports[a].take(), [(CHANNEL_CLOSED, b"\0")])

    def test_answers_have_a_limit_too(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.stick(a)
        self.ports[a].waiting = PEER_QUEUE_MAXIMUM + 1
        self.say(a, (OPEN_CHANNEL, b"\0" + bytes(82)))
        self.assertEqual(self.ports[a].closed, DropReason.SEND_BUFFER_FULL)
        self.assertIsNone(self.ports[b].closed)


class AbandonedTests(RelayCase):
    """A dialler that gives up again and again before it is answered."""

    profile = Profile.SKYWIRE

    def test_an_acceptor_of_go_stays_reachable(self) -> None:
        """The acceptor releases an id only at CloseChannel; where it keeps an id, other ids are tried first."""
        a, b = self.peer(0), self.peer(1)
        taken: set[int] = set()
        for _ in range(300):
            self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
            self.say(a, (CLOSE_CHANNEL, b"\0"))
            for frame, body in self.ports[b].take():
                if frame == OPEN_CHANNEL:
                    self.assertNotIn(body[0], taken)
                    taken.add(body[0])
                elif frame == CLOSE_CHANNEL:
                    taken.discard(body[0])
        self.assertEqual(taken, set())

    def test_ids_of_refused_offers_are_passed_over(self) -> None:
        a, b = self.peer(0), self.peer(1)
        kept = set(range(128, 256))
        opened = False
        for _ in range(130):
            self.say(a, (OPEN_CHANNEL, b"\0" + b.key + bytes(49)))
            number = self.ports[b].take()[-1][1][0]
            if number not in kept:
                self.say(b, (CHANNEL_OPENED, bytes((number,)) + bytes(49)))
                opened = True
                break
            self.say(b, (CHANNEL_CLOSED, bytes((number,))))
        self.assertTrue(opened)


class UnansweredTests(RelayCase):
    """An acceptor that does not answer the CloseChannel of a channel that is over."""

    profile = Profile.SKYWIRE

    def test_others_can_end_their_channels(self) -> None:
        """A peer could open channels to the client and disconnect. The client's late answer to the next CloseChannel
        must not count for that peer.
        """
        victim, enemy = self.peer(0), self.peer(1)
        for number in range(256):
            self.channel(enemy, victim, number)
        self.relay.remove(enemy)
        self.assertEqual(len(victim.answers_due), 256)
        other = self.peer(2)
        for _ in range(3):
            there = self.channel(other, victim)
            self.ports[victim].take()
            self.say(other, (CLOSE_CHANNEL, b"\0"))
            self.assertEqual(self.ports[victim].take(), [(CLOSE_CHANNEL, bytes((there,)))])
            self.say(victim, (CHANNEL_CLOSED, bytes((there,))))
            self.assertEqual(self.ports[other].take(), [(CHANNEL_CLOSED, b"\0")])
            self.assertEqual(self.relay.channel_count, 0)


class WrongProfileTests(SynchronousTestCase):
    """A client of the other dialect is refused at once, with a reason that is counted."""

    def test_first_frames_of_the_other_profile_end_the_link(self) -> None:
        for profile, other in ((Profile.SEED, Profile.SKYWIRE), (Profile.SKYWIRE, Profile.SEED)):
            for frame_type, body in (
                (OPEN_CHANNEL, b"\1" + LISTED[1].public + bytes(49)),
                (CHANNEL_OPENED, b"\1" + bytes(49)),
                (CLOSE_CHANNEL, b"\1"),
                (CHANNEL_CLOSED, b"\1"),
            ):
                data = bytearray(encode_frame(other, frame_type, body))
                relay = Relay(profile)
                peer = relay.add(LISTED[0].public, FakePort(profile))
                error = self.assertRaises(RemoteProtocolError, relay.receive_frames, peer, data, len(data))
                self.assertEqual(error.reason, DropReason.WRONG_PROFILE)
                client = ClientConnection(LISTED[0], profile)
                client.receive_frames(data, len(data))
                assert client.broken is not None
                self.assertEqual(client.broken.reason, DropReason.WRONG_PROFILE)
                # The valid frame is accepted.
                right = bytearray(encode_frame(profile, frame_type, body))
                relay = Relay(profile)
                peer = relay.add(LISTED[0].public, FakePort(profile))
                self.assertEqual(relay.receive_frames(peer, right, len(right)), len(right))

    def test_an_open_channel_that_is_too_long(self) -> None:
        for profile in Profile:
            relay = Relay(profile)
            peer = relay.add(LISTED[0].public, FakePort(profile))
            data = bytearray(
                encode_frame(profile, CLOSE_CHANNEL, b"\1") + encode_frame(profile, OPEN_CHANNEL, bytes(84))
            )
            error = self.assertRaises(RemoteProtocolError, relay.receive_frames, peer, data, len(data))
            self.assertEqual(error.reason, DropReason.WRONG_PROFILE)


class CountTests(RelayCase):
    """Frames that do not fit the state are counted once, and answered."""

    def counted(self, peer: RelayPeer, *frames: tuple[int, bytes]) -> dict[DropReason, int]:
        before = self.relay.drops.copy()
        self.say(peer, *frames)
        return dict(self.relay.drops - before)

    def test_frames_that_do_not_fit(self) -> None:
        a, b = self.peer(0), self.peer(1)
        there = self.channel(a, b)
        one = {DropReason.NO_SUCH_TRANSPORT: 1}
        for peer, frame, expected in (
            (a, (CLOSE_CHANNEL, b"\0\0"), {DropReason.BAD_FRAME: 1}),
            (a, (SEND, b"\x09\0\0x"), one),
            (a, (CHANNEL_OPENED, b"\0" + bytes(49)), one),
            (b, (CHANNEL_OPENED, bytes((there,)) + bytes(49)), one),
            (a, (CHANNEL_CLOSED, b"\x09"), one),
            (a, (SEND + 1, b"\0"), {DropReason.UNKNOWN_FRAME: 1}),
            (a, (SEND, b"\0"), {DropReason.BAD_FRAME: 1}),
        ):
            self.assertEqual(self.counted(peer, frame), expected, frame)
        self.assertEqual(self.relay.strays, 0)
        self.assertEqual(self.ports[a].take()[-1][0], CHANNEL_CLOSED)

    def test_frames_of_unknown_types_are_not_forwarded(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.channel(a, b)
        unknown = (SEND + 1, b"\0\1\0x")
        self.assertEqual(self.counted(a, unknown, unknown), {DropReason.UNKNOWN_FRAME: 2})
        self.assertEqual(self.ports[b].take(), [])

    def test_strays_of_a_read(self) -> None:
        a = self.peer(0)
        self.say(a, *[(SEND, b"\x09\0\0x")] * 3)
        self.assertEqual(self.relay.strays, 3)

    def test_frames_of_a_read_that_ends_early(self) -> None:
        """Frames that are passed again are counted once."""
        a, b, c = (self.peer(number) for number in range(3))
        self.channel(a, b, 0), self.channel(a, c, 1)
        before = self.relay.frames, self.relay.frame_bytes
        frames = [encode_frame(self.profile, SEND, bytes((number, 0, 0)) + b"x") for number in (0, 1, 0, 1, 9, 9)]
        data = bytearray(b"".join(frames))
        reads = 0
        while data:
            del data[: self.relay.receive_frames(a, data, len(data), 1)]
            reads += 1
        self.assertEqual(reads, len(frames))
        self.assertEqual(self.relay.frames - before[0], len(frames))
        self.assertEqual(self.relay.frame_bytes - before[1], sum(map(len, frames)))

    def test_lost_clients_are_not_notified(self) -> None:
        a, b = self.peer(0), self.peer(1)
        there = self.channel(a, b)
        self.ports[b].take()
        self.assertIs(self.relay.remove(a), True)
        self.assertIs(self.relay.remove(a), True)
        self.assertEqual((self.ports[a].take(), self.relay.channel_count), ([], 0))
        self.assertEqual(self.ports[b].take(), [(CHANNEL_CLOSED, bytes((there,)))])
        self.assertEqual(self.relay.drops, {DropReason.PEER_DISCONNECTED: 1})

    def test_one_turn_suffices_for_the_channels_of_a_lost_client(self) -> None:
        """``remove`` ignores its limit, because no client has as many channels as a server may close in one turn."""
        self.assertLessEqual(ID_COUNT, CLOSED_AT_ONCE)

    def test_a_server_that_leaves(self) -> None:
        """Every channel is closed at both ends, also one to oneself's other link; no new one is opened."""
        a, b, c = (self.peer(number) for number in range(3))
        ids = [self.channel(a, b, 0), self.channel(a, c, 1), self.channel(b, c, 0)]
        self.relay.close_all()
        self.relay.check()
        self.assertEqual((self.relay.channel_count, a.ends, b.ends, c.ends), (0, {}, {}, {}))
        closed = {
            number: [frame for frame in self.ports[peer].take() if frame[0] == CHANNEL_CLOSED]
            for number, peer in enumerate((a, b, c))
        }
        self.assertEqual([len(closed[number]) for number in range(3)], [2, 2, 2])
        self.assertEqual(sorted(body[0] for _, body in closed[2]), sorted(ids[1:]))
        self.say(a, (OPEN_CHANNEL, b"\5" + b.key + bytes(49)))
        self.assertEqual((self.ports[a].take(), self.ports[b].take()), ([(CHANNEL_CLOSED, b"\5")], []))
        self.assertEqual(self.relay.drops[DropReason.DRAINING], 1)

    def test_closing_unknown_channels_counts_against_the_rate(self) -> None:
        """Closing an unknown channel is answered while within the rate; closing an open channel is not counted."""
        a, b = self.peer(0), self.peer(1)
        self.relay.limits = Limits(open_rate=1)
        self.channel(a, b)
        self.say(a, (CLOSE_CHANNEL, b"\0"))
        strays = [(CLOSE_CHANNEL, b"\x09")] * 12
        self.say(a, *strays)
        answers = self.ports[a].take()
        self.assertTrue(0 < answers.count((CHANNEL_CLOSED, b"\x09")) < len(strays), answers)

    def test_answers_that_do_not_fit_cost_their_rate(self) -> None:
        """Answers to an open channel and to the client's own request count; an answer that is awaited does not."""
        a, b = self.peer(0), self.peer(1)
        self.relay.limits = Limits(open_rate=1)
        asked: list[Kind] = []
        there = self.channel(a, b)
        self.say(a, (OPEN_CHANNEL, b"\1" + b.key + bytes(49)))
        waiting = self.ports[b].take()[-1][1][0]
        for peer in (a, b):
            police = peer.police

            def counted(name: str, police: Any = police) -> Any:
                def ask(kind: Kind, *rest: Any) -> bool:
                    asked.append(kind)
                    return bool(getattr(police, name)(kind, *rest))

                return ask

            self.patch(peer, "police", SimpleNamespace(allows=counted("allows"), within=counted("within")))
        for peer, number, kinds in (
            (b, there, [Kind.STRAY]),
            (a, 1, [Kind.STRAY]),
            (b, waiting, []),
        ):
            asked.clear()
            self.say(peer, (CHANNEL_OPENED, bytes((number,)) + bytes(49)))
            self.assertEqual(asked, kinds, number)
        asked.clear()
        self.say(a, (CHANNEL_CLOSED, b"\1"))
        self.assertEqual(asked, [])

    def test_a_late_answer_reveals_the_dialect(self) -> None:
        """A frame for a closed channel shows by its id whether the client uses one id or two."""
        self.profile = Profile.SKYWIRE
        self.setUp()
        a = self.peer(0)
        for ids, two, name in ((b"\x09", False, 9), (b"\x09\x05", True, 5)):
            self.say(a, (CHANNEL_OPENED, ids + bytes(49)))
            self.assertIs(a.two_ids, two)
            self.assertEqual(self.ports[a].take(), [(CLOSE_CHANNEL, bytes((name,)))])

    def test_an_answer_in_the_name_of_another_channel(self) -> None:
        """The relay does not send a frame with an id that the client knows as another channel."""
        a, b = self.peer(0), self.peer(1)
        a.two_ids = True
        end_id = self.channel(a, b, 5)
        self.assertIn(5, [end.name for end in a.ends.values()])
        self.ports[a].take()
        self.say(a, (CLOSE_CHANNEL, b"\x07"))
        self.assertEqual(self.ports[a].take(), [(CHANNEL_CLOSED, b"\x07")])
        own = next(end for end in a.ends.values() if end.name == 5)
        own.id, gone = 77, own.id
        a.ends[77] = a.ends.pop(gone)
        self.relay._answer_stray(a, CLOSE_CHANNEL, b"\x05")
        self.assertEqual((self.ports[a].take(), end_id), ([], end_id))
        a.ends[gone] = a.ends.pop(77)
        own.id = gone


class ManyTests(RelayCase):
    """Floods, and links of one key."""

    def test_the_links_of_one_key_are_limited(self) -> None:
        for _ in range(MAX_LINKS_PER_KEY + 1):
            newest = self.peer(0)
        closed = [port.closed for port in self.ports.values()]
        self.assertEqual(closed, [DropReason.REPLACED] + [None] * MAX_LINKS_PER_KEY)
        self.assertIs(self.relay.newest[LISTED[0].public], newest)

    def test_a_flood_of_open_channel(self) -> None:
        a, b = self.peer(0), self.peer(1)
        limits = Limits(open_rate=10)
        self.relay.limits = limits
        frame = (OPEN_CHANNEL, b"\0" + LISTED[5].public + bytes(49))
        for _ in range(25):
            self.say(a, frame)
        self.assertEqual(self.relay.drops[DropReason.NO_SUCH_PEER], 20)
        self.assertEqual(self.relay.drops[DropReason.RATE_LIMITED], 5)
        self.assertEqual(len(self.ports[a].take()), 25)
        self.now += 1
        self.say(a, frame)
        self.assertEqual(self.relay.drops[DropReason.NO_SUCH_PEER], 21)
        error = self.assertRaises(RemoteProtocolError, self.say, a, *[frame] * 200)
        self.assertEqual(error.reason, DropReason.FLOOD)
        self.say(b, frame)

    def test_answers_to_others_are_no_flood(self) -> None:
        """Many clients, each within its own rate, open more channels to one client than one client may open. The client
        is not ended for its answers, and requests above the rate are refused.
        """
        victim = self.peer(0)
        others = [self.peer(number) for number in range(1, 6)]
        self.relay.limits = Limits(open_rate=10)
        refused = 0
        for _ in range(20):
            for other in others:
                self.say(other, (OPEN_CHANNEL, b"\0" + victim.key + bytes(49)))
                for frame_type, body in self.ports[victim].take():
                    self.assertEqual(frame_type, OPEN_CHANNEL)
                    self.say(victim, (CHANNEL_CLOSED, body[:1]))
                refused += len(self.ports[other].take())
        self.assertEqual(refused, 100)
        self.assertGreater(self.relay.drops[DropReason.DESTINATION_RATE], 100 - DESTINATION_BURST * 10)
        self.assertEqual((self.relay.drops[DropReason.RATE_LIMITED], self.ports[victim].closed), (0, None))
        with self.assertRaises(RemoteProtocolError) as caught:
            for _ in range(100):
                self.now += 0.1  # The messages stay within the rate of a link.
                self.say(others[0], (OPEN_CHANNEL, b"\0" + victim.key + bytes(49)))
                self.say(others[1], (OPEN_CHANNEL, b"\0" + victim.key + bytes(49)))
                for _, body in self.ports[victim].take():
                    self.say(victim, (CHANNEL_CLOSED, body[:1]))
                self.say(others[2], *[(OPEN_CHANNEL, b"\0" + victim.key + bytes(49))] * 5)
        self.assertEqual(caught.exception.reason, DropReason.FLOOD)

    def test_late_answers_are_no_flood(self) -> None:
        """Channels are closed before their remote answers. Then its answers are for unknown channels."""
        victim, other = self.peer(0), self.peer(1)
        self.relay.limits = Limits(open_rate=10)
        for _ in range(600):
            self.now += 0.1
            self.say(other, (OPEN_CHANNEL, b"\0" + victim.key + bytes(49)), (CHANNEL_CLOSED, b"\0"))
            asked = [body[:1] for kind, body in self.ports[victim].take() if kind == OPEN_CHANNEL]
            for number in asked:
                self.say(
                    victim, (CHANNEL_OPENED, number + bytes(49)), (CHANNEL_CLOSED, number), (CHANNEL_CLOSED, number)
                )
        self.assertEqual(self.relay.drops[DropReason.FLOOD], 0)

    def test_data_of_a_channel_that_others_closed_is_no_flood(self) -> None:
        victim, other = self.peer(0), self.peer(1)
        there = self.channel(other, victim)
        self.say(other, (CHANNEL_CLOSED, b"\0"))
        data = [(SEND, bytes((there,)) + bytes(20))] * 1000
        for _ in range(60):
            self.say(victim, *data)
            self.assertEqual(self.relay.strays, 0)
        for _ in range(10):
            self.say(victim, *data)
        self.assertEqual(self.relay.strays, 1000)

    def test_late_data_is_no_flood_when_the_id_is_in_use_again(self) -> None:
        """A client that occupies all ids of the victim closes a channel and opens another one, which gets the same id
        at the victim.
        """
        victim, other = self.peer(0), self.peer(1)
        self.relay.limits = Limits(open_rate=0)
        for number in range(256):
            there = self.channel(other, victim, number)
        data = [(SEND, bytes((there,)) + bytes(20))] * 1000
        for _ in range(20):
            self.say(other, (CHANNEL_CLOSED, b"\xff"), (OPEN_CHANNEL, b"\xff" + victim.key + bytes(49)))
            self.say(victim, *data)
            self.assertEqual((self.relay.strays, self.ports[other].take()), (0, []))
            self.say(victim, (CHANNEL_OPENED, bytes((there,)) + bytes(49)))
            self.ports[other].take()
        # While a client has not yet answered the offer of a channel, its frames are not blamed on the other client.
        fresh = self.peer(2)
        self.say(other, (CHANNEL_CLOSED, b"\xff"), (OPEN_CHANNEL, b"\xff" + fresh.key + bytes(49)))
        self.say(fresh, *[(SEND, b"\xff" + bytes(20))] * 3)
        self.assertEqual(self.relay.strays, 3)

    def test_the_channels_between_two_keys_are_limited(self) -> None:
        a, b = self.peer(0), self.peer(1)
        self.relay.limits = Limits(max_per_pair=2)
        for number in range(3):
            self.say(a, (OPEN_CHANNEL, bytes((number,)) + b.key + bytes(49)))
        self.assertEqual(self.ports[a].take(), [(CHANNEL_CLOSED, b"\2")])
        self.assertEqual(self.relay.drops[DropReason.TOO_MANY_PER_PAIR], 1)


class RandomTests(SynchronousTestCase):
    """No input of a peer breaks the table or affects other peers."""

    @given(st.integers(0, 2**32), st.sampled_from(Profile))
    def test_random_frames_of_three_clients(self, seed: int, profile: Profile) -> None:
        random = Random(seed)
        relay = Relay(profile, limits=Limits(open_rate=0, max_per_pair=random.choice((1, 3, 256))))
        ports = {}
        for number in range(3):
            port = FakePort(profile)
            ports[relay.add(LISTED[number].public, port)] = port
        for _ in range(120):
            if not relay.peers:
                break
            peer = random.choice(list(relay.peers))
            if random.random() < 0.02:
                relay.remove(peer)
                port = FakePort(profile)
                ports[relay.add(peer.key, port)] = port
                continue
            frame_type = random.choice((OPEN_CHANNEL,) * 3 + (CHANNEL_OPENED,) * 3 + tuple(range(7)))
            number = random.choice((0, 1, 2, 252, 253, 254, 255))
            length = {OPEN_CHANNEL: 49, CHANNEL_OPENED: 49}.get(frame_type, random.randrange(4))
            key = random.choice(LISTED[:4]).public if frame_type == OPEN_CHANNEL else b""
            body = bytes((number,)) + key + random.randbytes(length)
            if random.random() < 0.1:
                body = body[: random.randrange(len(body))]
            data = bytearray(encode_frame(profile, frame_type, body))
            relay.receive_frames(peer, data, len(data))
            relay.check()
        for peer in list(relay.peers):
            relay.remove(peer)
        relay.check()
        assert relay.channel_count == 0

    @given(st.integers(0, 2**32), st.sampled_from(Profile))
    def test_random_frames_at_a_client(self, seed: int, profile: Profile) -> None:
        random = Random(seed)
        core = ClientConnection(KEYS["A"], profile)
        core.accepting = True
        for _ in range(60):
            if random.random() < 0.3 and core.has_free_id:
                core.open(KEYS["B"].public)
            channels = list(core.channels.values())
            if channels and random.random() < 0.2:
                channel = random.choice(channels)
                random.choice((core.close, core.give_up))(channel)
            body = random.randbytes(random.choice((0, 1, 1, 2, 4, 50, 83)))
            if body and random.random() < 0.8:
                body = bytes((random.choice((0, 1, 2, 255)),)) + body[1:]
            data = bytearray(encode_frame(profile, random.randrange(6), body))
            taken, _ = core.receive_frames(data, len(data))
            self.assertEqual(taken, len(data))
            for number, channel in core.channels.items():
                self.assertEqual(channel.id, number)
                self.assertNotIn(channel.state, (None, State.CLOSED))
            FrameBuffer(profile).feed(b"".join(core.data_to_send()))

    def test_random_bytes_at_every_state(self) -> None:
        """The server survives random bytes before, within and after the handshake, with a channel and without."""
        random = Random(3)
        for profile in Profile:
            network = Network(profile)
            factory = Accepting()
            honest, other = network.client(KEYS["A"], Accepting()), network.client(KEYS["B"], factory)
            for _ in range(60):
                link: Any = network.factory.buildProtocol(None)
                from twisted.internet.testing import StringTransport

                transport = StringTransport()
                transport.abortConnection = transport.loseConnection  # type: ignore[method-assign]
                link.makeConnection(transport)
                link.dataReceived(random.choice((b"", b"{", b'{"version"')) + random.randbytes(random.randrange(200)))
                raw = network.raw(KEYS["X"])
                if random.random() < 0.5:
                    raw.send(OPEN_CHANNEL, b"\0" + KEYS["B"].public + random.randbytes(49))
                cast(Any, raw.transport).write(random.randbytes(random.randrange(300)))
                network.settle()
                other.link.server_side.send(encode_frame(profile, random.randrange(9), random.randbytes(60)))
                network.settle()
                cast(Any, raw.transport).abortConnection()
                network.settle()
                if not link._is_lost:
                    link.connectionLost()
            opening = honest.open(KEYS["B"].public, Accepting())
            network.settle()
            mine: Any = self.successResultOf(opening)
            mine.transport.write(b"still there")
            network.settle()
            self.assertEqual(factory.built[-1].data, b"still there")

    def test_frames_before_an_invalid_size_are_processed(self) -> None:
        network = Network(Profile.SKYWIRE)
        factory = Accepting()
        a, b = network.client(KEYS["A"], Accepting()), network.client(KEYS["B"], factory)
        opening = a.open(KEYS["B"].public, Accepting())
        network.settle()
        mine: Any = self.successResultOf(opening)
        mine.transport.write(b"the last word")
        network.clock.advance(0)
        a.link.send(b"\0\0\0")
        b.link.server_side.send(encode_frame(Profile.SKYWIRE, CHANNEL_CLOSED, b"\xff") + b"\0\0\0")
        network.settle()
        self.assertIsNotNone(factory.built[0].lost)
        self.assertIsNotNone(mine.lost)
        self.assertFalse(a.connected or b.connected)

        network = Network(Profile.SKYWIRE)
        a, b = network.client(KEYS["A"], Accepting()), network.client(KEYS["B"], factory)
        opening = a.open(KEYS["B"].public, Accepting())
        network.settle()
        mine = self.successResultOf(opening)
        mine.transport.write(b"the last word")
        network.clock.advance(0)
        a.link.send(b"\0\0\0")
        network.settle()
        self.assertEqual(factory.built[1].data, b"the last word")

    def test_transitions_are_closed(self) -> None:
        """Every state is reached, and every state but the last is left."""
        targets = set(TRANSITIONS.values())
        sources = {state for state, _ in TRANSITIONS}
        self.assertEqual(targets, set(State))
        self.assertEqual(sources, {None, *State} - {State.CLOSED})
        self.assertEqual({what for _, what in TRANSITIONS}, set(Input))

    def test_closing_a_client_ends_its_channels_in_order(self) -> None:
        """When a client stops, its channels end in order, and all written data arrives."""
        network = Network()
        factory = Accepting()
        a, _ = network.client(KEYS["A"]), network.client(KEYS["B"], factory)
        opening = a.open(KEYS["B"].public, Accepting())
        network.settle()
        mine: Any = self.successResultOf(opening)
        mine.transport.write(b"the last word")
        network.clock.advance(0)
        a.close()
        network.settle()
        self.assertEqual(factory.built[0].data, b"the last word")
        self.assertIsNotNone(factory.built[0].lost)
        self.assertIsNotNone(mine.lost)
        self.assertEqual(network.relay.channel_count, 0)
        self.assertEqual((CLOSE_CHANNEL, len(network.factory.sessions)), (2, 1))


class UnreadTests(SynchronousTestCase):
    """Applications that do not read."""

    def setUp(self) -> None:
        self.network = Network()
        self.factory = Accepting()
        self.a, self.b = self.network.client(KEYS["A"]), self.network.client(KEYS["B"], self.factory)
        self.ends: list[Any] = []
        for _ in range(2):
            self.a.open(KEYS["B"].public, Accepting()).addCallback(self.ends.append)
            self.network.settle()
        self.stopped = self.factory.built[0]
        self.stopped.transport.pauseProducing()
        self.ends[0].transport.write(bytes(2_000_000))
        self.network.settle()

    def test_a_stopped_application_holds_the_link(self) -> None:
        self.assertTrue(self.b.link.is_reading_paused)
        self.stopped.transport.resumeProducing()
        self.network.settle()
        self.assertFalse(self.b.link.is_reading_paused)
        self.assertEqual(len(self.stopped.data), 2_000_000)
        self.network.advance(STALL_TIMEOUT)
        self.assertIsNone(self.stopped.lost)

    def test_a_slow_reader_keeps_its_channel(self) -> None:
        self.network.advance(STALL_TIMEOUT - 1)
        while self.b.link.is_reading_paused:
            self.stopped.transport._deliver(self.stopped.transport._unread.popleft())
        self.network.advance(STALL_TIMEOUT * 2)
        self.assertIsNone(self.stopped.lost)
        self.assertGreater(self.stopped.transport.unread, 500_000)

    def test_a_stopped_reader_loses_its_channel(self) -> None:
        self.network.advance(STALL_TIMEOUT - 1)
        self.assertTrue(self.b.link.is_reading_paused)
        self.network.advance(2)
        self.assertFalse(self.b.link.is_reading_paused)
        self.assertIsNotNone(self.ends[0].lost)
        self.ends[1].transport.write(b"still here")
        self.network.settle()
        self.assertEqual(self.factory.built[1].data, b"still here")
        # The data that had arrived is delivered, and then the error.
        self.stopped.transport.resumeProducing()
        self.network.settle()
        self.assertGreater(len(self.stopped.data), 1_000_000)
        self.assertIn("no data was read", str(self.stopped.lost.value))

    def test_unread_data_of_closed_channels_is_limited(self) -> None:
        built = self.factory.built
        self.ends[0].transport.abortConnection()
        for _ in range(30):
            opened: list[Any] = []
            self.a.open(KEYS["B"].public, Accepting()).addCallback(opened.append)
            self.network.settle()
            built[-1].transport.pauseProducing()
            opened[0].transport.write(bytes(900_000))
            opened[0].transport.loseConnection()
            self.network.settle()
        left = sum(one.transport.waiting for one in built)
        self.assertLessEqual(left, MAX_UNREAD_OF_CLOSED)
        self.assertGreater(left, MAX_UNREAD_OF_CLOSED - 2_000_000)
        told = [one for one in built if one.lost is not None]
        self.assertEqual(len(told), len(built) - 1 - left // 900_000)

    def test_aborting_releases_the_link(self) -> None:
        self.stopped.transport.abortConnection()
        self.network.settle()
        self.assertFalse(self.b.link.is_reading_paused)
        self.assertIsNotNone(self.ends[0].lost)
