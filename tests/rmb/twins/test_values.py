"""Values that a twin is made of, at their borders: lengths of junctions, accounts, relays, numbers, key files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import base58
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import KeyFileError
from dmsg.rmb.errors import IdentityError, RegistryRefused
from dmsg.rmb.twins.identity import (
    MAX_ACCOUNT_TEXT,
    SS58_PREFIX,
    Identity,
    _chain_code,
    _checksum,
    _compact,
    hex_seed,
    parse_account,
)
from dmsg.rmb.twins.secrets import _from_file
from dmsg.rmb.twins.twin import MAX_COUNTER, MAX_PK, MAX_RELAY, SIGNED_LABEL, Twin, check_relay, relay_of_websocket

SEED = "0x" + "ab" * 32


class IdentityTests(SynchronousTestCase):
    def test_compact_lengths_are_encoded_and_decoded(self) -> None:
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

    def test_junctions_are_encoded_by_their_type(self) -> None:
        """Numbers below 2**64 are eight bytes; texts have their length before them, and are hashed beyond 32 bytes."""
        self.assertEqual(_chain_code("1"), b"\1" + bytes(31))
        self.assertEqual(_chain_code(str(2**64 - 1)), b"\xff" * 8 + bytes(24))
        self.assertEqual(_chain_code(str(2**64)), b"\x50" + b"18446744073709551616" + bytes(11))
        self.assertEqual(_chain_code("x" * 31), b"\x7c" + b"x" * 31)
        for size in (32, 33):
            code = _chain_code("x" * size)
            self.assertEqual(len(code), 32)
            self.assertNotIn(b"xx", code)

    def test_seeds_derive_the_known_keys(self) -> None:
        self.assertEqual(hex_seed(SEED), b"\xab" * 32)
        for wrong in (SEED[2:], SEED + "ab", SEED[:-2], "0x" + "xy" * 32, "0x" + " " * 2 + "ab" * 31):
            self.assertRaises(IdentityError, hex_seed, wrong)

    def test_accounts_that_are_too_long(self) -> None:
        error = self.assertRaises(IdentityError, parse_account, "x" * (MAX_ACCOUNT_TEXT + 1))
        self.assertIn(f"'{'x' * 20}'...", str(error))

    def test_accounts_with_something_changed(self) -> None:
        """The length, the prefix, the checksum, or a digit that is not hexadecimal."""

        def text(data: bytes) -> str:
            return base58.b58encode(data + _checksum(data)).decode()

        account = bytes(range(32))
        good = bytes([SS58_PREFIX]) + account
        self.assertEqual(parse_account(text(good)), account)
        checked = good + _checksum(good)
        number = int.from_bytes(checked, "big")
        wrong = [
            text(bytes([SS58_PREFIX - 1]) + account),
            text(bytes([SS58_PREFIX + 1]) + account),
            text(good[:-1]),
            text(good + b"x"),
            *(base58.b58encode((number + step).to_bytes(35, "big")).decode() for step in (-1, 1, -256, 256)),
            "zz" * 32,
            "0x" + "zz" * 32,
        ]
        for one in wrong:
            error = self.assertRaises(IdentityError, parse_account, one)
            self.assertIn(f"{one[:80]!r} is not an account", str(error))


class TwinTests(SynchronousTestCase):
    def test_relays_of_twins_are_normalised(self) -> None:
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

    def test_fields_are_checked_before_the_signature(self) -> None:
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

    def test_unknown_members_are_refused(self) -> None:
        twin = {"id": 7, "account": "ab" * 32, "relay": ""}
        self.assertEqual([Twin.from_dict({**twin, "strict": one}).strict for one in (False, True)], [False, True])
        self.assertRaises(RegistryRefused, Twin.from_dict, {**twin, "strict": 1})

    def test_long_urls_are_cut(self) -> None:
        for url in ("x" * 100, "ws://" + "_" * 100):
            error = self.assertRaises(ValueError, relay_of_websocket, url)
            self.assertIn(f"{url[:80]!r} is not", str(error))

    def test_numbers_of_twins_are_checked(self) -> None:
        twin = {"id": 7, "account": "ab" * 32, "relay": "", "pk": None}
        for value in (-1, 2**32, True, "7", None, 1.0):
            self.assertRaises(RegistryRefused, Twin.from_dict, {**twin, "id": value})
        for value in (0, 1, 2**32 - 1):
            try:
                self.assertEqual(Twin.from_dict({**twin, "id": value}).id, value)
            except RegistryRefused as error:
                self.assertNotIn("id is not a number", str(error))

    def test_relays_are_domains_or_bare_urls(self) -> None:
        for good in ("http://127.0.0.1:1", "https://[::1]:8080", "http://127.0.0.1:65535"):
            self.assertEqual(check_relay(good), good)
        self.assertEqual(check_relay("http://127.0.0.1:8080/"), "http://127.0.0.1:8080")
        for wrong in (
            "ftp://127.0.0.1:1",
            "http://:8080",
            "http://127.0.0.1:0",
            "http://127.0.0.1:65536",
            "http://127.0.0.1:1?query",
            "http://127.0.0.1:1#fragment",
            "http://user@127.0.0.1:1",
            "http://user@127.0.0.1:1?query",
            "http://user@127.0.0.1:1#fragment",
            "http://127.0.0.1:1?query#fragment",
        ):
            self.assertIn("is not a relay", str(self.assertRaises(ValueError, check_relay, wrong)))

    def test_the_names_of_the_relays_have_a_limit(self) -> None:
        identity = Identity(SEED)
        Twin(7, identity.account, "a" * MAX_RELAY).sign(identity).check()
        longer = Twin(7, identity.account, "a" * (MAX_RELAY + 1)).sign(identity)
        self.assertIn("relay has more than", str(self.assertRaises(RegistryRefused, longer.check)))

    def test_the_statement_that_an_owner_signs(self) -> None:
        """Six lines: a label, the account, the counter, the relays, the key, and whether the twin is strict."""
        account = "ab" * 32
        for twin, lines in (
            (Twin(7, b"\xab" * 32), ["0", "", "", ""]),
            (Twin(8, b"\xab" * 32, "a_b", b"\1\2", True, 5), ["5", "a_b", "0102", "strict"]),
        ):
            self.assertEqual(twin.signed().decode().split("\n"), [SIGNED_LABEL, account, *lines])

    def test_a_twin_and_its_json(self) -> None:
        """Fields that are missing have their defaults."""
        account = b"\xab" * 32
        for twin in (
            Twin(7, account),
            Twin(8, account, "relay.example.org", bytes(33), True, 9, bytes(65)),
            Twin(9, account, "", None, False, 1, b"x"),
        ):
            self.assertEqual(Twin.from_dict(json.loads(twin.to_json())), twin)
        bare = Twin.from_dict({"account": "0x" + account.hex()})
        self.assertEqual(bare, Twin(0, account))
        self.assertEqual((bare.strict, bare.counter, bare.signature, bare.pk), (False, 0, b"", None))
        self.assertEqual(parse_account(bare.address), account)

    def test_errors_of_a_twin_name_the_field(self) -> None:
        for field, value, said in (
            ("account", "5xyz", "account is not valid: "),
            ("account", None, "account is missing"),
            ("account", 5, "account is missing"),
            ("relay", 5, "relay is not a text"),
            ("pk", "xy", "pk is not hexadecimal"),
            ("pk", 5, "pk is not hexadecimal"),
            ("signature", "0", "signature is not hexadecimal"),
            ("counter", -1, "counter is not a number"),
        ):
            error = self.assertRaises(RegistryRefused, Twin.from_dict, {"id": 7, "account": "ab" * 32, field: value})
            self.assertTrue(str(error).startswith(said), error)
        self.assertRaises(RegistryRefused, Twin.from_dict, [])


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
