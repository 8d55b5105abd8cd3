"""Ciphers of one end of a channel.  No I/O.

The cipher is ChaCha20-Poly1305 with empty associated data.  Nonces count from 0 in each direction as the Noise
specification says (4 zero bytes, then 8 little endian).  In the ``skywire`` profile each direction is rekeyed before
its messages 10, 20, 30 and so on, by Noise's REKEY; the nonce counter continues.

Nonces are counted and never sent.  So a message that is lost, repeated or reordered is not authentic, and the channel
ends; an honest server over TCP does none of this.  Sources: the seed document for the cipher, the Go code of March 2019
for the rekeying.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.errors import HandshakeError

REKEY_INTERVAL = 10
"""Number of messages after which a direction is rekeyed in the ``skywire`` profile."""

_nonce = struct.Struct("<4xQ")
_REKEY_NONCE = _nonce.pack(2**64 - 1)
_ZEROS = bytes(32)


class _Direction:
    """Cipher of one direction.

    :ivar count: number of messages so far.
    """

    __slots__ = ("_rekey", "aead", "count")

    def __init__(self, key: bytes, rekey: bool) -> None:
        self.aead = ChaCha20Poly1305(key)
        self._rekey = rekey
        self.count = 0

    def next_nonce(self) -> bytes:
        """Return the nonce of the next message, and rekey before it if needed."""
        # Go rekeys before its tenth message, not after it, and does not reset the nonce.
        count = self.count
        self.count = count + 1
        if self._rekey and not self.count % REKEY_INTERVAL:
            self.aead = ChaCha20Poly1305(self.aead.encrypt(_REKEY_NONCE, _ZEROS, None)[:32])
        return _nonce.pack(count)


class ChannelCiphers:
    """Ciphers of both directions of a channel."""

    __slots__ = ("_receive", "_send")

    def __init__(self, send_key: bytes, receive_key: bytes, *, rekey: bool) -> None:
        self._send = _Direction(send_key, rekey)
        self._receive = _Direction(receive_key, rekey)

    def seal(self, data: bytes | memoryview) -> bytes:
        """Return the ciphertext of the next message, which is 16 bytes longer than ``data``."""
        nonce = self._send.next_nonce()
        return self._send.aead.encrypt(nonce, data, None)

    def open(self, data: bytes | memoryview) -> bytes:
        """Return the plaintext of the next message.

        :raises HandshakeError: a message was altered, repeated, left out or reordered.
        """
        # As in Go, a message that is not authentic uses up its nonce, too.
        nonce = self._receive.next_nonce()
        try:
            return self._receive.aead.decrypt(nonce, data, None)
        except InvalidTag:
            raise HandshakeError("message is not authentic") from None
