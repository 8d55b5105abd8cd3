"""A rate that several sources share, and frames that somebody else provoked."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base import fair_rate
from dmsg.base.fair_rate import (
    COMMON_FRACTION,
    FORGET_AFTER,
    KNOWN_FRACTION,
    MAX_CROWDED,
    MAX_SOURCES,
    CrowdedRates,
    FairRate,
)
from dmsg.base.policing import PROVOKED_LIFETIME, ProvokedFrames

RATE, BURST = 100.0, 400.0


def count(sources: Any) -> int:
    """Number of sources, of all levels."""
    return sum(1 + count(one.below) for one in (sources or {}).values())


class FairRateTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.rate = FairRate()
        self.now = 0.0

    def ask(self, count: int, *paths: Sequence[Hashable]) -> int:
        """Return how many of ``count`` requests, made by these sources in turn, are within the rate."""
        return sum(self.rate.take(paths[number % len(paths)], RATE, BURST, self.now) for number in range(count))

    def crowd(self, seconds: float, paths: Sequence[Sequence[Hashable]]) -> int:
        """Let each key ask for ten times the rate. Return the number of admitted requests."""
        let_in = 0
        for _ in range(int(seconds * 100)):
            self.now += 0.01
            let_in += self.ask(int(RATE / 10), *paths)
            paths = [*paths[1:], paths[0]]
        return let_in

    def test_a_single_source_may_use_the_whole_rate(self) -> None:
        self.assertGreaterEqual(self.ask(1000, ("a",)), COMMON_FRACTION * BURST)
        let_in = self.crowd(10, [("a",)])
        self.assertTrue(9 * RATE < let_in < 11 * RATE, let_in)

    def test_a_new_source_gets_its_share(self) -> None:
        """A new source gets its share of the rate, however many other sources there are."""
        for count in (1, 20, 1000):
            self.setUp()
            others = [(f"other {number}",) for number in range(count)]
            self.crowd(15, others)
            for number in range(50):
                self.crowd(0.2, others)
                self.assertEqual(self.ask(1, (f"new {number}",)), 1, (count, number))

    def test_a_source_below_its_share_is_never_refused(self) -> None:
        greedy = [("g1",), ("g2",), ("g3",)]
        self.crowd(5, greedy)
        for _ in range(100):
            self.crowd(0.1, greedy)
            self.assertEqual(self.ask(1, ("modest",)), 1)  # The source asks 10 times a second, and a fair share is 22.

    def test_many_keys_at_one_address_have_one_part(self) -> None:
        keys = [("192.0.2.0/24", "192.0.2.1", number) for number in range(1000)]
        other = ("198.51.100.0/24", "198.51.100.1", "key")
        self.crowd(15, keys)
        let_in = 0
        for _ in range(100):
            self.crowd(0.05, keys)
            let_in += self.ask(10, other)  # This is a rate of 200 a second.
        self.assertGreater(let_in, 0.8 * KNOWN_FRACTION**3 * RATE / 2 * 5)

    def test_fresh_keys_at_an_address_gain_no_rate(self) -> None:
        for number in range(20_000):
            self.now += 0.001
            self.ask(1, ("here", "192.0.2.1", number))
        self.assertEqual(self.ask(5, *[(f"{number}", "there", "key") for number in range(5)]), 5)

    def test_never_more_than_the_rate(self) -> None:
        total = self.crowd(20, [(f"{number}",) for number in range(500)])
        self.assertLessEqual(total, 20 * RATE + BURST)

    def test_the_number_of_remembered_sources_is_bounded(self) -> None:
        self.patch(fair_rate, "MAX_SOURCES", 8)
        self.ask(int(BURST), ("a",))
        self.ask(100, *[(f"{number}",) for number in range(100)])
        self.assertEqual(self.rate.sources, 8)
        # Sources that were silent for long are forgotten. All sources are forgotten after a quiet time.
        self.patch(fair_rate, "FORGET_AFTER", 1.0)
        self.now += 1.5
        self.ask(120, ("last",))
        self.assertEqual(self.rate.sources, 1)
        self.now += FORGET_AFTER
        self.ask(1, ("b",))
        self.assertEqual(self.rate.sources, 0)

    def test_memory_of_all_levels_is_bounded(self) -> None:
        """Many addresses with new keys for each request cannot grow the memory beyond the limit."""
        self.ask(int(BURST), ("here", "192.0.2.1", "key"))
        for number in range(4 * MAX_SOURCES):
            self.now += 0.001
            self.ask(1, (f"{number % 5}", f"{number % 20}", number))
            self.assertLessEqual(self.rate.remembered, MAX_SOURCES)
        self.assertEqual(self.rate.remembered, count(self.rate._sources))
        self.assertEqual(self.ask(1, ("new", "there", "key")), 1)

    def test_memory_over_many_rates_of_a_server_is_bounded(self) -> None:
        crowds = CrowdedRates()
        rates = [FairRate() for _ in range(2 * MAX_CROWDED)]
        for rate in rates:
            taken = sum(crowds.take(rate, ("here", number), RATE, BURST, 0.0) for number in range(int(BURST)))
            self.assertTrue(COMMON_FRACTION * BURST <= taken < BURST)
        self.assertEqual(len(crowds), MAX_CROWDED)
        self.assertEqual([bool(rate.remembered) for rate in rates], [False] * MAX_CROWDED + [True] * MAX_CROWDED)
        # Forgetting a source does not refill its bucket.
        self.assertLess(sum(rates[0].take(("other",), RATE, BURST, 0.0) for _ in range(int(BURST))), BURST)
        for rate in rates:
            crowds.take(rate, ("here", 0), RATE, BURST, 100.0)
        self.assertEqual(len(crowds), 0)

    @given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5), st.integers(0, 3)), max_size=300))
    def test_rates_hold_in_any_order_of_calls(self, asked: list[tuple[float, int, int]]) -> None:
        self.setUp()
        let_in = 0
        for passed, place, key in asked:
            self.now += passed / 100
            let_in += self.rate.take((place, key), 10.0, 20.0, self.now)
            self.assertLessEqual(let_in, 20 + 10 * self.now + 1e-6)


class ProvokedTests(SynchronousTestCase):
    def test_each_once_and_not_for_ever(self) -> None:
        provoked = ProvokedFrames()
        provoked.add(3, 0.0)
        self.assertEqual([provoked.take(1.0) for _ in range(4)], [True] * 3 + [False])
        provoked.add(2, 10.0)
        self.assertTrue(provoked.take(PROVOKED_LIFETIME + 5))
        provoked.add(1, PROVOKED_LIFETIME + 5)
        self.assertEqual([provoked.take(PROVOKED_LIFETIME + 6) for _ in range(3)], [True, True, False])
        provoked.add(5, PROVOKED_LIFETIME + 7)
        self.assertFalse(provoked.take(5 * PROVOKED_LIFETIME))
