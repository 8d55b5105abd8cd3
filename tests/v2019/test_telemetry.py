"""Counts of a relay, and receipts of clients."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DropReason
from dmsg.telemetry.receipts import Role, parse_receipt, transport_identity
from dmsg.telemetry.relays import PROGRESS_INTERVAL, RelayTelemetry
from dmsg.telemetry.schema import EVENT
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, RECEIPT, REQUEST, Frame
from dmsg.v2019.transport_streams import TransportStreams
from tests.support import KEYS as CLIENTS, SERVER_KEY
from tests.v2019.core.test_relay import KEYS, FakePort, feed
from tests.v2019.secure_support import SecureCase

SECURE_REQUEST = 66 + 33 + 128 + 16


class Memory:
    """Replacement of the recorder, which keeps events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.beats: list[Any] = []
        self.turns: list[Any] = []
        self.load: Any = None
        self.about: Any = None

    def record(self, event: str, fields: dict[str, Any]) -> None:
        known = {field.name for field in EVENT[event].fields}
        assert set(fields) <= known, (event, set(fields) - known)
        self.events.append((event, fields))

    record_receipt = record

    def record_repeated(self, event: str, key: Any, fields: dict[str, Any], target: bytes | None = None) -> None:
        self.record(event, {**fields, "n": 1})

    def network(self, host: str) -> str:
        return f"network of {host}"

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]


