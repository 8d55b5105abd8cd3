"""Handshakes of the library ``noiseprotocol``, used as its README shows, with the library's own functions except for
secp256k1.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from noise.backends.default import DefaultNoiseBackend
from noise.connection import NoiseConnection
from noise.exceptions import NoiseHandshakeError

from dmsg.errors import HandshakeError, KeyFormatError, LocalProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.handshake import HandshakeResult, Pattern
from dmsg.noise.suite import Secp256k1, Secp256k1KeyPair


class _Plain(Secp256k1):
    """Curve without the values that keys cache."""

    def dh(self, private_key: SecKey, public_key: PubKey) -> bytes:
        return private_key.ecdh(public_key) + b"\0"


PLAIN_BACKEND = DefaultNoiseBackend()
PLAIN_BACKEND.diffie_hellmans["Secp256k1"] = _Plain
PLAIN_BACKEND.keypairs["Secp256k1"] = Secp256k1KeyPair


class LibraryHandshake:
    """One end of a handshake, with the interface of :class:`dmsg.noise.handshake.Handshake`."""

    result: HandshakeResult | None
    """Result of the handshake; None until the last message was written or read."""

    def __init__(
        self,
        pattern: Pattern,
        local: SecKey,
        *,
        initiator: bool,
        remote: PubKey | None = None,
        prologue: bytes = b"",
        ephemeral: SecKey | None = None,
    ) -> None:
        connection = NoiseConnection.from_name(pattern.value, backend=PLAIN_BACKEND)
        keypairs = connection.noise_protocol.keypairs
        if initiator:
            connection.set_as_initiator()
        else:
            connection.set_as_responder()
        keypairs["s"] = Secp256k1KeyPair.of(local)
        if remote is not None:
            keypairs["rs"] = Secp256k1KeyPair.from_public_bytes(remote)
        connection.set_prologue(prologue)
        connection.start_handshake()
        # The library removes this object at the end, and with it the remote key.
        self._state = connection.noise_protocol.handshake_state
        if ephemeral is not None:
            self._state.e = Secp256k1KeyPair.of(ephemeral)
        self._connection = connection
        self._swap = pattern is Pattern.XK
        self.result = None

    def write_message(self, payload: bytes = b"") -> bytes:
        try:
            message = bytes(self._connection.write_message(payload))
        except NoiseHandshakeError as error:
            raise LocalProtocolError(str(error)) from None
        self._finish()
        return message

    def read_message(self, message: bytes) -> bytes:
        try:
            payload = bytes(self._connection.read_message(message))
        except NoiseHandshakeError as error:
            raise LocalProtocolError(str(error)) from None
        except InvalidTag:
            raise HandshakeError("handshake message is not authentic") from None
        except KeyFormatError as error:
            raise HandshakeError(f"handshake message is malformed: {error}") from None
        self._finish()
        return payload

    def _finish(self) -> None:
        connection = self._connection
        if not connection.handshake_finished:
            return
        protocol = connection.noise_protocol
        send, receive = protocol.cipher_state_encrypt.k, protocol.cipher_state_decrypt.k
        if self._swap:
            send, receive = receive, send
        self.result = HandshakeResult(
            remote=self._state.rs.public, send_key=send, receive_key=receive, hash=connection.get_handshake_hash()
        )
