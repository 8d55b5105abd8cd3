"""A client's table of channels, by plain calls: frames in states in which they are not expected."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason
from dmsg.messaging.client import Client
from dmsg.messaging.core.agreement import Offer, Proposal
from dmsg.messaging.core.dialect import Dialect, dialect_of
from dmsg.messaging.core.events import Closed, DataReceived, Event, Opened, Rejected, Requested
from dmsg.messaging.core.state import ClientChannel, State
from dmsg.messaging.core.table import JOIN_LIMIT, ClientConnection
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
    encode_close,
    encode_closed,
    encode_frame,
    encode_open,
    encode_opened,
    send_head,
)
from dmsg.messaging.server import Server
from tests.messaging.support import KEYS

A, B = KEYS["A"], KEYS["B"]


class CoreCase(SynchronousTestCase):
    """Test case with one client; the test takes the part of its server and its remote."""

    profile = Profile.SEED
    two_ids = False

    def setUp(self) -> None:
        self.core = ClientConnection(A, self.profile, two_ids=self.two_ids)
        self.core.accepting = True
        self.ciphers: dict[int, Any] = {}

    def receive(self, data: bytes, most: int = 1000) -> list[Event]:
        taken, events = self.core.receive_frames(bytearray(data), len(data), most)
        self.assertTrue(taken == len(data) or self.core.has_frames_left or self.core.broken)
        return events

    def sent(self) -> list[Any]:
        return FrameBuffer(self.profile).feed(b"".join(self.core.data_to_send()))

    def open(self, name: int | None = None, **options: Any) -> ClientChannel:
        """A channel that A opened and B answered."""
        channel = self.core.open(B.public, **options)
        (frame,) = self.sent()
        _, message = decode_open(frame.body)
        self.ciphers[channel.id], answer = Offer(B, A.public, message, self.profile).accept()
        own = (channel.id, answer, name) if self.two_ids else (channel.id, answer)
        (event,) = self.receive(encode_opened(self.profile, *own))
        self.assertIsInstance(event, Opened)
        return channel

    def message(self, channel: ClientChannel, data: bytes) -> bytes:
        return send_head(self.profile, channel.id, len(data)) + self.ciphers[channel.id].seal(data)

    def asked_for(self, number: int) -> bytes:
        """An OpenChannel of B."""
        return encode_open(self.profile, number, B.public, Proposal(B, A.public, self.profile).message)


class DataTests(CoreCase):
    """Messages of one read."""

    def test_a_new_connection_has_zero_counters(self) -> None:
        self.assertIs(self.core.has_frames_left, False)
        self.assertIs(self.core.has_free_id, True)
        self.assertEqual(self.core.drops, {})
        self.assertIs(ClientConnection(A, self.profile).accepting, False)

    def test_the_first_frame_in_the_other_dialect(self) -> None:
        """No part of the frame is processed."""
        other = Profile.SKYWIRE if self.profile is Profile.SEED else Profile.SEED
        data = encode_open(other, 5, B.public, bytes(49))
        self.assertEqual(self.core.receive_frames(bytearray(data), len(data)), (0, []))
        self.assertIsNotNone(self.core.broken)

    def test_a_close_of_no_channel_is_answered(self) -> None:
        for number in (0, 3, 255):
            self.assertEqual(self.receive(encode_close(self.profile, number)), [])
            self.assertEqual([(frame.type, frame.body) for frame in self.sent()], [(CHANNEL_CLOSED, bytes((number,)))])
        self.receive(encode_frame(self.profile, CLOSE_CHANNEL, b"\3\4"))
        self.assertEqual((self.sent(), self.core.drops), ([], {DropReason.NO_SUCH_TRANSPORT: 4}))

    def test_an_answer_that_is_not_the_remotes_is_counted_once(self) -> None:
        channel = self.core.open(B.public)
        self.sent()
        own = (channel.id, bytes(49), 5) if self.two_ids else (channel.id, bytes(49))
        (event,) = self.receive(encode_opened(self.profile, *own))
        self.assertIsInstance(event, Rejected)
        self.assertEqual(self.core.drops, {DropReason.BAD_FRAME: 1})

    def test_messages_are_joined_to_so_many_bytes(self) -> None:
        channel = self.open()
        half = JOIN_LIMIT // 2 - 16  # The overhead of each message counts, too.
        for sizes, told in (
            ((half,) * 4, [3 * half, half]),
            ((half, half + 1, 5), [2 * half + 1, 5]),
            ((5, 6, 7), [18]),
        ):
            events = self.receive(b"".join(self.message(channel, bytes(size)) for size in sizes))
            self.assertEqual([len(event.data) for event in events if isinstance(event, DataReceived)], told)

    def test_messages_are_reported_as_separate_events(self) -> None:
        channel = self.open(report_messages=True)
        events = self.receive(b"".join(self.message(channel, data) for data in (b"one", b"", b"two")))
        self.assertEqual([cast(Any, event).data for event in events], [b"one", b"", b"two"])

    def test_data_for_unknown_channels_does_not_hide_later_frames(self) -> None:
        channel = self.open()
        stray = send_head(self.profile, 77, 3) + bytes(3 + 16)
        good = self.message(channel, b"good"), self.message(channel, b"and more")
        events = self.receive(stray + good[0] + stray + good[1])
        self.assertEqual([cast(Any, event).data for event in events], [b"good", b"and more"])
        self.assertEqual(self.core.drops, {DropReason.NO_SUCH_TRANSPORT: 2})

    def test_a_header_that_cannot_be_is_counted_once(self) -> None:
        self.open()
        self.receive(encode_frame(self.profile, OPEN_CHANNEL, bytes(200)) * 3)
        self.assertIsNotNone(self.core.broken)
        self.assertEqual(self.core.drops.total(), 1)

    def test_the_dialect_is_looked_at_once(self) -> None:
        """A later frame may look like one of the other dialect."""
        self.open()
        other = Profile.SKYWIRE if self.profile is Profile.SEED else Profile.SEED
        self.receive(encode_closed(other, 5) + bytes(200))
        self.assertNotIn("first frame", str(self.core.broken))


class ReadTests(CoreCase):
    """Reads with several frames."""

    def test_several_messages_of_one_read_arrive_in_order(self) -> None:
        channel = self.open(report_messages=True)
        data = bytearray(b"".join(self.message(channel, bytes((number,))) for number in range(5)))
        told = []
        while data:
            taken, events = self.core.receive_frames(data, len(data), 2)
            del data[:taken]
            told.append(len(events))
        self.assertEqual(told, [2, 2, 1])
        self.assertIs(self.core.has_frames_left, False)

    def test_joining_of_data_stops_at_another_frame(self) -> None:
        channel = self.open()
        half = JOIN_LIMIT // 2 - 16
        pieces = [self.message(channel, bytes(half)) for _ in range(4)]
        pieces.insert(2, encode_closed(self.profile, 200))
        events = self.receive(b"".join(pieces))
        self.assertEqual([len(cast(Any, event).data) for event in events], [2 * half, 2 * half])

    def test_a_message_of_a_wrong_length_closes_its_channel(self) -> None:
        for size in (OPEN_BODY_SIZE - 1, OPEN_BODY_SIZE + 1):
            body = self.asked_for(3)[len(encode_frame(self.profile, OPEN_CHANNEL, b"")) :]
            frame = encode_frame(self.profile, OPEN_CHANNEL, body.ljust(size, b"x")[:size])
            if size > OPEN_BODY_SIZE:
                self.receive(frame)
                self.assertIsNotNone(self.core.broken)
            else:
                self.assertEqual(self.receive(frame), [])
                self.assertEqual(self.sent()[-1], (CHANNEL_CLOSED, b"\3"))
                self.assertEqual(self.core.drops, {DropReason.REFUSED: 1})

    def test_frames_behind_a_forged_message_are_processed(self) -> None:
        """The frames are of another channel, in the same read; frames before the forged message are reported first."""
        bad, good = self.open(), self.open()
        forged = bytearray(self.message(bad, b"forged"))
        before = self.message(good, b"first")
        forged[-1] ^= 1
        events = self.receive(before + bytes(forged) + self.message(good, b"behind"))
        self.assertEqual([type(event) for event in events], [DataReceived, Closed, DataReceived])
        self.assertEqual(self.core.drops, {DropReason.BAD_FRAME: 1})

    def test_close_says_whether_an_answer_is_expected(self) -> None:
        """Whether there is an answer to wait for."""
        channel = self.open()
        self.assertIs(self.core.close(channel), True)
        self.assertIs(self.core.close(channel), False)
        self.receive(encode_closed(self.profile, channel.id))
        self.assertIs(self.core.close(channel), False)
        (event,) = self.receive(self.asked_for(9))
        self.assertIs(self.core.close(event.channel), False)

    def test_closed_from_both_sides_at_once(self) -> None:
        channel = self.open()
        self.core.close(channel)
        self.receive(encode_close(self.profile, channel.id))
        before = self.core.drops.copy()
        self.receive(encode_close(self.profile, channel.id))
        self.assertEqual(self.core.drops - before, {DropReason.NO_SUCH_TRANSPORT: 1})

    def test_a_close_followed_by_a_lost_remote_is_not_clean(self) -> None:
        """The server sends both at once when it has lost the remote; other channels are not concerned."""
        first, second = self.open(), self.open()
        close, closed = (encode(self.profile, second.id) for encode in (encode_close, encode_closed))
        events = self.receive(self.message(first, b"data") + encode_close(self.profile, first.id) + close + closed)
        self.assertEqual([type(event) for event in events], [DataReceived, Closed, Closed])
        reasons = [event.reason for event in events if isinstance(event, Closed)]
        self.assertEqual(reasons, [CloseReason.UNSPECIFIED, CloseReason.ABORTED])


class CountTests(CoreCase):
    """Each ignored frame is counted once."""

    def test_ignored_frames_are_counted_once(self) -> None:
        channel = self.open()
        for frame, reason in (
            (encode_frame(self.profile, CHANNEL_OPENED, bytes((channel.id,)) + bytes(49)), "NO_SUCH_TRANSPORT"),
            (encode_frame(self.profile, CLOSE_CHANNEL, bytes((channel.id, 0))), "BAD_FRAME"),
            (encode_closed(self.profile, 200), "NO_SUCH_TRANSPORT"),
            (encode_frame(self.profile, SEND + 3, b"\0"), "UNKNOWN_FRAME"),
            (encode_frame(self.profile, SEND, bytes((200,))), "BAD_FRAME"),
        ):
            before = self.core.drops.copy()
            self.assertEqual(self.receive(frame), [])
            self.assertEqual(self.core.drops - before, {DropReason[reason]: 1})
        self.core.close(channel)
        self.receive(encode_closed(self.profile, channel.id))
        before = self.core.drops.copy()
        self.receive(encode_closed(self.profile, channel.id) + encode_close(self.profile, channel.id))
        self.assertEqual(self.core.drops - before, {DropReason.NO_SUCH_TRANSPORT: 2})


class IdTests(CoreCase):
    """The 256 ids of channels."""

    def test_all_256_ids_can_be_used(self) -> None:
        for number in range(ID_COUNT):
            self.assertIs(self.core.has_free_id, True)
            self.assertEqual(self.core.open(B.public).id, number)
        self.assertIs(self.core.has_free_id, False)

    def test_ids_in_doubt_are_reused_last(self) -> None:
        """A ChannelClosed may still be on its way, and would be taken for an answer to the next channel."""
        channel = self.open()
        self.receive(encode_close(self.profile, channel.id))
        self.core.give_up(channel)
        self.assertEqual(channel.state, State.CLOSED)
        ids = [self.core.open(B.public).id for _ in range(ID_COUNT)]
        self.assertEqual((ids[0], ids[-1]), (1, 0))

    def test_abandoning_a_closed_channel_has_no_effect(self) -> None:
        channel = self.open()
        self.assertTrue(self.core.close(channel))
        self.assertIs(self.core.give_up(channel), True)
        self.assertIs(self.core.give_up(channel), False)

    def test_a_channel_closed_by_both_ends_frees_its_id(self) -> None:
        channel = self.open()
        self.core.close(channel)
        self.receive(encode_close(self.profile, channel.id))
        self.assertEqual((channel.state, len(self.core.channels)), (State.ENDED, 1))
        self.assertIs(self.core.give_up(channel), True)
        self.assertEqual((channel.state, len(self.core.channels)), (State.CLOSED, 0))


class TwoIdsTests(CoreCase):
    """The server's names are no ids of this side."""

    profile = Profile.SKYWIRE
    two_ids = True

    def test_a_name_that_is_an_id_here(self) -> None:
        own = self.open(name=7)
        self.assertEqual((own.id, own.name), (0, 7))
        (event,) = self.receive(self.asked_for(0))
        assert isinstance(event, Requested)
        self.assertNotEqual(event.channel.id, own.id)
        self.assertEqual((event.channel.name, len(self.core.channels)), (0, 2))

    def test_a_name_that_is_in_use(self) -> None:
        """The channel with that name is open, and the server must not use the name for a second one."""
        self.open(name=7)
        self.assertEqual(self.receive(self.asked_for(7)), [])
        self.assertEqual((self.core.drops[DropReason.REFUSED], len(self.core.channels)), (1, 1))

    def test_closing_an_unknown_id_is_answered(self) -> None:
        """An id that no channel has is answered, one by which an open channel is known is not."""
        self.open(name=7)
        self.sent()
        self.receive(encode_close(self.profile, 7))
        self.assertEqual(self.sent(), [])
        for number in (9, 5):
            self.receive(encode_close(self.profile, number))
            self.assertEqual([frame.type for frame in self.sent()], [CHANNEL_CLOSED])

    def answered(self, number: int, name: int) -> bytes:
        """A ChannelOpened that nobody may be waiting for."""
        return encode_opened(self.profile, number, bytes(49), name)

    def test_a_name_equal_to_an_unanswered_id_is_ignored(self) -> None:
        """The server has not said by which name it wants to hear of that one."""
        own = self.core.open(B.public)
        self.assertIs(own.named, False)
        (event,) = self.receive(self.asked_for(own.id))
        assert isinstance(event, Requested)
        self.assertEqual((event.channel.name, own.state), (own.id, State.OPENING))

    def test_an_unexpected_answer_closes_its_channel(self) -> None:
        """The channel is open for the server, and is closed unless an open channel has that name."""
        self.open(name=7)
        self.sent()
        self.receive(self.answered(200, 7))
        self.assertEqual(self.sent(), [])
        for name in (9, 5):
            self.receive(self.answered(200, name))
            self.assertEqual([(frame.type, frame.body) for frame in self.sent()], [(CLOSE_CHANNEL, bytes((name,)))])

    def test_an_answer_to_an_abandoned_channel_teaches_its_name(self) -> None:
        """The client closed the channel by the only id it knew; afterwards it uses the channel's name."""
        own = self.core.open(B.public)
        self.assertIs(self.core.close(own), True)
        self.assertEqual([frame.type for frame in self.sent()], [OPEN_CHANNEL, CLOSE_CHANNEL])
        self.assertEqual(self.receive(self.answered(own.id, 9)), [])
        self.assertEqual((own.name, own.named, self.sent()), (9, True, []))
        # Two closes have crossed. The answer to the peer's own close ends the channel.
        self.receive(encode_close(self.profile, 9))
        self.assertEqual(self.sent(), [])
        self.receive(encode_closed(self.profile, own.id))
        self.assertEqual((own.state, self.core.channels), (State.CLOSED, {}))

    def test_a_channel_is_closed_when_its_name_becomes_known(self) -> None:
        """With the other id, the server would have closed another channel, so the client waits for the name."""
        own = self.core.open(B.public)
        (event,) = self.receive(self.asked_for(own.id))
        assert isinstance(event, Requested)
        self.core.accept(event.channel)
        self.sent()
        self.assertIs(self.core.close(own), True)
        self.assertEqual(self.sent(), [])
        self.assertIs(self.core.give_up(own), True)
        self.assertEqual((own.state, self.core.channels[own.id], self.sent()), (State.ABANDONED, own, []))
        self.assertEqual(self.receive(self.answered(own.id, 9)), [])
        self.assertEqual([(frame.type, frame.body) for frame in self.sent()], [(CLOSE_CHANNEL, b"\x09")])
        self.assertIs(self.core.give_up(own), True)
        self.assertEqual([(frame.type, frame.body) for frame in self.sent()], [(CHANNEL_CLOSED, b"\x09")])
        self.assertEqual((own.state, event.channel.state), (State.CLOSED, State.OPEN))


class NameTests(SynchronousTestCase):
    """Profiles by name, as programs write them."""

    def test_profiles_are_found_by_name(self) -> None:
        self.assertEqual(dialect_of("skywire", None, True), Dialect(Profile.SKYWIRE, None, True))
        self.assertEqual(dialect_of("seed", None, False), Dialect())
        self.assertRaisesRegex(ValueError, "seed or skywire, not 'sky'", dialect_of, "sky", None, False)
        self.assertRaisesRegex(ValueError, "not 'yes'", dialect_of, "skywire", "yes", False)
        reactor: Any = Clock()
        client = Client(reactor, KEYS["A"], ["http://127.0.0.1:9"], profile="skywire")
        self.assertIs(client.profile, Profile.SKYWIRE)
        server = Server(reactor, KEYS["S"], ["tcp:0"], profile="skywire")
        self.assertIs(server.factory.profile, Profile.SKYWIRE)
