"""Receipts that wait for a server's next connection."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.v2019.core import receipts_kept as kept_module
from dmsg.v2019.core.receipts_kept import KeptReceipts

ONE, OTHER, THIRD = (SecKey.generate().public for _ in range(3))


class KeptReceiptsTests(SynchronousTestCase):
    """The table of kept receipts, called directly."""

    def setUp(self) -> None:
        self.kept = KeptReceipts()

    def test_receipts_are_taken_once_in_order(self) -> None:
        for data in (b"1", b"2"):
            self.kept.keep(ONE, data, 10)
        self.kept.keep(OTHER, b"3", 10)
        self.assertEqual(len(self.kept), 3)
        self.assertEqual(self.kept.take(ONE), [b"1", b"2"])
        self.assertEqual(self.kept.take(ONE), [])
        self.assertEqual(len(self.kept), 1)

    def test_receipts_of_fewest_bytes_are_dropped_first(self) -> None:
        """A peer that opens many transports pushes out its own."""
        self.patch(kept_module, "KEPT_OF_SERVER", 2)
        self.patch(kept_module, "KEPT_SERVERS", 2)
        for data, size in ((b"1", 5), (b"2", 1000), (b"3", 0)):
            self.kept.keep(ONE, data, size)
        self.kept.keep(OTHER, b"4", 1)
        self.kept.keep(ONE, b"5", 5)
        self.kept.keep(THIRD, b"6", 1)
        self.assertEqual([self.kept.take(one) for one in (ONE, OTHER, THIRD)], [[b"2", b"5"], [], [b"6"]])
