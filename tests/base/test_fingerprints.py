"""Table of fingerprints of recent texts."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.fingerprints import Fingerprints


class FingerprintTests(SynchronousTestCase):
    def test_the_last_are_remembered_and_no_more_than_twice_as_many(self) -> None:
        marks = Fingerprints(100)
        said = [number.to_bytes(33, "big") for number in range(1000)]
        for count, one in enumerate(said, 1):
            self.assertNotIn(one, marks)
            marks.add(one)
            if count % 50 == 0:
                self.assertTrue(all(each in marks for each in said[max(0, count - 100) : count]))
                self.assertFalse(any(each in marks for each in said[: max(0, count - 200)]))

    def test_an_empty_set_contains_no_fingerprint(self) -> None:
        marks = Fingerprints(4)
        self.assertNotIn(b"", marks)
        self.assertNotIn(None, marks)
        self.assertEqual(len(marks), 0)

    @given(st.lists(st.binary(max_size=2)), st.integers(1, 20))
    def test_fingerprints_behave_like_a_set_within_the_limit(self, said: list[bytes], least: int) -> None:
        marks = Fingerprints(least)
        for one in said:
            marks.add(one)
        kinds = list(dict.fromkeys(reversed(said)))
        self.assertTrue(all(one in marks for one in kinds[:least]) or len(kinds) > least)
        self.assertNotIn(b"never said", marks)
