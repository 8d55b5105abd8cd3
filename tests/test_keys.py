"""Keys, signatures, key files."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg import keys
from dmsg.errors import KeyFileError, KeyFormatError, SignatureError
from dmsg.keys import PubKey, SecKey, Signature, load_or_create_key, read_key_file, sha256, write_key_file
from dmsg.rmb.twins.secrets import TwinSecret, write_secret
from tests.support import vectors


class VectorTests(SynchronousTestCase):
    """cipher.json, case by case."""

    def setUp(self) -> None:
        self.vectors = vectors("cipher")

    def test_keys_of_seeds(self) -> None:
        for case in self.vectors["deterministic_keypairs"]:
            if case["result"] != "ok":
                self.assertRaises(KeyFormatError, SecKey.from_seed, bytes.fromhex(case["seed"]))
                continue
            key = SecKey.from_seed(bytes.fromhex(case["seed"]))
            self.assertEqual((key.hex(), key.public.hex()), (case["sk"], case["pk"]))

    def test_public_key_of_secret_key(self) -> None:
        for case in self.vectors["sk_to_pk"]:
            secret = bytes.fromhex(case["sk"])
            if case["result"] == "ok":
                self.assertEqual(SecKey(secret).public.hex(), case["pk"])
            else:
                self.assertRaises(KeyFormatError, SecKey, secret)

    def test_repeated_ecdh_returns_the_same_secret(self) -> None:
        """The result is the same each time. Only a limited number of results is cached."""
        self.patch(keys, "MAX_CACHED_SECRETS", 2)
        own = SecKey.generate()
        others = [SecKey.generate() for _ in range(4)]
        for other in [*others, *reversed(others)]:
            self.assertEqual(own.lasting_ecdh(other.public), other.ecdh(own.public))
            self.assertEqual(own.lasting_ecdh(other.public), other.ecdh(own.public))
            self.assertLessEqual(len(own._shared), 2)

    def test_ecdh_matches_the_vectors(self) -> None:
        for case in self.vectors["ecdh"]["cases"]:
            shared = SecKey.from_hex(case["sk"]).ecdh(PubKey.from_hex(case["pk"]))
            self.assertEqual(shared.hex(), case["shared"])

    def test_public_key_bytes(self) -> None:
        """x >= p, where the reference panics, is an error like the others."""
        for case in self.vectors["pubkey_parse"]:
            data = bytes.fromhex(case["bytes"])
            if case["result"] == "ok":
                self.assertEqual(PubKey(data), data)
            else:
                self.assertRaises(KeyFormatError, PubKey, data)

    def test_public_key_text(self) -> None:
        """The null key of the reference, zeros of any length, is invalid here."""
        for case in self.vectors["pubkey_text"]:
            if case["result"] == "ok" and case["text"].strip("0"):
                self.assertEqual(PubKey.from_hex(case["text"]).hex(), case["value"])
            else:
                self.assertRaises(KeyFormatError, PubKey.from_hex, case["text"])

    def test_the_short_form_fits_people_and_hosts(self) -> None:
        """The text fits into a label of a host name, and both forms are accepted, in upper and lower case."""
        for _ in range(50):
            key = SecKey.generate().public
            self.assertRegex(key.text, r"\A[a-z2-7]{53}\Z")
            for text in (key.text, key.text.upper(), str(key), str(key).upper()):
                self.assertEqual(PubKey.from_text(text), key)

    def test_text_that_is_no_key(self) -> None:
        key = SecKey.from_seed(b"text").public
        last = key.text[-1]
        twin = "abcdefghijklmnopqrstuvwxyz234567"["abcdefghijklmnopqrstuvwxyz234567".index(last) ^ 1]
        wrong = {
            "": "53 characters, or 66 in hexadecimal, not 0",
            key.text[:-1]: "not 52",
            key.text + "=": "not 54",
            key.text[:-1]
            # The changed bit is not part of the key.
            + twin: "not valid base32: the last character has a spare bit set",
            key.text[:-1] + "1": "not base32",
            key.text[:-1] + "\u00e9": "not base32",
            "7" * 53: "not a point",
            "g" * 66: "not hexadecimal",
        }
        for text, why in wrong.items():
            with self.assertRaisesRegex(KeyFormatError, why):
                PubKey.from_text(text)

    def test_recorded_signatures_verify(self) -> None:
        for case in self.vectors["signatures"]["cases"]:
            signature = Signature.from_hex(case["sig"])
            payload = bytes.fromhex(case["payload"])
            PubKey.from_hex(case["pk"]).verify(payload, signature)
            self.assertEqual(signature.recover(payload).hex(), case["recovered"])

    def test_signatures_of_fixed_nonces_verify(self) -> None:
        for case in self.vectors["fixed_nonce_signatures"]:
            recovered = Signature.from_hex(case["sig"]).recover_digest(bytes.fromhex(case["hash"]))
            self.assertEqual(recovered.hex(), case["pk"])

    def test_verification_matches_the_vectors(self) -> None:
        for case in self.vectors["verify_payload"]:
            payload = bytes.fromhex(case["payload"])
            signature = Signature(bytes.fromhex(case["sig"]))
            if not case["pk"].strip("0"):
                continue  # The null key cannot be made into a PubKey.
            key = PubKey.from_hex(case["pk"])
            if case["result"] == "ok":
                key.verify(payload, signature)
            else:
                self.assertRaises(SignatureError, key.verify, payload, signature)

    def test_recovery_matches_the_reference(self) -> None:
        """The reference accepts a recovery at infinity in addition."""
        for case in self.vectors["recover_hash"]:
            signature = Signature(bytes.fromhex(case["sig"]))
            digest = bytes.fromhex(case["hash"])
            good = case["recover"] == "ok" and case["verify"] == "ok" and "infinity" not in case["name"]
            if good:
                self.assertEqual(signature.recover_digest(digest).hex(), case["pk"], case["name"])
            else:
                self.assertRaises(SignatureError, signature.recover_digest, digest)

    def test_signatures_are_read_from_text(self) -> None:
        for case in self.vectors["sig_text"]:
            if case["result"] == "ok":
                self.assertEqual(Signature.from_hex(case["text"]).hex(), case["text"].lower())
            else:
                self.assertRaises(KeyFormatError, Signature.from_hex, case["text"])


class KeyTests(SynchronousTestCase):
    """Properties of any key."""

    @given(st.binary(min_size=1, max_size=40), st.binary(max_size=200))
    def test_only_signed_data_verifies(self, seed: bytes, payload: bytes) -> None:
        key = SecKey.from_seed(seed)
        signature = key.sign(payload)
        key.public.verify(payload, signature)
        self.assertLess(signature[32], 0x80)
        self.assertRaises(SignatureError, key.public.verify, payload + b"x", signature)

    @given(st.binary(max_size=80))
    def test_random_bytes_are_a_key_or_a_named_error(self, data: bytes) -> None:
        for make in (PubKey, SecKey, Signature):
            try:
                make(data)
            except KeyFormatError:
                pass

    @given(st.binary(min_size=65, max_size=65), st.binary(min_size=32, max_size=32))
    def test_random_signatures_recover_or_are_a_named_error(self, data: bytes, digest: bytes) -> None:
        try:
            PubKey(Signature(data).recover_digest(digest))
        except SignatureError:
            pass

    @given(st.text(max_size=140))
    def test_random_text_is_a_key_or_a_named_error(self, text: str) -> None:
        for make in (PubKey.from_hex, PubKey.from_text, SecKey.from_hex, Signature.from_hex):
            try:
                make(text)
            except KeyFormatError:
                pass

    def test_a_secret_key_does_not_show_itself(self) -> None:
        key = SecKey.generate()
        self.assertNotIn(key.hex(), f"{key!r} {key}")

    def test_high_s_is_refused(self) -> None:
        order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
        key = SecKey.generate()
        signature = key.sign(b"payload")
        flipped = order - int.from_bytes(signature[32:64], "big")
        high = signature[:32] + flipped.to_bytes(32, "big") + bytes([signature[64] ^ 1])
        self.assertRaises(SignatureError, key.public.verify, b"payload", Signature(high))

    def test_sha256_matches_the_vectors(self) -> None:
        self.assertEqual(sha256(b"").hex()[:8], "e3b0c442")


class KeyFileTests(SynchronousTestCase):
    """Key files."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def test_written_for_the_owner_alone(self) -> None:
        before = os.umask(0)
        self.addCleanup(os.umask, before)
        key = SecKey.generate()
        write_key_file(self.path, key)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), 0o600)
        self.assertEqual(read_key_file(self.path).hex(), key.hex())

    def test_refused_when_others_may_read(self) -> None:
        write_key_file(self.path, SecKey.generate())
        for mode in (0o640, 0o604, 0o660, 0o644):
            self.path.chmod(mode)
            error = self.assertRaises(KeyFileError, read_key_file, self.path)
            self.assertIn("chmod 600", str(error))

    def test_key_files_are_never_overwritten(self) -> None:
        write_key_file(self.path, SecKey.generate())
        self.assertRaises(KeyFileError, write_key_file, self.path, SecKey.generate())

    def test_malformed_key_files_are_errors(self) -> None:
        other = SecKey.generate().public
        for text in (
            "",
            "secret",
            "secret 00\n",
            "\0\xff",
            f"secret {'1' * 64}\npublic {other}\n",
            "secret " + "0" * 64,
        ):
            self.path.write_text(text, encoding="latin-1")
            self.path.chmod(0o600)
            self.assertRaises(KeyFileError, read_key_file, self.path)

    def test_missing_and_directory(self) -> None:
        self.assertRaises(KeyFileError, read_key_file, self.path)
        self.path.mkdir()
        self.assertRaises(KeyFileError, read_key_file, self.path)

    def test_concurrent_creation_makes_a_single_key(self) -> None:
        key = load_or_create_key(self.path)
        self.assertEqual(load_or_create_key(self.path).hex(), key.hex())

    def test_not_made_unless_asked(self) -> None:
        """A mistyped name makes neither a key nor directories."""
        with self.assertRaisesRegex(KeyFileError, "--create"):
            load_or_create_key(self.path, create=False)
        self.assertRaises(KeyFileError, load_or_create_key, self.path / "deep" / "x.key")
        self.assertFalse(self.path.exists())

    def test_a_full_disk_leaves_no_secret_of_a_twin(self) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch(os, "fsync", full)
        directory = Path(self.mktemp())
        secret = TwinSecret("0x" + "11" * 32, "ed25519")
        self.assertRaises(KeyFileError, write_secret, str(directory / "x.twin"), secret)
        self.assertEqual(list(directory.iterdir()), [])

    def test_a_full_disk_leaves_no_key_file(self) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        self.patch(os, "fsync", full)
        with self.assertRaisesRegex(KeyFileError, "No space left"):
            write_key_file(self.path, SecKey.generate())
        self.assertEqual(list(self.path.parent.glob("*key*")), [])

    def test_other_files_are_reported_before_their_mode(self) -> None:
        """The advice to change the mode is not given for a file such as /etc/passwd."""
        with self.assertRaisesRegex(KeyFileError, "not a key file$"):
            read_key_file("/etc/passwd")
        self.path.write_bytes(b"")
        with self.assertRaisesRegex(KeyFileError, "is empty"):
            read_key_file(self.path)

    def test_a_pipe_does_not_block(self) -> None:
        os.mkfifo(self.path)
        with self.assertRaisesRegex(KeyFileError, "not a regular file"):
            read_key_file(self.path)
