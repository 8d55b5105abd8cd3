"""Values that a twin is made of, at their borders: lengths of junctions, accounts, relays, numbers, key files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import KeyFileError
from dmsg.rmb.errors import IdentityError, RegistryRefused
from dmsg.rmb.twins.identity import MAX_ACCOUNT_TEXT, Identity, _chain_code, _compact, hex_seed, parse_account
from dmsg.rmb.twins.secrets import _from_file
from dmsg.rmb.twins.twin import MAX_COUNTER, MAX_PK, Twin, check_relay, relay_of_websocket

SEED = "0x" + "ab" * 32


class IdentityTests(SynchronousTestCase):
    def test_compact_lengths(self) -> None:
        """SCALE: two low bits say whether a length has 1, 2 or 4 bytes."""
        for number, encoded in (
            (0, "00"),
            (1, "04"),
            (63, "fc"),
            (64, "0101"),
            (2**14 - 1, "fdff"),
            (2**14, "02000100"),
        ):
            self.assertEqual(_compact(number).hex(), encoded)

    def test_junctions(self) -> None:
        """Numbers below 2**64 are eight bytes; texts have their length before them, and are hashed beyond 32 bytes."""
        self.assertEqual(_chain_code("1"), b"\1" + bytes(31))
        self.assertEqual(_chain_code(str(2**64 - 1)), b"\xff" * 8 + bytes(24))
        self.assertEqual(_chain_code(str(2**64)), b"\x50" + b"18446744073709551616" + bytes(11))
        self.assertEqual(_chain_code("x" * 31), b"\x7c" + b"x" * 31)
        for size in (32, 33):
            code = _chain_code("x" * size)
            self.assertEqual(len(code), 32)
            self.assertNotIn(b"xx", code)

    def test_seeds(self) -> None:
        self.assertEqual(hex_seed(SEED), b"\xab" * 32)
        for wrong in (SEED[2:], SEED + "ab", SEED[:-2], "0x" + "xy" * 32, "0x" + " " * 2 + "ab" * 31):
            self.assertRaises(IdentityError, hex_seed, wrong)

    def test_accounts_that_are_too_long(self) -> None:
        error = self.assertRaises(IdentityError, parse_account, "x" * (MAX_ACCOUNT_TEXT + 1))
        self.assertIn(f"'{'x' * 20}'...", str(error))


class TwinTests(SynchronousTestCase):
    def test_relays(self) -> None:
        for good in ("relay.example.org", "http://127.0.0.1:8080", "https://relay.example.org"):
            self.assertEqual(check_relay(good), good)
        for wrong in (
            "http://relay.example.org/\x7f",
            "http://127.0.0.1:1/a",
            "http://h\xe4.example",
            "http://a_b.example",
        ):
            self.assertRaises(ValueError, check_relay, wrong)
        error = self.assertRaises(ValueError, check_relay, "_" * 81)
        self.assertIn(f"{'_' * 80!r} is not a relay", str(error))

    def test_what_is_checked_before_the_signature(self) -> None:
        identity = Identity(SEED)

        def twin(**changes: Any) -> Twin:
            return Twin(**{"id": 7, "account": identity.account, "relay": "relay.example.org", **changes}).sign(
                identity
            )

        for good in ({}, {"counter": MAX_COUNTER}, {"counter": 1}, {"pk": bytes(MAX_PK)}):
            twin(**good).check()
        for wrong in (
            {"counter": -1},
            {"counter": MAX_COUNTER + 1},
            {"pk": bytes(MAX_PK + 1)},
            {"relay": "no relay"},
        ):
            self.assertRaises(RegistryRefused, twin(**wrong).check)

    def test_strict(self) -> None:
        twin = {"id": 7, "account": "ab" * 32, "relay": ""}
        self.assertEqual([Twin.from_dict({**twin, "strict": one}).strict for one in (False, True)], [False, True])
        self.assertRaises(RegistryRefused, Twin.from_dict, {**twin, "strict": 1})

    def test_long_urls_are_cut(self) -> None:
        for url in ("x" * 100, "ws://" + "_" * 100):
            error = self.assertRaises(ValueError, relay_of_websocket, url)
            self.assertIn(f"{url[:80]!r} is not", str(error))

    def test_numbers(self) -> None:
        twin = {"id": 7, "account": "ab" * 32, "relay": "", "pk": None}
        for value in (-1, 2**32, True, "7", None, 1.0):
            self.assertRaises(RegistryRefused, Twin.from_dict, {**twin, "id": value})
        for value in (0, 1, 2**32 - 1):
            try:
                self.assertEqual(Twin.from_dict({**twin, "id": value}).id, value)
            except RegistryRefused as error:
                self.assertNotIn("id is no number", str(error))


class SecretTests(SynchronousTestCase):
    def file(self, text: str) -> str:
        path = self.mktemp()
        Path(path).write_text(text)
        os.chmod(path, 0o600)
        return path

    def test_the_first_line_that_is_no_comment(self) -> None:
        found = _from_file(self.file(f"# a comment\n\n{SEED}\nanother line\ntype ed25519\n"), None)
        self.assertEqual((found.secret, found.key_type), (SEED, "ed25519"))
        for mode in (0o640, 0o604, 0o610):
            path = self.file(SEED)
            os.chmod(path, mode)
            self.assertIn("chmod 600", str(self.assertRaises(KeyFileError, _from_file, path, None)))
        self.assertRaises(KeyFileError, _from_file, self.file("# nothing\n"), None)
        self.assertRaises(KeyFileError, _from_file, self.mktemp(), None)
