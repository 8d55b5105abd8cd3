"""Tables of both ends of a direct link, which talk to each other without a server."""

from __future__ import annotations

from random import Random

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.v2019.core.events import Accepted, Confirmed, DataReceived, Established, Event, Ponged, Requested
from dmsg.v2019.core.state import State
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import Side, TableSettings
from dmsg.v2019.core.wire import CLOSE, MAX_PING, OK, PING, PONG, REQUEST, Frame
from tests.v2019.core.test_table import feed, sent

CALLER, CALLED = SecKey.from_seed(b"caller"), SecKey.from_seed(b"called")


def exchange(one: ClientConnection, other: ClientConnection) -> tuple[list[Event], list[Event]]:
    """Deliver frames in both directions until neither side sends, and return the events of each side."""
    events: tuple[list[Event], list[Event]] = [], []
    for _ in range(20):
        frames = sent(one), sent(other)
        if not any(frames):
            return events
        events[1].extend(feed(other, *frames[0]))
        events[0].extend(feed(one, *frames[1]))
    raise AssertionError("the two sides do not come to rest")


class DirectCase(SynchronousTestCase):
    """Two clients with one link."""

    def setUp(self) -> None:
        self.caller = ClientConnection(CALLER.public, TableSettings(key=CALLER, side=Side.CALLER, random=Random(1)))
        self.called = ClientConnection(CALLED.public, TableSettings(key=CALLED, side=Side.CALLED, random=Random(2)))
        self.caller.accepting = self.called.accepting = True

    def open(self, one: ClientConnection, key: SecKey, other: ClientConnection) -> None:
        """Open a secure transport from one side to the other, and check that it carries data both ways."""
        transport = one.request(other.local, Proposal(key, other.local, Hello(25, INITIAL_WINDOW)))
        self.assertEqual(transport.id & 1, int(one is self.called))
        _, (requested,) = exchange(one, other)
        assert isinstance(requested, Requested)
        other.accept_secure(requested.transport, Hello(0, INITIAL_WINDOW))
        (accepted,), events = exchange(one, other)
        assert isinstance(accepted, Accepted)
        one.send(transport, b"there")
        events += exchange(one, other)[1]
        self.assertEqual(sum(isinstance(event, Confirmed) for event in events), 1)
        self.assertEqual([event.data for event in events if isinstance(event, DataReceived)], [b"there"])
        other.send(requested.transport, b"and back")
        got = [one.data for one in exchange(one, other)[0] if isinstance(one, DataReceived)]
        self.assertEqual(got, [b"and back"])
        self.assertIs(transport.state, State.OPEN)


class DirectLinkTests(DirectCase):
    """Both clients keep the rules of a server and of a client."""

    def test_the_caller_says_ok_first_and_the_other_answers(self) -> None:
        self.assertEqual(sent(self.called), [])
        (frame,) = sent(self.caller)
        self.assertEqual(frame, Frame(OK, 0, b""))
        self.assertEqual(feed(self.called, frame), [Established()])
        (answer,) = sent(self.called)
        self.assertEqual(feed(self.caller, answer), [Established()])
        self.assertEqual(sent(self.caller), [])

    def test_both_sides_can_open_transports(self) -> None:
        exchange(self.caller, self.called)
        for _ in range(2):
            self.open(self.caller, CALLER, self.called)
            self.open(self.called, CALLED, self.caller)
        self.assertEqual(len(self.caller.transports), 4)
        self.assertEqual((self.caller.incoming, self.called.incoming), (2, 2))

    def test_an_id_of_the_wrong_side_is_refused(self) -> None:
        exchange(self.caller, self.called)
        for core, key, other in ((self.caller, CALLER, self.called), (self.called, CALLED, self.caller)):
            mine = int(core is self.called)
            payload = Proposal(key, other.local, Hello(25, INITIAL_WINDOW)).payload
            self.assertEqual(feed(other, Frame(REQUEST, 2 + (1 - mine), payload)), [])
            self.assertEqual(sent(other), [Frame(CLOSE, 2 + (1 - mine), bytes((CloseReason.BAD_REQUEST,)))])

    def test_both_sides_answer_ping(self) -> None:
        exchange(self.caller, self.called)
        for one, other in ((self.caller, self.called), (self.called, self.caller)):
            one.ping(b"12345678")
            self.assertEqual(exchange(one, other)[0], [Ponged(b"12345678")])

    def test_a_ping_that_is_too_long_ends_the_link(self) -> None:
        exchange(self.caller, self.called)
        feed(self.called, Frame(PING, 0, bytes(MAX_PING)))
        self.assertEqual(sent(self.called), [Frame(PONG, 0, bytes(MAX_PING))])
        with self.assertRaises(RemoteProtocolError) as caught:
            feed(self.called, Frame(PING, 0, bytes(MAX_PING + 1)))
        self.assertIs(caught.exception.reason, DropReason.BAD_FRAME)

    def test_a_client_of_a_server_answers_no_ping(self) -> None:
        client = ClientConnection(CALLER.public, TableSettings(key=CALLER))
        feed(client, Frame(OK, 0, b""), Frame(PING, 0, b"12345678"))
        self.assertEqual([frame.type for frame in sent(client)], [CLOSE])

    def test_another_first_frame_ends_the_link(self) -> None:
        with self.assertRaises(RemoteProtocolError) as caught:
            feed(self.called, Frame(PING, 0, b""))
        self.assertIs(caught.exception.reason, DropReason.NO_OK_FRAME)

    @given(st.binary(max_size=300))
    def test_any_bytes_end_the_link_at_most(self, data: bytes) -> None:
        for side in (Side.CALLER, Side.CALLED):
            core = ClientConnection(CALLED.public, TableSettings(key=CALLED, side=side))
            core.accepting = True
            buffer = bytearray(Frame(OK, 0, b"").encode() + data)
            core.receive_frames(buffer, len(buffer))
            sent(core)
