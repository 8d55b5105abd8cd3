"""Answers and counts of a relay in unusual cases, and events for its observer."""

from __future__ import annotations

from typing import Any

from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.streams.core.agreement import MAX_MESSAGE, MIN_MESSAGE
from dmsg.telemetry.receipts import RECEIPT_SIZE
from dmsg.telemetry.transports import TransportRecord
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.relay import STRANGER_AFTER, Relay
from dmsg.v2019.core.routes import IN_FLIGHT, LATE_ANSWERS, MAX_CONNECTIONS_PER_KEY
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HANDSHAKE_PAYLOAD_SIZE,
    HEADER_SIZE,
    ID_COUNT,
    INSTANCE_SIZE,
    MAX_PING,
    NOTICE,
    PING,
    PING_NAME,
    PONG,
    RECEIPT,
    REQUEST,
    SAME_KEY,
    Frame,
)
from tests.support import Draws
from tests.v2019.core.test_relay import KEYS, FakePort, RelayCase, feed


class RequestTests(RelayCase):
    """REQUESTs of every length, and ids."""

    def test_requests_of_wrong_length_are_refused(self) -> None:
        """A valid payload has two keys, or two keys and a handshake message."""
        keys = bytes(KEYS[0] + KEYS[1])
        good = {HANDSHAKE_PAYLOAD_SIZE} | {HANDSHAKE_PAYLOAD_SIZE + size for size in (MIN_MESSAGE, 200, MAX_MESSAGE)}
        sizes = good | {33, 65, 67, HANDSHAKE_PAYLOAD_SIZE + MIN_MESSAGE - 1, HANDSHAKE_PAYLOAD_SIZE + MAX_MESSAGE + 1}
        for number, size in enumerate(sorted(sizes)):
            feed(self.relay, self.peers[0], Frame(REQUEST, 2 * number, keys.ljust(size, b"m")[:size]))
            self.assertEqual(len(self.ports[1].take()), int(size in good), size)
            answers = self.ports[0].take()
            if size not in good:
                self.assertEqual(answers, [Frame(CLOSE, 2 * number, bytes((CloseReason.BAD_REQUEST,)))])
        self.assertEqual(self.relay.drops[DropReason.BAD_REQUEST], len(sizes) - len(good))

    def test_ids_of_responders_are_odd_and_go_round(self) -> None:
        self.peers[1].next_id = ID_COUNT - 1
        self.assertEqual([self.open(0, 1, own_id) for own_id in (2, 4)], [ID_COUNT - 1, 1])
        self.peers[1].next_id = ID_COUNT - 1
        self.assertEqual(self.open(0, 1, 6), 3)


