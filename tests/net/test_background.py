"""Work in steps: its slices end whatever the system's clock does; strangers get at most half of a core."""

from __future__ import annotations

import time
from collections.abc import Iterator

from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from dmsg.net.background import TURN_SLICE, work, work_for_strangers
from dmsg.net.reactor import the_reactor

STEP = TURN_SLICE / 4
"""Seconds that one step of the work keeps the processor."""


def _busy(times: list[float], steps: int) -> Iterator[None]:
    for _ in range(steps):
        until = time.monotonic() + STEP
        while time.monotonic() < until:
            pass
        times.append(time.monotonic())
        yield None


class SliceTests(TestCase):
    """Slices of work."""

    async def test_a_clock_that_is_set_back_does_not_lengthen_a_slice(self) -> None:
        others: list[float] = []

        def other() -> None:
            others.append(time.monotonic())

        real = time.time
        times: list[float] = []
        done: Deferred[object] = work(_busy(times, 40)).whenDone()
        the_reactor().callLater(0, other)
        self.patch(time, "time", lambda: real() - 3600 * len(times))
        await done
        self.assertLess(others[0], times[-1], "nobody else had a turn before all of the work was done")

    async def test_all_work_for_strangers_leaves_half_of_a_core(self) -> None:
        first: list[float] = []
        second: list[float] = []
        began = time.monotonic()
        both = [work_for_strangers(_busy(times, 30)).whenDone() for times in (first, second)]
        for one in both:
            await one
        worked, took = STEP * 60, time.monotonic() - began
        self.assertGreater(took, 1.6 * worked)
