"""Entries end, and what is dropped is counted."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import fail
from twisted.internet.task import Clock
from twisted.internet.testing import EventLoggingObserver
from twisted.logger import formatEvent, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.rules import Terms
from dmsg.discovery.service.expiry import BATCH_SIZE, FIRST_SWEEP, LOG_INTERVAL, SWEEP_INTERVAL, DropLog, ExpirySweep
from dmsg.discovery.service.service import Discovery
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.telemetry.metrics import Metrics
from tests.discovery.store.support import server_entry


class SweepTests(SynchronousTestCase):
    """Expiry with a test clock."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.metrics = Metrics()
        self.store = SQLiteStore(":memory:", on_dropped=DropLog(self.clock.seconds, self.metrics).count)
        self.sweep = ExpirySweep(self.clock, self.store, self.clock.seconds)
        self.sweep.start()
        self.addCleanup(self.sweep.stop)

    def count(self) -> int:
        return self.successResultOf(self.store.count())

    def dropped(self, reason: str) -> float:
        return self.metrics.dropped.labels(reason)._value.get()

    def post(self, number: int, terms: Terms) -> None:
        self.successResultOf(self.store.post(server_entry(number), self.clock.seconds(), terms))

    def test_entries_expire_a_few_at_a_time(self) -> None:
        """Entries do not expire before clients whose discovery was absent could post them again."""
        for number in range(BATCH_SIZE + 10):
            self.post(number, Terms(lasts=10.0))
        self.clock.advance(FIRST_SWEEP - 1)
        self.assertEqual(self.count(), BATCH_SIZE + 10)
        self.clock.advance(1)
        self.assertEqual(self.count(), 10)
        self.clock.advance(1)
        self.assertEqual((self.count(), self.dropped("ended")), (0, BATCH_SIZE + 10))

    def test_entries_survive_a_step_of_the_clock(self) -> None:
        """After a step of the store's clock all entries look old; their owners post them again."""
        self.clock.advance(FIRST_SWEEP)
        self.post(1, Terms(lasts=10.0))
        self.sweep.postpone()
        self.clock.advance(FIRST_SWEEP - 1)
        self.assertEqual(self.count(), 1)
        self.clock.advance(1)
        self.assertEqual(self.count(), 0)

    def test_a_discovery_whose_store_has_the_systems_times(self) -> None:
        """A store in Redis uses the system's time, because other machines write to it: a step forward removes no
        entry, and a step back keeps none too long.
        """
        self.sweep.stop()
        discovery: Any = Discovery(cast(Any, self.clock), [], "memory:")
        running = discovery._running = discovery._make(self.store, self.clock.seconds, moves=True)
        self.addCleanup(running.watch.stopService)
        self.addCleanup(running.sweep.stop)
        self.addCleanup(running.checks._check_loop.stop)
        self.clock.advance(FIRST_SWEEP)
        self.post(1, Terms(lasts=10.0))
        discovery._clock_was_set(+7200.0, self.clock.seconds() + 7200.0)
        self.clock.advance(FIRST_SWEEP - 1)
        self.assertEqual(self.count(), 1)
        before = self.clock.seconds() - 3600.0
        self.post(2, Terms())
        discovery._clock_was_set(-3600.0, before)
        self.assertEqual(self.successResultOf(self.store.available(9, before + 1.0)), [])
        self.assertEqual(len(self.successResultOf(self.store.available(9, before))), 2)

    def test_a_store_that_fails_is_asked_again(self) -> None:
        sweep = self.store.sweep
        self.store.sweep = lambda *arguments: fail(OSError("away"))  # type: ignore[method-assign]
        self.post(1, Terms(lasts=10.0))
        self.clock.advance(FIRST_SWEEP)
        self.store.sweep = sweep  # type: ignore[method-assign]
        self.clock.advance(SWEEP_INTERVAL)
        self.assertEqual(self.count(), 0)

    def test_excessive_posters_are_logged_once_a_minute(self) -> None:
        log = EventLoggingObserver.createWithCleanup(cast(Any, self), globalLogPublisher)

        def lines() -> int:
            return sum("the oldest entries of 1.2.3.4 are deleted" in (formatEvent(event) or "") for event in log)

        for number in range(10):
            self.post(number, Terms(place="1.2.3.4", most=3000.0))
        self.assertEqual(self.dropped("address"), 10 - self.count())
        self.assertEqual(lines(), 1)
        self.clock.advance(LOG_INTERVAL)
        self.post(11, Terms(place="1.2.3.4", most=3000.0))
        self.assertEqual(lines(), 2)
