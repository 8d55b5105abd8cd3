"""The keys of AES-256-GCM, and the choice between the ciphers."""

from __future__ import annotations

import hashlib
import hmac

from cryptography.hazmat.primitives.ciphers import Cipher as Block, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.cipher_names import AUTO, CIPHER_SETTINGS, Cipher
from dmsg.net import cipher_choice
from dmsg.noise.ciphers import NEVER, REKEY_AFTER, begin_cipher, first_key, next_key, rekey_after

KEY = bytes(range(32))
NONCE = bytes(12)


def gcm(key: bytes, nonce: bytes, data: bytes, associated: bytes = b"") -> bytes:
    """Encrypt with OpenSSL's block cipher, without the class that the product uses."""
    cipher = Block(algorithms.AES(key), modes.GCM(nonce)).encryptor()
    cipher.authenticate_additional_data(associated)
    return cipher.update(data) + cipher.finalize() + cipher.tag


class KeyTests(SynchronousTestCase):
    """Keys from the key of the handshake."""

    def test_chacha_uses_the_key_of_the_handshake(self) -> None:
        sealed = begin_cipher(Cipher.CHACHA20_POLY1305, KEY).encrypt(NONCE, b"data", b"a")
        self.assertEqual(sealed, ChaCha20Poly1305(KEY).encrypt(NONCE, b"data", b"a"))

    def test_aes_has_a_key_of_its_own(self) -> None:
        derived = hmac.new(KEY, b"dmsg aes-256-gcm 1", hashlib.sha256).digest()
        self.assertEqual(first_key(KEY), derived)
        sealed = begin_cipher(Cipher.AES_256_GCM, KEY).encrypt(NONCE, b"data", b"a")
        self.assertEqual(sealed, gcm(derived, NONCE, b"data", b"a"))

    def test_the_next_key_is_that_of_noise(self) -> None:
        cipher = begin_cipher(Cipher.AES_256_GCM, KEY)
        self.assertEqual(next_key(cipher.encrypt), gcm(first_key(KEY), bytes(4) + b"\xff" * 8, bytes(32))[:32])

    def test_only_aes_changes_its_keys(self) -> None:
        self.assertEqual(rekey_after(Cipher.AES_256_GCM), REKEY_AFTER)
        self.assertEqual(rekey_after(Cipher.CHACHA20_POLY1305), NEVER)

    def test_the_bound_of_the_draft_holds(self) -> None:
        """Confidentiality: (blocks + messages + 1)^2 / 2^129, for messages of 64 KiB."""
        blocks = REKEY_AFTER * (65536 // 16)
        self.assertLess((blocks + REKEY_AFTER + 1) ** 2 / 2**129, 2**-64)


class ChoiceTests(SynchronousTestCase):
    """The faster cipher, or the one that was asked for."""

    def test_aes_is_chosen_only_if_it_is_clearly_faster(self) -> None:
        self.assertIs(cipher_choice.choose(3.0, 1.0), Cipher.AES_256_GCM)
        self.assertIs(cipher_choice.choose(1.0, 1.0), Cipher.CHACHA20_POLY1305)
        self.assertIs(cipher_choice.choose(1.0, 8.0), Cipher.CHACHA20_POLY1305)

    def test_both_ciphers_are_measured(self) -> None:
        asked = []

        def measure(kind: type) -> float:
            asked.append(kind.__name__)
            return {"AESGCM": 1.0, "ChaCha20Poly1305": 9.0}[kind.__name__]

        self.patch(cipher_choice, "_seconds", measure)
        self.assertIs(cipher_choice.faster_cipher.__wrapped__(), Cipher.AES_256_GCM)
        self.assertEqual(sorted(asked), ["AESGCM", "ChaCha20Poly1305"])

    def test_a_setting_decides(self) -> None:
        for one in Cipher:
            self.assertIs(cipher_choice.preferred_cipher(one.value), one)
        self.assertIn(cipher_choice.preferred_cipher(AUTO), tuple(Cipher))
        self.assertRaises(ValueError, cipher_choice.preferred_cipher, "rot13")
        self.assertEqual(set(CIPHER_SETTINGS), {"auto", "aes-256-gcm", "chacha20-poly1305"})
