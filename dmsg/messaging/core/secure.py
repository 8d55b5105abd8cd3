"""Ciphers of one end of a channel.  No I/O.

The cipher is ChaCha20-Poly1305 with empty associated data.  In each direction, the nonce counts messages from 0. It is
encoded by the Noise specification, as 4 zero bytes and 8 bytes little endian.  In the ``skywire`` profile, each
direction is rekeyed before its messages 10, 20, 30 and so on, by Noise's REKEY; the nonce continues to count.

Nonces are never sent, only counted.  So if a message was lost, repeated or reordered, the next one is not authentic,
and the channel ends. None of this happens with an honest server over TCP.  Sources: the seed document for the cipher,
the Go code of March 2019 for the rekeying.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from dmsg.errors import HandshakeError

REKEY_INTERVAL = 10
"""Number of messages between two rekeys of a direction in the ``skywire`` profile."""

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
        """Return the nonce of the next message. If this message needs a new key, change the key before."""
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
        """Encrypt the next message. The ciphertext is 16 bytes longer than ``data``."""
        nonce = self._send.next_nonce()
        return self._send.aead.encrypt(nonce, data, None)

    def open(self, data: bytes | memoryview) -> bytes:
        """Decrypt the next message.

        :raises HandshakeError: this message was changed, or a message was repeated, left out or reordered.
        """
        # As in Go, a message that is not authentic counts, too, and uses up its nonce.
        nonce = self._receive.next_nonce()
        try:
            return self._receive.aead.decrypt(nonce, data, None)
        except InvalidTag:
            raise HandshakeError("message is not authentic") from None
