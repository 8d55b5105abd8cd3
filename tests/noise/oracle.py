"""The handshakes by ``noiseprotocol``: what the product's own are held against."""

from __future__ import annotations

from copy import copy

from cryptography.exceptions import InvalidTag
from noise.connection import NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseMaxNonceError, NoiseValueError
from noise.noise_protocol import NoiseProtocol

from dmsg.errors import HandshakeError, KeyFormatError, LocalProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.handshake import HandshakeResult, Pattern
from dmsg.noise.suite import BACKEND, Secp256k1KeyPair

_TEMPLATES = {pattern: NoiseProtocol(pattern.value, BACKEND) for pattern in Pattern}


class LibraryHandshake:
    """One side of one handshake, as :class:`dmsg.noise.handshake.Handshake` is."""

    __slots__ = ("_connection", "_state", "_swap", "result")

    result: HandshakeResult | None
    """None until the last message was written or read."""

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
        connection = NoiseConnection()
        connection.protocol_name = pattern.value
        # from_name() parses the name and looks everything up again each time
        protocol = connection.noise_protocol = copy(_TEMPLATES[pattern])
        protocol.keypairs = {"s": None, "e": None, "rs": None, "re": None}
        if initiator:
            connection.set_as_initiator()
        else:
            connection.set_as_responder()
        protocol.keypairs["s"] = Secp256k1KeyPair.of(local)
        if remote is not None:
            protocol.keypairs["rs"] = Secp256k1KeyPair(public=remote, public_bytes=bytes(remote))
        elif initiator or pattern is Pattern.KK:
            raise LocalProtocolError(f"the remote key is needed for this side of {pattern.name}")
        if prologue:
            connection.set_prologue(prologue)
        connection.start_handshake()
        # the library forgets this object at the end, and with it the remote key
        self._state = protocol.handshake_state
        if ephemeral is not None:
            self._state.e = Secp256k1KeyPair.of(ephemeral)
        self._connection = connection
        self._swap = pattern is Pattern.XK
        self.result = None

    def write_message(self, payload: bytes = b"") -> bytes:
        """The next handshake message.

        :raises LocalProtocolError: it is the other side's turn.
        """
        try:
            message = bytes(self._connection.write_message(payload))
        except NoiseHandshakeError as error:
            raise LocalProtocolError(str(error)) from None
        self._finish()
        return message

    def read_message(self, message: bytes) -> bytes:
        """Take the other side's message; returns its payload.

        :raises HandshakeError: too short or too long, a key that is no point,
            or a tag that does not fit.
        :raises LocalProtocolError: it is this side's turn.
        """
        try:
            payload = bytes(self._connection.read_message(bytes(message)))
        except NoiseHandshakeError as error:
            raise LocalProtocolError(str(error)) from None
        except (InvalidTag, NoiseMaxNonceError):
            raise HandshakeError("handshake message is not authentic") from None
        except (KeyFormatError, NoiseValueError, ValueError) as error:
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
            remote=self._state.rs.public,
            send_key=send,
            receive_key=receive,
            hash=protocol.handshake_hash,
        )
