"""client_rules.json: the clients of 2019 in a lab against the recordings."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import RemoteProtocolError
from dmsg.testing.old_client import FIRST_ID, FIRST_SEQUENCE, OldTransport, OldTransports
from dmsg.v2019.core.wire import CLOSE, FWD, REQUEST, Frame
from tests.support import KEYS, vectors

LEFT_OUT = {
    "connect_no_first_frame": "the recording only shows that the client waits",
    "large_writes": "the recorded client breaks its stream by a long write, and the client of the lab does not",
    "reconnect": "it is about two connections, and these rules are about one",
}
"""Recorded exchanges that the client of the lab does not repeat, with the reasons."""
ENDED = {"connect_first_frame_close", "connect_first_frame_unknown", "frame_for_known_id"}
"""Exchanges after whose last frame the client ends the connection."""


class OldClientTests(SynchronousTestCase):
    """The lab's client sends what was recorded, and nothing more."""

    def setUp(self) -> None:
        self.scenarios = {one["name"]: one for one in vectors("client_rules")["scenarios"]}

    def replay(self, scenario: dict[str, Any]) -> None:
        wraps = scenario["name"] == "seq_and_id_wrap"
        sequence = 0xFFFE if scenario["name"] == "write_waits_for_ack" or wraps else FIRST_SEQUENCE
        client = OldTransports(KEYS["A"].public, 0xFFFE if wraps else FIRST_ID, sequence)
        transports: dict[int, OldTransport] = {}
        waiting: list[Frame] = []
        for event in scenario["events"]:
            for one in event.get("frames") or []:
                frame = Frame(one["type"], one["id"], bytes.fromhex(one["payload"]))
                if event["hop"] == "S->A":
                    self.assertEqual(waiting, [])
                    client.receive(frame)
                    # Only in the exchange about a full backlog, the application takes no transport.
                    if scenario["name"] != "accept_buffer_full":
                        transports.update((taken.id, taken) for taken in client.accepted)
                        client.accepted.clear()
                    waiting = client.take()
                    continue
                if not waiting and frame.type == REQUEST:
                    transports[frame.id] = client.open(KEYS["B"].public)
                elif not waiting and frame.type == FWD:
                    client.write(transports[frame.id], frame.payload[2:])
                elif not waiting and frame.type == CLOSE:
                    client.close(transports[frame.id])
                waiting += client.take()
                self.assertEqual(waiting.pop(0), frame)
        self.assertEqual(waiting, [])

    def test_the_client_does_what_was_recorded(self) -> None:
        for name, scenario in self.scenarios.items():
            if name in LEFT_OUT:
                continue
            with self.subTest(name):
                if name in ENDED:
                    self.assertRaises(RemoteProtocolError, self.replay, scenario)
                else:
                    self.replay(scenario)
        self.assertLessEqual({*LEFT_OUT, *ENDED}, set(self.scenarios))

    def test_data_and_acknowledgements(self) -> None:
        client = OldTransports(KEYS["A"].public)
        client.receive(Frame(0, 0, b""))
        client.receive(Frame(REQUEST, 1, bytes(KEYS["B"].public + KEYS["A"].public)))
        transport = client.accepted.popleft()
        client.receive(Frame(FWD, 1, b"\0\5hello"))
        self.assertEqual(list(transport.received), [b"hello"])
        client.write(transport, b"abc")
        client.receive(Frame(11, 1, FIRST_SEQUENCE.to_bytes(2, "big")))
        self.assertEqual((transport.acknowledged, transport.unacknowledged), (3, {}))
