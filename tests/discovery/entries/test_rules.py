"""Rules for an entry that replaces another, and for the checks of its server."""

from __future__ import annotations

import json

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.dialects import Dialect, decode, find_signed_form
from dmsg.discovery.entries.entry import ClientMeta, Entry, EntryInvalid, EntrySignatureError, ServerMeta, Successor
from dmsg.discovery.entries.gojson import STRICT
from dmsg.discovery.entries.rules import (
    NEVER,
    WRONG_FIRST_SEQUENCE,
    WRONG_SEQUENCE,
    WRONG_TIME,
    DeletedLater,
    Head,
    PresentState,
    Replacement,
    Terms,
    check_iteration,
    decide_post,
    next_sequence,
    time_order,
)
from dmsg.keys import SecKey

STATIC = "02" + "ab" * 32
UNCHECKED, QUIET = Terms(checked=False), Terms(checked=False, refreshes=False)
NUMBERS = st.one_of(st.integers(0, 3), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1]))
TIMES = st.one_of(st.integers(-2, 2), st.sampled_from([-(2**63), 2**63 - 1, 2**62]))
ADDRESSES = st.sampled_from(["", "h:1", "h:2"])
TERMS = st.builds(Terms, refreshes=st.booleans(), checked=st.booleans())
PRESENT = st.none() | st.builds(
    PresentState,
    st.builds(Head, NUMBERS, TIMES.map(time_order), st.booleans()),
    ADDRESSES,
    st.booleans(),
)


def entry(sequence: int, timestamp: int = 9, address: str = "h:1") -> Entry:
    if not address:
        return Entry("0.0.1", sequence, timestamp, STATIC, ClientMeta(()))
    return Entry("0.0.1", sequence, timestamp, STATIC, server=ServerMeta(address, 5))


def present(sequence: int = 0, timestamp: int = 1, address: str = "h:1", checked: bool = True) -> PresentState:
    return PresentState(Head(sequence, time_order(timestamp)), address, checked)


class SignedTests(SynchronousTestCase):
    """An entry that can be read in several ways is the one that its signature covers."""

    def test_a_signature_covers_the_whole_entry(self) -> None:
        key = SecKey.from_seed(b"ways")
        plain = [Entry("0.0.1", number, 9, key.public.hex(), ClientMeta(())) for number in range(3)]
        for signed in range(3):
            ways = [one.sign(key) if number == signed else one for number, one in enumerate(plain)]
            self.assertEqual(find_signed_form(ways).sequence, signed)
        self.assertRaises(EntrySignatureError, find_signed_form, plain)

    def test_a_key_that_follows(self) -> None:
        """The seed's dialect knows it, that of 2019 ignores it."""
        one = entry(0)
        members = json.loads(one.to_json())
        members["successor"] = {"static": STATIC, "signature": "AB"}
        body = json.dumps(members).encode()
        self.assertEqual(decode(body).successor, Successor(STATIC, "ab"))
        self.assertIsNone(decode(body, Dialect.GO2019).successor)

    def test_a_number_that_is_not_there(self) -> None:
        self.assertEqual(STRICT.integer(None, 5, 9, "number"), 0)


class PostTests(SynchronousTestCase):
    """The decision on a post, which all stores share."""

    def test_decisions_follow_the_table(self) -> None:
        deleted = PresentState(Head(3, time_order(5), deleted=True), "h:1", True)
        for before, new, terms, expected in (
            # A first entry is listed after a check, or at once if there are no checks.
            (None, entry(0), UNCHECKED, Replacement(True, False, 7.0, False)),
            (None, entry(0), Terms(), Replacement(True, True, NEVER, False)),
            (deleted, entry(0), UNCHECKED, Replacement(True, False, 7.0, False)),
            # The next entry from the same address keeps the result of the check.
            (present(), entry(1), UNCHECKED, Replacement(False, True, 7.0, True)),
            (present(checked=False), entry(1), UNCHECKED, Replacement(False, False, 7.0, True)),
            (present(), entry(1), QUIET, Replacement(False, True, 7.0, False)),
            (present(), entry(1), Terms(), Replacement(False, True, NEVER, False)),
            # An entry from another address is for another server.
            (present(address="h:2"), entry(1), UNCHECKED, Replacement(False, False, 7.0, False)),
        ):
            self.assertEqual(decide_post(before, new, 7.0, terms), expected, (before, new, terms))

    def test_refusals_have_their_reasons(self) -> None:
        deleted = PresentState(Head(3, time_order(5), deleted=True), "h:1", True)
        for before, new, text in (
            (None, entry(1), WRONG_FIRST_SEQUENCE),
            (deleted, entry(4), WRONG_FIRST_SEQUENCE),
            (deleted, entry(0, 5), WRONG_TIME),
            (present(), entry(0), WRONG_SEQUENCE),
            (present(), entry(2), WRONG_SEQUENCE),
            (present(2**64 - 1), entry(1), WRONG_SEQUENCE),
            (present(), entry(1, 1), WRONG_TIME),
        ):
            with self.assertRaises(EntryInvalid) as refused:
                decide_post(before, new, 7.0, UNCHECKED)
            self.assertIn(text, str(refused.exception))
        self.assertRaises(DeletedLater, decide_post, deleted, entry(0, 5), 7.0, UNCHECKED)

    @given(PRESENT, st.builds(entry, NUMBERS, TIMES, ADDRESSES), TERMS)
    def test_decisions_are_consistent_in_any_state(self, before: PresentState | None, new: Entry, terms: Terms) -> None:
        """Properties that hold in every state."""
        there = None if before is None or before.head.deleted else before
        try:
            first = check_iteration(None if before is None else before.head, new)
        except EntryInvalid as error:
            with self.assertRaises(type(error)) as refused:
                decide_post(before, new, 7.0, terms)
            self.assertEqual(str(refused.exception), str(error))
            return
        decision = decide_post(before, new, 7.0, terms)
        self.assertEqual(decision.first, first)
        self.assertEqual(first, there is None)
        self.assertEqual(new.sequence, 0 if there is None else next_sequence(there.head.sequence))
        self.assertIn(decision.check_at, (7.0, NEVER))
        if before is not None:
            self.assertGreater(time_order(new.timestamp), before.head.order)
        if not terms.checked:
            # A server is listed only after a check, or if it keeps its address.
            address = "" if new.server is None else new.server.address
            is_same = there is not None and there.target == address
            self.assertEqual(decision.checked, is_same and there is not None and there.checked)
            self.assertEqual(decision.keeps_check, is_same and terms.refreshes)
