"""Timers that no step of the system's clock moves, and what notices such a step."""

from __future__ import annotations

from typing import Any

from twisted.internet.base import ReactorBase
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net import reactor as module
from dmsg.net.clock import CHECK_INTERVAL, MIN_STEP, ClockWatch, SteadyClock
from dmsg.net.reactor import monotonic, use_monotonic_clock


class _Reactor(ReactorBase):
    """Reactor that has only timers."""

    def installWaker(self) -> None:
        pass

    def doIteration(self, delay: float | None) -> None:
        pass

    def removeAll(self) -> list[Any]:
        return []


class MonotonicReactorTests(SynchronousTestCase):
    """``use_monotonic_clock`` on a reactor of Twisted's own kind."""

    def setUp(self) -> None:
        self.now, self.wall = 100.0, 1_000_000_000.0
        self.reactor: Any = _Reactor()
        self.reactor.seconds = lambda: self.wall
        self.patch(module, "monotonic", lambda: self.now)
        self.fired: list[str] = []

    def pass_time(self, seconds: float, step: float = 0.0) -> list[str]:
        self.now += seconds
        self.wall += seconds + step
        self.reactor.runUntilCurrent()
        return self.fired

    def test_a_step_moves_no_timer(self) -> None:
        use_monotonic_clock(self.reactor)
        self.reactor.callLater(30.0, self.fired.append, "refresh")
        self.assertEqual(self.pass_time(29.0, +7200.0), [])
        self.assertEqual(self.pass_time(1.0, -10_800.0), ["refresh"])

    def test_planned_calls_keep_their_delay(self) -> None:
        first = self.reactor.callLater(1.0, self.fired.append, "cancelled")
        for delay in (5.0, 2.0, 3.0):
            self.reactor.callLater(delay, self.fired.append, f"after {delay:g}")
        self.pass_time(0.0)  # The timers are now in the reactor's heap.
        later = self.reactor.callLater(9.0, self.fired.append, "put off")
        first.cancel()
        use_monotonic_clock(self.reactor)
        later.reset(4.0)
        self.assertEqual(self.pass_time(2.0, -3600.0), ["after 2"])
        self.assertEqual(self.pass_time(1.0), ["after 2", "after 3"])
        self.assertEqual(self.pass_time(1.0), ["after 2", "after 3", "put off"])
        self.assertEqual(self.pass_time(1.0), ["after 2", "after 3", "put off", "after 5"])
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_a_second_call_has_no_effect(self) -> None:
        use_monotonic_clock(self.reactor)
        call = self.reactor.callLater(30.0, self.fired.append, "x")
        use_monotonic_clock(self.reactor)
        self.assertEqual(call.getTime(), 130.0)

    def test_a_test_clock_is_unchanged(self) -> None:
        """A test clock takes the place of the reactor's clock; code that needs dates receives ``clock.seconds`` as
        well.
        """
        clock = Clock()
        use_monotonic_clock(clock)
        self.assertEqual(clock.seconds(), 0.0)

    def test_the_monotonic_reactor_advances(self) -> None:
        self.assertLessEqual(monotonic(), monotonic())


class StepTests(SynchronousTestCase):
    """Values that are kept by date, and the log line when the date jumps."""

    def setUp(self) -> None:
        self.clock, self.off = Clock(), 1_700_000_000.0

    def wall(self) -> float:
        return self.clock.seconds() + self.off

    def test_a_steady_clock_follows_no_step(self) -> None:
        steady = SteadyClock(self.clock, self.wall)
        self.assertEqual(steady(), 1_700_000_000.0)
        self.off -= 3600.0
        self.clock.advance(10.0)
        self.assertEqual(steady(), 1_700_000_010.0)

    def test_each_step_is_reported_once(self) -> None:
        told: list[float] = []
        watch = ClockWatch(self.clock, told.append, self.wall)
        watch.startService()
        for step in (0.0, -3600.0, 0.0, MIN_STEP / 2, +7200.0):
            self.off += step
            self.clock.advance(CHECK_INTERVAL)
        self.assertEqual(told, [-3600.0, 7200.0])
        watch.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_failing_callback_does_not_stop_the_watch(self) -> None:
        told: list[float] = []

        def fail(step: float) -> None:
            told.append(step)
            raise ValueError(step)

        watch = ClockWatch(self.clock, fail, self.wall)
        watch.startService()
        for step in (-3600.0, +7200.0):
            self.off += step
            self.clock.advance(CHECK_INTERVAL)
        self.assertEqual((told, len(self.flushLoggedErrors(ValueError))), ([-3600.0, 7200.0], 2))
        watch.stopService()
