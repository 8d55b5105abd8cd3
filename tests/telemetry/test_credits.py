"""Credits of a day: the bytes that receipts of both ends prove. No trick adds to them."""

from __future__ import annotations

import random
from datetime import date, timedelta
from pathlib import Path

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.telemetry import credits
from dmsg.telemetry.credits import DAYS_BEFORE, MAX_RECEIPT_BYTES, Credits, InputError, compute_credits
from dmsg.telemetry.receipts import Role
from dmsg.telemetry.statements import body_of
from tests.telemetry.receipt_files import (
    AFTER,
    BEFORE,
    DAY,
    OTHER,
    SERVER,
    A,
    B,
    C,
    both,
    line,
    signed,
    write,
)


class CreditCase(SynchronousTestCase):
    """Files of a directory."""

    def setUp(self) -> None:
        self.here = Path(self.mktemp())
        self._written = 0

    def file(self, *lines: bytes) -> Path:
        self._written += 1
        return write(self.here / f"receipts-{self._written}.jsonl.gz", lines)

    def files(self) -> list[Path]:
        return sorted(self.here.iterdir())

    def credits(self, day: date = DAY, before: int = DAYS_BEFORE, about: bytes | None = None) -> Credits:
        return compute_credits(self.files(), day, day - timedelta(before), about)

    def credited(self, server: SecKey = SERVER, day: date = DAY, before: int = DAYS_BEFORE) -> int:
        total = self.credits(day, before).servers.get(server.public)
        return 0 if total is None else total.credited


class RuleTests(CreditCase):
    """Receipts that count."""

    def test_the_smaller_word_of_each_direction_counts(self) -> None:
        self.file(
            line(signed(1, Role.INITIATOR, A, B, 100, 7)),
            line(signed(1, Role.RESPONDER, B, A, 5, 90)),
        )
        found = self.credits()
        self.assertEqual(found.servers[SERVER.public].credited, 95)
        self.assertEqual(found.servers[SERVER.public].difference, 12)
        pair = found.pairs[SERVER.public, A.public, B.public]
        self.assertEqual((pair.transports, pair.bytes_ab, pair.bytes_ba), (1, 90, 5))

    def test_nothing_is_credited_on_one_word(self) -> None:
        self.file(line(both(1, 100, 100)[0]), line(both(2, 100, 100)[1]))
        total = self.credits().servers[SERVER.public]
        self.assertEqual((total.credited, total.transports, total.one_sided), (0, 0, 2))

    def test_ends_that_do_not_name_each_other_are_two_single_words(self) -> None:
        self.file(line(signed(1, Role.INITIATOR, A, B, 9, 9)), line(signed(1, Role.RESPONDER, B, C, 9, 9)))
        self.file(line(signed(2, Role.INITIATOR, A, B, 9, 9)), line(signed(2, Role.INITIATOR, B, A, 9, 9)))
        self.assertEqual(self.credited(), 0)

    def test_a_transport_counts_on_the_day_of_its_second_word(self) -> None:
        one, other = both(1, 100, 0)
        self.file(line(one, BEFORE, time="23:59:59"))
        self.file(line(other, DAY, time="00:00:00"))
        self.assertEqual([self.credited(day=day) for day in (BEFORE, DAY, AFTER)], [0, 100, 0])
        self.assertEqual(self.credits(BEFORE).servers[SERVER.public].one_sided, 1)
        self.assertEqual(self.credits(DAY).servers[SERVER.public].one_sided, 0)

    def test_each_server_is_credited_what_names_it(self) -> None:
        self.file(*map(line, both(1, 10, 0)))
        self.file(*(line(one, server=OTHER) for one in both(1, 20, 0, server=OTHER)))
        self.assertEqual((self.credited(), self.credited(OTHER)), (10, 20))

    def test_lines_of_one_key_need_no_others(self) -> None:
        self.file(*map(line, both(1, 10, 0)))
        self.file(*(line(one, server=OTHER) for one in both(2, 20, 0, server=OTHER)))
        whole, own = self.credits(), self.credits(about=OTHER.public)
        self.assertEqual(own.servers, {OTHER.public: whole.servers[OTHER.public]})
        self.assertEqual(len(own.inputs), 1)


