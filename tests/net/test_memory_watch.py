"""Return of freed memory to the system."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.memory_watch import MAX_TRIM_PAUSE, TRIM_PAUSE, TRIM_THRESHOLD, Allocator

MIB = 1024 * 1024
BASE = 60 * MIB


class AllocatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.size = BASE
        self.kept = 0
        """Freed bytes that were not returned to the system. ``stuck`` counts those that cannot be returned."""
        self.stuck = 0
        self.allocator = Allocator(self.clock.seconds, self.trim, lambda: self.size + self.kept + self.stuck)

    def trim(self) -> None:
        self.kept = 0

    def look(self, seconds: float, held: int = 0) -> None:
        for _ in range(int(seconds)):
            self.clock.advance(1)
            self.allocator.trim(held)

    def test_no_memory_is_returned_without_need(self) -> None:
        self.look(600)
        self.kept = TRIM_THRESHOLD - MIB
        self.look(600)
        self.assertEqual(self.allocator.releases, 0)

    def test_freed_memory_is_returned_within_a_minute(self) -> None:
        """Freed memory is returned, however much was held and for however long."""
        for lasts in (1, 20, 300):
            self.size = BASE + 100 * MIB
            self.look(lasts, held=100 * MIB)
            self.size, self.kept = BASE, 100 * MIB
            self.look(60)
            self.assertEqual(self.kept, 0, lasts)

    def test_uncounted_memory_is_returned(self) -> None:
        self.size = BASE + 50 * MIB
        self.look(30)
        self.size, self.kept = BASE, 50 * MIB
        self.look(60)
        self.assertEqual(self.kept, 0)

    def test_fruitless_requests_to_the_allocator_back_off(self) -> None:
        """The next request comes sooner when more memory was freed, or when less is held."""
        self.stuck = 30 * MIB
        self.look(3600)
        asked = self.allocator.releases
        self.assertLess(asked, 3600 / MAX_TRIM_PAUSE + 10)
        self.kept = 20 * MIB
        self.look(MAX_TRIM_PAUSE)
        self.assertEqual(self.kept, 0)
        self.look(1800, held=25 * MIB)
        self.kept, self.stuck = 28 * MIB, 2 * MIB
        self.look(TRIM_PAUSE + 1)
        self.assertEqual(self.kept, 0)

    def test_slow_requests_to_the_allocator_are_rare(self) -> None:
        def trim() -> None:
            self.clock.advance(1)

        self.allocator = Allocator(self.clock.seconds, trim, lambda: BASE + self.stuck)
        self.stuck = 100 * MIB
        self.look(1500)
        self.assertEqual(self.allocator.releases, 2)
