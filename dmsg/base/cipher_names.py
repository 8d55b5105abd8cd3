"""Names of the ciphers on which two programs can agree, and the values of the option ``--cipher``."""

from __future__ import annotations

from enum import Enum


class Cipher(Enum):
    """Ciphers on which two programs can agree."""

    CHACHA20_POLY1305 = "chacha20-poly1305"
    AES_256_GCM = "aes-256-gcm"


AUTO = "auto"
"""Value of ``--cipher`` that prefers the cipher that is faster on this machine."""
CIPHER_SETTINGS = (AUTO, *(one.value for one in Cipher))
"""Values that the option ``--cipher`` accepts."""
