"""Entries against disc.json, and what may come instead of one."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.dialects import DIALECTS, Dialect, decode, decode_verified
from dmsg.discovery.entries.entry import (
    VERSION,
    ClientMeta,
    Entry,
    EntryInvalid,
    EntrySignatureError,
    ServerMeta,
    with_feature,
)
from dmsg.discovery.entries.gojson import EntryDecodeError
from dmsg.discovery.entries.rules import Head, check_iteration, decode_deletion, time_order
from dmsg.errors import EntryError
from dmsg.keys import SecKey
from tests.support import vectors

KEY = SecKey.from_seed(b"entry")


class VectorTests(SynchronousTestCase):
    """disc.json."""

    def setUp(self) -> None:
        self.vectors = vectors("disc")

    def test_signed_json_matches_the_vectors(self) -> None:
        for case in self.vectors["entries"]:
            body = bytes.fromhex(case["entry_json_hex"])
            entry = decode(body, Dialect.GO2019)
            if case["verify_after_roundtrip"] != "ok":
                self.assertRaises(EntrySignatureError, entry.verify)
                continue
            self.assertEqual(entry.signing_json().hex(), case["signing_json_hex"], case["name"])
            self.assertEqual(entry.to_json(), body, case["name"])
            entry.validate()
            entry.verify()

    def test_invalid_entries_are_refused_with_their_reason(self) -> None:
        for case in self.vectors["invalid_entries"]:
            entry = decode(case["entry"].encode(), Dialect.GO2019)
            result = "ok"
            try:
                entry.validate()
            except EntryInvalid as error:
                result = f"error: {error}"
            self.assertEqual(result, case["validate"], case["name"])
            if case["verify"] == "ok":
                entry.verify()
            else:
                self.assertRaises(EntrySignatureError, entry.verify)

    def test_sequences_follow_the_iteration_vectors(self) -> None:
        for case in self.vectors["iterations"]:
            head = Head(case["old_sequence"], time_order(case["old_timestamp"]))
            entry = Entry("0.0.1", case["new_sequence"], case["new_timestamp"], KEY.public.hex())
            result = "ok"
            try:
                self.assertFalse(check_iteration(head, entry))
            except EntryInvalid as error:
                result = f"error: {error}"
            self.assertEqual(result, case["result"], case["name"])


class FormTests(SynchronousTestCase):
    """The signed form of an entry, and the port in it."""

    def _entry(self, port: str | None) -> Entry:
        return Entry("0.0.1", 0, 1, KEY.public.hex(), server=ServerMeta("h:1", 5, port)).sign(KEY)

    def test_with_and_without_port(self) -> None:
        for port in ("", "8080", None):
            entry = self._entry(port)
            self.assertEqual(decode_verified(entry.to_json()), entry)

    def test_port_signed_and_left_out(self) -> None:
        """Go writes the absent text as an empty string, as disc.json shows."""
        entry = self._entry("")
        body = entry.to_json().replace(b'"port":"",', b"")
        self.assertEqual(decode_verified(body), entry)
        self.assertEqual(decode_verified(body, Dialect.GO2019), entry)

    def test_the_2019_service_always_has_a_port(self) -> None:
        self.assertRaises(EntrySignatureError, decode_verified, self._entry(None).to_json(), Dialect.GO2019)

    def test_a_port_that_was_not_signed(self) -> None:
        body = self._entry(None).to_json().replace(b'"address":"h:1"', b'"address":"h:1","port":""')
        self.assertRaises(EntrySignatureError, decode_verified, body)

    @given(st.text(max_size=40), st.text(max_size=40))
    def test_any_text_survives(self, address: str, version: str) -> None:
        entry = Entry("v" + version, 0, 1, KEY.public.hex(), server=ServerMeta(address, 1))
        try:
            entry = entry.sign(KEY)
        except UnicodeEncodeError:
            return  # A lone surrogate is not valid text.
        self.assertEqual(decode_verified(entry.to_json()), entry)
        self.assertEqual(decode_verified(entry.to_json(), Dialect.GO2019), entry)


MALFORMED = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"5",
    b'"x"',
    b"{}garbage",
    b'{"sequence":NaN}',
    b'{"sequence":Infinity}',
    b'{"sequence":1.5}',
    b'{"sequence":1e999999999}',
    b'{"sequence":1e-999999999999999999999}',
    b'{"sequence":"1"}',
    b'{"sequence":true}',
    b'{"sequence":-1}',
    b'{"sequence":18446744073709551616}',
    b'{"timestamp":9223372036854775808}',
    b'{"timestamp":' + b"9" * 5000 + b"}",
    b'{"version":1}',
    b'{"version":"1","version":"1"}',
    b'{"static":"02"}',
    b'{"static":[]}',
    b'{"client":[]}',
    b'{"client":{"delegated_servers":{}}}',
    b'{"client":{"delegated_servers":["x"]}}',
    b'{"client":{"delegated_servers":[5]}}',
    b'{"server":{"address":5}}',
    b'{"server":{"port":5}}',
    b'{"server":{"available_connections":1.5}}',
    b'{"signature":5}',
    b"[" * 60_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b'\xef\xbb\xbf{"version":"1"}',
    b'{"version":"\xff"}',
)


class MalformedTests(SynchronousTestCase):
    """Bad input is a named error, never another."""

    def test_the_strict_reader_refuses_ambiguous_json(self) -> None:
        for body in MALFORMED:
            self.assertRaises(EntryDecodeError, decode, body)

    def test_keys_that_are_no_curve_points_are_refused(self) -> None:
        """The signature of an entry with such a key cannot be valid.  A server with such a key is refused although the
        entry is signed.
        """
        for key in ("02" + "ff" * 32, "02" + "00" * 31 + "05"):
            entry = Entry("0.0.1", 0, 1, key, ClientMeta(()), signature=KEY.sign(b"").hex())
            self.assertRaises(EntrySignatureError, decode_verified, entry.to_json())
            self.assertRaises(EntryDecodeError, decode_verified, entry.to_json(), Dialect.GO2019)
            entry = Entry("0.0.1", 0, 1, KEY.public.hex(), ClientMeta((key,))).sign(KEY)
            self.assertRaises(EntryInvalid, decode_verified, entry.to_json())

    @given(st.binary(max_size=200))
    def test_random_bytes_are_an_entry_or_an_error(self, body: bytes) -> None:
        for act in (decode_verified, decode_deletion, lambda body: decode_verified(body, Dialect.GO2019)):
            self.assertRaises(EntryError, act, body)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        [
                            "version",
                            "sequence",
                            "timestamp",
                            "static",
                            "client",
                            "server",
                            "signature",
                            "delegated_servers",
                            "address",
                            "port",
                            "available_connections",
                        ]
                    ),
                    inner,
                    max_size=6,
                )
            ),
            max_leaves=12,
        )
    )
    def test_random_json_is_an_entry_or_an_error(self, value: object) -> None:
        import json

        body = json.dumps(value).encode()
        for form in DIALECTS:
            self.assertRaises(EntryError, decode_verified, body, form)

    def test_every_changed_field_breaks_the_signature(self) -> None:
        entry = Entry("0.0.1", 0, 1, KEY.public.hex(), ClientMeta((KEY.public.hex(),))).sign(KEY)
        for old, new in (
            (b"0.0.1", b"0.0.2"),
            (b'"sequence":0', b'"sequence":1'),
            (b'"timestamp":1', b'"timestamp":2'),
        ):
            self.assertRaises(EntrySignatureError, decode_verified, entry.to_json().replace(old, new))


class FeatureTests(SynchronousTestCase):
    """Words behind the version."""

    def test_features_are_read_from_and_written_to_the_version(self) -> None:
        self.assertEqual(with_feature("1.2", "b"), "1.2+b")
        self.assertEqual(with_feature("1.2+b", "a"), "1.2+a.b")
        self.assertEqual(with_feature("1.2+a.b", "a", present=False), "1.2+b")
        self.assertEqual(with_feature("1.2+b", "b", present=False), "1.2")
        self.assertEqual(with_feature("", "a"), f"{VERSION}+a")
        self.assertEqual(with_feature("+a", "a", present=False), VERSION)
