"""Coverage of walks: the states of streams in which faults happen."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.determinism import Trace
from dmsg.testing.lab import Lab
from dmsg.testing.plan import Aim, Plan
from dmsg.testing.promise import Fixed, Talker, Talkers
from dmsg.testing.stream_places import (
    OTHER_CLIENT,
    OTHER_SERVER,
    OWN_SERVER,
    RESPONDER,
    STATES,
    StreamPlace,
    obstacle,
    parties_of,
    state_of,
)
from dmsg.testing.walk import follow
from dmsg.testing.walk_command import Done, _Walks, coverage_text
from dmsg.testing.walk_coverage import NO_PARTY, Cell, WalkCoverage, pairs
from dmsg.testing.walk_kinds import EVERY_LIE, WAYS, draw_plan


class StateTests(SynchronousTestCase):
    """The state of an end of a stream in a lab."""

    def test_each_state(self) -> None:
        lab = Lab(3)
        lab.add_servers(2)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        for name in ("alice", "bob"):
            for server in lab.servers:
                for path in lab.network.both_ways(lab.network.host(name), lab.network.host(server)):
                    path.delay = 0.1
        lab.settle()
        talkers = Talkers()
        bob.listen(talkers, 7)
        one = talkers.pair(1)
        found = [state_of(one)]
        lab.result(alice.connect(bob.public_key, Fixed(one), 7))
        found.append(state_of(one))
        one.say(10)
        lab.clock.advance(0)
        found.append(state_of(one))
        lab.network.run(1)
        stream: Any = one.transport
        stream.pauseProducing()
        found.append(state_of(one))
        stream.resumeProducing()
        for name in list(lab.servers):
            lab.kill(name)
        lab.network.run(1)
        found.append(state_of(one))
        lab.add_servers(2)
        lab.network.run_until(lambda: state_of(one) == "moving")
        found.append(state_of(one))
        lab.network.run(5)
        one.say(10)
        stream.loseConnection()
        found.append(state_of(one))
        lab.network.run(5)
        found.append(state_of(one))
        self.assertEqual(set(found), {*STATES, None})

    def test_a_talker_without_a_stream_is_opening(self) -> None:
        self.assertEqual(state_of(Talker(1, 2)), "opening")


class WalkCoverageTests(SynchronousTestCase):
    """Counts of faults by states."""

    def test_a_table_shows_what_never_happened(self) -> None:
        coverage = WalkCoverage(["kill", "delay", "kill"], STATES)
        coverage.note_states("kill", ["opening", "opening"])
        other = WalkCoverage(["kill", "delay"], STATES)
        other.note_states("kill", ["opening"])
        coverage.add(other)
        lines = coverage.table().splitlines()
        self.assertEqual(
            lines[0].split(), ["opening", "idle", "in", "flight", "paused", "moving", "suspended", "closing"]
        )
        self.assertEqual(lines[1].split(), ["kill", "2", "-", "-", "-", "-", "-", "-"])
        self.assertEqual(len(lines), 3)
        self.assertEqual(len(coverage.missing), 13)
        self.assertIn("delay while moving", list(map(str, coverage.missing)))

    def test_a_fault_counts_for_the_roles_of_its_hosts(self) -> None:
        places = [StreamPlace("idle", "alice", "bob", "server-1"), StreamPlace("opening", "bob", "alice", "")]
        found = set(pairs(places, ("alice", "server-1")))
        expected = {
            ("its initiator", "idle"),
            ("its server", "idle"),
            ("its responder", "opening"),
            ("another server", "opening"),
        }
        self.assertEqual(found, expected)
        self.assertEqual(
            [places[0].party_of(host) for host in ("carol", "discovery-2")], ["another client", "discovery"]
        )
        coverage = WalkCoverage(["delay"], STATES, parties_of, obstacle)
        coverage.note("delay", found)
        self.assertEqual(len(coverage.cells) - len(coverage.missing), 4)
        self.assertNotIn(Cell("delay", "its server", "suspended"), coverage.cells)
        self.assertEqual([len(line.split()) for line in coverage.table().splitlines()[4:5]], [8])

    def test_a_fault_that_happened_to_no_host_is_not_counted(self) -> None:
        places = [StreamPlace("idle", "alice", "bob", "server-1")]
        coverage = WalkCoverage(["reset", "heal"], STATES, parties_of, obstacle)
        for kind in ("reset", "heal"):
            coverage.note(kind, pairs(places, ()))
        self.assertEqual(coverage.reached, {Cell("heal", NO_PARTY, "idle")})

    def test_what_can_never_happen_is_printed_with_its_reason(self) -> None:
        def odd(kind: str, party: str, state: str) -> str:
            return "it is at rest" if kind == "kill" and state == "paused" else obstacle(kind, party, state)

        coverage = WalkCoverage(["kill", "delay"], STATES, parties_of, odd)
        text = coverage_text(coverage)
        server = "anything of its server while opening, anything of its server while suspended"
        self.assertIn(f"can never happen, because a stream that opens or is suspended has no server: {server}\n", text)
        killed = "kill of its server while paused, kill of another server while paused"
        self.assertIn(f"can never happen, because it is at rest: {killed}\n", text)
        self.assertNotIn("kill of its server while paused", text.partition("never happened:")[2])

    def test_walks_are_steered_to_what_never_happened(self) -> None:
        coverage = WalkCoverage(["kill", "delay"], ["idle", "paused"])
        for _ in range(1000):
            coverage.note_states("kill", ["idle", "paused"])
            coverage.note_states("delay", ["idle"])
        aims = coverage.aims(Random(1), 20)
        self.assertGreater(aims.count(Aim("delay", "paused")), 18)
        self.assertEqual(Aim.parse(str(aims[0])), aims[0])

    def test_walks_are_steered_to_a_party_too(self) -> None:
        coverage = WalkCoverage(["reset"], ["idle"], parties_of)
        for party in parties_of("reset")[1:]:
            for _ in range(1000):
                coverage.note("reset", [(party, "idle")])
        aims = coverage.aims(Random(1), 20)
        rare = Aim("reset", "idle", parties_of("reset")[0])
        self.assertGreater(aims.count(rare), 18)
        self.assertEqual(str(rare), "reset@its initiator@idle")
        self.assertEqual(Aim.parse(str(rare)), rare)

    def test_a_fault_happens_to_the_party_that_is_aimed_at(self) -> None:
        aims = [Aim("kill", "idle", OWN_SERVER), Aim("reset", "idle", RESPONDER), Aim("delay", "idle", OTHER_CLIENT)]
        plan = draw_plan(203, 20, aims)
        plan = replace(plan, shape=replace(plan.shape, clients=3, servers=3, old=False, second=""))
        steps = tuple(step for step in plan.steps if step.to or step.fault in ("", "restart"))
        done = follow(replace(plan, steps=steps))
        reached = {Aim(cell.kind, cell.state, cell.party) for cell in done.coverage.reached}
        self.assertLessEqual({Aim(step.fault, step.at, step.to) for step in steps if step.to}, reached)

    def test_a_plan_follows_its_aims(self) -> None:
        """Each state has ways that lead to it, and every fault and lie can be aimed at."""
        aims = [Aim("lie: cut", "closing"), Aim("poison", "opening")]
        plan = draw_plan(5, 60, aims, lies=True)
        self.assertEqual(plan, draw_plan(5, 60, aims, lies=True))
        aimed = [
            (before.fault, step.fault, [lie.kind for lie in step.lies])
            for before, step in zip(plan.steps, plan.steps[1:], strict=False)
        ]
        self.assertGreater(aimed.count(("finish", "lies", ["cut"])), 3)
        self.assertGreater(aimed.count(("open", "poison", [])), 3)
        self.assertEqual(set(WAYS), set(STATES))
        self.assertIn("lie: cut", EVERY_LIE)

    def test_a_server_is_stopped_before_the_aim_to_start_it(self) -> None:
        for fault, before in (("restart", "kill"), ("kill", "restart")):
            steps = draw_plan(1, 60, [Aim(fault, "idle", OTHER_SERVER)]).steps
            aimed = [number for number, step in enumerate(steps) if step.to]
            self.assertTrue(aimed)
            self.assertEqual({steps[number - 2].fault for number in aimed}, {before})

    def test_a_fault_waits_for_the_state_that_is_aimed_at(self) -> None:
        """Without a delay of the paths, and without the wait, streams are never seen in these states."""
        aims = [Aim("reset", "moving"), Aim("partition", "closing"), Aim("poison", "closing")]
        plan = draw_plan(204, 40, aims)
        self.assertEqual({step.at for step in plan.steps}, {"", "moving", "closing"})
        done = follow(replace(plan, shape=replace(plan.shape, clients=2, delay=0.02)))
        reached = {Aim(cell.kind, cell.state) for cell in done.coverage.reached}
        self.assertTrue(reached.intersection(aims), reached)

    def test_the_summary_of_walks_says_how_fast_they_were(self) -> None:
        walks = _Walks("", lambda seed, aims: Plan(seed, ()), lambda plan: Done(2, [], Trace()), (), is_steered=False)
        now, used = iter((0.0, 0.5, 1.5)), iter((1.0, 5.0))
        self.patch(time, "monotonic", lambda: next(now))
        self.patch(time, "process_time", lambda: next(used))
        walks.walk(1.0)
        seeds = r"1 walks, seeds (\d+) to \1"
        self.assertRegex(walks.text("bytes"), rf"^{seeds}: 2 bytes\n0\.25 walks a second of processor time\n$")
