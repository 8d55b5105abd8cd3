"""Formats of counts with a unit or a noun."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.units import counted


class CountedTests(SynchronousTestCase):
    """:func:`counted`."""

    def test_the_noun_is_singular_for_one_only(self) -> None:
        for number, expected in ((0, "0 days"), (1, "1 day"), (2, "2 days"), (1200, "1,200 days")):
            self.assertEqual(counted(number, "day"), expected)
