"""Records with nonces of 8 bytes, as in the protocol after 2019.

A record is ``nonce(8, big endian) || ciphertext || tag(16)``, 24 bytes longer than the plaintext. It has no length
field; the framing around a record must give its length. The nonce of ChaCha20-Poly1305 is four zero bytes and then the
same number in little endian. The associated data are empty. The first nonce is 1, and each direction has its own
counter.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.base.cipher_names import TAG_SIZE
from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.noise.nonces import Nonces

NONCE_SIZE = 8
OVERHEAD = NONCE_SIZE + TAG_SIZE
MAX_NONCE = 2**64 - 1

_prefix = struct.Struct(">Q")
_nonce = struct.Struct("<4xQ").pack


class Sealer8:
    """Sealer that encrypts the records of one direction.

    :ivar nonce: nonce of the last record; 0 before the first.
    """

    __slots__ = ("_encrypt", "nonce")

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        """:param key: 32 bytes."""
        self._encrypt = ChaCha20Poly1305(key).encrypt
        self.nonce = nonce

    def seal(self, plaintext: bytes | bytearray | memoryview) -> bytes:
        """Encrypt ``plaintext`` and return the record, which is :data:`OVERHEAD` bytes longer.

        :raises LocalProtocolError: the nonces are used up.
        """
        if self.nonce >= MAX_NONCE:
            raise LocalProtocolError("the nonces are used up")
        self.nonce += 1
        return _prefix.pack(self.nonce) + self._encrypt(_nonce(self.nonce), plaintext, None)


class Opener8:
    """Opener that decrypts the records of one direction.

    :param nonces: replay protection, which decides whether a nonce is new.
    """

    __slots__ = ("_decrypt", "_nonces")

    def __init__(self, key: bytes, nonces: Nonces) -> None:
        """:param key: 32 bytes."""
        self._decrypt = ChaCha20Poly1305(key).decrypt
        self._nonces = nonces

    def open(self, record: bytes | bytearray | memoryview) -> bytes:
        """Decrypt one complete record and return its plaintext.

        :raises RemoteProtocolError: the record is too short, its nonce is not new, or it is not authentic. The opener
            has ignored the record, and can open further ones.
        """
        if len(record) < OVERHEAD:
            raise RemoteProtocolError(DropReason.BAD_RECORD, f"record of {len(record)} bytes is too short")
        (nonce,) = _prefix.unpack_from(record)
        # A replay is refused before the decryption, so refusing it costs less than sending it.
        if not self._nonces.accepts(nonce):
            raise RemoteProtocolError(DropReason.REPLAYED_RECORD, f"the nonce {nonce} was used before or is too old")
        try:
            plaintext = self._decrypt(_nonce(nonce), memoryview(record)[NONCE_SIZE:], None)
        except InvalidTag:
            raise RemoteProtocolError(DropReason.BAD_RECORD, "record is not authentic") from None
        # Only an authentic record may move the replay window. Otherwise a forged high nonce would put the nonces of all
        # honest records below the window.
        self._nonces.record(nonce)
        return plaintext
