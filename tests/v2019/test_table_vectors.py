"""client_rules.json and the clients of sessions.json: the client's table against the recordings.

Server frames go in as recorded; what the client answers is compared with what
the reference's client answered.  Differences are deliberate and written down
in ``docs/protocol/betterments``.
"""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason as R, RemoteProtocolError
from dmsg.v2019.core.events import Accepted, Acknowledged, Closed, DataReceived, EndedBy, Event, Requested
from dmsg.v2019.core.state import ClientTransport
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import ACK, CLOSE, FWD, REQUEST, Frame, FrameBuffer
from tests.support import KEYS, Draws, vectors


def _payload(frame: dict[str, Any]) -> bytes:
    if "payload" in frame:
        return bytes.fromhex(frame["payload"])
    size = frame["payload_len"]  # A long payload consists of its sequence, and then the pattern 3, 10, 17, ...
    return b"\0\0" + bytes((3 + 7 * n) & 0xFF for n in range(size - 2))


class _Client:
    """A client's table, fed with frames."""

    def __init__(self, name: str, first_id: int = 0x1000, sequence: int = 0x3000) -> None:
        settings = TableSettings(random=Draws(first_id // 2, sequence))  # type: ignore[arg-type]
        self.core = ClientConnection(KEYS[name].public, settings)
        self.core.accepting = True
        self.events: list[Event] = []
        self._frames = FrameBuffer()

    def feed(self, *frames: Frame) -> list[Frame]:
        """Pass frames in one piece, and return the answers."""
        data = bytearray(b"".join(frame.encode() for frame in frames))
        taken, events = self.core.receive_frames(data, len(data))
        if self.core.broken is not None:
            raise self.core.broken
        assert taken == len(data)
        for event in events:
            if isinstance(event, Requested):
                self.core.accept(event.transport)
            elif isinstance(event, DataReceived):
                self.core.consumed(event.transport, len(event.data))
        self.events += events
        return self.sent()

    def sent(self) -> list[Frame]:
        """Return the frames that the core wants to send."""
        return self._frames.feed(self.core.data_to_send())


# Maps each scenario to the reasons of the client's own CLOSE frames, which are all 0 in the reference.
REASONS: dict[str, list[int]] = {
    "connect_ok_plain": [],
    "connect_ok_with_id_and_payload": [],
    "request_good": [],
    "fwd_rules": [R.BAD_FRAME] * 2,
    "ack_rules": [R.BAD_FRAME] * 2,
    "frame_for_unknown_id": [R.NO_SUCH_TRANSPORT] * 6,
    "remote_close": [R.NO_SUCH_TRANSPORT] * 3,
    "dial_accept_good": [],
    "dial_accept_swapped_keys": [R.BAD_FRAME],
    "dial_accept_empty": [R.BAD_FRAME],
    "dial_close": [],
    "dial_close_reason_9": [],
    "dial_close_empty": [],
    "dial_fwd_first": [R.BAD_FRAME],
    "dial_ack_first": [R.BAD_FRAME],
    "dial_request_back": [R.BAD_FRAME],
    "dial_unknown_type": [R.BAD_FRAME],
    "dial_ids": [],
    "seq_and_id_wrap": [],
}
# These scenarios have an action of the application in the middle, or another result than the reference. Each has a test
# of its own.
OTHERS = {
    "connect_first_frame_close",
    "connect_first_frame_unknown",
    "connect_no_first_frame",  # The wait is limited; see tests/v2019/test_protocol.py.
    "request_refused",
    "accept_buffer_full",
    "write_waits_for_ack",
    "zero_length_write",
    "frame_for_known_id",
    "local_close",
    "dial_timeout",
    "large_writes",
    "reconnect",  # The delay grows, and other servers are tried; see tests/net/test_entities.py.
}


class ClientRuleTests(SynchronousTestCase):
    """client_rules.json."""

    def setUp(self) -> None:
        self.scenarios = {one["name"]: one for one in vectors("client_rules")["scenarios"]}

    def _frames(self, name: str, hop: str | None = None) -> list[tuple[str, list[Frame]]]:
        return [
            (event["hop"], [Frame(one["type"], one["id"], _payload(one)) for one in event["frames"]])
            for event in self.scenarios[name]["events"]
            if "frames" in event and hop in (None, event["hop"])
        ]

    def test_every_scenario_is_covered(self) -> None:
        self.assertEqual(set(self.scenarios), set(REASONS) | OTHERS)

    def test_client_rules_match_the_recording(self) -> None:
        for name, reasons in REASONS.items():
            client = _Client("A", first_id=65534 if name == "seq_and_id_wrap" else 0x1000)
            given: list[int] = []
            waiting: list[Frame] = []
            for hop, frames in self._frames(name):
                if hop == "S->A":
                    self.assertEqual(waiting, [], name)
                    waiting = client.feed(*frames)
                    continue
                for expected in frames:
                    if expected.type == REQUEST:
                        client.core.request(KEYS["B"].public)
                        waiting += client.sent()
                    sent = waiting.pop(0)
                    if sent.type == CLOSE and sent.payload != expected.payload:
                        given.append(sent.payload[0])
                        sent = Frame(CLOSE, sent.id, b"\0")
                    self.assertEqual(sent, expected, name)
            self.assertEqual(waiting, [], name)
            self.assertEqual(given, [int(reason) for reason in reasons], name)

    def _open(self) -> tuple[_Client, ClientTransport]:
        """A client with the transport 0x2001 that B opened."""
        client = _Client("A")
        client.feed(Frame(0, 0, b""))
        client.feed(Frame(REQUEST, 0x2001, bytes(KEYS["B"].public + KEYS["A"].public)))
        requested = client.events[-1]
        assert isinstance(requested, Requested)
        return client, requested.transport

    def test_first_frame_has_to_be_ok(self) -> None:
        for name in ("connect_first_frame_close", "connect_first_frame_unknown"):
            ((_, frames),) = self._frames(name, "S->A")
            self.assertRaises(RemoteProtocolError, _Client("A").feed, *frames)

    def test_refused_requests_match_the_recording(self) -> None:
        """A null initiator key, which the reference accepts, is refused in addition."""
        client = _Client("A")
        client.feed(Frame(0, 0, b""))
        refused = self._frames("request_refused", "S->A")[1:]
        self.assertEqual(len(refused), 6)
        for _, (frame,) in refused:
            self.assertEqual(client.feed(frame), [Frame(CLOSE, frame.id, bytes([R.BAD_REQUEST]))])
        self.assertEqual(client.core.transports, {})

    def test_requests_without_listener_are_refused_at_once(self) -> None:
        """Bettered: refused at once, where the reference accepts 20 that nobody may ever take."""
        client = _Client("A")
        client.feed(Frame(0, 0, b""))
        client.core.accepting = False
        for _, (frame,) in self._frames("accept_buffer_full", "S->A")[1:]:
            self.assertEqual(client.feed(frame), [Frame(CLOSE, frame.id, bytes([R.REFUSED]))])

    def test_acks_fire_their_own_sends(self) -> None:
        client, transport = self._open()
        transport.next_sequence = 0xFFFE
        recorded = [frame for _, frames in self._frames("write_waits_for_ack", "A->S")[1:] for frame in frames]
        for letter in "abc":
            client.core.send(transport, letter.encode(), letter)
        self.assertEqual(client.sent(), recorded[:3])
        cases: tuple[tuple[int, str | None], ...] = ((0, "c"), (0xFFFE, "a"), (0xFFFE, None))
        for sequence, said in cases:
            before = len(client.events)
            client.feed(Frame(ACK, 0x2001, sequence.to_bytes(2, "big")))
            acknowledged = client.events[before:]
            expected = [] if said is None else [Acknowledged(transport, said)]
            self.assertEqual(acknowledged, expected)
        client.core.send(transport, b"d", "d")
        self.assertEqual(client.sent(), recorded[3:])
        client.feed(Frame(CLOSE, 0x2001, b"\0"))
        self.assertEqual(client.events[-1], Closed(transport, 0, refused=False, by=EndedBy.UNAUTHENTICATED))
        self.assertEqual(set(token for _, token in transport.in_flight.values()), {"b", "d"})

    def test_zero_length_write(self) -> None:
        client, transport = self._open()
        client.core.send(transport, b"", "token")
        self.assertEqual(client.sent(), self._frames("zero_length_write", "A->S")[1][1])

    def test_frames_for_a_live_transport(self) -> None:
        """OK, ACCEPT and unknown types mean nothing; REQUEST ends the connection."""
        client, transport = self._open()
        frames = [frame for _, frames in self._frames("frame_for_known_id", "S->A")[2:] for frame in frames]
        for frame in frames[:-1]:
            self.assertEqual(client.feed(frame), [])
        self.assertEqual(frames[-1].type, REQUEST)
        self.assertRaises(RemoteProtocolError, client.feed, frames[-1])

    def test_local_closes_match_the_recording(self) -> None:
        client, transport = self._open()
        client.core.close(transport)
        self.assertEqual(client.sent(), [Frame(CLOSE, 0x2001, b"\0")])
        late, crossing = (frames[0] for _, frames in self._frames("local_close", "S->A")[2:])
        self.assertEqual(client.feed(late), [Frame(CLOSE, 0x2001, bytes([R.NO_SUCH_TRANSPORT]))])
        self.assertEqual(client.feed(crossing), [])
        client.core.close(transport)
        self.assertEqual(client.sent(), [])

    def test_cancelling_a_request_closes_the_transport(self) -> None:
        client = _Client("A")
        client.feed(Frame(0, 0, b""))
        transport = client.core.request(KEYS["B"].public)
        client.core.close(transport, R.TIMEOUT)
        request, close = client.sent()
        self.assertEqual((request.type, close), (REQUEST, Frame(CLOSE, 0x1000, bytes([R.TIMEOUT]))))

    def test_the_largest_frame(self) -> None:
        client, transport = self._open()
        recorded = next(frames[0] for _, frames in self._frames("large_writes", "A->S") if frames[0].type == FWD)
        client.core.send(transport, recorded.payload[2:])
        (sent,) = client.sent()
        self.assertEqual(len(sent.payload), 65510)
        self.assertEqual(sent.payload[2:], recorded.payload[2:])


class SessionTests(SynchronousTestCase):
    """Both clients of session_basic, session_wraps and session_ids_after_wrap."""

    def test_clients_reproduce_the_recorded_sessions(self) -> None:
        scenarios = {one["name"]: one for one in vectors("sessions")["scenarios"]}
        for name in ("session_basic", "session_wraps", "session_ids_after_wrap"):
            clients: dict[str, _Client] = {}
            waiting: dict[str, list[Frame]] = {"A": [], "B": []}
            for event in scenarios[name]["events"]:
                if "frames" not in event:
                    continue
                source, target = event["hop"].split("->")
                frames = [Frame(one["type"], one["id"], _payload(one)) for one in event["frames"]]
                if source == "S":
                    if target not in clients:
                        clients[target] = _Client(target, *self._draws(scenarios[name], target))
                    waiting[target] += clients[target].feed(*frames)
                    continue
                client = clients[source]
                for expected in frames:
                    if not waiting[source]:
                        self._act(client, expected)
                        waiting[source] += client.sent()
                    self.assertEqual(waiting[source].pop(0), expected, name)
            self.assertEqual(waiting, {"A": [], "B": []}, name)
            self.assertTrue(any(isinstance(event, Accepted) for event in clients["A"].events))

    @staticmethod
    def _draws(scenario: dict[str, Any], client: str) -> tuple[int, int]:
        """The first id and the first sequence that this client drew."""
        sent = [
            frame for event in scenario["events"] if event["hop"] == f"{client}->S" for frame in event.get("frames", [])
        ]
        first_id = next((frame["id"] for frame in sent if frame["type"] == REQUEST), 0)
        sequence = next((int(frame["payload"][:4], 16) for frame in sent if frame["type"] == FWD), 0)
        return first_id, sequence

    @staticmethod
    def _act(client: _Client, wanted: Frame) -> None:
        """Do what the application did to cause a frame."""
        if wanted.type == REQUEST:
            client.core.request(KEYS["B"].public)
            return
        (transport,) = client.core.transports.values()
        if wanted.type == FWD:
            client.core.send(transport, wanted.payload[2:])
        elif wanted.type == CLOSE:
            client.core.close(transport)