class EnemyTests(CreditCase):
    """Attacks with receipts."""

    def test_repeated_receipts_and_files_count_once(self) -> None:
        lines = [line(one) for one in both(1, 100, 50)]
        self.file(*lines)
        first = self.credits()
        self.file(*lines)
        self.assertEqual(self.credits().inputs.keys(), first.inputs.keys())
        self.file(*lines, *lines)
        self.file(*reversed(lines))
        self.assertEqual(self.credited(), 150)

    def test_of_several_words_of_an_end_the_smallest_counts_in_any_order(self) -> None:
        one, other = both(1, 100, 0)
        less = signed(1, Role.INITIATOR, A, B, 60, 0)
        for lines in ([one, other, less], [less, other, one]):
            self.file(*map(line, lines))
            self.assertEqual(self.credited(), 60)

    def test_receipts_handed_in_again_later_are_not_credited_again(self) -> None:
        lines = both(1, 100, 0)
        self.file(*map(line, lines))
        later = DAY + timedelta(DAYS_BEFORE)
        self.file(*(line(one, later) for one in lines))
        self.assertEqual((self.credited(), self.credited(day=later)), (100, 0))
        self.assertNotIn(SERVER.public, self.credits(later).servers)
        # The limit is what the page says: after the days that are considered, they count again.
        self.assertEqual(self.credited(day=later, before=DAYS_BEFORE - 1), 100)

    def test_files_of_later_days_change_nothing(self) -> None:
        self.file(*map(line, both(1, 100, 0)))
        before = body_of(self.credits())
        self.file(*(line(one, AFTER) for one in both(2, 1000, 0)))
        self.file(line(signed(1, Role.INITIATOR, A, B, 1, 0), AFTER))
        self.assertEqual(body_of(self.credits()), before)

    def test_a_server_cannot_hand_in_receipts_of_another(self) -> None:
        """The receipt counts neither for the server itself nor on another day."""
        self.file(*(line(one, server=OTHER) for one in both(1, 100, 0)))
        found = self.credits()
        self.assertEqual(found.servers, {})
        self.assertEqual(found.refused, {"of another server than the one that reports it": 2})
        self.file(*(line(one, AFTER) for one in both(1, 100, 0)))
        self.assertEqual(self.credited(day=AFTER), 100)

    def test_what_is_not_signed_by_the_client_does_not_count(self) -> None:
        good, other = both(1, 100, 0)
        forged = bytearray(other)
        forged[-70] ^= 1
        self.file(line(good), line(bytes(forged)))
        self.assertEqual(self.credited(), 0)
        # A forged receipt of an earlier day does not keep a transport from its credit.
        self.file(line(bytes(forged), BEFORE), line(bytes(forged[:-1]) + b"\5", BEFORE))
        self.file(line(other))
        self.assertEqual(self.credited(), 100)

    def test_one_client_cannot_be_both_ends(self) -> None:
        body = signed(1, Role.INITIATOR, A, A, 100, 0), signed(1, Role.RESPONDER, A, A, 0, 100)
        self.file(*map(line, body))
        self.assertEqual(self.credited(), 0)

    def test_several_pairs_on_one_transport_credit_nothing(self) -> None:
        self.file(*map(line, both(1, 100, 0)), *map(line, both(1, 100, 0, a=A, b=C)))
        total = self.credits().servers[SERVER.public]
        self.assertEqual((total.credited, total.conflict), (0, 1))

    def test_a_stranger_with_a_transports_identity_spoils_nothing(self) -> None:
        self.file(*map(line, both(1, 100, 0)), line(signed(1, Role.INITIATOR, C, B, 1, 0)))
        self.assertEqual(self.credited(), 100)

    def test_a_pair_that_comes_later_does_not_take_a_credit_back(self) -> None:
        self.file(*map(line, both(1, 100, 0)))
        self.file(*(line(one, AFTER) for one in both(1, 100, 0, a=A, b=C)))
        self.assertEqual((self.credited(), self.credited(day=AFTER)), (100, 0))

    def test_giant_numbers(self) -> None:
        self.file(*map(line, both(1, MAX_RECEIPT_BYTES, MAX_RECEIPT_BYTES)))
        self.file(*map(line, both(2, MAX_RECEIPT_BYTES + 1, 0)))
        self.file(*map(line, both(3, 2**63 - 1, 2**63 - 1)))
        self.assertEqual(self.credited(), 2 * MAX_RECEIPT_BYTES)
        self.file(
            *(one for number in range(4, 14) for one in map(line, both(number, MAX_RECEIPT_BYTES, MAX_RECEIPT_BYTES)))
        )
        self.assertEqual(self.credited(), 22 * MAX_RECEIPT_BYTES)  # The sum is above 2^53, and exact.

    def test_lines_that_two_programs_might_read_differently(self) -> None:
        good, other = (line(one) for one in both(1, 100, 0))
        self.file(good)
        for bad in (
            other.replace(b'"ts":', b'"ts":[],"ts":'),
            other.replace(b'"role":"server"', b'"role":{"a":1}'),
            other.replace(b'"server"', '"sérver"'.encode()),
            other.replace(b'"server"', b'"\xff"'),
            other.replace(b'"ts":17', b'"ts":1e3,"x":17'),
            other.replace(b'"ts":17', b'"ts":true,"x":17'),
            other.replace(b'"ts":17', b'"ts":-17'),
            other.replace(b'"ts":17', b'"ts":' + b"9" * 5000 + b',"x":17'),
            other.replace(b'"receipt":"', b'"receipt":" '),
            other.replace(b'"type":"receipt"', b'"type":"receipt_checked"'),
            other[:-1],
            b"[" * 100_000 + b'"receipt"',
            b'{"receipt":' * 5000,
            b'"receipt"',
            b"",
        ):
            self.file(bad)
            self.assertEqual(self.credited(), 0, bad[:300])
        self.file(other)
        self.assertEqual(self.credited(), 100)

    def test_a_damaged_file_is_left_out_whole(self) -> None:
        path = self.file(*map(line, both(1, 100, 0)))
        whole = path.read_bytes()
        for bad in (whole[:-1], whole[:-9], whole + b"x", b"", b"no gzip", whole[:40] + b"\0\0\0\0" + whole[44:]):
            path.write_bytes(bad)
            found = self.credits()
            self.assertEqual((found.servers, found.inputs, list(found.damaged)), ({}, {}, [path]))
        path.write_bytes(whole + whole)  # The file has two complete gzip members.
        self.assertEqual(self.credited(), 100)

    def test_sizes_are_bounded(self) -> None:
        path = self.file(*map(line, both(1, 100, 0)))
        self.patch(credits, "FILE_LIMIT", 100)
        self.assertEqual(list(self.credits().damaged), [path])
        self.patch(credits, "FILE_LIMIT", 10_000)
        self.patch(credits, "MAX_RECEIPTS", 1)
        with self.assertRaisesRegex(InputError, "more than 1 receipts of 2026-03-10"):
            self.credits()

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=2, max_size=8))
    def test_statements_of_several_days_credit_a_transport_once(self, times: list[tuple[int, int]]) -> None:
        receipts = both(1, 100, 10)
        here = Path(self.mktemp())
        path = write(here / "receipts-1.jsonl.gz", [line(receipts[end], DAY + timedelta(day)) for day, end in times])
        credited = [
            sum(total.credited for total in compute_credits([path], DAY + timedelta(day), DAY).servers.values())
            for day in range(6)
        ]
        ends = {end: min(day for day, one in times if one == end) for _, end in times}
        expected = [110 * (len(ends) == 2 and max(ends.values()) == day) for day in range(6)]
        self.assertEqual(credited, expected)

    @settings(max_examples=30, deadline=None)
    @given(st.randoms(use_true_random=False), st.data())
    def test_order_names_and_division_of_files_do_not_matter(self, chance: random.Random, data: st.DataObject) -> None:
        receipts = _ALL
        found = set()
        for _ in range(2):
            order = list(receipts)
            chance.shuffle(order)
            here = Path(self.mktemp())
            cut = data.draw(st.integers(0, len(order)))
            paths = [write(here / f"{name}.jsonl.gz", part) for name, part in enumerate((order[:cut], order[cut:]))]
            chance.shuffle(paths)
            result = compute_credits(paths, DAY, DAY - timedelta(5))
            self.assertGreater(result.servers[SERVER.public].credited, 0)
            found.add(str((sorted(result.servers.items()), sorted(result.pairs.items()))))
        self.assertEqual(len(found), 1)


_ALL = [
    *(line(one) for number in range(4) for one in both(number, 100 + number, number)),
    *(line(one, BEFORE) for one in both(2, 102, 2)),
    *(line(one, BEFORE) for one in both(3, 103, 3)[:1]),
    line(signed(0, Role.INITIATOR, A, B, 7, 7)),
    line(signed(0, Role.INITIATOR, A, C, 7, 7)),
    *(line(one) for one in both(1, 5, 5, a=A, b=C)),
]
