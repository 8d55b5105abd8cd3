"""Choice of the cipher that this process prefers.

On a processor with AES instructions, AES-256-GCM takes a third of the time of ChaCha20-Poly1305. On a processor without
them, AES-256-GCM takes many times as long. So each process measures both ciphers once.
"""

from __future__ import annotations

from functools import cache
from time import perf_counter

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from dmsg.base.cipher_names import AUTO, Cipher
from dmsg.noise.ciphers import AEAD

SAMPLE = 16384
"""Size in bytes of the message whose encryption is timed."""
ROUNDS = 16
"""Number of measurements of each cipher. The shortest time is used, because other processes may interrupt some
measurements."""
MAX_RATIO = 1.25
"""Maximum ratio of the time of AES-256-GCM to the time of ChaCha20-Poly1305 at which AES-256-GCM is preferred.

With AES instructions, AES-256-GCM is 1.65 to 3 times as fast as ChaCha20-Poly1305; without them, it takes many times as
long. The limit is above 1, because a busy machine distorts the measurement: on a machine where AES-256-GCM is 1.65
times as fast, factors down to 1.04 were measured while other programs used all cores.
"""


@cache
def faster_cipher() -> Cipher:
    """Return the faster cipher. The first call measures both ciphers, which takes less than a millisecond on most
    processors."""
    return choose(*_seconds((ChaCha20Poly1305, AESGCM)))


def choose(chacha: float, aes: float) -> Cipher:
    """Return the cipher to prefer, given the seconds that each cipher takes for the same work."""
    return Cipher.AES_256_GCM if aes <= chacha * MAX_RATIO else Cipher.CHACHA20_POLY1305


def _seconds(kinds: tuple[type[AEAD], ...]) -> list[float]:
    """Return the shortest time in seconds in which each cipher encrypted one message."""
    ciphers = [kind(bytes(32)) for kind in kinds]
    data, nonce = bytes(SAMPLE), bytes(12)
    best = [float("inf")] * len(ciphers)
    for _ in range(ROUNDS):
        # The ciphers take turns, so that a load that begins during the measurement slows down both.
        for number, cipher in enumerate(ciphers):
            began = perf_counter()
            cipher.encrypt(nonce, data, None)
            best[number] = min(best[number], perf_counter() - began)
    return best


def preferred_cipher(setting: str) -> Cipher:
    """Return the cipher that a setting names; ``auto`` stands for the faster one.

    :raises ValueError: the setting has another value.
    """
    return faster_cipher() if setting == AUTO else Cipher(setting)
