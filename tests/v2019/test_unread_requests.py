"""REQUESTs whose handshakes are worked out later, so that what open transports carry does not wait for them."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.streams.core.agreement import Hello, Proposal
from dmsg.v2019.core import requests as requests_module
from dmsg.v2019.core.events import DataReceived, Event, Requested
from dmsg.v2019.core.requests import HANDSHAKES_A_TURN
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, OK, REQUEST, Frame, close_reason
from tests.support import KEYS
from tests.v2019.core.test_table import feed, sent
from tests.v2019.secure_support import SecureCase

LOCAL = SecKey.from_seed(b"local")
REMOTE = SecKey.from_seed(b"remote")


def request(number: int) -> Frame:
    return Frame(REQUEST, 2 * number + 1, Proposal(REMOTE, LOCAL.public, Hello(7)).payload)


class UnreadTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.core = ClientConnection(LOCAL.public, TableSettings(key=LOCAL))
        feed(self.core, Frame(OK, 0, b""))
        self.core.accepting = True

    def refused(self) -> list[tuple[int, int]]:
        """Ids and reasons of what the core closes."""
        return [(frame.id, close_reason(frame.payload)) for frame in sent(self.core) if frame.type == CLOSE]

    def test_data_of_open_transports_comes_first(self) -> None:
        other = self.core.request(REMOTE.public)
        feed(self.core, Frame(ACCEPT, other.id, other.payload))
        requests = [request(number) for number in range(2 * HANDSHAKES_A_TURN + 3)]
        events = feed(self.core, *requests, Frame(FWD, other.id, b"\0\0data"))
        self.assertEqual(events[0], DataReceived(other, b"data"))
        self.assertEqual([type(one) for one in events[1:]], [Requested] * HANDSHAKES_A_TURN)
        self.assertEqual(len(self.core.read_requests()), HANDSHAKES_A_TURN)
        last = [one.transport.id for one in self.core.read_requests() if isinstance(one, Requested)]
        self.assertEqual(last, [one.id for one in requests[-3:]])
        self.assertEqual(self.core.read_requests(), [])

    def wait(self, *frames: Frame) -> int:
        """Receive a REQUEST behind as many as are read at once; return its id."""
        waiting = request(HANDSHAKES_A_TURN)
        feed(self.core, *[request(number) for number in range(HANDSHAKES_A_TURN)], waiting, *frames)
        return waiting.id

    def test_a_withdrawn_request_is_not_delivered(self) -> None:
        waiting = self.wait(Frame(CLOSE, request(HANDSHAKES_A_TURN).id, b"\0"))
        self.assertNotIn(waiting, self.core.unread_requests)
        self.assertEqual(self.refused(), [])

    def test_a_frame_before_the_answer(self) -> None:
        waiting = self.wait(Frame(ACK, request(HANDSHAKES_A_TURN).id, b"\0\0"))
        self.assertEqual(self.refused(), [(waiting, CloseReason.BAD_FRAME)])
        self.assertEqual(self.core.read_requests(), [])

    def test_the_id_of_an_unread_request_is_in_use(self) -> None:
        self.wait()
        with self.assertRaises(RemoteProtocolError):
            feed(self.core, request(HANDSHAKES_A_TURN))

    def test_the_number_of_waiting_requests_is_bounded(self) -> None:
        self.patch(requests_module, "UNREAD_REQUESTS", 2)
        feed(self.core, *[request(number) for number in range(4)])
        self.assertEqual(self.refused(), [(request(number).id, CloseReason.RATE_LIMITED) for number in (2, 3)])

    def test_a_false_one(self) -> None:
        payload = bytearray(request(0).payload)
        payload[-1] ^= 1
        self.assertEqual(feed(self.core, Frame(REQUEST, 1, bytes(payload))), [])
        self.assertEqual(self.refused(), [(1, CloseReason.NOT_AUTHENTIC)])


class TurnTests(SecureCase):
    def test_a_burst_is_read_in_turns(self) -> None:
        frames = [
            Frame(REQUEST, 901 + 2 * number, Proposal(KEYS["A"], KEYS["B"].public, Hello(7)).payload)
            for number in range(2 * HANDSHAKES_A_TURN + 1)
        ]
        data = bytearray(b"".join(frame.encode() for frame in frames))
        self.assertEqual(self.b.frames_received(data, len(data)), len(data))
        self.assertEqual(len(self.b.core.unread_requests), HANDSHAKES_A_TURN + 1)
        read: list[int] = []
        read_requests = self.b.core.read_requests

        def counted() -> list[Event]:
            events = read_requests()
            read.append(len(events))
            return events

        self.patch(self.b.core, "read_requests", counted)
        self.network.settle()
        self.assertEqual(read, [HANDSHAKES_A_TURN, 1])

    def test_a_link_that_is_lost_before(self) -> None:
        frames = [
            Frame(REQUEST, 901 + 2 * number, Proposal(KEYS["A"], KEYS["B"].public, Hello(7)).payload)
            for number in range(HANDSHAKES_A_TURN + 1)
        ]
        data = bytearray(b"".join(frame.encode() for frame in frames))
        self.b.frames_received(data, len(data))
        link = self.b._link
        assert link is not None
        link.abort(DropReason.STALLED)
        self.network.settle()
        self.assertEqual((self.b.core.unread_requests, self.b._reading_requests), ({}, None))
