"""Receipts that wait for a server's next connection."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.transport import kept as kept_module
from dmsg.transport.kept import KeptReceipts

ONE, OTHER, THIRD = (SecKey.generate().public for _ in range(3))


class KeptTests(SynchronousTestCase):
    """By plain calls."""

    def setUp(self) -> None:
        self.kept = KeptReceipts()

    def test_they_are_taken_once_in_their_order(self) -> None:
        for data in (b"1", b"2"):
            self.kept.keep(ONE, data)
        self.kept.keep(OTHER, b"3")
        self.assertEqual(len(self.kept), 3)
        self.assertEqual(self.kept.take(ONE), [b"1", b"2"])
        self.assertEqual(self.kept.take(ONE), [])
        self.assertEqual(len(self.kept), 1)

    def test_the_oldest_go(self) -> None:
        self.patch(kept_module, "KEPT_OF_SERVER", 2)
        self.patch(kept_module, "KEPT_SERVERS", 2)
        for data in (b"1", b"2", b"3"):
            self.kept.keep(ONE, data)
        self.kept.keep(OTHER, b"4")
        self.kept.keep(ONE, b"5")
        self.kept.keep(THIRD, b"6")
        self.assertEqual([self.kept.take(one) for one in (ONE, OTHER, THIRD)], [[b"3", b"5"], [], [b"6"]])