class CountTests(RelayCase):
    """Counts, and limits at their boundaries."""

    def test_frames_of_changing_routes_are_counted(self) -> None:
        for target in (1, 2):
            self.open(0, target, 2 * target)
        frames = [Frame(FWD, own_id, b"\0\0x") for own_id in (2, 4, 2, 2, 2, 4)]
        feed(self.relay, self.peers[0], *frames)
        self.assertEqual(self.relay.steps, 4)
        data = bytearray(b"".join(frame.encode() for frame in frames))
        taken = self.relay.receive_frames(self.peers[0], data, len(data), 3)
        self.assertEqual((taken, self.relay.steps), (5 * len(frames[0].encode()), 3))

    def test_transports_and_frames_since_the_start(self) -> None:
        self.assertEqual((self.relay.transports_opened, self.relay.frames, self.relay.frame_bytes), (0, 0, 0))
        self.open(0, 1, 2)
        self.open(0, 2, 4)
        before = self.relay.frames, self.relay.frame_bytes
        self.assertEqual((self.relay.transports_opened, before[0]), (2, 4))
        self.relay.remove(self.peers[0])
        self.assertEqual((self.relay.frames, self.relay.frame_bytes), before)
        self.assertEqual(self.relay.drops[DropReason.PEER_DISCONNECTED], 2)

    def test_control_frames_are_steps_too(self) -> None:
        self.open(0, 1, 2)
        fwd = Frame(FWD, 2, b"\0\0x")
        feed(self.relay, self.peers[0], fwd, Frame(PING, 0, b""), Frame(PING, 0, b""), fwd, fwd)
        self.assertEqual(self.relay.steps, 4)
        before = self.relay.frames
        data = bytearray(Frame(PING, 0, b"").encode() * 3)
        taken = self.relay.receive_frames(self.peers[0], data, len(data), 2)
        self.assertEqual((taken, self.relay.frames - before), (2 * HEADER_SIZE, 2))

    def test_a_request_on_an_id_in_use(self) -> None:
        there = self.open(0, 1, 2)
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, bytes(KEYS[0] + KEYS[2])))
        in_use = bytes((CloseReason.ID_IN_USE,))
        self.assertEqual(self.ports[0].take(), [Frame(CLOSE, 2, in_use)])
        self.assertEqual(self.ports[1].take(), [Frame(CLOSE, there, in_use)])
        self.assertEqual((self.ports[2].take(), self.relay.drops), ([], {DropReason.ID_IN_USE: 1}))

    def test_the_newest_of_a_key_that_is_left(self) -> None:
        second, third = (self.relay.add(KEYS[0], FakePort()) for _ in range(2))
        self.assertIs(self.relay.newest[KEYS[0]], third)
        self.relay.remove(third)
        self.assertIs(self.relay.newest[KEYS[0]], second)
        self.relay.remove(self.peers[0])
        self.assertIs(self.relay.newest[KEYS[0]], second)
        self.relay.remove(second)
        self.assertNotIn(KEYS[0], self.relay.newest)

    def test_a_frame_of_a_one_sided_route(self) -> None:
        self.relay.limits = Limits(max_per_pair=1)
        self.open(0, 1, 2)
        feed(self.relay, self.peers[0], Frame(REQUEST, 4, bytes(KEYS[0] + KEYS[1])))
        self.assertEqual(self.ports[0].take(), [Frame(CLOSE, 4, bytes((CloseReason.TOO_MANY_TRANSPORTS,)))])
        self.open(0, 2, 6)
        self.assertEqual(self.relay.drops[DropReason.TOO_MANY_PER_PAIR], 1)

    def test_the_instance_of_a_longer_ping(self) -> None:
        feed(self.relay, self.peers[0], Frame(PING, 0, b"n" * PING_NAME + b"i" * INSTANCE_SIZE + b"rest"))
        self.assertEqual(self.peers[0].instance, b"i" * INSTANCE_SIZE)

    def test_bytes_of_a_run_that_a_control_frame_ends(self) -> None:
        there = self.open(0, 1, 2)
        fwd, ack = Frame(FWD, 2, b"\0\0data"), Frame(ACK, 2, b"\0\0")
        # The first frame belongs to another transport, so that the run does not begin at 0.
        before = Frame(FWD, 4, b"\0\0")
        feed(self.relay, self.peers[0], before, fwd, ack, Frame(PING, 0, b""), fwd)
        route = self.peers[0].routes[2]
        self.assertEqual((route.frames, route.acks), (3, 1))
        self.assertEqual((route.wire, route.ack_wire), (2 * len(fwd.encode()) + len(ack.encode()), len(ack.encode())))
        self.assertEqual([frame.id for frame in self.ports[1].take()], [there] * 3)

    def test_frames_before_the_accept(self) -> None:
        """Each frame is counted by its type."""
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, bytes(KEYS[0] + KEYS[1])))
        fwd, ack = Frame(FWD, 2, b"\0\0data"), Frame(ACK, 2, b"\0\0")
        feed(self.relay, self.peers[0], fwd, ack, fwd)
        route = self.peers[0].routes[2]
        self.assertEqual((route.frames, route.acks, route.ack_wire), (3, 1, len(ack.encode())))
        self.assertEqual(route.wire, len(ack.encode()) + 2 * len(fwd.encode()))

    def test_the_longest_ping(self) -> None:
        feed(self.relay, self.peers[0], Frame(PING, 0, bytes(MAX_PING)))
        self.assertEqual(self.ports[0].take(), [Frame(PONG, 0, bytes(MAX_PING))])
        for own_id, size in ((0, MAX_PING + 1), (2, MAX_PING)):
            with self.assertRaises(RemoteProtocolError):
                feed(self.relay, self.peers[0], Frame(PING, own_id, bytes(size)))

    def test_connections_without_frames_are_not_observed(self) -> None:
        """Before the first frame nothing is counted, and no observer is notified."""
        self.open(0, 1, 2)
        route, peer = self.peers[0].routes[2], self.peers[0]
        self.assertEqual((route.tick, self.relay.tick, Relay().steps), (0, 0, 0))
        self.assertEqual((route.queued, route.mark, route.dropped, peer.sent), (0, 0, 0, 0))

    def test_frames_that_an_end_provokes(self) -> None:
        """Frames that may come of a transport that is over: those answered, and what is on its way."""
        there = self.open(0, 1, 2)
        fwd = Frame(FWD, 2, b"\0\0x")
        feed(self.relay, self.peers[0], *[fwd] * 5)
        feed(self.relay, self.peers[1], *[Frame(FWD, there, b"\0\0x")] * 3)
        added: list[int] = []

        class Adding:
            def add(self, frames: int, now: float) -> None:
                added.append(frames)

        self.peers[0].provoked = self.peers[1].provoked = Adding()  # type: ignore[assignment]
        route = self.peers[0].routes[2]
        self.relay._drop_route(self.peers[0], 2, route, 0, by_server=True)
        self.assertEqual(added, [3 + LATE_ANSWERS + IN_FLIGHT, 5 + LATE_ANSWERS + IN_FLIGHT])


