"""Blocks of addresses: everything that counts an address counts those around it, too."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.buckets import RateLimit
from dmsg.net.blocks import MAX_CHANGED_BLOCKS, MIN_FACTOR, WIDTHS_IPV4, WIDTHS_IPV6, BlockCounts, blocks_of
from dmsg.net.turn_share import MAX_SHARE, TurnShare

HOSTS = [f"2600:{site}:0:{subnet:x}::1" for site in (1, 2) for subnet in (0, 1, 0x100)] + [
    "8.8.8.8",
    "8.8.8.9",
    "a key",
]


class BlocksTests(SynchronousTestCase):
    """Blocks of addresses, by name and by factor."""

    def test_blocks_have_the_documented_widths(self) -> None:
        for host, expected in (
            ("8.8.4.4", [("8.8.4.4", 1), ("8.8.4.0/24", 8)]),
            ("::ffff:8.8.4.4", [("8.8.4.4", 1), ("8.8.4.0/24", 8)]),
            ("8.8.4.0/24", [("8.8.4.0/24", 8)]),
            ("2600:1:2:3ff:4::5", [("2600:1:2:3ff::/64", 1), ("2600:1:2:300::/56", 4), ("2600:1:2::/48", 8)]),
            ("2600:1:2:3ff::/64", [("2600:1:2:3ff::/64", 1), ("2600:1:2:300::/56", 4), ("2600:1:2::/48", 8)]),
            ("2600:1:2::/48", [("2600:1:2::/48", 8)]),
            ("2600::/20", [("2600::/20", 1)]),
            ("fe80::1%eth0", [("fe80::/64", 1), ("fe80::/56", 4), ("fe80::/48", 8)]),
            ("", [("", 1)]),
            ("02ab" * 16, [("02ab" * 16, 1)]),
            ("1.2.3", [("1.2.3", 1)]),
            ("/", [("/", 1)]),
        ):
            self.assertEqual(list(blocks_of(host)), expected, host)

    def test_factors_have_a_minimum(self) -> None:
        self.assertEqual(min(factor for _, factor in (*WIDTHS_IPV6, *WIDTHS_IPV4) if factor > 1), MIN_FACTOR)

    @given(st.lists(st.tuples(st.sampled_from(HOSTS), st.booleans()), max_size=60), st.integers(1, 60))
    def test_counts_equal_a_simple_sum(self, steps: list[tuple[str, bool]], every: int) -> None:
        counts = BlockCounts()
        there: list[str] = []
        for number, (host, comes) in enumerate(steps, 1):
            if comes:
                counts.add(host)
                there.append(host)
            elif host in there:
                counts.remove(host)
                there.remove(host)
            if number % every:
                continue  # The ranks of several changes are updated together.
            sums = Counter(name for one in there for name, _ in blocks_of(one))
            narrow = {blocks_of(one)[0].name for one in there}
            self.assertEqual(dict(counts.narrow_blocks()), {name: sums[name] for name in narrow})
            self.assertEqual(len(counts), len(narrow))
            loads = {one: max(sums[name] / factor for name, factor in blocks_of(one)) for one in HOSTS}
            self.assertEqual({one: counts.load(one) for one in HOSTS}, loads)
            heaviest = counts.heaviest()
            self.assertEqual(bool(heaviest), bool(there))
            if there:
                self.assertEqual(counts.load(heaviest), max(loads.values()))
                for wide in {name for one in there for name, _ in blocks_of(one)}:
                    inside = [sums[blocks_of(one)[0].name] for one in there if wide in {b.name for b in blocks_of(one)}]
                    self.assertEqual(sums[counts.heaviest(wide)], max(inside))
                order = [(counts.load(one), sums[one]) for one in counts.by_load(99)]
                self.assertEqual(counts.by_load(2), counts.by_load(99)[:2])
                self.assertEqual(order, sorted(order, reverse=True))

    def test_changes_without_a_question_are_bounded(self) -> None:
        counts = BlockCounts()
        for number in range(10 * MAX_CHANGED_BLOCKS):
            host = f"8.{number >> 8}.{number & 255}.1"
            counts.add(host)
            counts.remove(host)
            self.assertLessEqual(len(counts._changed), MAX_CHANGED_BLOCKS)
        self.assertEqual(counts.heaviest(), "")
        self.assertEqual((len(counts), len(counts._inside), len(counts._ranks)), (0, 0, 0))

    def test_a_limit_of_each_width(self) -> None:
        """Neighbours have as much as one address several times over, and no more."""
        counts = BlockCounts()
        for number in range(8):
            self.assertEqual(counts.crowded_block(f"8.8.8.{number}", 10), "")
            counts.add(f"8.8.8.{number}", 10)
        self.assertEqual(counts.crowded_block("8.8.8.7", 10), "8.8.8.7")
        self.assertEqual(counts.crowded_block("8.8.8.100", 10), "8.8.8.0/24")
        self.assertEqual(counts.crowded_block("8.8.9.1", 10), "")

    def test_a_rate_of_each_width(self) -> None:
        """A stranger with a /48 has 65536 blocks of /64; a neighbour in the /24 has a rate of its own."""
        limit = RateLimit(1.0, 10.0, blocks_of)
        allowed = sum(limit.allow(f"2600:1:2:{block:x}::1", 0.0) for block in range(256) for _ in range(10))
        self.assertEqual(allowed, 40)  # All addresses are in one /56.
        allowed = sum(
            limit.allow(f"2600:1:2:{block:x}::1", 0.0) for block in range(0x100, 0x4000, 8) for _ in range(10)
        )
        self.assertEqual(allowed, 40)
        self.assertTrue(limit.is_exhausted("2600:1:2:ffff::1", 0.0))
        self.assertFalse(limit.is_exhausted("2600:1:3::1", 0.0))
        self.assertEqual(sum(limit.allow("8.8.8.8", 0.0) for _ in range(100)), 10)
        self.assertTrue(limit.allow("8.8.8.9", 0.0))
        # The network's bucket also refills eight times as fast.
        self.assertEqual(sum(limit.allow(f"2600:1:2:{block:x}::1", 1.0) for block in range(0x8000, 0xA000, 0x100)), 8)
        self.assertGreater(limit.charge("8.8.8.8", 100.0, 1.0), 0.0)

    def test_a_turn_is_shared_at_each_width(self) -> None:
        share = TurnShare(Clock())
        for number in range(8):
            self.assertTrue(share.allows(f"8.8.8.{number}"))
            share.used(f"8.8.8.{number}", MAX_SHARE)
        self.assertFalse(share.allows("8.8.8.100"))
        self.assertTrue(share.allows("8.8.9.1"))
        self.assertTrue(share.allows(12345))
