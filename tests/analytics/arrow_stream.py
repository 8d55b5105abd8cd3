"""When a stream updates its tables, and which settings of Spark a run gets for its amount of work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import main
from dmsg.analytics.main import RefinementSchedule
from dmsg.analytics.session import MEDIUM_FILES, SMALL_FILES, Load

TICK = 1.0
"""Seconds between two steps of a stream's main loop."""


class LoadTests(SynchronousTestCase):
    """Amount of work that follows from the size of the files."""

    def test_limits_belong_to_the_larger_load(self) -> None:
        self.assertEqual((SMALL_FILES, MEDIUM_FILES), (8 * 2**20, 2**30))
        for size, expected in (
            (0, Load.SMALL),
            (SMALL_FILES - 1, Load.SMALL),
            (SMALL_FILES, Load.MEDIUM),
            (MEDIUM_FILES - 1, Load.MEDIUM),
            (MEDIUM_FILES, Load.LARGE),
            (2**60, Load.LARGE),
        ):
            self.assertIs(Load.of_files(size), expected, size)

    def test_an_unknown_size_may_be_large(self) -> None:
        self.assertIs(Load.of_files(None), Load.LARGE)


class TurnsTests(SynchronousTestCase):
    """Times at which a stream makes its tables."""

    def test_half_of_the_time_at_most(self) -> None:
        now = [100.0]
        turns = RefinementSchedule(lambda: now[0])
        self.assertTrue(turns.due())  # The lines were read before the refinement began.
        with turns.measure():
            now[0] += 5
        self.assertFalse(turns.due())
        now[0] += 60
        self.assertFalse(turns.due())  # No file arrived.
        turns.wanted = True
        self.assertTrue(turns.due())
        with turns.measure():
            now[0] += 20
            turns.wanted = True  # Lines arrive during the refinement.
        for passed, due in ((19, False), (1, True)):
            now[0] += passed
            self.assertIs(turns.due(), due)


class FakePipeline:
    """Stand-in for a pipeline and its stop event. A line arrives each second, and time passes only in this object.

    :param every: seconds between two batches.
    :param cost: seconds that an update of the tables takes.
    :param end: seconds after which the stream is stopped.
    :param lines: number of lines that arrive.
    :ivar delays: seconds from the arrival of each line until the tables contained it.
    :ivar updates: number of batches that each update processed.
    """

    def __init__(self, every: float, cost: float, end: float, lines: int) -> None:
        self.passed = 0.0
        self._every, self._cost, self._end, self._lines = every, cost, end, lines
        self._next_batch = every
        self._in_bronze = self._batches = 0
        self._refine: Callable[[Any], None]
        self._lock: AbstractContextManager[object]
        self.delays: list[float] = []
        self.updates: list[int] = []
        self.lake = SimpleNamespace(state=lambda: SimpleNamespace(run=len(self.updates)))

    def begin_small(self) -> None:
        pass

    def note_unreadable(self, sources: object) -> None:
        pass

    def follow(self, source: object, every: str, refine: Any, lock: Any, stop: threading.Event) -> Any:
        self._refine, self._lock = refine, lock
        idle = {"isTriggerActive": False}
        return SimpleNamespace(isActive=True, name="spool", status=idle, stop=lambda: None)

    def run_claimed(self, on_claim: Callable[[Any], None]) -> None:
        on_claim(None)

    def refine(self, before: Any, claim: object, unread: list[str]) -> Any:
        """Process all lines that are in bronze."""
        self.passed += self._cost
        self.delays += [self.passed - arrived for arrived in range(len(self.delays), self._in_bronze)]
        self.updates.append(self._batches)
        self._batches = 0
        return SimpleNamespace(state=SimpleNamespace(run=before.run + 1))

    def wait(self, seconds: float) -> bool:
        """Let time pass, and write a batch if one is due, as Spark does in another thread."""
        self.passed += seconds
        if self.passed >= self._next_batch:
            self._next_batch = self.passed - self.passed % self._every + self._every
            with self._lock:
                arrived = min(int(self.passed), self._lines)
                if arrived > self._in_bronze:
                    self._in_bronze = arrived
                    self._batches += 1
                    self._refine(None)
        return self.passed >= self._end

    def is_set(self) -> bool:
        return self.passed >= self._end


class StreamTests(SynchronousTestCase):
    """Delay and cost of a stream, by a clock of the test."""

    def streamed(self, every: float, cost: float, end: float, lines: int = 1_000_000) -> FakePipeline:
        """Run a stream, and check that its delay and its cost have their limits."""
        pipeline: Any = FakePipeline(every, cost, end, lines)
        schedule = RefinementSchedule(lambda: pipeline.passed)
        outcomes: list[Any] = []
        with (
            patch.object(main, "Pipeline", lambda spark, out, **options: pipeline),
            patch.object(main, "RefinementSchedule", lambda: schedule),
        ):
            spark: Any = None
            main.stream(spark, "/spool", None, "/out", f"{every} seconds", outcomes.append, pipeline)
        found: FakePipeline = pipeline
        self.assertEqual(len(outcomes), len(found.updates))
        # Each of the two waits, for a batch and for the end of a pause, ends at a step of the main loop.
        self.assertLessEqual(max(found.delays), every + 3 * cost + 2 * TICK)
        # The update at the start is not preceded by a pause.
        self.assertLessEqual(len(found.updates) * cost, found.passed / 2 + cost)
        return found

    def test_each_batch_is_processed_at_once_while_updates_are_short(self) -> None:
        for cost in (0.0, 1.0, 10.0, 14.0):
            found = self.streamed(30.0, cost, 3000.0)
            self.assertEqual(set(found.updates[1:]), {1}, cost)
            self.assertGreaterEqual(len(found.updates), 3000 // 30, cost)

    def test_long_updates_process_several_batches_together(self) -> None:
        for cost, batches in ((10.0, 2), (60.0, 10), (500.0, 50)):
            found = self.streamed(5.0, cost, 40 * cost)
            self.assertGreaterEqual(max(found.updates), batches, cost)
            # The stream does not fall behind: the last lines are as new as the first ones were.
            self.assertGreaterEqual(len(found.delays), found.passed - 5.0 - 3 * cost - 2 * TICK, cost)
            self.assertGreaterEqual(len(found.updates), 40 // 3, cost)

    def test_lines_that_arrive_in_a_pause_need_no_later_batch(self) -> None:
        found = self.streamed(5.0, 60.0, 1000.0, lines=70)
        self.assertEqual(len(found.delays), 70)
