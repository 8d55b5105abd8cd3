"""Tables that do not grow for ever."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.bounded_tables import SPARSE, SPARSE_ENTRY, compact, decrement, remember
from dmsg.base.priority_queue import MAX_STALE_ENTRIES, PriorityQueue


class TableTests(SynchronousTestCase):
    def test_counters_at_zero_are_removed(self) -> None:
        counter = Counter({"a": 2, "b": 5})
        decrement(counter, "a")
        self.assertEqual(counter, {"a": 1, "b": 5})
        decrement(counter, "a")
        decrement(counter, "b", 5)
        self.assertEqual(list(counter), [])

    def test_the_least_recently_remembered_entry_is_evicted(self) -> None:
        """An entry that is remembered again is the newest."""
        known: OrderedDict[str, int] = OrderedDict()
        for number, key in enumerate("abcad"):
            remember(known, key, number, 3)
        self.assertEqual(list(known.items()), [("c", 2), ("a", 3), ("d", 4)])

    def test_a_mostly_empty_dict_is_shrunk(self) -> None:
        table = dict.fromkeys(range(5000))
        self.assertIs(compact(table), table)
        for number in range(4000):
            del table[number]
        smaller = compact(table)
        self.assertEqual((list(smaller), len(smaller)), (list(table), 1000))
        self.assertLess(sys.getsizeof(smaller), sys.getsizeof(table) // 2)
        self.assertLess(sys.getsizeof(smaller), max(SPARSE, SPARSE_ENTRY * 1000))
        self.assertIs(compact(smaller), smaller)


class PriorityQueueTests(SynchronousTestCase):
    def test_removed_names_are_forgotten(self) -> None:
        ranked: PriorityQueue[str] = PriorityQueue()
        for number in range(50):
            ranked.put("a", number)
            ranked.put(f"b{number}", 0)
        for number in range(50):
            ranked.remove(f"b{number}")
        self.assertEqual((ranked.first(), len(ranked)), ("a", 1))
        self.assertLessEqual(len(ranked._heap), 2 + MAX_STALE_ENTRIES)
        ranked.remove("a")
        self.assertEqual(ranked._heap, [])
