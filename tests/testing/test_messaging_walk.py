"""Random walks of the Messaging System through faults."""

from __future__ import annotations

from functools import partial
from typing import Any

from dmsg.messaging.core.acks import AckLayer
from dmsg.messaging.core.relay import Relay
from dmsg.messaging.core.secure import ChannelCiphers
from dmsg.testing.messaging_walk import FAULTS, STATES, WAYS, draw_plan, follow
from dmsg.testing.plan import Aim, Plan, draw
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.stream_places import INITIATOR, OTHER_SERVER
from dmsg.testing.walk_coverage import NO_PARTY, Cell
from tests.testing.walks import WalkCase

SEEDS = range(2)
STEPS = 60
UNACKNOWLEDGED = 9
"""Seed of a walk that finds data without acknowledgement.  One walk in six finds them."""


def plan(seed: int) -> Plan:
    return draw(seed, STEPS, FAULTS)


WALKS = [partial(follow, plan(seed)) for seed in SEEDS]


class MessagingWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_no_channel_breaks_its_guarantee(self) -> None:
        delivered = 0
        faults = set()
        for seed in SEEDS:
            walk, _ = follow(plan(seed))
            delivered += walk.delivered
            faults.update(walk.faults)
            self.assertLessEqual(walk.coverage.kinds, set(walk.faults))
            self.assertIn(Cell("open", NO_PARTY, "idle"), walk.coverage.reached)
        self.assertGreater(delivered, 60_000)
        self.assertLessEqual({"kill", "leave", "pause", "reset", "open", "close"}, faults)

    def test_a_fault_happens_in_the_state_and_to_the_party_that_are_aimed_at(self) -> None:
        self.assertEqual(set(WAYS), set(STATES))
        for state in STATES:
            walk, _ = follow(draw_plan(3, 20, [Aim("reset", state, INITIATOR)]))
            self.assertIn(Cell("reset", INITIATOR, state), walk.coverage.reached)

    def test_a_server_starts_while_a_channel_opens(self) -> None:
        """A fault waits for a server to which it can happen, and the plan first makes the fault possible."""
        for kind in ("restart", "leave"):
            walk, _ = follow(draw_plan(2, 20, [Aim(kind, "opening", OTHER_SERVER)]))
            self.assertIn(Cell(kind, OTHER_SERVER, "opening"), walk.coverage.reached)

    def test_a_server_that_forgets_channels_is_found(self) -> None:
        def forget(relay: Relay, peer: Any, limit: int = 0) -> bool:
            # The channels of this client stay open at their other ends.
            relay.connections.remove(peer)
            relay.congestion.gone(peer)
            return True

        self.patch(Relay, "remove", forget)
        self.found("ends hang", WALKS)

    def test_data_without_acknowledgement_are_found(self) -> None:
        self.patch(AckLayer, "consumed", lambda acks: acks._read.clear())
        self.found("ends hang", [partial(follow, plan(UNACKNOWLEDGED))])

    def test_wrong_bytes_are_found(self) -> None:
        decrypt = ChannelCiphers.open
        self.patch(ChannelCiphers, "open", lambda ciphers, data: decrypt(ciphers, data)[::-1])
        self.found("wrong bytes arrived", WALKS)
        self.assertTrue(self.flushLoggedErrors(PromiseBroken))
