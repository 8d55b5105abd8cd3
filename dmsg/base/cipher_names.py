"""Ciphers on which two programs can agree: their names, the size of their tags, and the values of ``--cipher``."""

from __future__ import annotations

from enum import Enum


class Cipher(Enum):
    """Ciphers on which two programs can agree."""

    CHACHA20_POLY1305 = "chacha20-poly1305"
    AES_256_GCM = "aes-256-gcm"


TAG_SIZE = 16
"""Number of bytes of the authentication tag with which each of the ciphers extends a message."""
AUTO = "auto"
"""Value of ``--cipher`` that prefers the cipher that is faster on this machine."""
CIPHER_SETTINGS = (AUTO, *(one.value for one in Cipher))
"""Values that the option ``--cipher`` accepts."""
