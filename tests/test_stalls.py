"""Pauses of the reactor in ``make long WHICH=stalls``."""

from __future__ import annotations

import re
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.stalls import Stalling, Stalls, modules


class Reactor:
    """Reactor that counts its polls."""

    def __init__(self) -> None:
        self.polls: list[float | None] = []

    def doIteration(self, delay: float | None) -> None:
        self.polls.append(delay)


class StallTests(SynchronousTestCase):
    """The pauses depend on the seed and on the name of the test, and on nothing else."""

    def pauses(self, stalls: Stalls, test: str) -> list[float]:
        """Return the pauses in 100 turns of a test."""
        reactor, slept = Reactor(), list[float]()
        stalling = Stalling(stalls, reactor, slept.append)
        reactor.doIteration(0.5)
        self.assertEqual(slept, [])
        stalling.begin(test)
        for _ in range(100):
            reactor.doIteration(None)
        stalling.end()
        found = slept[:]
        reactor.doIteration(0.5)
        self.assertEqual((slept, reactor.polls), (found, [0.5, *[None] * 100, 0.5]))
        return found

    def test_pauses_can_be_repeated(self) -> None:
        first = self.pauses(Stalls(0.3, 0.1, 7), "a")
        self.assertEqual(first, self.pauses(Stalls.parse(str(Stalls(0.3, 0.1, 7))), "a"))
        self.assertTrue(10 < len(first) < 60 and 0.05 < max(first) <= 0.1, first)
        for other in ((8, "a"), (7, "b")):
            self.assertNotEqual(first, self.pauses(Stalls(0.3, 0.1, other[0]), other[1]))
        self.assertEqual(self.pauses(Stalls(0.0, 1.0, 7), "a"), [])

    def test_malformed_pauses_are_refused(self) -> None:
        for text in ("", "0.1", "0.1:1", "x:1:1", "1.5:1:1", "0.1:-1:1", "0.1:1:1:1"):
            self.assertRaises(ValueError, Stalls.parse, text)

    def test_every_module_of_whole_entities_is_included(self) -> None:
        found = modules()
        self.assertEqual(len(found), len(set(found)))
        for path in Path(__file__).parent.joinpath("net").glob("test_*.py"):
            if re.search(r"\(EntityCase\)", path.read_text()):
                self.assertIn(f"tests.net.{path.stem}", found)
        self.assertIn("tests.rmb.test_peer", found)
