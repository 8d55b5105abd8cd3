"""Coverage of walks: the states of streams in which faults happen."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.testing.lab import Lab
from dmsg.testing.promise import Fixed, Talker, Talkers
from dmsg.testing.walk import walk
from dmsg.testing.walk_coverage import STATES, WalkCoverage, state_of


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
        coverage = WalkCoverage(["kill", "delay", "kill"])
        coverage.note("kill", [Talker(1, 2), Talker(3, 4)])
        other = WalkCoverage(["kill", "delay"])
        other.note("kill", [Talker(1, 2)])
        coverage.add(other)
        lines = coverage.table().splitlines()
        self.assertEqual(
            lines[0].split(), ["opening", "idle", "in", "flight", "paused", "moving", "suspended", "closing"]
        )
        self.assertEqual(lines[1].split(), ["kill", "2", "-", "-", "-", "-", "-", "-"])
        self.assertEqual(len(lines), 3)
        self.assertEqual(len(coverage.missing), 13)
        self.assertIn(("delay", "moving"), coverage.missing)

    def test_a_walk_counts_its_faults_and_lies(self) -> None:
        done = walk(0, steps=12, lies=True)
        happened = {kind for kind, state in done.coverage._counts}
        self.assertLessEqual(set(done.faults), happened)
        self.assertTrue(any(kind.startswith("lie: ") for kind in happened), happened)
