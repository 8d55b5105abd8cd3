"""Random walks of programs that use agents through faults."""

from __future__ import annotations

from functools import partial

from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure

from dmsg.agent.programs import ProgramConnection
from dmsg.testing.agent_streams import STATES
from dmsg.testing.agent_walk import FAULTS, WAYS, draw_plan, follow
from dmsg.testing.plan import Aim, Plan, Step
from dmsg.testing.walk_coverage import WalkCoverage
from tests.testing.walks import WalkCase

STEPS = 20
SEEDS = range(3)
WALKS = [partial(follow, draw_plan(seed, STEPS)) for seed in SEEDS]


class AgentWalkTests(WalkCase):
    """Walks with fixed seeds."""

    def test_every_stream_delivers_or_ends(self) -> None:
        faults: set[str] = set()
        delivered = 0
        coverage = WalkCoverage(FAULTS, STATES)
        for walk in WALKS[:2]:
            done = walk()
            delivered += done.amount
            faults.update(done.faults)
            assert done.coverage is not None
            coverage.add(done.coverage)
        self.assertGreater(delivered, 1_000_000)
        self.assertLessEqual(faults, set(FAULTS))
        self.assertLessEqual({"opening", "idle"}, {cell.state for cell in coverage.reached})

    def test_a_paused_program_writes_nothing_after_its_half_close(self) -> None:
        """The program finishes only after the pause, and the walk has asked for more data in between."""
        steps = (
            Step(fault="open", chance=1678923393, seconds=0.3),
            Step(fault="pause program", chance=2695869801),
            Step(fault="close", chance=1910468841),
            Step(fault="open", chance=343035461),
            Step(fault="finish", chance=3692919539, seconds=0.002),
            Step(fault="abort", chance=1447691739),
            Step(((0, 100), (2, 10000), (4, 10000), (6, 100)), "close", 3805899852),
        )
        self.assertGreater(follow(Plan(1724621858, steps)).amount, 0)

    def test_data_arrives_after_a_program_has_closed_its_stream(self) -> None:
        """The agent was paused, and reads the CLOSE of the program and data of the peer in the same turn."""
        steps = (
            Step(fault="kill program", chance=3327620113),
            Step(fault="open", chance=2401302484),
            Step(fault="kill program", chance=906689212, seconds=0.3),
            Step(fault="finish", chance=568202262, seconds=0.0005),
            Step(fault="pause agent", chance=84759813),
            Step(((0, 300000), (3, 10000), (4, 1), (5, 300000), (6, 1)), "close", 4222061184),
            Step(seconds=12.0),
        )
        self.assertGreater(follow(Plan(999, steps)).amount, 0)

    def test_a_plan_follows_its_aims(self) -> None:
        aims = [Aim("kill agent", "half-closed"), Aim("abort", "closing")]
        plan = draw_plan(3, 60, aims)
        self.assertEqual(plan, draw_plan(3, 60, aims))
        aimed = [(one.fault, two.fault) for one, two in zip(plan.steps, plan.steps[1:], strict=False)]
        self.assertGreater(aimed.count(("finish", "kill agent")), 3)
        self.assertGreater(aimed.count(("close", "abort")), 3)
        self.assertEqual(set(WAYS), set(STATES))

    def test_a_program_that_ends_the_streams_of_others_is_found(self) -> None:
        lost = ProgramConnection.connectionLost

        def lose_all(connection: ProgramConnection, reason: Failure = connectionDone) -> None:
            lost(connection, reason)
            for bridge in list(connection._agent.bridges):
                bridge.program_lost()

        self.patch(ProgramConnection, "connectionLost", lose_all)
        self.found("has ended for no reason", WALKS)
