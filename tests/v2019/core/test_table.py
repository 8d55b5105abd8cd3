"""The client's table: every state and input, windows, random bytes."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, LocalProtocolError, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.streams.core.agreement import Hello, Offer, Proposal
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.core.secure import MAX_SECURE_DATA
from dmsg.v2019.core import requests
from dmsg.v2019.core.events import (
    Accepted,
    Acknowledged,
    Closed,
    Confirmed,
    DataReceived,
    EndedBy,
    Event,
    Noticed,
    Ponged,
    Requested,
)
from dmsg.v2019.core.state import TRANSITIONS, ClientTransport, Input, State
from dmsg.v2019.core.table import RECEIVE_LIMIT, ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    ID_COUNT,
    MAX_FWD_DATA,
    MAX_NOTICE,
    NOTICE,
    OK,
    PING,
    PONG,
    REQUEST,
    UNREAD_LIMIT,
    WINDOW_BYTES,
    WINDOW_FRAMES,
    Frame,
    FrameBuffer,
)

LOCAL = SecKey.from_seed(b"local").public
REMOTE = SecKey.from_seed(b"remote").public


def feed(core: ClientConnection, *frames: Frame) -> list[Event]:
    """Pass all frames in one piece."""
    data = bytearray(b"".join(frame.encode() for frame in frames))
    taken, events = core.receive_frames(data, len(data))
    if core.broken is not None:
        raise core.broken
    assert taken == len(data)
    return events


def sent(core: ClientConnection) -> list[Frame]:
    """Return the frames that the core wants to send."""
    return FrameBuffer().feed(core.data_to_send())


class ClosedTests(SynchronousTestCase):
    """Whether another transport may be looked for."""

    def test_only_a_close_of_the_peer_is_final(self) -> None:
        final = {
            (by, refused, reason): Closed(cast(Any, None), reason, refused, by).final
            for by in EndedBy
            for refused in (False, True)
            for reason in (CloseReason.UNSPECIFIED, CloseReason.HASH_MISMATCH)
        }
        self.assertEqual(
            {key for key, value in final.items() if not value},
            {
                (EndedBy.UNAUTHENTICATED, False, CloseReason.UNSPECIFIED),
                (EndedBy.UNAUTHENTICATED, False, CloseReason.HASH_MISMATCH),
                (EndedBy.UNAUTHENTICATED, True, CloseReason.UNSPECIFIED),
                (EndedBy.UNAUTHENTICATED, True, CloseReason.HASH_MISMATCH),
                (EndedBy.LOCAL, True, CloseReason.UNSPECIFIED),
            },
        )


class ClientCase(SynchronousTestCase):
    """A connection and one open transport."""

    def setUp(self) -> None:
        self.core = ClientConnection(LOCAL)
        self.core.accepting = True
        feed(self.core, Frame(OK, 0, b""))
        (event,) = feed(self.core, Frame(REQUEST, 1, bytes(REMOTE + LOCAL)))
        assert isinstance(event, Requested)
        self.transport: ClientTransport = event.transport
        self.core.accept(self.transport)
        sent(self.core)


class StateTests(ClientCase):
    """TRANSITIONS is the truth."""

    def _in(self, state: State | None) -> ClientTransport:
        transport = ClientTransport(2, REMOTE, bytes(LOCAL + REMOTE), True, 0)
        transport.state = state
        return transport

    def test_every_state_and_input(self) -> None:
        """Each pair of state and input is a transition in the table, or an error without a transition."""
        for state in (None, *State):
            for what in Input:
                transport = self._in(state)
                if (state, what) in TRANSITIONS:
                    self.core._move(transport, what)
                    self.assertIs(transport.state, TRANSITIONS[state, what])
                else:
                    self.assertRaises(LocalProtocolError, self.core._move, transport, what)
                    self.assertIs(transport.state, state)

    def test_closed_is_a_final_state(self) -> None:
        self.assertFalse([pair for pair in TRANSITIONS if pair[0] is State.CLOSED])

    @given(
        st.lists(
            st.tuples(
                st.sampled_from([OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 4, 0xFF]),
                st.integers(0, 6),
                st.integers(0, 70),
                st.booleans(),
            ),
            max_size=40,
        )
    )
    def test_any_frames_move_by_the_table(self, frames: list[tuple[int, int, int, bool]]) -> None:
        core = ClientConnection(LOCAL)
        core.accepting = True
        feed(core, Frame(OK, 0, b""))
        opened = [core.request(REMOTE) for _ in range(2)]
        for kind, transport_id, size, proper in frames:
            payload = bytes(REMOTE + LOCAL) if kind == REQUEST and proper else bytes(size)
            if kind == ACCEPT and proper:
                transport_id, payload = opened[0].id, opened[0].payload
            try:
                for event in feed(core, Frame(kind, transport_id, payload)):
                    if isinstance(event, Requested) and size % 3:
                        core.accept(event.transport)
            except RemoteProtocolError:
                return
            for own_id, transport in core.transports.items():
                self.assertEqual(own_id, transport.id)
                self.assertIn(transport.state, (State.REQUESTED, State.OFFERED, State.OPEN))
            self.assertEqual(core.incoming, sum(not transport.initiator for transport in core.transports.values()))

    @given(st.binary(max_size=400), st.lists(st.integers(1, 60), max_size=12))
    def test_random_bytes_are_a_named_error(self, data: bytes, cuts: list[int]) -> None:
        core = ClientConnection(LOCAL)
        feed(core, Frame(OK, 0, b""))
        tail = b""
        for size in [*cuts, len(data)]:
            piece, data = data[:size], data[size:]
            buffer = bytearray(tail + piece)
            taken, _ = core.receive_frames(buffer, len(buffer))
            if core.broken is not None:
                return
            tail = bytes(buffer[taken:])

    def test_a_close_that_follows_its_request_closely(self) -> None:
        """Defect 11: the reference loses it."""
        requested, closed = feed(self.core, Frame(REQUEST, 3, bytes(REMOTE + LOCAL)), Frame(CLOSE, 3, b"\0"))
        assert isinstance(requested, Requested) and isinstance(closed, Closed)
        self.assertIs(requested.transport.state, State.CLOSED)
        self.assertEqual(list(self.core.transports), [1])


class SendTests(ClientCase):
    """Windows and identifiers of sent frames."""

    def test_many_frames_in_flight(self) -> None:
        for number in range(100):
            self.core.send(self.transport, b"x", number)
        frames = sent(self.core)
        self.assertEqual(len(frames), 100)
        events = feed(self.core, *[Frame(ACK, 1, frame.payload[:2]) for frame in reversed(frames)])
        self.assertEqual([event.ticket for event in events if isinstance(event, Acknowledged)], list(range(99, -1, -1)))
        self.assertEqual((self.transport.in_flight, self.transport.in_flight_bytes), ({}, 0))

    def test_the_window_closes_by_bytes_and_by_frames(self) -> None:
        while self.transport.window_open:
            self.core.send(self.transport, bytes(60_000))
        self.assertLess(self.transport.in_flight_bytes, WINDOW_BYTES + 60_000)
        self.assertRaises(LocalProtocolError, self.core.send, self.transport, b"x")
        self.setUp()
        for _ in range(WINDOW_FRAMES):
            self.core.send(self.transport, b"")
        self.assertFalse(self.transport.window_open)
        sequences = [frame.payload[:2] for frame in sent(self.core)]
        self.assertEqual(len(set(sequences)), WINDOW_FRAMES)

    def test_too_long_for_one_frame(self) -> None:
        self.assertRaises(LocalProtocolError, self.core.send, self.transport, bytes(MAX_FWD_DATA + 1))

    def test_sending_on_an_unopened_transport_is_an_error(self) -> None:
        requested = self.core.request(REMOTE)
        self.assertRaises(LocalProtocolError, self.core.send, requested, b"x")
        self.core.close(self.transport)
        self.assertRaises(LocalProtocolError, self.core.send, self.transport, b"x")

    def test_all_ids_in_use(self) -> None:
        ids = {self.core.request(REMOTE).id for _ in range(32768)}
        self.assertEqual(ids, set(range(0, 65536, 2)))
        self.assertRaises(LocalProtocolError, self.core.request, REMOTE)


class ReceiveTests(ClientCase):
    """ACKs are the flow control."""

    def _fwd(self, sequence: int, size: int) -> list[Event]:
        return feed(self.core, Frame(FWD, 1, sequence.to_bytes(2, "big") + bytes(size)))

    def test_acks_are_withheld_beyond_the_limit_and_sent_together(self) -> None:
        """The numbers are those of session_read_buffer: 30000 unread bytes each."""
        acknowledged = []
        for sequence in range(5):
            self._fwd(sequence, 30_000)
            acknowledged.append([frame.payload for frame in sent(self.core)])
        self.assertEqual(acknowledged, [[b"\0\0"], [b"\0\1"], [], [], []])
        for _ in range(4):
            self.core.consumed(self.transport, 20_000)
            self.assertEqual(sent(self.core), [])
        self.core.consumed(self.transport, 20_000)
        self.assertEqual([frame.payload for frame in sent(self.core)], [b"\0\2", b"\0\3", b"\0\4"])

    def test_a_frame_that_reaches_the_limit_is_still_acknowledged(self) -> None:
        self._fwd(0, UNREAD_LIMIT - 1000)
        self._fwd(1, 1000)
        self.assertEqual(len(sent(self.core)), 2)
        self._fwd(2, 1)
        self.assertEqual(sent(self.core), [])

    def test_a_sender_that_ignores_missing_acks_loses_the_transport(self) -> None:
        events: list[Event] = []
        sequence = 0
        while not any(isinstance(event, Closed) for event in events):
            events = self._fwd(sequence & 0xFFFF, 60_000)
            sequence += 1
            self.assertLess(sequence * 60_000, 2 * RECEIVE_LIMIT)
        self.assertEqual(events[-1], Closed(self.transport, CloseReason.BUFFER_FULL, refused=False, by=EndedBy.LOCAL))
        self.assertEqual(sent(self.core)[-1], Frame(CLOSE, 1, bytes([CloseReason.BUFFER_FULL])))

    def test_tiny_frames_count_for_more_than_their_bytes(self) -> None:
        self._fwd(0, UNREAD_LIMIT - 10)
        self._fwd(0, 10)
        for sequence in range(RECEIVE_LIMIT // 64 + 10):
            if any(isinstance(event, Closed) for event in self._fwd(sequence & 0xFFFF, 1)):
                return
        self.fail("unread frames of one byte have no limit")

    def test_frames_behind_a_lost_transport_are_processed(self) -> None:
        """The same read has data of another transport, and frames for the one that has ended."""
        (event,) = feed(self.core, Frame(REQUEST, 3, bytes(REMOTE + LOCAL)))
        assert isinstance(event, Requested)
        self.core.accept(event.transport)
        while self.transport.held_size + 60_000 <= RECEIVE_LIMIT:
            self._fwd(0, 60_000)
        events = feed(
            self.core, *[Frame(FWD, 1, b"\0\0" + bytes(60_000))] * 3, Frame(FWD, 3, b"\0\0behind"), Frame(PONG, 0, b"")
        )
        self.assertIsInstance(events[-2], Closed)
        self.assertEqual(events[-1], DataReceived(event.transport, b"behind"))

    def test_a_frame_of_an_unknown_type_is_no_ack(self) -> None:
        self.core.send(self.transport, b"x", "ticket")
        (sequence,) = self.transport.in_flight
        for kind in (0xC, 0xFF):
            self.assertEqual(feed(self.core, Frame(kind, self.transport.id, sequence.to_bytes(2, "big"))), [])
        self.assertEqual(list(self.transport.in_flight), [sequence])

    def test_so_many_frames_of_a_read(self) -> None:
        data = bytearray(b"".join(Frame(FWD, 1, b"\0%cx" % number).encode() for number in range(5)))
        taken, events = self.core.receive_frames(data, len(data), 2)
        self.assertEqual((taken, len(events), self.core.has_frames_left), (2 * len(data) // 5, 2, True))
        taken, events = self.core.receive_frames(data, len(data), 6)
        self.assertEqual((taken, len(events), self.core.has_frames_left), (len(data), 5, False))

    def test_an_accept_must_match_its_request(self) -> None:
        transport = self.core.request(REMOTE)
        request = sent(self.core)[-1]
        for payload in (bytes(REMOTE + LOCAL), request.payload + b"x", b"\xff" * len(request.payload)):
            self.assertEqual([type(event) for event in feed(self.core, Frame(ACCEPT, transport.id, payload))], [Closed])
            transport = self.core.request(REMOTE)
            request = sent(self.core)[-1]
        (event,) = feed(self.core, Frame(ACCEPT, transport.id, request.payload))
        self.assertIsInstance(event, Accepted)

    def test_ids_go_round(self) -> None:
        """Past those that are in use, and back to the first."""
        self.core._next_id = ID_COUNT - 4
        self.assertEqual([self.core.request(REMOTE).id for _ in range(3)], [ID_COUNT - 4, ID_COUNT - 2, 0])
        self.core._next_id = ID_COUNT - 4
        self.assertEqual(self.core.request(REMOTE).id, 2)

    def test_so_many_transports(self) -> None:
        self.patch(requests, "MAX_INCOMING", 2)
        asked: list[Any] = []
        self.core.make_room = lambda initiator: bool(asked.append(initiator))
        self.assertEqual(len(feed(self.core, Frame(REQUEST, 3, bytes(REMOTE + LOCAL)))), 1)
        self.assertEqual((feed(self.core, Frame(REQUEST, 5, bytes(REMOTE + LOCAL))), asked), ([], [None]))
        self.assertEqual(sent(self.core)[-1], Frame(CLOSE, 5, bytes([CloseReason.TOO_MANY_TRANSPORTS])))
        self.core.make_room = lambda initiator: True
        self.assertEqual(len(feed(self.core, Frame(REQUEST, 5, bytes(REMOTE + LOCAL)))), 1)

    def test_empty_data_is_acknowledged_and_not_delivered(self) -> None:
        self.assertEqual(self._fwd(7, 0), [])
        self.assertEqual(sent(self.core), [Frame(ACK, 1, b"\0\7")])

    @given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200), max_size=40))
    def test_frames_accept_any_chunking(self, messages: list[bytes], cuts: list[int]) -> None:
        self.setUp()
        stream = b"".join(
            Frame(FWD, 1, number.to_bytes(2, "big") + message).encode() for number, message in enumerate(messages)
        )
        tail, data = b"", b""
        for size in [*cuts, len(stream)]:
            piece, stream = stream[:size], stream[size:]
            buffer = bytearray(tail + piece)
            taken, events = self.core.receive_frames(buffer, len(buffer))
            tail = bytes(buffer[taken:])
            data += b"".join(event.data for event in events if isinstance(event, DataReceived))
        self.assertEqual((data, tail), (b"".join(messages), b""))
        self.assertEqual(len(sent(self.core)), len(messages))


class ServerFrameTests(SynchronousTestCase):
    """Frames of a server to a client that supports extensions."""

    def setUp(self) -> None:
        self.core = ClientConnection(LOCAL)
        self.assertIs(self.core.accepting, False)
        feed(self.core, Frame(OK, 0, b""))

    def test_a_ping_is_of_no_transport(self) -> None:
        self.core.ping(b"payload")
        self.assertEqual(sent(self.core), [Frame(PING, 0, b"payload")])

    def test_notices_have_a_code_and_text(self) -> None:
        """The first byte says of what, the rest is text; those without a byte, and long ones, mean nothing."""
        self.assertEqual(feed(self.core, Frame(NOTICE, 0, b"\1early")), [])
        sent(self.core)
        self.core.ping(b"")
        for payload, told in (
            (b"", []),
            (b"\1", [Noticed(1, "")]),
            (b"\1at 192.0.2.1\xff", [Noticed(1, "at 192.0.2.1\ufffd")]),
            (b"\2".ljust(MAX_NOTICE, b"x"), [Noticed(2, "x" * (MAX_NOTICE - 1))]),
            (b"\2".ljust(MAX_NOTICE + 1, b"x"), []),
        ):
            self.assertEqual(feed(self.core, Frame(NOTICE, 0, payload)), told)
        self.assertEqual(feed(self.core, Frame(PONG, 0, b"p")), [Ponged(b"p")])


class SecureTests(SynchronousTestCase):
    """Two clients whose frames the test carries between them: times of acknowledgements."""

    KEYS = SecKey.from_seed(b"asks"), SecKey.from_seed(b"answers")

    def setUp(self) -> None:
        asks, answers = self.KEYS
        self.a, self.b = (ClientConnection(key.public, TableSettings(key=key)) for key in self.KEYS)
        self.b.accepting = True
        for core in (self.a, self.b):
            feed(core, Frame(OK, 0, b""))
        proposal = Proposal(asks, answers.public, Hello(7, INITIAL_WINDOW))
        self.at_a = self.a.request(answers.public, proposal, told_window=INITIAL_WINDOW)
        (event,) = self.to_b()
        assert isinstance(event, Requested)
        self.at_b = event.transport

    def to_b(self) -> list[Event]:
        return feed(self.b, *[Frame(frame.type, 1, frame.payload) for frame in sent(self.a)])

    def to_a(self) -> list[Event]:
        return feed(self.a, *[Frame(frame.type, self.at_a.id, frame.payload) for frame in sent(self.b)])

    def open(self) -> Any:
        """The end of the one who answered; nothing is on its way."""
        end = self.b.accept_secure(self.at_b, Hello(0, INITIAL_WINDOW))
        self.to_a()
        self.to_b()
        return end

    def types(self, core: ClientConnection) -> list[int]:
        return [frame.type for frame in sent(core)]

    def test_the_first_ack_confirms_the_initiator(self) -> None:
        self.b.accept_secure(self.at_b, Hello(0, INITIAL_WINDOW))
        self.assertEqual([type(event) for event in self.to_a()], [Accepted])
        self.assertEqual(self.types(self.a), [ACK])
        self.assertEqual(self.types(self.a), [])

    def test_more_than_one_frame_holds(self) -> None:
        """A frame of a secure transport has its tag, too."""
        self.open()
        self.a.send(self.at_a, bytes(MAX_SECURE_DATA))
        self.assertRaises(LocalProtocolError, self.a.send, self.at_a, bytes(MAX_SECURE_DATA + 1))

    def test_a_window_changed_before_the_first_ack_is_sent(self) -> None:
        """The window changes when a resumed stream is read meanwhile."""
        for more, answer in ((0, []), (1000, [ACK])):
            self.setUp()
            end = self.b.accept_secure(self.at_b, Hello(0, INITIAL_WINDOW))
            end.window += more
            self.to_a()
            self.assertIsInstance(self.to_b()[0], Confirmed)
            self.assertEqual(self.types(self.b), answer)

    def test_acks_report_received_and_read_bytes(self) -> None:
        """One ACK is sent for all data of a turn; the next one follows when a quarter of the window is free again."""
        self.open()
        for size in (1000, 1000, INITIAL_WINDOW // 4 - 2000):
            self.a.send(self.at_a, bytes(size))
        self.to_b()
        self.assertEqual(self.types(self.b), [ACK])
        self.b.consumed(self.at_b, 1000)
        self.assertEqual(self.types(self.b), [])
        self.b.consumed(self.at_b, INITIAL_WINDOW // 4 - 1000)
        self.assertEqual(self.types(self.b), [ACK])
        self.assertEqual(self.types(self.b), [])

    def test_small_reads_are_acknowledged_together(self) -> None:
        """One ACK is sent, however often the application reads before it."""
        self.open()
        for _ in range(3):
            self.a.send(self.at_a, bytes(INITIAL_WINDOW // 4 - 2000))
        self.to_b()
        self.assertEqual(self.types(self.b), [ACK])
        for _ in range(2):
            self.b.consumed(self.at_b, INITIAL_WINDOW // 4)
        self.assertTrue(self.at_b.ack_due)
        self.assertEqual(self.types(self.b), [ACK])

    def test_the_first_frame_is_a_close(self) -> None:
        """An authentic one confirms who asked; of another nobody knows who made it."""
        for authentic in (True, False):
            self.setUp()
            self.b.accept_secure(self.at_b, Hello(0, INITIAL_WINDOW))
            self.to_a()
            self.at_a.ack_due = False  # Otherwise the ACK would come first.
            self.a.close(self.at_a, CloseReason.SHUTTING_DOWN)
            payload = next(frame.payload for frame in sent(self.a) if frame.type == CLOSE)
            events = feed(self.b, Frame(CLOSE, 1, payload if authentic else payload[:1]))
            self.assertEqual([type(event) for event in events], [Confirmed, Closed] if authentic else [Closed])
            closed = events[-1]
            assert isinstance(closed, Closed)
            self.assertEqual(
                (closed.refused, closed.by), (not authentic, EndedBy.REMOTE if authentic else EndedBy.UNAUTHENTICATED)
            )

    def test_both_have_to_know_half_closes(self) -> None:
        for asks, answers in ((False, True), (True, False), (True, True)):
            one, two = Hello(half_close=asks), Hello(half_close=answers)
            result = Offer(self.KEYS[1], Proposal(self.KEYS[0], self.KEYS[1].public, Hello()).payload).accept(Hello())[
                0
            ]
            end = self.b._new_end(self.at_b, result, INITIAL_WINDOW, None, one, two)
            self.assertIs(end.half_close, asks and answers)

    def test_data_is_acknowledged_before_the_end(self) -> None:
        self.open()
        self.a.send(self.at_a, b"data")
        self.to_b()
        self.b.close(self.at_b)
        self.assertEqual(self.types(self.b), [ACK, CLOSE])
        self.assertEqual(self.types(self.b), [])

    def test_a_request_that_is_not_authentic(self) -> None:
        (request,) = [
            Frame(REQUEST, 3, bytes(self.a.local + self.b.local) + self.KEYS[0].public + bytes(128 + 16)),
        ]
        self.assertEqual(feed(self.b, request), [])
        self.assertEqual([(one.type, one.payload[0]) for one in sent(self.b)], [(CLOSE, CloseReason.NOT_AUTHENTIC)])

    def test_how_many_came_in(self) -> None:
        """Transports that this end opened do not count, nor does a closed one."""
        self.open()
        self.assertEqual((self.a.incoming, self.b.incoming), (0, 1))
        self.a.close(self.at_a)
        self.b.close(self.at_b)
        self.assertEqual((self.a.incoming, self.b.incoming), (0, 0))
        self.b.close(self.at_b)
        self.assertEqual(self.b.incoming, 0)