class StrangeFrameTests(RelayCase):
    """Each unexpected frame is counted once."""

    def test_of_no_transport(self) -> None:
        for kind in (FWD, ACK, ACCEPT, CLOSE):
            feed(self.relay, self.peers[0], Frame(kind, 8, b"\0\0"))
        self.assertEqual(self.relay.drops[DropReason.NO_SUCH_TRANSPORT], 4)
        self.assertEqual(self.ports[0].take(), [Frame(CLOSE, 8, bytes((CloseReason.NO_SUCH_TRANSPORT,)))] * 4)

    def test_receipts_of_another_form_are_unknown_frames(self) -> None:
        for own_id, size in ((1, RECEIPT_SIZE), (0, RECEIPT_SIZE - 1), (0, RECEIPT_SIZE + 1)):
            with self.assertRaises(RemoteProtocolError) as caught:
                feed(self.relay, self.peers[0], Frame(RECEIPT, own_id, bytes(size)))
            self.assertIs(caught.exception.reason, DropReason.UNKNOWN_FRAME)
        feed(self.relay, self.peers[0], Frame(RECEIPT, 0, bytes(RECEIPT_SIZE)))
        self.assertEqual(self.ports[0].take(), [])
        with self.assertRaises(RemoteProtocolError):
            feed(self.relay, self.peers[0], Frame(RECEIPT + 1, 0, bytes(RECEIPT_SIZE)))


