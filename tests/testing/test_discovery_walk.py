"""Random walks of discovery through faults."""

from __future__ import annotations

from functools import partial
from typing import Any

from twisted.internet.defer import Deferred

from dmsg.discovery.entries import rules
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.store import sqlite
from dmsg.net.web.plain_client import _Connection
from dmsg.testing.discovery_walk import FAULTS, WAYS, draw_plan, follow
from dmsg.testing.key_records import OTHER_OWNER, OWNER, STATES, TWIN
from dmsg.testing.plan import Aim, Plan, Step
from dmsg.testing.walk_coverage import Cell, WalkCoverage
from tests.testing.walks import WalkCase

STEPS = 60
_POSTS = ((0, 1), (1, 1), (2, 1))
_TIMES = (0.0, 0.015, 3.0)
"""Seconds from a request to the next fault."""
WALKS = [partial(follow, draw_plan(seed, STEPS)) for seed in range(5)]


class DiscoveryWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_no_acknowledged_change_is_lost(self) -> None:
        faults: set[str] = set()
        covered = WalkCoverage(FAULTS, STATES)
        for walk in WALKS[:2]:
            done = walk()
            assert done.coverage is not None
            covered.add(done.coverage)
            self.assertIn(Cell("kill discovery", "discovery", "stored"), done.coverage.reached)
            self.assertGreater(done.amount, 20)
            faults.update(done.faults)
        self.assertLessEqual({"kill discovery", "delete", "wall clock", "replay an entry"}, faults)
        self.assertEqual(covered.kinds, faults)

    def test_each_way_leads_to_its_state(self) -> None:
        """A fault that is planned for the state happens in this state."""
        self.assertEqual(set(WAYS), set(STATES))
        for state in STATES:
            done = follow(draw_plan(3, 30, [Aim("reset", state)]))
            assert done.coverage is not None
            self.assertIn(state, {cell.state for cell in done.coverage.reached})

    def test_the_answer_to_a_deletion_may_overtake_that_to_a_post(self) -> None:
        """The entry was posted before it was deleted, so it is not lost."""
        steps = (
            Step(fault="loss", chance=1871952319),
            Step(says=((0, 10000), (2, 10000), (3, 10000), (4, 10000), (6, 100), (7, 300000))),
            Step(says=((2, 1), (6, 1)), seconds=0.3),
            Step(fault="heal", chance=27368772),
            Step(says=((0, 1), (1, 1), (2, 1))),
            Step(fault="loss", chance=412712998),
            Step(fault="delete", chance=1287016440),
            Step(seconds=0.3),
        )
        self.assertGreater(follow(Plan(2948904977, steps)).amount, 0)

    def test_requests_that_never_end_are_found(self) -> None:
        self.patch(Lookup, "delete", lambda lookup, key: Deferred())
        self.found("requests to discovery hang", WALKS)

    def test_half_open_connections_happen_to_programs_in_each_state(self) -> None:
        steps: list[Step] = []
        for number in range(18):
            steps.append(Step(_POSTS, fault="delete", chance=number, seconds=_TIMES[number % 3]))
            steps.append(Step(fault="half-open", chance=number))
        done = follow(Plan(5, tuple(steps)))
        assert done.coverage is not None
        cells = {cell for cell in done.coverage.reached if cell.kind == "half-open"}
        self.assertEqual({cell.party for cell in cells}, {OWNER, TWIN, OTHER_OWNER})
        self.assertLessEqual({"posting", "deleting"}, {cell.state for cell in cells})

    def test_a_request_that_waits_on_a_half_open_connection_is_found(self) -> None:
        """No kernel ends the connection in time, so only the timeout of the request can."""
        ask = _Connection.ask

        def wait(connection: _Connection, data: bytes, limit: int, deadline: float) -> Any:
            return ask(connection, data, limit, deadline + 10_000)

        self.patch(_Connection, "ask", wait)
        plans = [draw_plan(seed, STEPS, [Aim("half-open", "posting")]) for seed in (4, 7, 10)]
        self.found("requests to discovery hang", [partial(follow, plan) for plan in plans])

    def test_a_store_that_takes_old_entries_is_found(self) -> None:
        def decide(present: Any, entry: Any, now: float, terms: Any) -> rules.Replacement:
            return rules.Replacement(present is None, True, rules.NEVER, False)

        self.patch(sqlite, "decide_post", decide)
        self.found("was replaced by an older one", WALKS)
