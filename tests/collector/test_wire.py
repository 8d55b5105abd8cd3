"""Lines between a sender and its collector."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.collector.wire import (
    FILE_LIMIT,
    LINE_LIMIT,
    WHY_LIMIT,
    Answer,
    Kind,
    Offer,
    WireError,
    is_spool_name,
    parse_answer,
    parse_offer,
)
from tests.collector.support import spool_name

OFFER = Offer(spool_name(1), 5, "ab" * 32)


class WireTests(SynchronousTestCase):
    """Plain calls."""

    def test_encoded_lines_decode_to_the_same_values(self) -> None:
        for offer in (OFFER, replace(OFFER, voucher="0a" * 65)):
            self.assertEqual(parse_offer(offer.line()), offer)
            self.assertLess(len(offer.line()), LINE_LIMIT)
        for answer in (Answer(Kind.SEND), Answer(Kind.LATER, "full"), Answer(Kind.REFUSED, "ä" * WHY_LIMIT)):
            self.assertEqual(parse_answer(answer.line()), answer)
            self.assertLess(len(answer.line()), LINE_LIMIT)
        self.assertEqual(len(parse_answer(Answer(Kind.LATER, "x" * 5000).line()).why), WHY_LIMIT)

    def test_malformed_offers_are_refused(self) -> None:
        good = json.loads(OFFER.line())
        for change in (
            {"v": 2},
            {"name": "../events-x.jsonl.gz"},
            {"name": f"events-{'A' * 32}-000001.jsonl.gz"},
            {"name": spool_name(1) + "\n"},
            {"name": 5},
            {"size": 0},
            {"size": FILE_LIMIT + 1},
            {"size": True},
            {"size": "5"},
            {"sha256": "ab" * 31},
            {"sha256": None},
            {"voucher": "0A" * 65},
            {"voucher": 5},
        ):
            self.assertRaises(WireError, parse_offer, json.dumps(good | change).encode())

    def test_names_of_spool_files_are_recognised(self) -> None:
        self.assertTrue(is_spool_name(spool_name(1, prefix="receipts-")))
        for name in ("secret", "sender.key", f".{spool_name(1)}.part", "events-1.jsonl.gz", f"x/{spool_name(1)}"):
            self.assertFalse(is_spool_name(name))

    @given(
        st.binary(max_size=200)
        | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda value: json.dumps(value).encode())
    )
    def test_malformed_messages_are_wire_errors(self, line: bytes) -> None:
        for parse in (parse_offer, parse_answer):
            self.assertRaises(WireError, parse, line)
