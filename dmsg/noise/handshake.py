"""A Noise handshake: messages in, messages out, at the end two keys.

Beside ``suite`` the only module that uses ``noiseprotocol``.  No length prefixes here (see
:mod:`dmsg.noise.xk`) and no records (see :mod:`dmsg.noise.records`): the
library's own transport ciphers are not used, only their keys.

The 2019 reference gives the *writer of the last message* the keys the other
way round than the Noise specification (``noise/noise.go``: ``res, ns.dec,
ns.enc, err = ns.hs.WriteMessage(...)``).  For XK, three messages, that is the
initiator, so both sides swap.  For KK, two messages, what comes out is the
specification's assignment.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from enum import Enum

from cryptography.exceptions import InvalidTag
from noise.connection import NoiseConnection
from noise.exceptions import NoiseHandshakeError, NoiseMaxNonceError, NoiseValueError
from noise.noise_protocol import NoiseProtocol

from dmsg.errors import HandshakeError, KeyFormatError, LocalProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.suite import BACKEND, Secp256k1KeyPair

TAG_SIZE = 16
MAX_HANDSHAKE_MESSAGE = 65535
"""Bytes; the Noise specification's maximum (section 3)."""
HANDSHAKE_FRAMES = 64
"""Of the frames of a read that are taken at a time: what the keys of one handshake cost, a third of a millisecond."""


class Pattern(Enum):
    """The two patterns of the reference."""

    XK = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49, 65 bytes
    KK = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49 bytes


_TEMPLATES = {pattern: NoiseProtocol(pattern.value, BACKEND) for pattern in Pattern}


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """What a finished handshake leaves.

    :ivar remote: the static key that the other side proved to hold.
    :ivar send_key: 32 bytes, encrypts what this side sends.
    :ivar receive_key: 32 bytes.
    :ivar hash: 32 bytes, the handshake hash (channel binding).
    """

    remote: PubKey
    send_key: bytes
    receive_key: bytes
    hash: bytes


class Handshake:
    """One side of one handshake.

    After any error it is damaged: drop it and close the connection.

    :param remote: the other side's static key; needed by all but the
        responder of XK.
    :param ephemeral: only for tests with recorded randomness.
    """

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
        if len(message) > MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError("handshake message is too long")
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
