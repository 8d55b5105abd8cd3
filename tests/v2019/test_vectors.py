"""server_rules.json and sessions.json: the server against everything recorded of the reference.

The recorded client packets are fed byte by byte as they were, the server gets
the recorded ephemeral keys, and what it sends is compared packet by packet.
Where this server is deliberately better, the difference is written down here
and in ``docs/protocol/betterments``.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason as R
from dmsg.keys import SecKey
from dmsg.noise.records import RecordOpener, RecordSealer
from dmsg.noise.xk import XKHandshake
from dmsg.testing.old_relay import OldRelay
from dmsg.v2019.core.wire import CLOSE, FWD, REQUEST, Frame, FrameBuffer
from tests.support import KEYS, SERVER_KEY, Draws, MemoryNetwork, ciphers, some, vectors


class _Abortable(StringTransport):
    """Notes how the connection ended, and tells the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.ended = False

    def loseConnection(self) -> None:
        super().loseConnection()
        self.ended = True

    def abortConnection(self) -> None:
        super().abortConnection()
        self.ended = True


class _Peer:
    """The recorded client of one connection."""

    def __init__(self, recorded: dict[str, Any], link: Any) -> None:
        self.key = KEYS[recorded["client"]]
        self.handshake = XKHandshake(
            self.key, SERVER_KEY.public, ephemeral=SecKey.from_hex(recorded["client_ephemeral_sk"])
        )
        self.handshake.data_to_send()
        self.link = link
        self.transport = _Abortable()
        self.link.makeConnection(self.transport)
        self.output = b""
        self.frames = FrameBuffer()
        self.backlog: list[Frame] = []
        self.gone = False
        self.exact = True
        """Whether each record so far was the recorded one."""

    @cached_property
    def ciphers(self) -> tuple[RecordSealer, RecordOpener]:
        """Return the sealer and opener of this end after the handshake."""
        return ciphers(self.handshake)

    def packet(self) -> bytes | None:
        """The next packet of the server."""
        self.output += self.transport.value()
        self.transport.clear()
        if len(self.output) < 2:
            return None
        size = 2 + int.from_bytes(self.output[:2], "big")
        packet, self.output = self.output[:size], self.output[size:]
        return packet

    def opened(self, packet: bytes) -> list[Frame]:
        """The frames that a packet completes."""
        buffer = bytearray(200_000)
        return self.frames.feed(bytes(buffer[: self.ciphers[1].open_into(packet, buffer, 0)]))

    def send(self, frame: Frame) -> None:
        """A frame that was not recorded."""
        self.link.dataReceived(bytes(self.ciphers[0].seal(frame.encode())))


def _pattern(head: bytes, size: int) -> bytes:
    """Recorded long payloads count up by 7 from 3; only their start is kept."""
    start = head.find(b"\x03\x0a\x11")
    if start < 0:  # The second piece continues where the first one ended.
        return bytes((head[0] + 7 * n) & 0xFF for n in range(size))
    return head[:start] + bytes((3 + 7 * n) & 0xFF for n in range(size - start))