class SameKeyTests(RelayCase):
    """Two programs with one key."""

    def setUp(self) -> None:
        super().setUp()
        self.now = 0.0
        self.relay._now = lambda: self.now
        self.port = FakePort()
        self.port.address = "192.0.2.7"
        for port in self.ports:
            port.address = "192.0.2.1"

    def ping(self, peer: Any, port: FakePort, instance: bytes = b"") -> list[Frame]:
        """Send a PING; return the frames in addition to the PONG."""
        payload = b"n" * PING_NAME + instance
        feed(self.relay, peer, Frame(PING, 0, payload))
        *notices, pong = port.take()
        self.assertEqual(pong, Frame(PONG, 0, payload))
        return notices

    def test_a_single_program_is_not_reported(self) -> None:
        self.assertEqual(self.ping(self.peers[0], self.ports[0], b"i" * INSTANCE_SIZE), [])
        self.assertEqual(self.peers[0].instance, b"i" * INSTANCE_SIZE)
        self.now = STRANGER_AFTER + 1
        self.assertEqual(self.ping(self.peers[0], self.ports[0], b"j" * INSTANCE_SIZE), [], "nobody else is there")

    def test_another_program_with_the_key_is_reported_once(self) -> None:
        self.ping(self.peers[0], self.ports[0], b"1" * INSTANCE_SIZE)
        other = self.relay.add(KEYS[0], self.port)
        self.assertEqual(self.ping(other, self.port), [], "it does not say which program it is")
        told = [Frame(NOTICE, 0, bytes((SAME_KEY,)) + b"192.0.2.1")]
        self.assertEqual(self.ping(other, self.port, b"2" * INSTANCE_SIZE), told)
        self.assertEqual(self.ping(other, self.port, b"2" * INSTANCE_SIZE), [])
        self.port.address = "a" * 70
        told = [Frame(NOTICE, 0, bytes((SAME_KEY,)) + b"a" * 64)]
        self.assertEqual(self.ping(self.peers[0], self.ports[0], b"1" * INSTANCE_SIZE), told)

    def test_an_older_connection_of_the_same_program_is_none(self) -> None:
        self.ping(self.peers[0], self.ports[0], b"1" * INSTANCE_SIZE)
        again = self.relay.add(KEYS[0], self.port)
        self.assertEqual(self.ping(again, self.port, b"1" * INSTANCE_SIZE), [])

    def test_unidentified_programs_have_a_grace_period(self) -> None:
        other = self.relay.add(KEYS[0], self.port)
        self.now = STRANGER_AFTER
        self.assertEqual(self.ping(other, self.port, b"2" * INSTANCE_SIZE), [])
        self.now = STRANGER_AFTER + 0.1
        self.assertEqual(len(self.ping(other, self.port, b"2" * INSTANCE_SIZE)), 1)

    def test_closing_connections_are_not_reported(self) -> None:
        self.ping(self.peers[0], self.ports[0], b"1" * INSTANCE_SIZE)
        other = self.relay.add(KEYS[0], self.port)
        self.peers[0].closing = True
        self.assertEqual(self.ping(other, self.port, b"2" * INSTANCE_SIZE), [])

    def test_too_many_connections_of_a_key(self) -> None:
        """The oldest that is not closing goes, and is counted."""
        ports = [FakePort() for _ in range(MAX_CONNECTIONS_PER_KEY + 1)]
        for port in ports:
            self.relay.add(KEYS[0], port)
        self.assertEqual((self.ports[0].closed, ports[0].closed), ([DropReason.REPLACED], [DropReason.REPLACED]))
        self.assertEqual(self.relay.drops[DropReason.REPLACED], 2)
        self.assertEqual([port.closed for port in ports[1:]], [[]] * MAX_CONNECTIONS_PER_KEY)


