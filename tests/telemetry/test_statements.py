"""Statements: the same bytes from the same receipts, and any change found."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey
from dmsg.telemetry import statements
from dmsg.telemetry.credits import Credits, Pair, ServerSum
from dmsg.telemetry.statements import StatementError, body_of, read_statement, sign_statement
from tests.telemetry.receipt_files import DAY, OPERATOR, OTHER, SERVER, A, B, C, both, line
from tests.telemetry.test_credits import CreditCase


def example() -> Credits:
    found = Credits(DAY, DAY - timedelta(30))
    found.inputs = {name * 32: None for name in ("ab", "cd")}  # type: ignore[misc]
    server, other = SERVER.public, OTHER.public
    found.servers = {server: ServerSum(3, 2**60 + 5, 7, 1, 2), other: ServerSum(one_sided=1)}
    found.pairs = {(server, A.public, B.public): Pair(2, 2**60, 2), (server, B.public, C.public): Pair(1, 1, 2)}
    return found


BODY = body_of(example())
FILE = sign_statement(BODY, OPERATOR)


def resigned(lines: list[dict[str, Any]], key: SecKey = OPERATOR) -> bytes:
    return sign_statement(b"".join(statements._encode_line(one) for one in lines), key)


class StatementTests(SynchronousTestCase):
    """Bytes."""

    def test_the_documented_form(self) -> None:
        lines = FILE.decode().splitlines()
        self.assertEqual(
            lines[0],
            '{"day":"2026-03-10","first":"2026-02-08","inputs":2,"kind":"statement","pairs":2,"servers":2,"version":1}',
        )
        self.assertEqual(lines[1], f'{{"kind":"input","sha256":"{"ab" * 32}"}}')
        self.assertEqual(
            [json.loads(one)["kind"] for one in lines[1:]],
            ["input"] * 2 + ["server"] * 2 + ["pair"] * 2 + ["signature"],
        )
        self.assertEqual(json.loads(lines[-1])["operator"], OPERATOR.public.hex())

    def test_what_is_signed_is_read(self) -> None:
        found = read_statement(FILE)
        self.assertEqual((found.body, found.operator, found.day), (BODY, OPERATOR.public, DAY))
        self.assertEqual(found.first, DAY - timedelta(30))
        found.check_lines()
        self.assertEqual([line["kind"] for line in found.lines(C.public)], ["pair"])

    def test_two_operators_sign_the_same_lines(self) -> None:
        other = sign_statement(BODY, OTHER)
        self.assertEqual(other.splitlines()[:-1], FILE.splitlines()[:-1])
        self.assertEqual(read_statement(other).operator, OTHER.public)
        # The signature of one does not fit under the key of the other.
        swapped = FILE.replace(OPERATOR.public.hex().encode(), OTHER.public.hex().encode())
        self.assertRaises(StatementError, read_statement, swapped)

    @given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
    def test_a_changed_byte_is_found(self, place: int, change: int) -> None:
        data = bytearray(FILE)
        data[place] ^= change
        self.assertRaises(StatementError, read_statement, bytes(data))

    def test_a_signature_has_one_form(self) -> None:
        """A file in which the case of a digit was changed is not what the operator wrote."""
        *lines, last = FILE.splitlines(keepends=True)
        signature = json.loads(last)["signature"]
        changed = last.replace(signature.encode(), signature.upper().encode())
        self.assertNotEqual(changed, last)
        self.assertRaises(StatementError, read_statement, b"".join([*lines, changed]))

    @given(st.integers(0, len(FILE) - 1))
    def test_a_shorter_file_is_found(self, size: int) -> None:
        self.assertRaises(StatementError, read_statement, FILE[:size])

    @given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda data: b'{"day":' + data + b"\n"))
    def test_anything_is_a_named_error(self, data: bytes) -> None:
        self.assertRaises(StatementError, read_statement, data)

    def test_what_follows_the_signature_is_found(self) -> None:
        for more in (b"x", b"\n", b"{}\n", FILE, FILE.splitlines(keepends=True)[-1]):
            self.assertRaises(StatementError, read_statement, FILE + more)

    def test_an_operator_cannot_sign_lines_that_contradict_each_other(self) -> None:
        lines = [json.loads(one) for one in BODY.splitlines()]

        def refused(changed: list[dict[str, Any]]) -> None:
            with self.assertRaises(StatementError):
                read_statement(resigned(changed)).check_lines()

        read_statement(resigned(lines)).check_lines()
        for number, name, value in (
            (0, "pairs", 3),
            (0, "inputs", 0),
            (3, "credited", 1),
            (3, "transports", 1),
            (5, "bytes_ab", 3),
            (5, "bytes_ab", -1),
            (5, "bytes_ab", 1.0),
            (5, "bytes_ab", True),
            (5, "bytes_ab", "1"),
            (5, "server", C.public.hex()),
            (5, "server", "AB"),
            (5, "more", 1),
            (0, "version", 2),
            (0, "day", "2026-03-99"),
            (0, "day", "20260310"),
            (0, "first", "2026-03-11"),
            (1, "kind", "nothing"),
            (1, "kind", []),
        ):
            refused([one | {name: value} if index == number else one for index, one in enumerate(lines)])
        refused([lines[0], *lines[2:]])
        refused([*lines, lines[-1]])
        refused([lines[0], lines[2], lines[1], *lines[3:]])
        refused([*lines[:5], lines[6], lines[5]])
        refused([*lines[:3], *lines[5:], *lines[3:5]])
        refused(lines[1:])
        refused([*lines, lines[0]])

    def test_only_the_canonical_form_is_read(self) -> None:
        for old, new in (
            (b'{"day"', b'{ "day"'),
            (b'"inputs":2', b'"inputs":2,"inputs":2'),
            (b'"version":1', b'"version":1 '),
            (b'"version":1', b'"version":01'),
        ):
            self.assertIn(old, BODY)
            with self.assertRaises(StatementError):
                read_statement(sign_statement(BODY.replace(old, new, 1), OPERATOR)).check_lines()


class MadeTests(CreditCase):
    """Statements made from files."""

    def test_the_same_receipts_make_the_same_bytes(self) -> None:
        self.file(*map(line, both(1, 100, 5)))
        self.file(*map(line, both(2, 10, 5, a=B, b=C)))
        one = body_of(self.credits())
        for number, path in enumerate(self.files()):
            path.rename(self.here / f"receipts-{9 - number}.jsonl.gz")
        self.assertEqual(body_of(self.credits()), one)
        read_statement(sign_statement(one, OPERATOR)).check_lines()
