"""Measurements and timeouts that leave out the pauses of this process."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError, DmsgTimeout
from dmsg.net.own_pauses import FairTimeout, PauseMeter
from dmsg.v2019.pings import PING_TIMEOUT, Pings


def pass_time(clock: Clock, seconds: float) -> None:
    """Advance the clock as in a process that is never paused."""
    clock.pump([0.005] * round(seconds / 0.005))


class PauseTests(SynchronousTestCase):
    """Time that passes in small steps, and time that passes at once."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.timeouts = 0

    def on_timeout(self) -> None:
        self.timeouts += 1

    def test_without_a_pause_all_time_is_measured(self) -> None:
        meter = PauseMeter(self.clock)
        pass_time(self.clock, 3.0)
        self.assertAlmostEqual(meter.measured or 0.0, 3.0)
        meter.stop()
        pass_time(self.clock, 1.0)
        self.assertAlmostEqual(meter.elapsed, 3.0)
        self.assertEqual((meter.paused, self.clock.getDelayedCalls()), (0.0, []))

    def test_a_pause_is_measured_before_any_check_of_it(self) -> None:
        """The reactor may call others after the pause first."""
        meter = PauseMeter(self.clock)
        pass_time(self.clock, 1.0)
        self.clock.rightNow += 0.5
        for _ in range(2):
            self.assertApproximates(meter.paused, 0.5, 0.1)
            self.assertApproximates(meter.measured or 0.0, 1.0, 0.1)
            self.clock.advance(0)
        self.clock.advance(5.0)
        self.assertIsNone(meter.measured)
        meter.stop()

    def test_a_timeout_without_a_pause_is_exact(self) -> None:
        FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 9.99)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 0.02)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1, []))

    def test_a_pause_does_not_count(self) -> None:
        FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 5.0)
        self.clock.advance(60.0)
        pass_time(self.clock, 4.0)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 1.5)
        self.assertEqual(self.timeouts, 1)

    def test_a_process_that_pauses_all_the_time_has_timeouts_too(self) -> None:
        FairTimeout(self.clock, 1.0, self.on_timeout)
        for _ in range(100):
            self.clock.advance(1.0)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1, []))

    def test_a_stopped_timeout_does_not_fire(self) -> None:
        timeout = FairTimeout(self.clock, 1.0, self.on_timeout)
        timeout.stop()
        pass_time(self.clock, 2.0)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (0, []))


class PingTests(SynchronousTestCase):
    """Round trips of a connection, in a process that pauses."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.sent: list[bytes] = []
        self.stalls = 0
        self.pings = Pings(self.clock, self.sent.append, self.on_stalled)

    def on_stalled(self) -> None:
        self.stalls += 1

    def test_a_pause_makes_no_server_slow(self) -> None:
        for _ in range(3):
            answered = self.pings.ping()
            pass_time(self.clock, 0.1)
            self.pings.pong(self.sent[-1])
            self.successResultOf(answered)
        self.assertAlmostEqual(self.pings.round_trip or 0.0, 0.1)
        for _ in range(3):
            answered = self.pings.ping()
            self.clock.advance(2.0)
            self.pings.pong(self.sent[-1])
            self.assertAlmostEqual(self.successResultOf(answered), 2.0)
        self.assertAlmostEqual(self.pings.round_trip or 0.0, 0.1)

    def test_a_server_that_is_slow_is_measured_in_spite_of_a_pause(self) -> None:
        for _ in range(20):
            answered = self.pings.ping()
            pass_time(self.clock, 0.6)
            self.clock.advance(0.3)
            self.pings.pong(self.sent[-1])
            self.successResultOf(answered)
        self.assertApproximates(self.pings.round_trip or 0.0, 0.6, 0.15)

    def test_a_first_measurement_that_was_mostly_a_pause_says_nothing(self) -> None:
        self.pings.ping()
        self.clock.advance(2.0)
        self.pings.pong(self.sent[-1])
        self.assertIsNone(self.pings.round_trip)

    def test_a_pause_ends_no_connection(self) -> None:
        self.pings.watch()
        self.clock.advance(10 * PING_TIMEOUT)
        self.assertEqual(self.stalls, 0)
        self.pings.pong(self.sent[-1])
        self.assertEqual(self.stalls, 0)
        self.pings.stop(Failure(DmsgError("over")))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_server_that_does_not_answer_is_noticed(self) -> None:
        self.pings.watch()
        pass_time(self.clock, PING_TIMEOUT + 0.1)
        self.assertEqual(self.stalls, 1)
        asking = self.pings.ping(1.0)
        pass_time(self.clock, 1.1)
        self.assertIn("within 1 s", str(self.failureResultOf(asking, DmsgTimeout).value))
        self.assertEqual(self.clock.getDelayedCalls(), [])
