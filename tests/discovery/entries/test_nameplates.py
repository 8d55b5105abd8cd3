"""Nameplates without a store."""

from __future__ import annotations

import json
from random import Random

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import EntryInvalid, EntrySignatureError
from dmsg.discovery.entries.gojson import EntryDecodeError
from dmsg.discovery.entries.nameplates import (
    CANDIDATES_PER_LENGTH,
    DIGITS,
    LARGEST_NAMEPLATE,
    NONE_FREE,
    TOO_MANY,
    Release,
    StoredNameplate,
    candidates,
    check_stored,
    decide_claim,
    decode_claim,
    decode_release,
    length,
)
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey

KEY, OTHER, THIRD = (SecKey.from_seed(b"nameplate %d" % number) for number in range(3))
ONE, TWO, THREE = (key.public.hex() for key in (KEY, OTHER, THIRD))


class RuleTests(SynchronousTestCase):
    """Rules that need no store."""

    def test_candidates_are_random_distinct_and_short_first(self) -> None:
        """Candidates are random, distinct and in range; short ones come first."""
        numbers = candidates(Random(1))
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertEqual({len(str(one)) for one in numbers[:CANDIDATES_PER_LENGTH]}, {4})
        self.assertEqual({len(str(one)) for one in candidates(Random(1), 1)}, {6, 8})
        self.assertNotEqual(numbers, candidates(Random(2)))
        self.assertEqual([len(str(one)) for one in numbers], sorted(len(str(one)) for one in numbers))
        self.assertTrue(all(1 <= one <= LARGEST_NAMEPLATE for one in numbers))

    def test_numbers_grow_when_many_are_in_use_or_guessed(self) -> None:
        """At most one in twenty numbers of one length is in use; one in 2000 while somebody guesses numbers."""
        for in_use, attacked, digits in (
            (0, False, 4),
            (500, False, 4),
            (501, False, 6),
            (50_000, False, 6),
            (50_001, False, 8),
            (10**9, True, 8),
            (0, True, 6),
            (501, True, 8),
        ):
            self.assertEqual(DIGITS[length(in_use, attacked)], digits, (in_use, attacked))

    def test_a_signed_release_decodes(self) -> None:
        release = Release(7, ONE).sign(KEY)
        self.assertEqual(decode_release(release.to_json()), release)
        self.assertRaises(EntrySignatureError, decode_release, Release(7, ONE).sign(OTHER).to_json())
        stolen = release.to_json().replace(b'"nameplate":7', b'"nameplate":8')
        self.assertRaises(EntrySignatureError, decode_release, stolen)

    def test_numbers_and_members_of_a_release(self) -> None:
        for number in (0, LARGEST_NAMEPLATE):
            release = Release(number, ONE).sign(KEY)
            self.assertEqual(decode_release(release.to_json()), release)
        for number in (-1, LARGEST_NAMEPLATE + 1):
            body = Release(number, ONE).sign(KEY).to_json()
            self.assertIn("out of range", str(self.assertRaises(EntryDecodeError, decode_release, body)))
        members = json.loads(Release(7, ONE).sign(KEY).to_json())
        for name in members:
            rest = json.dumps({other: value for other, value in members.items() if other != name}).encode()
            error = self.assertRaises(EntryDecodeError, decode_release, rest)
            self.assertIn(f"has no {name}", str(error))

    @given(st.binary(max_size=80))
    def test_malformed_claims_are_refused(self, body: bytes) -> None:
        for decode in (decode_claim, decode_release):
            self.assertRaises((EntryDecodeError, EntryInvalid, EntrySignatureError), decode, body)

    def test_claims_follow_the_rules(self) -> None:
        self.assertEqual(decode_claim(json.dumps({"static": ONE.upper()}).encode()), ONE)
        for wrong in ({"static": "00" * 33}, {"static": "02" + "fg" * 32}, {}, {"static": 7}, {"static": None}):
            body = json.dumps(wrong).encode()
            self.assertRaises((EntryDecodeError, EntryInvalid), decode_claim, body)

    def test_claims_follow_the_limits_of_a_place(self) -> None:
        here, elsewhere = StoredNameplate(7, ONE, "p", 9.0), StoredNameplate(7, ONE, "q", 9.0)
        for known, held, free, number in (
            (None, 0, [3, 4], 3),
            (None, 0, [], NONE_FREE),
            (None, 1, [3], 3),
            (None, 2, [3], TOO_MANY),
            # The key's own nameplate already counts for its place.
            (here, 2, [3], 7),
            (elsewhere, 1, [3], 7),
            (elsewhere, 2, [3], TOO_MANY),
        ):
            self.assertEqual(decide_claim(known, "p", held, 2, free), number, (known, held, free))

    @given(
        st.none() | st.builds(StoredNameplate, st.integers(1, 9), st.just(ONE), st.sampled_from("pq"), st.just(9.0)),
        st.integers(0, 4),
        st.integers(0, 4),
        st.lists(st.integers(1, 9), max_size=3),
    )
    def test_claims_never_exceed_the_limit_of_a_block(
        self, known: StoredNameplate | None, held: int, most: int, free: list[int]
    ) -> None:
        """A place that keeps to its limit keeps within it, and no candidate is asked for in vain."""
        asked = iter(free)
        number = decide_claim(known, "p", held, most, asked)
        counts_anew = known is None or known.place != "p"
        self.assertEqual(number == TOO_MANY, counts_anew and held >= most)
        if number == TOO_MANY or known is not None:
            self.assertEqual(list(asked), free)
        if number != TOO_MANY:
            self.assertEqual(number, known.number if known is not None else next(iter(free), NONE_FREE))

    def test_expired_nameplates_lead_nowhere(self) -> None:
        kept = StoredNameplate(7, ONE, "p", 9.0)
        self.assertEqual(check_stored(kept, 8.9), kept)
        self.assertEqual(check_stored(kept, 8.9, ONE), kept)
        for gone in ((None, 0.0), (kept, 9.0), (kept, 8.9, TWO), (kept, 9.0, ONE), (kept, 9.1)):
            self.assertRaises(EntryNotFound, check_stored, *gone)
