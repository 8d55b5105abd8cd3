"""Records with nonces of 8 bytes, as the protocol after 2019 has them.

``nonce(8, big endian) || ciphertext || tag(16)``: 24 bytes more than the plaintext, and no length, which is
the matter of whatever frames them.  The nonce of ChaCha20-Poly1305 is four zero bytes and that number, little
endian; the associated data is empty.  The first is 1, each direction counts for itself.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.errors import DropReason, LocalProtocolError, RemoteProtocolError
from dmsg.noise.nonces import Nonces

NONCE_SIZE = 8
TAG_SIZE = 16
OVERHEAD = NONCE_SIZE + TAG_SIZE
MAX_NONCE = 2**64 - 1

_prefix = struct.Struct(">Q")
_nonce = struct.Struct("<4xQ").pack


class Sealer8:
    """Encrypts one direction.

    :ivar nonce: of the last record.
    """

    __slots__ = ("_encrypt", "nonce")

    def __init__(self, key: bytes, nonce: int = 0) -> None:
        """:param key: 32 bytes."""
        self._encrypt = ChaCha20Poly1305(key).encrypt
        self.nonce = nonce

    def seal(self, plaintext: bytes | bytearray | memoryview) -> bytes:
        """The next record, :data:`OVERHEAD` bytes longer.

        :raises LocalProtocolError: the nonces are used up.
        """
        if self.nonce >= MAX_NONCE:
            raise LocalProtocolError("the nonces are used up")
        self.nonce += 1
        return _prefix.pack(self.nonce) + self._encrypt(_nonce(self.nonce), plaintext, None)


class Opener8:
    """Decrypts one direction.

    :param nonces: which nonces are new.
    """

    __slots__ = ("_decrypt", "_nonces")

    def __init__(self, key: bytes, nonces: Nonces) -> None:
        """:param key: 32 bytes."""
        self._decrypt = ChaCha20Poly1305(key).decrypt
        self._nonces = nonces

    def open(self, record: bytes | bytearray | memoryview) -> bytes:
        """The plaintext of a whole record.

        :raises RemoteProtocolError: too short, a nonce that is not new, or not authentic.  Another
            record may be opened after it: nothing was remembered of this one.
        """
        if len(record) < OVERHEAD:
            raise RemoteProtocolError(DropReason.BAD_RECORD, f"record of {len(record)} bytes is too short")
        (nonce,) = _prefix.unpack_from(record)
        if not self._nonces.takes(nonce):
            raise RemoteProtocolError(DropReason.REPLAYED_RECORD, f"the nonce {nonce} is not new")
        try:
            plaintext = self._decrypt(_nonce(nonce), memoryview(record)[NONCE_SIZE:], None)
        except InvalidTag:
            raise RemoteProtocolError(DropReason.BAD_RECORD, "record is not authentic") from None
        self._nonces.took(nonce)
        return plaintext
