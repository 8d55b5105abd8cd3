"""Ciphers that encrypt data, and the key schedule of AES-256-GCM. No I/O.

ChaCha20-Poly1305 is the cipher of 2019, which every program supports. Two programs use AES-256-GCM only if both prefer
it (:mod:`dmsg.net.cipher_choice`). ``docs/protocol/secure-transport.md`` specifies how they agree.

Both ciphers have keys of 32 bytes, nonces of 12 bytes and tags of 16 bytes. AES-256-GCM has two additional rules:

* Its first key is derived from the key of the handshake (:func:`first_key`). So no key is used with two ciphers.
* Its key changes after :data:`REKEY_AFTER` messages (:func:`next_key`), because the security of GCM decreases with the
  square of the number of blocks under one key.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from dmsg.base.cipher_names import Cipher

AEAD = ChaCha20Poly1305 | AESGCM
"""Cipher object of the package ``cryptography``, which encrypts and decrypts under one key."""

REKEY_AFTER = 1 << 20
"""Number of messages that AES-256-GCM encrypts under one key.

With messages of at most 64 KiB, this is at most 2**32 blocks. The advantage of an attacker who tries to distinguish the
ciphertext from random bytes is then at most 2**-65. The formula is in the CFRG draft "Usage Limits on AEAD Algorithms".
"""
NO_REKEY = 1 << 64
"""Message number of the next rekey for a cipher whose key never changes. No counter reaches this number."""
AES_LABEL = b"dmsg aes-256-gcm 1"
"""Label from which :func:`first_key` derives the first key of AES-256-GCM."""

_MAX_NONCE = struct.pack("<4xQ", 2**64 - 1)
_ZEROS = bytes(32)


def rekey_after(cipher: Cipher) -> int:
    """Return the number of messages that ``cipher`` encrypts before its key changes."""
    return REKEY_AFTER if cipher is Cipher.AES_256_GCM else NO_REKEY


def begin_cipher(cipher: Cipher, key: bytes) -> AEAD:
    """Return a cipher object for one direction, with its first key.

    :param key: 32 bytes, the key of that direction from the handshake.
    """
    return make_cipher(cipher, begin_key(cipher, key))


def begin_key(cipher: Cipher, key: bytes) -> bytes:
    """Return the first key of a cipher, derived from the handshake's key of one direction."""
    return first_key(key) if cipher is Cipher.AES_256_GCM else key


def make_cipher(cipher: Cipher, key: bytes) -> AEAD:
    """Return a cipher object for a 32-byte key. The object uses 2.5 KiB of memory, and creating it takes 1.6 us."""
    return AESGCM(key) if cipher is Cipher.AES_256_GCM else ChaCha20Poly1305(key)


def first_key(key: bytes) -> bytes:
    """Return the first key of AES-256-GCM, 32 bytes: HMAC-SHA-256 of :data:`AES_LABEL` under the handshake's key."""
    return hmac.digest(key, AES_LABEL, "sha256")


def next_key(encrypt: Callable[[bytes, bytes, bytes | None], bytes]) -> bytes:
    """Return the next key, 32 bytes, by the function ``REKEY`` of the Noise specification, section 4.2.

    :param encrypt: encryption method of the cipher object with the current key. It is called with the largest nonce,
        which no message uses.
    """
    return encrypt(_MAX_NONCE, _ZEROS, None)[:32]


def next_cipher(encrypt: Callable[[bytes, bytes, bytes | None], bytes]) -> AEAD:
    """Return an AES-256-GCM object for one direction, with its next key. Other ciphers never change their key.

    :param encrypt: encryption method of the cipher object with the current key.
    """
    return AESGCM(next_key(encrypt))
