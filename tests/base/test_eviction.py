"""Which owner loses an item when a table is full."""

from __future__ import annotations

from collections import Counter

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.eviction import MAX_REMEMBERED, Seniority, pick_loser, pick_replaced


def loser_to(newcomer: str, **counts: int) -> str | None:
    return pick_loser(Counter(counts), newcomer)


class PickLoserTests(SynchronousTestCase):
    """The rule of eviction, by counts of items."""

    def test_the_owner_with_most_items_loses_one_to_a_newcomer(self) -> None:
        self.assertEqual("greedy", loser_to("newcomer", greedy=5, modest=3))
        self.assertEqual("greedy", loser_to("modest", greedy=5, modest=3))

    def test_owners_do_not_take_items_from_each_other_in_turns(self) -> None:
        self.assertIsNone(loser_to("other", one=5, other=4))
        self.assertIsNone(loser_to("one", one=5, other=4))
        self.assertIsNone(loser_to("newcomer", one=1))
        self.assertIsNone(loser_to("newcomer"))

    def test_an_owner_of_few_items_loses_none(self) -> None:
        """An attacker with many keys cannot end the streams of a peer that has several."""
        counts = Counter({**{f"key {number}": 1 for number in range(100)}, "honest": 4})
        loser = pick_loser(counts, "newcomer", protected_count=4)
        self.assertIsNone(loser)
        counts["honest"] += 1
        loser = pick_loser(counts, "newcomer", protected_count=4)
        self.assertEqual("honest", loser)

    def test_one_owner_cannot_keep_another_out(self) -> None:
        """Two owners that open as many items as possible end with equal shares, in any order."""
        counts: Counter[str] = Counter()
        for owner in ["greedy"] * 30 + ["modest"] * 30 + ["greedy"] * 30:
            if counts.total() == 20:
                loser = pick_loser(counts, owner)
                if loser is None:
                    continue
                counts[loser] -= 1
            counts[owner] += 1
        self.assertEqual({"greedy": 10, "modest": 10}, dict(counts))

    def test_an_item_is_replaced_without_more_than_a_share_of_others(self) -> None:
        for counts, newcomer, expected in (
            ({"greedy": 7, "modest": 1}, "modest", "greedy"),
            ({"greedy": 7, "modest": 1}, "greedy", "greedy"),
            ({"one": 4, "other": 4}, "one", "one"),
            ({"one": 1, "other": 1}, "newcomer", None),
        ):
            self.assertEqual(pick_replaced(Counter(counts), newcomer), expected, counts)


class SeniorityTests(SynchronousTestCase):
    """Owners that came early, among many new ones."""

    def test_new_keys_of_a_stranger_keep_no_earlier_owner_out(self) -> None:
        """64 keys with 16 items each fill a table of 1024, and none of them has more than it may keep."""
        counts: Counter[str] = Counter()
        seniority: Seniority[str] = Seniority()
        seniority.record("known")
        for number in range(64):
            seniority.record(f"key {number}")
            counts[f"key {number}"] = 16
        for held in range(16):
            loser = pick_loser(counts, "known", 16)
            self.assertIsNone(loser)
            junior = seniority.pick_loser(counts, "known", 16)
            self.assertEqual(junior, "key 63", held)
            counts["key 63"] -= 1
            counts["known"] += 1
        # An owner takes no more than its share.
        self.assertIsNone(seniority.pick_loser(counts, "known", 16))
        # A new key takes nothing from earlier owners, and the last key takes nothing from itself.
        self.assertIsNone(seniority.pick_loser(counts, "new", 16))
        self.assertIsNone(seniority.pick_loser(Counter({"known": 16, "key 0": 1}), "key 0", 16))

    def test_many_keys_do_not_make_early_owners_forgotten(self) -> None:
        seniority: Seniority[str] = Seniority()
        seniority.record("known")
        for number in range(2 * MAX_REMEMBERED):
            seniority.record(f"key {number}")
        self.assertEqual(len(seniority._ranks), MAX_REMEMBERED)
        last = f"key {2 * MAX_REMEMBERED - 1}"
        self.assertEqual(seniority.pick_loser(Counter({last: 16}), "known", 16), last)
        self.assertIsNone(seniority.pick_loser(Counter({last: 16}), "other", 16))