class ObservedCase(SynchronousTestCase):
    """A relay with three peers that is observed."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.memory = Memory()
        self.telemetry = RelayTelemetry(self.memory, self.clock.seconds, bytes(KEYS[4]))  # type: ignore[arg-type]
        self.relay = Relay(now=self.clock.seconds, observer=self.telemetry)
        self.telemetry.relay = self.relay
        self.ports = [FakePort() for _ in range(3)]
        self.peers = [self.relay.add(key, port) for key, port in zip(KEYS, self.ports, strict=False)]

    def tearDown(self) -> None:
        self.relay.check()

    def ask(self, own_id: int = 2, rest: bytes = b"") -> int:
        feed(self.relay, self.peers[0], Frame(REQUEST, own_id, bytes(KEYS[0] + KEYS[1]) + rest))
        return next(frame.id for frame in self.ports[1].take() if frame.type == REQUEST)

    def open(self, own_id: int = 2, rest: bytes = b"", answer: bytes = b"") -> int:
        there = self.ask(own_id, rest)
        self.clock.advance(0.25)
        feed(self.relay, self.peers[1], Frame(ACCEPT, there, bytes(KEYS[0] + KEYS[1]) + answer))
        return there

    def second(self) -> None:
        self.clock.advance(1)
        for turn in self.memory.turns:
            turn()


class RelayTelemetryTests(ObservedCase):
    """Events of transports."""

    def test_the_life_of_a_transport(self) -> None:
        rest = bytes(SECURE_REQUEST - 66)
        there = self.open(rest=rest, answer=b"answer")
        identity = transport_identity(bytes(KEYS[0] + KEYS[1]) + rest, bytes(KEYS[0] + KEYS[1]) + b"answer")
        (opened,) = self.memory.of("transport_open")
        self.assertEqual(
            opened,
            {
                "transport": identity.hex(),
                "src": KEYS[0],
                "dst": KEYS[1],
                "secure": True,
                "accept_ms": 250,
                "accept_us": 250_000,
            },
        )
        feed(self.relay, self.peers[0], *[Frame(FWD, 2, bytes(18 + size)) for size in (0, 10, 500)])
        feed(self.relay, self.peers[1], Frame(ACK, there, bytes(22)), Frame(FWD, there, bytes(18 + 7)))
        self.clock.advance(2)
        feed(self.relay, self.peers[1], Frame(CLOSE, there, bytes([CloseReason.MOVED])))
        (closed,) = self.memory.of("transport_close")
        self.assertEqual((closed["reason"], closed["by"], closed["duration_ms"]), ("moved", "dst", 2250))
        self.assertEqual((closed["data_ab"], closed["data_ba"]), (510, 7))
        self.assertEqual((closed["frames_ab"], closed["frames_ba"]), (3, 1))
        self.assertEqual((closed["acks_ab"], closed["acks_ba"]), (1, 0))
        self.assertEqual((closed["total_ab"], closed["accept_ms"]), (510, 250))

    def test_an_unaccepted_transport_is_recorded(self) -> None:
        there = self.ask()
        feed(self.relay, self.peers[1], Frame(CLOSE, there, bytes([CloseReason.REFUSED])))
        (closed,) = self.memory.of("transport_close")
        self.assertEqual((closed["reason"], closed["by"]), ("refused", "dst"))
        self.assertNotIn("accept_ms", closed)
        self.assertNotIn("transport", closed)
        self.assertNotIn("data_ab", closed)
        self.assertEqual(self.memory.of("transport_open"), [])

    def test_the_record_names_the_closing_end(self) -> None:
        for by, end in (
            ("src", lambda there: feed(self.relay, self.peers[0], Frame(CLOSE, 2, b"\0"))),
            ("server", lambda there: self.relay.close_all(CloseReason.SHUTTING_DOWN)),
            ("dst", lambda there: self.relay.remove(self.peers[1])),
        ):
            self.setUp()
            end(self.open())
            self.assertEqual([event["by"] for event in self.memory.of("transport_close")], [by])

    def test_dropped_frames_do_not_count_as_delivered(self) -> None:
        """Delivered bytes are the bytes taken from the sender, without the frames dropped at the end."""
        self.open(rest=bytes(SECURE_REQUEST - 66))
        self.relay.congest(self.peers[1])
        data = self.ports[1].data
        frame = Frame(FWD, 2, bytes(18 + 1000))
        while not self.memory.of("transport_close"):
            feed(self.relay, self.peers[0], frame, frame)
        (closed,) = self.memory.of("transport_close")
        self.assertEqual((closed["reason"], closed["dropped_ab"]), ("queue_full", 2000))
        self.assertNotIn("dropped_ba", closed)
        self.ports[1].data = self.ports[1].data[len(data) :]
        got = sum(len(frame.payload) - 18 for frame in self.ports[1].take() if frame.type == FWD)
        self.assertEqual(closed["total_ab"] - closed["dropped_ab"], got)

    def test_frames_queued_for_a_lost_receiver_are_shared_out(self) -> None:
        """Each transport has its share of the unsent frames; frames sent before the queue began do not count."""
        own = 2, 4, 6
        for one in own:
            self.open(one)
            feed(self.relay, self.peers[0], Frame(FWD, one, bytes(2 + 5000)))
        self.relay.congest(self.peers[1])
        for one, count in ((2, 3), (4, 1)):
            for _ in range(count):
                feed(self.relay, self.peers[0], Frame(FWD, one, bytes(2 + 993)))
        self.ports[1].left_behind = 2000  # This is half of the bytes.
        self.relay.remove(self.peers[1])
        closed = self.memory.of("transport_close")
        self.assertEqual([one["total_ab"] for one in closed], [7979, 5993, 5000])
        dropped = [one.get("dropped_ab", 0) for one in closed]
        self.assertEqual(dropped[2], 0)
        self.assertEqual(round(dropped[0] / dropped[1]), 3)
        self.assertLess(abs(sum(dropped) - 2000), 20)

    def test_counts_without_congestion_never_exceed_the_carried_bytes(self) -> None:
        """Without congestion, the owner of dropped frames is unknown. Neither a single transport nor all together have
        more bytes than they carried.
        """
        self.open(2)
        self.open(4)
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(2 + 100)), Frame(FWD, 4, bytes(2 + 60_000)))
        self.ports[1].left_behind = 30_000
        self.relay.remove(self.peers[1])
        small, large = (one.get("dropped_ab", 0) for one in self.memory.of("transport_close"))
        self.assertLessEqual(small, 100)
        self.assertLess(abs(small + large - 30_000), 200)

    def test_refusals_are_recorded(self) -> None:
        feed(self.relay, self.peers[0], Frame(REQUEST, 2, bytes(KEYS[0]) + b"\2" * 33), Frame(REQUEST, 4, b"short"))
        first, second = self.memory.of("transport_refuse")
        self.assertEqual((first["reason"], first["dst"]), (DropReason.NO_SUCH_PEER.value, b"\2" * 33))
        self.assertEqual(second["reason"], DropReason.BAD_REQUEST.value)
        self.assertNotIn("dst", second)

    def test_progress_events_report_only_new_counts(self) -> None:
        self.open()
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(102)))
        for _ in range(int(PROGRESS_INTERVAL) + 1):
            self.second()
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(12)))
        for _ in range(2 * int(PROGRESS_INTERVAL)):
            self.second()
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(3)), Frame(CLOSE, 2, b"\0"))
        progress, (closed,) = self.memory.of("transport_progress"), self.memory.of("transport_close")
        self.assertEqual([event["data_ab"] for event in progress], [100, 10])  # Nothing passed in the third second.
        self.assertEqual((closed["data_ab"], closed["total_ab"]), (1, 111))

    def test_growing_drop_counts_are_reported(self) -> None:
        for _ in range(3):
            feed(self.relay, self.peers[0], Frame(FWD, 8, b""))
        for beat in self.memory.beats:
            beat()
            beat()
        self.assertEqual(self.memory.of("drop"), [{"reason": "no_such_transport", "n": 3}])

    @given(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from([FWD, ACK]), st.integers(2, 40), st.integers(1, 40)),
            max_size=12,
        ),
        st.lists(st.integers(1, 900), max_size=8),
    )
    def test_counts_equal_those_of_single_frames(self, runs: list[Any], cuts: list[int]) -> None:
        """The counts are equal, whatever pieces the bytes arrive in and whatever frames are in between."""
        self.setUp()
        own = (2, 4, 6)
        for one in own:
            self.open(one)
        frames = [Frame(kind, own[which], bytes(size)) for which, kind, size, count in runs for _ in range(count)]
        data = b"".join(frame.encode() for frame in frames)
        buffer = bytearray()
        position = 0
        for cut in [*cuts, len(data)]:
            buffer += data[position : position + cut]
            position += cut
            del buffer[: self.relay.receive_frames(self.peers[0], buffer, len(buffer))]
        self.assertEqual(bytes(buffer), b"")
        for one in own:
            route = self.peers[0].routes[one]
            mine = [frame for frame in frames if frame.id == one]
            sent = [frame for frame in mine if frame.type == FWD]
            self.assertEqual(route.frames, len(mine))
            self.assertEqual(route.acks, len(mine) - len(sent))
            self.assertEqual(route.user_data(False), sum(len(frame.payload) - 2 for frame in sent))

    def test_round_trips_are_taken_after_silence(self) -> None:
        there = self.open()
        self.second()
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(10)))
        self.clock.advance(0.003)
        feed(self.relay, self.peers[1], Frame(ACK, there, bytes(2)))
        # Another frame follows at once, so it is uncertain which frame the ACK is for.
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(10)))
        self.clock.advance(0.5)
        feed(self.relay, self.peers[1], Frame(ACK, there, bytes(2)))
        for _ in range(3):
            self.second()
        feed(self.relay, self.peers[1], Frame(FWD, there, bytes(10)))
        self.clock.advance(0.1)
        feed(self.relay, self.peers[0], Frame(FWD, 2, bytes(10)))
        feed(self.relay, self.peers[0], Frame(ACK, 2, bytes(2)))
        feed(self.relay, self.peers[0], Frame(CLOSE, 2, b"\0"))
        (closed,) = self.memory.of("transport_close")
        # The upper bounds are 0.1 * 2 ** (i / 2) ms. The first one above 3 ms is number 10 (3.2 ms), and above 100 ms
        # number 20 (102.4 ms).
        self.assertEqual({index: count for index, count in enumerate(closed["rtt"]) if count}, {10: 1, 20: 1})

    def test_malformed_receipts_are_counted_and_not_written(self) -> None:
        feed(self.relay, self.peers[0], Frame(RECEIPT, 0, bytes(198)))
        self.assertEqual((self.memory.of("receipt"), self.relay.drops[DropReason.BAD_RECEIPT]), ([], 1))
        self.relay.observer = None
        # A server that stores no receipts accepts all of them.
        feed(self.relay, self.peers[0], Frame(RECEIPT, 0, bytes(198)))
        self.assertEqual(self.ports[0].take(), [])


class ReceiptCase(SecureCase):
    """Two clients and an observed relay."""

    willing = True

    def setUp(self) -> None:
        super().setUp()
        self.receipts: list[bytes] = []
        relay = self.network.factory.relay
        test = self

        class Observer(RelayTelemetry):
            def receipt(self, source: Any, payload: bytes) -> bool:
                test.receipts.append(payload)
                return super().receipt(source, payload)

        self.memory = Memory()
        relay.observer = Observer(self.memory, self.network.clock.seconds, bytes(SERVER_KEY.public))  # type: ignore[arg-type]
        relay.observer.relay = relay
        for name in "AB":
            self.sessions[name] = self.network.client(CLIENTS[name], streams=self.streams[name], receipts=self.willing)

    def make_streams(self, key: Any, listeners: Any) -> TransportStreams:
        streams = super().make_streams(key, listeners)
        streams.receipts = True
        return streams


class ReceiptTests(ReceiptCase):
    """Clients sign at the end of a transport what it delivered."""

    def test_both_ends_and_the_relay_say_the_same(self) -> None:
        one, other = self.open()
        one.transport.write(b"x" * 100_000)
        other.transport.write(b"y" * 777)
        self.network.settle()
        one.transport.loseConnection()
        self.network.settle()
        first, second = sorted((parse_receipt(data) for data in self.receipts), key=lambda receipt: receipt.role)
        self.assertEqual((first.role, second.role), (Role.INITIATOR, Role.RESPONDER))
        self.assertEqual((first.signer, first.peer), (second.peer, second.signer))
        self.assertEqual(first.signer, CLIENTS["A"].public)
        self.assertEqual((first.delivered_out, first.delivered_in), (100_000, 777))
        self.assertEqual((second.delivered_out, second.delivered_in), (777, 100_000))
        (closed,) = self.memory.of("transport_close")
        self.assertEqual((closed["total_ab"], closed["total_ba"]), (100_000, 777))
        self.assertEqual({first.transport.hex(), second.transport.hex()}, {closed["transport"]})
        self.assertEqual(first.server, SERVER_KEY.public)
        # Each receipt is written once, whoever repeats it.
        written = [fields["receipt"] for fields in self.memory.of("receipt")]
        self.assertEqual(written, [data.hex() for data in self.receipts])
        relay = self.network.factory.relay
        for peer in list(relay.peers):
            for data in self.receipts[:2]:
                feed(relay, peer, Frame(RECEIPT, 0, data))
        self.assertEqual(
            (len(self.memory.of("receipt")), relay.drops[DropReason.BAD_RECEIPT]), (2, 2 * len(relay.peers))
        )

    def test_a_stream_that_moved_is_settled_transport_by_transport(self) -> None:
        one, other = self.open()
        one.transport.write(b"x" * 1000)
        self.network.settle()
        again = self.network.client(CLIENTS["A"], streams=self.streams["A"], receipts=True)
        moved = again.reopen(one.transport)
        self.network.settle()
        self.successResultOf(moved)
        one.transport.write(b"x" * 500)
        self.network.settle()
        one.transport.loseConnection()
        self.network.settle()
        said = [parse_receipt(data) for data in self.receipts]
        self.assertEqual(sorted(one.delivered_out for one in said if one.role is Role.INITIATOR), [500, 1000])
        self.assertEqual(sorted(one.delivered_in for one in said if one.role is Role.RESPONDER), [500, 1000])
        by_transport: dict[bytes, set[int]] = {}
        for receipt in said:
            way = receipt.delivered_out if receipt.role is Role.INITIATOR else receipt.delivered_in
            by_transport.setdefault(receipt.transport, set()).add(way)
        self.assertEqual(sorted(map(sorted, by_transport.values())), [[500], [1000]])
        self.assertEqual(len(self.memory.of("receipt")), 4)


class LostConnectionTests(ReceiptCase):
    """Receipts that could not be handed in are sent over the next connection."""

    def carry(self) -> None:
        self.one, self.other = self.open()
        self.one.transport.write(b"x" * 5000)
        self.other.transport.write(b"y" * 70)
        self.network.settle()

    def said(self) -> list[tuple[int, int, int]]:
        receipts = sorted((parse_receipt(data) for data in self.receipts), key=lambda receipt: receipt.role)
        return [(int(one.role), one.delivered_out, one.delivered_in) for one in receipts]

    def test_a_lost_connection_leaves_receipts_due(self) -> None:
        self.carry()
        self.cut("A")
        self.network.settle()
        self.assertEqual(self.said(), [(1, 70, 5000)])
        self.assertEqual(len(self.streams["A"].kept_receipts), 1)
        self.network.client(CLIENTS["A"], streams=self.streams["A"], receipts=True)
        self.network.settle()
        self.assertEqual(self.said(), [(0, 5000, 70), (1, 70, 5000)])
        self.assertEqual(len(self.streams["A"].kept_receipts), 0)
        (closed,) = self.memory.of("transport_close")
        self.assertEqual({parse_receipt(data).transport.hex() for data in self.receipts}, {closed["transport"]})
        self.assertEqual(len(self.memory.of("receipt")), 2)

    def test_receipts_are_kept_for_a_server_that_wants_them(self) -> None:
        """For example, a server starts without telemetry and is later restarted with it."""
        self.carry()
        self.cut("A")
        self.network.client(CLIENTS["A"], streams=self.streams["A"], receipts=False)
        self.network.settle()
        self.assertEqual(len(self.streams["A"].kept_receipts), 1)


class UnwillingTests(ReceiptCase):
    """A client that was not asked, or that does not want to, signs no receipt."""

    willing = False

    def test_a_client_may_decline_to_send_receipts(self) -> None:
        one, _ = self.open()
        one.transport.write(b"x")
        self.network.settle()
        one.transport.loseConnection()
        self.network.settle()
        self.assertEqual(self.receipts, [])
