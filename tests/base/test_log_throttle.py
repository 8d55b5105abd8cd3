"""Log lines that are written at most once per interval and kind."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.log_throttle import MAX_KINDS, LogThrottle


class LogThrottleTests(SynchronousTestCase):
    def test_one_line_is_logged_per_interval(self) -> None:
        clock = Clock()
        seldom = LogThrottle(clock.seconds, 10.0)
        self.assertEqual(seldom.suffix("a"), "")
        self.assertEqual([seldom.suffix("a") for _ in range(3)], [None] * 3)
        self.assertEqual(seldom.suffix("b"), "")
        clock.advance(10.0)
        self.assertEqual(seldom.suffix("a"), ", and 3 more since the last line")
        clock.advance(9.9)
        self.assertIsNone(seldom.suffix("a"))

    def test_unbounded_kinds_share_one_entry(self) -> None:
        """All kinds beyond the limit are counted together, without more memory."""
        clock = Clock()
        seldom = LogThrottle(clock.seconds, 10.0)
        told = [seldom.count_left_out(number) for number in range(10 * MAX_KINDS)]
        self.assertEqual(told.count(0), MAX_KINDS + 1)
        self.assertLessEqual(len(seldom._reported), MAX_KINDS + 1)
        clock.advance(10.0 * MAX_KINDS)
        self.assertEqual(seldom.count_left_out("new"), 0)
        self.assertEqual(len(seldom._reported), 1)
