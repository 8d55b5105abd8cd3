"""Random walks of discovery through faults."""

from __future__ import annotations

from functools import partial
from typing import Any

from dmsg.discovery.entries import rules
from dmsg.discovery.store import sqlite
from dmsg.testing.discovery_walk import FAULTS, WAYS, draw_plan, follow
from dmsg.testing.key_records import STATES
from dmsg.testing.plan import Aim
from dmsg.testing.walk_coverage import Cell, WalkCoverage
from tests.testing.walks import WalkCase

STEPS = 60
WALKS = [partial(follow, draw_plan(seed, STEPS)) for seed in range(5)]


class DiscoveryWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_no_acknowledged_change_is_lost(self) -> None:
        faults: set[str] = set()
        covered = WalkCoverage(FAULTS, STATES)
        for walk in WALKS[:3]:
            done = walk()
            assert done.coverage is not None
            covered.add(done.coverage)
            self.assertIn(Cell("kill discovery", "discovery", "stored"), done.coverage.reached)
            self.assertGreater(done.amount, 20)
            faults.update(done.faults)
        self.assertLessEqual({"kill discovery", "delete", "wall clock", "replay an entry"}, faults)
        self.assertEqual(covered.kinds, faults)

    def test_each_way_leads_to_its_state(self) -> None:
        """And a fault that is aimed at happens there."""
        self.assertEqual(set(WAYS), set(STATES))
        for state in STATES:
            done = follow(draw_plan(3, 30, [Aim("reset", state)]))
            assert done.coverage is not None
            self.assertIn(state, {cell.state for cell in done.coverage.reached})

    def test_a_seed_repeats_a_walk(self) -> None:
        one, two = WALKS[1](), WALKS[1]()
        self.assertEqual((one.trace.count, one.trace.digest()), (two.trace.count, two.trace.digest()))

    def test_a_store_that_takes_old_entries_is_found(self) -> None:
        def decide(present: Any, entry: Any, now: float, terms: Any) -> rules.Replacement:
            return rules.Replacement(present is None, True, rules.NEVER, False)

        self.patch(sqlite, "decide_post", decide)
        self.found("was replaced by an older one", WALKS)
