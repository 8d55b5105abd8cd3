"""Noise XK handshake of a connection: processes received bytes, returns bytes to send, and derives two keys.

The client is the initiator and knows the server's key. Each handshake message has a 2-byte big-endian length prefix, so
messages take 51, 51 and 67 bytes on TCP. A client that prefers AES-256-GCM sets :data:`AES_OFFER` in the payload of the
first message; a server that agrees sets it in the payload of the second. No other messages are sent with a payload, and
any other payload that is received is ignored, as in the reference implementation.

The server proves its key with the second message, and the client with the third. So a server computes a Diffie-Hellman
before it knows the key of the client. Any error ends the connection; nothing is retried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dmsg.base.buffers import PrefixedBuffer
from dmsg.base.cipher_names import Cipher
from dmsg.errors import HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.handshake import MAX_FRAMED_MESSAGE, Handshake, Pattern

AES_OFFER = 0x01
"""Bit in the first byte of a payload: the sender prefers AES-256-GCM."""
MAX_LINK_MESSAGE = 1024
"""Maximum size of a message in bytes, unless a protocol family sets a different one. Messages of 2019 have 49 or 65
bytes; a payload makes a message longer."""
AES_FEATURE = "aes1"
"""Mark in the ``version`` of a server's entry. It says that the server understands the payload of the first message."""
_AES_OFFER = bytes((AES_OFFER,))


class XKHandshake:
    """State of one side of the XK handshake over a byte stream.

    Feed it received bytes with :meth:`receive_data`, send the bytes of :meth:`data_to_send`, and stop when
    :attr:`remote` is set. Then :attr:`keys` is set, too, and :meth:`trailing_data` returns the bytes that the peer sent
    after its last message.

    :ivar remote: public key of the peer; None before the end of the handshake.
    :ivar keys: key to send with and key to receive with, 32 bytes each; None before the end of the handshake.
    :ivar cipher: cipher on which both sides have agreed.
    """

    __slots__ = ("_aes_gcm", "_buffer", "_handshake", "_is_client", "_make", "_outgoing", "cipher", "keys", "remote")

    def __init__(
        self,
        local: SecKey,
        remote: PubKey | None = None,
        *,
        ephemeral: SecKey | None = None,
        max_message: int = MAX_LINK_MESSAGE,
        aes_gcm: bool = False,
    ) -> None:
        """:param remote: public key of the server, if this side is the initiator.
        :param aes_gcm: whether this side prefers AES-256-GCM. A client must set it only for a server whose signed entry
            has the mark :data:`AES_FEATURE`.
        :param max_message: maximum size in bytes of a received message, at most
            :data:`~dmsg.noise.handshake.MAX_FRAMED_MESSAGE`.
        :raises ValueError: ``max_message`` is larger than that maximum.
        """
        if max_message > MAX_FRAMED_MESSAGE:
            raise ValueError(f"handshake messages have at most {MAX_FRAMED_MESSAGE} bytes, not {max_message}")
        # A responder's handshake state is created only when the first message is complete. So a silent peer costs a
        # server almost no memory.
        self._make: Callable[[], Handshake] | None = partial(
            Handshake, Pattern.XK, local, initiator=remote is not None, remote=remote, ephemeral=ephemeral
        )
        self._handshake: Handshake | None = None
        self._buffer = PrefixedBuffer(max_message)
        self._outgoing = b""
        self.remote: PubKey | None = None
        self.keys: tuple[bytes, bytes] | None = None
        self.cipher = Cipher.CHACHA20_POLY1305
        self._aes_gcm = aes_gcm
        self._is_client = remote is not None
        if remote is not None:
            self._write(self._begin(), _AES_OFFER if aes_gcm else b"")

    def receive_data(self, data: bytes) -> None:
        """Process the next bytes of the stream.

        :raises HandshakeError: the handshake failed; close the connection.
        """
        self._buffer.feed(data)
        while self.remote is None:
            try:
                message = self._buffer.next_message()
            except ValueError as error:
                raise HandshakeError(str(error)) from None
            if message is None:
                return
            # The loop stops after the last handshake message, because the bytes after it are records.
            handshake = self._handshake or self._begin()
            payload = handshake.read_message(message)
            if handshake.result is not None:
                self._finish(handshake)
                return
            # This side is the server, which has read the first message, or the client, which has read the second.
            # AES-256-GCM is agreed if the client offered it and the server's answer, the second message, confirms it.
            agreed = self._aes_gcm and payload[:1] != b"" and bool(payload[0] & AES_OFFER)
            if agreed:
                self.cipher = Cipher.AES_256_GCM
            self._write(handshake, _AES_OFFER if agreed and not self._is_client else b"")

    def data_to_send(self) -> bytes:
        """Remove and return the bytes to send to the peer now."""
        data, self._outgoing = self._outgoing, b""
        return data

    def trailing_data(self) -> bytes:
        """Remove and return the bytes that the peer sent after its last handshake message."""
        return self._buffer.take_rest()

    def _begin(self) -> Handshake:
        assert self._make is not None
        handshake = self._handshake = self._make()
        self._make = None
        return handshake

    def _write(self, handshake: Handshake, payload: bytes = b"") -> None:
        message = handshake.write_message(payload)
        self._outgoing += len(message).to_bytes(2, "big") + message
        if handshake.result is not None:
            self._finish(handshake)

    def _finish(self, handshake: Handshake) -> None:
        result = handshake.result
        assert result is not None
        # The objects of ``noiseprotocol`` take 2 KiB of memory, so a connection keeps only the two keys.
        self._handshake = None
        self.keys = (result.send_key, result.receive_key)
        self.remote = result.remote
