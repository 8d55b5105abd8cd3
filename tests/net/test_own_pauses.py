"""Measurements and timeouts that leave out the pauses of this process."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError, DmsgTimeout
from dmsg.net.own_pauses import (
    MAX_EXTENSIONS,
    MIN_ATTEMPT,
    FairTimeout,
    PauseMeter,
    PausesBetweenChecks,
    TimeLeft,
    add_fair_timeout,
    stop_timeout,
)
from dmsg.testing.network import Network
from dmsg.v2019.pings import PING_TIMEOUT, Pings


class PausingClock(Clock):
    """Clock of a simulated process that pauses: each step is time in which the process runs no call."""

    can_pause = True


def let_pause(clock: Clock) -> None:
    """Let each later step of this clock be a pause, as with :class:`PausingClock`."""
    clock.can_pause = True  # type: ignore[attr-defined]


def pass_time(clock: Clock, seconds: float) -> None:
    """Advance the clock as in a process that is never paused."""
    clock.pump([0.005] * round(seconds / 0.005))


class PauseTests(SynchronousTestCase):
    """Time that passes in small steps, and time that passes at once."""

    def setUp(self) -> None:
        self.clock = PausingClock()
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

    def test_two_pauses_do_not_count(self) -> None:
        FairTimeout(self.clock, 10.0, self.on_timeout)
        for _ in range(2):
            pass_time(self.clock, 4.0)
            self.clock.advance(7.0)
        pass_time(self.clock, 1.0)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 2.5)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1, []))

    def test_after_a_pause_at_the_deadline_an_answer_is_still_read(self) -> None:
        """The pause begins just before the deadline: the time is over, but the reactor has not read since."""
        for seconds in (0.1, 3.0, 60.0):
            answered: Deferred[str] = Deferred()
            add_fair_timeout(answered, 10.0, self.clock)
            pass_time(self.clock, 9.99)
            self.clock.advance(seconds)
            self.assertNoResult(answered)
            answered.callback("answer")
            self.assertEqual((self.successResultOf(answered), self.clock.getDelayedCalls()), ("answer", []))

    def test_after_a_pause_at_the_deadline_nobody_is_waited_for_long(self) -> None:
        FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 9.99)
        self.clock.advance(60.0)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 1.1)
        self.assertEqual(self.timeouts, 1)

    def test_a_pause_longer_than_the_timeout_leaves_the_rest_of_it(self) -> None:
        timeout = FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 1.0)
        self.clock.advance(3600.0)
        pass_time(self.clock, 8.8)
        self.assertTrue(timeout.active())
        pass_time(self.clock, 0.4)
        self.assertEqual((self.timeouts, timeout.active()), (1, False))

    def test_a_pause_counts_for_the_timeouts_that_ran_during_it(self) -> None:
        """The timeout that begins in a long callback loses only the rest of this callback."""
        first = FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 1.0)
        self.clock.rightNow += 30.0
        second = FairTimeout(self.clock, 10.0, self.on_timeout)
        self.clock.rightNow += 5.0
        self.clock.advance(0)
        pass_time(self.clock, 9.3)
        self.assertEqual((first.active(), second.active()), (False, True))
        pass_time(self.clock, 0.4)
        self.assertTrue(second.active())
        pass_time(self.clock, 0.5)
        self.assertFalse(second.active())

    def test_the_timeout_of_a_busy_process_is_no_longer(self) -> None:
        """A turn of 50 ms is no pause for a timeout of 10 s, because the process reads in each turn."""
        FairTimeout(self.clock, 10.0, self.on_timeout)
        self.clock.pump([0.05] * 199)
        self.assertEqual(self.timeouts, 0)
        self.clock.pump([0.05] * 8)
        self.assertEqual(self.timeouts, 1)

    def test_a_step_of_a_clock_is_no_pause(self) -> None:
        clock = Clock()
        FairTimeout(clock, 10.0, self.on_timeout)
        meter = PauseMeter(clock)
        self.assertEqual(len(clock.getDelayedCalls()), 1)
        clock.advance(60.0)
        self.assertEqual((self.timeouts, meter.measured, clock.getDelayedCalls()), (1, 60.0, []))

    def count_calls(self) -> list[float]:
        """Return a list that gets the delay of each delayed call that is made from now on."""
        made = self.clock.callLater
        delays: list[float] = []

        def count(delay: float, call: Any) -> Any:
            delays.append(delay)
            return made(delay, call)

        self.patch(self.clock, "callLater", count)
        return delays

    def test_an_answer_that_arrives_soon_costs_one_call(self) -> None:
        delays = self.count_calls()
        timeout = FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 0.15)
        timeout.stop()
        self.assertEqual((len(delays), self.clock.getDelayedCalls()), (1, []))

    def test_many_timeouts_need_one_check(self) -> None:
        """A timeout costs two calls, and all timeouts together have the checks of one."""
        delays = self.count_calls()
        for _ in range(1000):
            FairTimeout(self.clock, 10.0, self.on_timeout)
            self.clock.advance(0.001)
        pass_time(self.clock, 8.9)
        self.assertEqual((self.timeouts, len(self.clock.getDelayedCalls())), (0, 1001))
        self.assertLess(len(delays), 2 * 1000 + 150)
        pass_time(self.clock, 1.2)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1000, []))

    def run_calls(self, until: float) -> int:
        """Advance the clock from call to call, and return the number of calls."""
        steps = 0
        while calls := [call.getTime() for call in self.clock.getDelayedCalls()]:
            if (due := min(calls)) > until:
                break
            self.clock.advance(due - self.clock.seconds())
            steps += 1
        return steps

    def test_a_long_wait_needs_few_checks(self) -> None:
        FairTimeout(self.clock, 3600.0, self.on_timeout)
        self.assertLess(self.run_calls(3600.0), 150)
        self.assertEqual((self.timeouts, self.clock.seconds()), (1, 3600.0))

    def test_a_short_measurement_during_a_long_wait_is_exact(self) -> None:
        FairTimeout(self.clock, 3600.0, self.on_timeout)
        self.run_calls(1800.0)
        meter = PauseMeter(self.clock)
        pass_time(self.clock, 1.0)
        self.clock.advance(0.9)
        self.assertApproximates(meter.measured or 0.0, 1.0, 0.1)
        meter.stop()

    def test_a_clock_that_is_set_back_together_with_the_calls_makes_no_timeout_longer(self) -> None:
        """So does :func:`~dmsg.net.reactor.use_monotonic_clock`."""
        FairTimeout(self.clock, 10.0, self.on_timeout)
        pass_time(self.clock, 0.5)
        self.clock.rightNow -= 3600.0
        for call in self.clock.getDelayedCalls():
            call.time -= 3600.0  # type: ignore[attr-defined]
        pass_time(self.clock, 9.4)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 0.2)
        self.assertEqual(self.timeouts, 1)

    def test_a_restarted_timeout_begins_again(self) -> None:
        """Pauses before and after the restart do not count, and the restart makes no call."""
        for before in (0.1, 4.0):  # Before and after the timeout has joined the record of pauses.
            self.timeouts = 0
            timeout = FairTimeout(self.clock, 10.0, self.on_timeout)
            pass_time(self.clock, before)
            self.clock.advance(30.0)
            pass_time(self.clock, 5.0)
            calls = set(self.clock.getDelayedCalls())
            timeout.restart()
            self.assertEqual(set(self.clock.getDelayedCalls()), calls)
            pass_time(self.clock, 5.0)
            self.clock.advance(30.0)
            pass_time(self.clock, 3.9)
            self.assertEqual(self.timeouts, 0)
            pass_time(self.clock, 1.5)
            self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1, []))

    def test_a_timeout_that_was_restarted_for_long_measures_pauses_as_exactly_as_a_new_one(self) -> None:
        timeout = FairTimeout(self.clock, 10.0, self.on_timeout)
        for second in range(3600):
            self.run_calls(second + 1.0)
            timeout.restart()
        self.clock.advance(60.0)
        pass_time(self.clock, 8.9)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 1.5)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (1, []))

    def test_a_restart_after_long_makes_checks_frequent(self) -> None:
        FairTimeout(self.clock, 3600.0, self.on_timeout)
        timeout = FairTimeout(self.clock, 1800.0, self.on_timeout)
        short = FairTimeout(self.clock, 10.0, lambda: None)
        self.run_calls(9.0)
        short.restart()
        short.stop()
        self.run_calls(1500.0)
        delays = self.count_calls()
        timeout.restart()
        self.assertLessEqual(max(delays, default=0.0), 180.0)
        self.assertTrue(timeout.active())

    def test_a_timeout_that_is_restarted_during_a_pause_has_no_more_than_its_time(self) -> None:
        timeout = FairTimeout(self.clock, 10.0, self.on_timeout)
        self.clock.rightNow += 60.0
        timeout.restart()
        self.clock.advance(0)
        pass_time(self.clock, 9.9)
        self.assertEqual(self.timeouts, 0)
        pass_time(self.clock, 0.2)
        self.assertEqual(self.timeouts, 1)

    def test_a_restarted_timeout_may_be_extended_again(self) -> None:
        timeout = FairTimeout(self.clock, 1.0, self.on_timeout)
        for _ in range(MAX_EXTENSIONS + 1):
            pass_time(self.clock, 0.99)
            self.clock.advance(1.0)
            self.assertEqual(self.timeouts, 0)
            timeout.restart()
        timeout.stop()

    def test_a_restart_works_without_pauses(self) -> None:
        clock = Clock()
        timeout = FairTimeout(clock, 10.0, self.on_timeout)
        clock.advance(6.0)
        timeout.restart()
        clock.advance(6.0)
        self.assertEqual(self.timeouts, 0)
        clock.advance(4.0)
        self.assertEqual((self.timeouts, clock.getDelayedCalls()), (1, []))

    def test_attempts_share_the_time_without_pauses(self) -> None:
        time_left = TimeLeft(self.clock, 10.0)
        pass_time(self.clock, 4.0)
        self.clock.advance(60.0)
        self.assertApproximates(time_left.seconds, 6.0, 0.5)
        self.assertApproximates(time_left.share(3), 2.0, 0.2)
        pass_time(self.clock, 7.0)
        self.assertLess(time_left.seconds, 0.0)
        self.assertEqual(time_left.share(3), MIN_ATTEMPT)
        self.assertEqual((time_left.stop("result"), self.clock.getDelayedCalls()), ("result", []))

    def test_a_measurement_with_a_limit_leaves_out_long_pauses_only(self) -> None:
        """It finds pauses as exactly after an hour as at its beginning."""
        meter = PauseMeter(self.clock, 10.0)
        self.clock.pump([0.05] * 200)
        self.assertAlmostEqual(meter.awake, 10.0)
        self.run_calls(3600.0)
        before = meter.awake
        self.clock.advance(60.0)
        self.assertApproximates(meter.awake - before, 0.0, 1.0)
        meter.stop()

    def test_each_reactor_has_its_own_pauses(self) -> None:
        other = PausingClock()
        FairTimeout(self.clock, 10.0, self.on_timeout)
        there = FairTimeout(other, 10.0, self.on_timeout)
        pass_time(self.clock, 9.0)
        other.advance(9.0)
        pass_time(self.clock, 1.1)
        self.assertEqual((self.timeouts, there.active()), (1, True))
        there.stop()
        self.assertEqual((self.clock.getDelayedCalls(), other.getDelayedCalls()), ([], []))

    def test_timeouts_of_a_lost_reactor_use_no_memory(self) -> None:
        clock = PausingClock()
        FairTimeout(clock, 10.0, self.on_timeout)
        pass_time(clock, 1.0)
        lost = weakref.ref(clock)
        del clock
        gc.collect()
        self.assertIsNone(lost())

    def test_a_stopped_timeout_holds_nothing(self) -> None:
        owner = Failure(DmsgError("owner"))
        timeout = FairTimeout(self.clock, 10.0, owner.getErrorMessage)
        lost = weakref.ref(owner)
        timeout.stop()
        stop_timeout(timeout)
        stop_timeout(None)
        gc.disable()
        self.addCleanup(gc.enable)
        del owner
        self.assertIsNone(lost())

    def test_a_deferred_with_a_fair_timeout_fails_as_with_a_plain_one(self) -> None:
        answered: Deferred[str] = add_fair_timeout(Deferred(), 10.0, self.clock)
        pass_time(self.clock, 10.1)
        failure = self.failureResultOf(answered, TimeoutError)
        self.assertEqual(str(failure.value), "no answer within 10 s")

    def test_a_stopped_timeout_does_not_fire(self) -> None:
        timeout = FairTimeout(self.clock, 1.0, self.on_timeout)
        timeout.stop()
        pass_time(self.clock, 2.0)
        self.assertEqual((self.timeouts, self.clock.getDelayedCalls()), (0, []))


class CheckTests(SynchronousTestCase):
    """Pauses between periodic checks."""

    def setUp(self) -> None:
        self.clock = PausingClock()
        self.pauses = PausesBetweenChecks(self.clock, 5.0)
        self.pauses.begin()

    def check(self, *seconds: float) -> list[float]:
        found = []
        for one in seconds:
            self.clock.advance(one)
            found.append(self.pauses.measure())
        return found

    def test_a_check_after_a_pause_counts_no_time(self) -> None:
        self.assertEqual(self.check(5.0, 5.4, 65.0, 5.0, 3.0, 65.0), [0.0, 0.0, 65.0, 0.0, 0.0, 65.0])

    def test_if_each_check_is_late_every_second_one_counts(self) -> None:
        self.assertEqual(self.check(7.0, 7.0, 7.0, 7.0), [7.0, 2.0, 7.0, 2.0])

    def test_the_time_before_the_checks_is_no_pause(self) -> None:
        self.clock.advance(60.0)
        self.pauses.begin()
        self.assertEqual(self.check(5.0), [0.0])
        self.pauses = PausesBetweenChecks(self.clock, 5.0)
        self.assertEqual(self.check(60.0, 60.0), [0.0, 60.0])

    def test_a_step_of_a_clock_is_no_pause(self) -> None:
        clock = Clock()
        pauses = PausesBetweenChecks(clock, 5.0)
        pauses.begin()
        clock.advance(60.0)
        self.assertEqual(pauses.measure(), 0.0)


class HostTests(SynchronousTestCase):
    """Fair timeouts on simulated hosts of the lab."""

    def setUp(self) -> None:
        self.network = Network()
        self.host = self.network.host("one")
        self.timeouts = 0

    def on_timeout(self) -> None:
        self.timeouts += 1

    def test_only_the_paused_host_waits_longer(self) -> None:
        other = self.network.host("two")
        here = FairTimeout(self.host, 10.0, self.on_timeout)
        there = FairTimeout(other, 10.0, self.on_timeout)
        self.network.clock.advance(0)
        self.host.pause()
        pass_time(self.network.clock, 9.0)
        self.host.resume()
        pass_time(self.network.clock, 1.1)
        self.assertEqual((here.active(), there.active()), (True, False))
        pass_time(self.network.clock, 9.0)
        self.assertEqual((here.active(), self.timeouts), (False, 2))

    def test_a_new_process_of_a_killed_host_notices_pauses(self) -> None:
        killed = FairTimeout(self.host, 10.0, self.on_timeout)
        pass_time(self.network.clock, 1.0)
        self.host.kill()
        self.host.revive()
        pass_time(self.network.clock, 20.0)
        timeout = FairTimeout(self.host, 10.0, self.on_timeout)
        pass_time(self.network.clock, 1.0)
        self.host.pause()
        pass_time(self.network.clock, 20.0)
        self.host.resume()
        pass_time(self.network.clock, 8.0)
        self.assertTrue(timeout.active())
        pass_time(self.network.clock, 1.2)
        self.assertEqual((timeout.active(), self.timeouts), (False, 1))
        killed.stop()


class PingTests(SynchronousTestCase):
    """Round trips of a connection, in a process that pauses."""

    def setUp(self) -> None:
        self.clock = PausingClock()
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
