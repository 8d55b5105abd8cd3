"""Watch for suspensions of the machine."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.wake import CHECK_INTERVAL, MIN_SLEEP, WakeWatch


class WakeTests(SynchronousTestCase):
    """Checks that are late."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.woken: list[float] = []
        self.watch = WakeWatch(self.clock, self.woken.append)
        self.watch.start()
        self.addCleanup(self.watch.stop)

    def test_a_late_check_is_told_once(self) -> None:
        self.clock.pump([CHECK_INTERVAL] * 5)
        self.clock.advance(3600)
        self.clock.pump([CHECK_INTERVAL] * 5)
        self.assertEqual(self.woken, [3600 - CHECK_INTERVAL])

    def test_a_busy_process_was_not_suspended(self) -> None:
        self.clock.advance(MIN_SLEEP)
        self.assertEqual(self.woken, [])

    def test_the_watch_goes_on_when_the_function_fails(self) -> None:
        def fail(_: float) -> None:
            raise ValueError("told")

        watch = WakeWatch(self.clock, fail)
        watch.start()
        for _ in range(2):
            self.clock.advance(3600)
        watch.stop()
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 2)

    def test_a_stopped_watch_leaves_no_timer(self) -> None:
        self.watch.stop()
        self.assertEqual(self.clock.getDelayedCalls(), [])
