"""End-to-end encryption between twins: secp256k1, SHA-256, AES-256-GCM.

The payload format of the reference implementation (``cipher``) uses one key for both directions between two twins, and
authenticates no additional data. So a ciphertext in this format still decrypts if it is sent back to its sender, or
moved to another envelope between the same twins. Only the signature of the envelope protects against that.

Twins whose registry entry says ``strict`` use the format ``bound``. It has a separate key for each direction, and
authenticates the rest of the envelope as additional data.
"""

from __future__ import annotations

import hashlib
import os

import coincurve
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dmsg.rmb.errors import CipherError
from dmsg.rmb.twins.identity import hex_seed, mini_secret

NONCE_SIZE = 12
TAG_SIZE = 16
MAX_KEYS = 1000
"""Maximum number of shared keys in the cache. Computing a shared key takes a point multiplication of 60 µs."""
BOUND_LABEL = b"dmsg-rmb-bound-1"


class Encryption:
    """Encryption key of a twin.

    :param secret: words, or ``0x`` and 64 digits; junctions are not allowed.
    :raises IdentityError: the secret is malformed.
    :ivar pk: the public key, 33 bytes, as in the registry.
    """

    def __init__(self, secret: str) -> None:
        secret = secret.strip()
        seed = hex_seed(secret) if secret.startswith("0x") else mini_secret(secret)
        self._key = coincurve.PrivateKey(seed)
        self.pk: bytes = self._key.public_key.format()
        self._shared: dict[bytes, bytes] = {}

    def shared_key(self, pk: bytes) -> bytes:
        """Return the key shared with the public key ``pk``, 32 bytes.

        The key is the SHA-256 of the X coordinate, as 32 bytes big endian, of the elliptic-curve Diffie-Hellman point.

        :raises CipherError: ``pk`` is not a point of secp256k1.
        """
        shared = self._shared.get(pk)
        if shared is None:
            try:
                point = coincurve.PublicKey(pk).multiply(self._key.secret)
            except ValueError:
                raise CipherError("the twin's public key is not a point of secp256k1") from None
            shared = hashlib.sha256(point.format()[1:]).digest()
            if len(self._shared) >= MAX_KEYS:
                self._shared.pop(next(iter(self._shared)))
            self._shared[pk] = shared
        return shared

    def encrypt(self, data: bytes, pk: bytes, nonce: bytes | None = None) -> bytes:
        """Encrypt ``data`` for the twin with the public key ``pk``.

        :returns: 12 bytes of nonce, the ciphertext, and 16 bytes of tag.
        :raises CipherError: ``pk`` is not a point of secp256k1.
        """
        nonce = os.urandom(NONCE_SIZE) if nonce is None else nonce
        return nonce + AESGCM(self.shared_key(pk)).encrypt(nonce, data, None)

    def decrypt(self, data: bytes, pk: bytes) -> bytes:
        """Decrypt data that the twin with the public key ``pk`` encrypted for this twin.

        :raises CipherError: another twin encrypted the data, or the data were changed.
        """
        return _open(self.shared_key(pk), data, None)

    def _bound_key(self, sender: bytes, receiver: bytes) -> bytes:
        other = receiver if sender == self.pk else sender
        return hashlib.sha256(BOUND_LABEL + self.shared_key(other) + sender + receiver).digest()

    def encrypt_bound(self, data: bytes, pk: bytes, frame: bytes) -> bytes:
        """Encrypt like :meth:`encrypt`, but with a key for this direction only, and with ``frame`` as additional
        data."""
        nonce = os.urandom(NONCE_SIZE)
        return nonce + AESGCM(self._bound_key(self.pk, pk)).encrypt(nonce, data, frame)

    def decrypt_bound(self, data: bytes, pk: bytes, frame: bytes) -> bytes:
        """Decrypt a result of :meth:`encrypt_bound`.

        :raises CipherError: the twin with ``pk`` did not encrypt ``data``, or ``data`` or ``frame`` was changed.
        """
        return _open(self._bound_key(pk, self.pk), data, frame)


def _open(key: bytes, data: bytes, frame: bytes | None) -> bytes:
    if len(data) < NONCE_SIZE + TAG_SIZE:
        raise CipherError("invalid cipher data")
    try:
        return AESGCM(key).decrypt(data[:NONCE_SIZE], data[NONCE_SIZE:], frame)
    except InvalidTag:
        raise CipherError("invalid cipher data") from None
