"""Names of the ciphers on which two clients can agree, and the values of the option ``--cipher``, which names the
preferred one."""

from __future__ import annotations

from enum import Enum


class Cipher(Enum):
    """Ciphers for data between two clients."""

    CHACHA20_POLY1305 = "chacha20-poly1305"
    AES_256_GCM = "aes-256-gcm"


AUTO = "auto"
"""Value of ``--cipher`` with which the cipher that is faster on this machine is preferred."""
CIPHER_SETTINGS = (AUTO, *(one.value for one in Cipher))
"""Values that the option ``--cipher`` accepts."""
