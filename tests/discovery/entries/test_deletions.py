"""Signed deletions: only a deletion deletes an entry, and only once."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import (
    ClientMeta,
    Entry,
    EntryInvalid,
    EntrySignatureError,
)
from dmsg.discovery.entries.gojson import EntryDecodeError
from dmsg.discovery.entries.rules import Deletion, Head, check_deletion, check_iteration, decode_deletion, time_order
from dmsg.keys import SecKey

KEY = SecKey.from_seed(b"entry")


class DeletionTests(SynchronousTestCase):
    """A signed deletion, its parser, and its effect on an entry."""

    def test_a_signed_deletion_is_accepted(self) -> None:
        deletion = Deletion(KEY.public.hex(), 3, 10).sign(KEY)
        self.assertEqual(decode_deletion(deletion.to_json()), deletion)
        check_deletion(Head(3, time_order(9)), deletion)

    def test_an_entry_is_no_deletion(self) -> None:
        entry = Entry("0.0.1", 0, 1, KEY.public.hex(), ClientMeta(())).sign(KEY)
        self.assertRaises(EntryDecodeError, decode_deletion, entry.to_json())
        forged = Deletion(entry.static, 0, 1, entry.signature)
        self.assertRaises(EntrySignatureError, decode_deletion, forged.to_json())

    def test_numbers_at_the_limits_of_their_types_are_signed_alike(self) -> None:
        """The signed numbers are unsigned or signed 64-bit integers."""
        for sequence, timestamp, good in (
            (0, -(2**63), True),
            (2**64 - 1, 2**63 - 1, True),
            (-1, 0, False),
            (2**64, 0, False),
            (0, -(2**63) - 1, False),
            (0, 2**63, False),
        ):
            body = Deletion(KEY.public.hex(), 0, 0).sign(KEY).to_json()
            body = body.replace(b'"sequence":0', b'"sequence":%d' % sequence)
            body = body.replace(b'"timestamp":0', b'"timestamp":%d' % timestamp)
            # The signature covers other numbers. Only bodies with numbers get this far.
            self.assertRaises(EntrySignatureError if good else EntryDecodeError, decode_deletion, body)

    def test_another_key_cannot_delete(self) -> None:
        deletion = Deletion(KEY.public.hex(), 3, 10).sign(SecKey.generate())
        self.assertRaises(EntrySignatureError, decode_deletion, deletion.to_json())

    def test_deletions_with_other_sequences_or_earlier_times_are_refused(self) -> None:
        deletion = Deletion(KEY.public.hex(), 3, 10)
        self.assertRaises(EntryInvalid, check_deletion, Head(4, time_order(9)), deletion)
        self.assertRaises(EntryInvalid, check_deletion, Head(3, time_order(10)), deletion)
        self.assertRaises(KeyError, check_deletion, None, deletion)
        self.assertRaises(KeyError, check_deletion, Head(3, time_order(9), deleted=True), deletion)

    def test_after_a_deletion_old_entries_stay_out(self) -> None:
        head = Head(3, time_order(10), deleted=True)
        self.assertRaises(EntryInvalid, check_iteration, head, Entry("1", 0, 10, KEY.public.hex()))
        self.assertRaises(EntryInvalid, check_iteration, head, Entry("1", 4, 11, KEY.public.hex()))
        self.assertTrue(check_iteration(head, Entry("1", 0, 11, KEY.public.hex())))