class Watching:
    """An observer that notes."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.good = True
        self.marks = False

    def requested(
        self, source: Any, there: Any, back: Any, payload: bytes, target: bytes, secure: bool
    ) -> TransportRecord:
        return TransportRecord(there, back, payload, bytes(source.key), target, secure, 0.0)

    def accepted(self, carried: TransportRecord, payload: bytes) -> None:
        self.told.append("accepted")

    def refused(self, source: Any, target: bytes, reason: str) -> None:
        self.told.append(reason)

    def ended(self, carried: TransportRecord, reason: int, by: str) -> None:
        self.told.append((reason, by))

    def progress(self, carried: TransportRecord, route: Any, data: int, acks: int) -> None:
        self.told.append((data, acks))
        if self.marks:
            route.tick += 1

    def receipt(self, source: Any, payload: bytes) -> bool:
        self.told.append(len(payload))
        return self.good


class ObserverTests(RelayCase):
    """Observations: the end that closed a transport, its bytes, and the ACCEPT that counts."""

    def setUp(self) -> None:
        super().setUp()
        self.watching = Watching()
        self.relay = Relay(random=Draws(0x1000), observer=self.watching)  # type: ignore[arg-type]
        self.ports = [FakePort() for _ in range(4)]
        self.peers = [self.relay.add(key, port) for key, port in zip(KEYS, self.ports, strict=False)]
        self.assertEqual((self.relay.frames, self.relay.frame_bytes), (0, 0))

    def told(self) -> list[Any]:
        told, self.watching.told = self.watching.told, []
        return told

    def test_the_observer_learns_which_end_closed(self) -> None:
        for source, own_id, by in ((0, 2, "src"), (1, None, "dst")):
            there = self.open(0, 1, 2)
            feed(self.relay, self.peers[source], Frame(CLOSE, there if own_id is None else own_id, b"\7"))
            self.assertEqual(self.told(), ["accepted", (7, by)])
            for port in self.ports:
                port.take()
        self.open(0, 1, 2)
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, bytes(KEYS[0] + KEYS[1])))
        self.assertEqual(self.told(), ["accepted", (int(CloseReason.ID_IN_USE), "server")])

    def test_only_the_responders_accept_counts(self) -> None:
        payload = bytes(KEYS[0] + KEYS[1])
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, payload), Frame(ACCEPT, 2, payload))
        self.assertEqual(self.told(), [])
        route = self.peers[0].routes[2]
        self.assertFalse(route.accepted or route.back.accepted)
        feed(self.relay, self.peers[1], Frame(ACCEPT, route.to_id, payload))
        self.assertEqual((self.told(), route.accepted, route.back.accepted), (["accepted"], True, True))

    def test_each_route_of_a_read_is_observed(self) -> None:
        """Once a tick, with what the read had of it until another route came."""
        self.open(0, 1, 2)
        self.open(0, 2, 4)
        self.told()
        self.relay.tick += 1
        self.watching.marks = True
        fwd, ack = Frame(FWD, 2, b"\0\0x"), Frame(ACK, 2, b"\0\0")
        other = Frame(FWD, 4, b"\0\0x")
        feed(self.relay, self.peers[0], fwd, ack, fwd, other, fwd, other)
        self.assertEqual(self.told(), [(2, 1), (1, 0)])

    def test_receipts_reach_the_observer(self) -> None:
        feed(self.relay, self.peers[0], Frame(RECEIPT, 0, bytes(RECEIPT_SIZE)))
        self.assertEqual((self.told(), self.relay.drops), ([RECEIPT_SIZE], {}))
        self.watching.good = False
        feed(self.relay, self.peers[0], Frame(RECEIPT, 0, bytes(RECEIPT_SIZE)))
        self.assertEqual(self.relay.drops, {DropReason.BAD_RECEIPT: 1})

    def test_user_data_excludes_overhead(self) -> None:
        """Headers, sequences and ACKs do not count."""
        self.open(0, 1, 2)
        frames = [Frame(FWD, 2, b"\0\1" + b"x" * 50), Frame(ACK, 2, b"\0\1"), Frame(FWD, 2, b"\0\2" + b"x" * 30)]
        feed(self.relay, self.peers[0], *frames)
        route = self.peers[0].routes[2]
        self.assertEqual((route.user_data(False), route.ack_wire), (80, HEADER_SIZE + 2))
        self.assertEqual(route.user_data(True), 84 - 2 * (2 + 16))
        self.assertEqual(self.peers[1].routes[route.to_id].user_data(True), 0)
