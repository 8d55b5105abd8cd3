"""Ciphers of encrypted data, and how AES-256-GCM gets its keys. No I/O.

ChaCha20-Poly1305 is the cipher of 2019, which every program has. Two programs use AES-256-GCM if both prefer it
(:mod:`dmsg.net.cipher_choice`). ``docs/protocol/secure-transport.md`` specifies how they agree.

Both have keys of 32 bytes, nonces of 12 bytes and tags of 16 bytes. AES-256-GCM has two rules of its own:

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
"""Object of ``cryptography`` that encrypts and decrypts under one key."""

REKEY_AFTER = 1 << 20
"""Number of messages under one key of AES-256-GCM.

With messages of at most 64 KiB these are 2**32 blocks. An attacker then distinguishes the cipher from a random one with
a probability of at most 2**-65. The draft "Usage Limits on AEAD Algorithms" of the CFRG has the formula.
"""
NEVER = 1 << 64
"""Value of the next rekey for a cipher whose key never changes; no counter reaches it."""
AES_LABEL = b"dmsg aes-256-gcm 1"
"""Label by which the first key of AES-256-GCM is derived from the key of the handshake."""

_MAX_NONCE = struct.pack("<4xQ", 2**64 - 1)
_ZEROS = bytes(32)


def rekey_after(cipher: Cipher) -> int:
    """Return the number of messages that a cipher encrypts under one key."""
    return REKEY_AFTER if cipher is Cipher.AES_256_GCM else NEVER


def begin_cipher(cipher: Cipher, key: bytes) -> AEAD:
    """Return the cipher of one direction under its first key.

    :param key: 32 bytes, the key of that direction from the handshake.
    """
    if cipher is Cipher.AES_256_GCM:
        return AESGCM(first_key(key))
    return ChaCha20Poly1305(key)


def first_key(key: bytes) -> bytes:
    """Return the 32 bytes of the first key of AES-256-GCM: HMAC-SHA-256 of a label, under the handshake's key."""
    return hmac.digest(key, AES_LABEL, "sha256")


def next_key(encrypt: Callable[[bytes, bytes, bytes | None], bytes]) -> bytes:
    """Return the 32 bytes of the next key: ``REKEY`` of the Noise specification, section 4.2.

    :param encrypt: method of the cipher under the present key. The nonce that is used here is never used for a message.
    """
    return encrypt(_MAX_NONCE, _ZEROS, None)[:32]


def next_cipher(encrypt: Callable[[bytes, bytes, bytes | None], bytes]) -> AEAD:
    """Return the cipher of one direction under its next key; only AES-256-GCM changes its key.

    :param encrypt: method of the cipher under the present key.
    """
    return AESGCM(next_key(encrypt))