class Replay:
    """Player of one scenario against a server; it stops at a given event."""

    def __init__(self, test: SynchronousTestCase, scenario: dict[str, Any]) -> None:
        self.test = test
        self.scenario = scenario
        self.reasons: list[int] = []
        self.exact = 0
        events = scenario["events"]
        firsts = []
        for recorded in scenario["connections"]:
            hop = f"S->{recorded['client']}"
            assigned = [
                frame["id"]
                for event in events
                if event["hop"] == hop and event["conn"] == recorded["number"]
                for frame in event.get("frames") or []
                if frame.get("type") == REQUEST
            ]
            firsts.append(((assigned or [0x2001])[0] - 1) // 2)
        self.ephemerals = [SecKey.from_hex(one["server_ephemeral_sk"]) for one in scenario["connections"]]
        self.network = MemoryNetwork(random=Draws(*firsts), ephemeral=lambda: self.ephemerals.pop(0))
        self.peers: dict[tuple[str, int], _Peer] = {}

    def peer(self, client: str, number: int = 1) -> _Peer:
        """The connection of a client; made when its first packet is due."""
        if (client, number) not in self.peers:
            recorded = next(
                one for one in self.scenario["connections"] if (one["client"], one["number"]) == (client, number)
            )
            self.peers[client, number] = _Peer(recorded, self.network.factory.buildProtocol(None))
        return self.peers[client, number]

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Events ``first`` to ``last`` exclusive; nothing but what is recorded may be sent."""
        for event in self.scenario["events"][first:last]:
            source, target = event["hop"].split("->")
            peer = self.peer(source if target == "S" else target, event["conn"])
            if target == "S":
                self._feed(peer, event)
            else:
                self._compare(peer, event)
            self.network.factory.relay.check()
        if last is None:
            self.silent()

    def silent(self) -> None:
        """Assert that no more data was sent."""
        for name, peer in self.peers.items():
            self.test.assertIsNone(peer.packet(), name)
            self.test.assertEqual(peer.backlog, [], name)

    def _feed(self, peer: _Peer, event: dict[str, Any]) -> None:
        sealer = None if peer.handshake.keys is None else peer.ciphers[0]
        if "packet" in event:
            packet = bytes.fromhex(event["packet"])
        else:
            head = bytes.fromhex(event["packet_head"])
            if event["plain_len"] > 65515:  # The reference truncated the length to 16 bits.
                packet = head
            else:
                assert sealer is not None
                sealer.sequence = int.from_bytes(head[2:6], "big") - 1
                packet = bytes(sealer.seal(_pattern(bytes.fromhex(event["plain_head"]), event["plain_len"])))
                self.test.assertEqual(packet[: len(head)], head)
        if sealer is not None and len(packet) > 6:
            sealer.sequence = max(sealer.sequence, int.from_bytes(packet[2:6], "big"))
        peer.link.dataReceived(packet)
        self.network.settle()

    def _compare(self, peer: _Peer, event: dict[str, Any]) -> None:
        if peer.gone:
            return  # The reference continues to send by a rule that no longer exists (its defect 5).
        expected = event.get("frames")
        packet = None
        if not peer.backlog:
            packet = peer.packet()
            assert packet is not None, f"event {event['n']}: nothing was sent, recorded {expected}"
        if event["handshake"]:
            self.test.assertEqual(some(packet).hex(), event["packet"])
            peer.handshake.receive_data(some(packet))
            return
        assert expected is not None
        if packet is not None:
            peer.backlog += peer.opened(packet)
        # This server puts frames into one record that were several records in the recording.
        together = len(peer.backlog) > len(expected)
        frames, peer.backlog = peer.backlog[: len(expected)], peer.backlog[len(expected) :]
        self.test.assertEqual(
            [(frame.type, frame.id, len(frame.payload)) for frame in frames],
            [(one["type"], one["id"], one["payload_len"]) for one in expected],
        )
        changed = False
        for frame, one in zip(frames, expected, strict=True):
            if frame.type == CLOSE and one["payload"] == "00" and frame.payload != b"\0":
                self.reasons.append(frame.payload[0])
                changed = True
            elif "payload" in one:
                self.test.assertEqual(frame.payload.hex(), one["payload"])
        if packet is not None and not changed and not together and peer.exact:
            if "packet" in event:
                self.test.assertEqual(packet.hex(), event["packet"])
            else:
                self.test.assertEqual(packet[: len(event["packet_head"]) // 2].hex(), event["packet_head"])
                self.test.assertEqual(len(packet), event["packet_len"])
            self.exact += 1
        elif changed or together or packet is None:
            peer.exact = False  # Its later records have other sequences or contents.


# Maps each scenario to the reasons of the server's own CLOSE frames, which are all 0 in the reference.
REASONS: dict[str, list[int]] = {
    "request_accept": [],
    "request_unknown_responder": [R.NO_SUCH_PEER],
    "request_wrong_initiator": [R.BAD_REQUEST],
    "request_bad_length": [R.BAD_REQUEST] * 5,
    "unknown_transport_id": [R.NO_SUCH_TRANSPORT] * 4,
    "unknown_frame_type_00": [R.PEER_DISCONNECTED],
    "unknown_frame_type_04": [R.PEER_DISCONNECTED],
    "unknown_frame_type_09": [R.PEER_DISCONNECTED],
    "unknown_frame_type_0c": [R.PEER_DISCONNECTED],
    "unknown_frame_type_ff": [R.PEER_DISCONNECTED],
    "request_self": [],
    "close_payloads": [R.NO_SUCH_TRANSPORT] * 6,
    "responder_refuses": [R.NO_SUCH_TRANSPORT],
    "disconnect_of_initiator": [R.PEER_DISCONNECTED, R.NO_SUCH_TRANSPORT, R.NO_SUCH_TRANSPORT, R.NO_SUCH_PEER],
    "fwd_before_accept": [],
    "payloads_are_not_checked": [],
    "assigned_ids": [],
    "assigned_ids_reuse": [],
    "records_and_frames": [],
    "largest_frame": [R.PEER_DISCONNECTED],
    "damaged_record": [R.PEER_DISCONNECTED],
    "server_closes": [R.SHUTTING_DOWN, R.SHUTTING_DOWN],
}
# This server behaves differently in these scenarios. Each has a test of its own.
BETTERED = {
    "request_odd_id",
    "request_same_id_twice",
    "request_id_equals_assigned_id",
    "second_connection_of_a_key",
    "frame_split_over_records_larger_than_one_record",
    "frame_of_65516_split",
    "replayed_record",
}
# In these scenarios, the offender's connection ends.
ENDED = {name for name in REASONS if name.startswith("unknown_frame_type")} | {"largest_frame", "damaged_record"}


class ServerRuleTests(SynchronousTestCase):
    """server_rules.json."""

    def setUp(self) -> None:
        self.scenarios = {one["name"]: one for one in vectors("server_rules")["scenarios"]}

    def _replay(self, name: str) -> Replay:
        return Replay(self, self.scenarios[name])

    def test_every_scenario_is_covered(self) -> None:
        self.assertEqual(set(self.scenarios), set(REASONS) | BETTERED)

    def test_server_rules_match_the_recording(self) -> None:
        """Byte for byte, but for the reasons that this server gives."""
        for name, reasons in REASONS.items():
            replay = self._replay(name)
            if name == "disconnect_of_initiator":
                replay.run(0, 12)
                lost = replay.peer("A")
                lost.gone = True
                lost.link.connectionLost()
                replay.network.settle()
                replay.run(12)
            elif name == "server_closes":
                replay.run(0, 12)
                replay.network.factory.drain()
                replay.network.settle()
                replay.run(12)
                self.assertTrue(all(peer.transport.ended for peer in replay.peers.values()))
            else:
                ends_at = len(self.scenarios[name]["events"])
                for position, event in enumerate(self.scenarios[name]["events"]):
                    if name in ENDED and event["hop"] == "A->S":
                        ends_at = position + 1
                if name == "damaged_record":  # The offending packet of this scenario is only in its description.
                    ends_at = len(self.scenarios[name]["events"]) - 1
                replay.run(0, ends_at)
                if name in ENDED:
                    offender = replay.peer("A")
                    if name == "damaged_record":
                        self._send_damaged(offender)
                    self.assertTrue(offender.transport.ended, name)
                    offender.link.connectionLost()
                    replay.network.settle()
                    replay.run(ends_at)
            self.assertEqual(replay.reasons, [int(reason) for reason in reasons], name)
            self.assertGreaterEqual(replay.exact, 2, name)

    def test_the_old_servers_of_the_lab_match_the_recording(self) -> None:
        """Servers of 2019 give no reasons."""
        # Each of these scenarios ends a connection or the server, which the other test does.
        others = ENDED | {"disconnect_of_initiator", "server_closes"}
        for name in sorted(set(REASONS) - others):
            replay = self._replay(name)
            replay.network.factory.relay.__class__ = OldRelay
            replay.run()
            self.assertEqual(replay.reasons, [], name)

    def test_an_old_server_of_the_lab_loses_the_second_connection_of_a_key(self) -> None:
        """When the first connection ends, a REQUEST no longer reaches the second one."""
        replay = self._replay("second_connection_of_a_key")
        replay.network.factory.relay.__class__ = OldRelay
        for number, first, last in ((1, 0, 22), (2, 22, 25)):
            replay.run(first, last)
            lost = replay.peer("B", number)
            lost.gone = True
            lost.link.connectionLost()
            replay.network.settle()
        replay.run(25)
        self.assertEqual(replay.reasons, [])

    @staticmethod
    def _send_damaged(sender: _Peer) -> None:
        record = bytearray(sender.ciphers[0].seal(Frame(FWD, 0x10, b"\0\1x").encode()))
        record[-1] ^= 1
        sender.link.dataReceived(bytes(record))

    def test_a_replayed_record_ends_the_connection(self) -> None:
        """Bettered: the connection ends, the frame is not delivered twice."""
        replay = self._replay("replayed_record")
        replay.run(0, 14)
        sender = replay.peer("A")
        recorded = self.scenarios["replayed_record"]["events"][12]
        sender.link.dataReceived(bytes.fromhex(recorded["packet"]))
        self.assertTrue(sender.transport.ended)
        self.assertEqual(sender.link.ended_for.value, "replayed_record")

    def test_request_with_an_odd_id(self) -> None:
        """Bettered: refused, the responder hears nothing."""
        replay = self._replay("request_odd_id")
        replay.run(0, 8)
        event = self.scenarios["request_odd_id"]["events"][8]
        self.assertEqual(event["frames"][0]["id"] % 2, 1)
        initiator = replay.peer("A")
        initiator.link.dataReceived(bytes.fromhex(event["packet"]))
        replay.network.settle()
        packet = initiator.packet()
        assert packet is not None
        (frame,) = initiator.opened(packet)
        self.assertEqual(frame, Frame(CLOSE, event["frames"][0]["id"], bytes([R.BAD_REQUEST])))
        self.assertIsNone(replay.peer("B").packet())

    def test_request_with_a_used_id(self) -> None:
        """Bettered: both ends of the old transport learn that it is over, nothing is left half open."""
        replay = self._replay("request_same_id_twice")
        replay.run(0, 12)
        event = self.scenarios["request_same_id_twice"]["events"][12]
        self.assertEqual(event["frames"][0]["type"], REQUEST)
        initiator, responder = replay.peer("A"), replay.peer("B")
        initiator.link.dataReceived(bytes.fromhex(event["packet"]))
        replay.network.settle()
        for peer in (initiator, responder):
            packet = peer.packet()
            assert packet is not None
            (frame,) = peer.opened(packet)
            self.assertEqual((frame.type, frame.payload), (CLOSE, bytes([R.ID_IN_USE])))
        self.assertEqual(replay.network.factory.relay.route_count, 0)

    def test_request_with_an_id_that_the_server_assigned(self) -> None:
        """Bettered: the same, the id is not stolen."""
        name = "request_id_equals_assigned_id"
        replay = self._replay(name)
        replay.run(0, 12)
        event = self.scenarios[name]["events"][12]
        thief, other = replay.peer("A"), replay.peer("B")
        thief.link.dataReceived(bytes.fromhex(event["packet"]))
        replay.network.settle()
        packet = other.packet()
        assert packet is not None
        (frame,) = other.opened(packet)
        self.assertEqual((frame.type, frame.payload), (CLOSE, bytes([R.ID_IN_USE])))
        self.assertEqual(replay.network.factory.relay.route_count, 0)

    def test_second_connection_of_a_key(self) -> None:
        """Bettered: the end of the first leaves the second reachable."""
        name = "second_connection_of_a_key"
        replay = self._replay(name)
        replay.run(0, 22)
        replay.peer("B", 1).link.connectionLost()
        replay.network.settle()
        initiator, second = replay.peer("A"), replay.peer("B", 2)
        while (packet := initiator.packet()) is not None:
            initiator.opened(packet)
        payload = bytes(KEYS["A"].public + KEYS["B"].public)
        initiator.send(Frame(REQUEST, 0x14, payload))
        replay.network.settle()
        packet = second.packet()
        assert packet is not None
        (frame,) = second.opened(packet)
        self.assertEqual((frame.type, frame.payload), (REQUEST, payload))

    def test_frames_longer_than_a_record(self) -> None:
        """Bettered: frames of 65516 to 65540 bytes arrive whole, in two records."""
        for name in ("frame_split_over_records_larger_than_one_record", "frame_of_65516_split"):
            replay = self._replay(name)
            replay.run(0, 14)
            receiver = replay.peer("B")
            frames: list[Frame] = []
            records = 0
            while (packet := receiver.packet()) is not None:
                frames += receiver.opened(packet)
                records += 1
            size = {"frame_of_65516_split": 65511}.get(name, 65535)
            self.assertEqual([(frame.type, len(frame.payload)) for frame in frames], [(FWD, size)])
            self.assertEqual(frames[0].payload, bytes((3 + 7 * n) & 0xFF for n in range(size)))
            self.assertEqual(records, 2)
            self.assertIsNone(replay.peer("A").packet())


class SessionTests(SynchronousTestCase):
    """sessions.json: recorded frames between real clients and the real server."""

    def test_the_server_reproduces_the_recorded_sessions(self) -> None:
        """Every packet of every session, byte for byte."""
        for scenario in vectors("sessions")["scenarios"]:
            replay = Replay(self, scenario)
            replay.run()
            refused = scenario["name"] == "session_reject_unknown_responder"
            self.assertEqual(replay.reasons, [R.NO_SUCH_PEER] if refused else [], scenario["name"])
            self.assertGreaterEqual(replay.exact, 1, scenario["name"])
