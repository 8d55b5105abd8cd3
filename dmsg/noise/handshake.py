"""A Noise handshake: messages in, messages out, at the end two keys.

``noiseprotocol`` makes the two patterns of the reference (Noise specification, revision 34,
sections 5 and 7), with the functions of ``dmsg.noise.suite``. This module adds what the
library leaves to its users: whose turn it is, the errors of dmsg, and the keys as the
reference assigns them. No length prefixes here (see :mod:`dmsg.noise.xk`) and no records
(see :mod:`dmsg.noise.records`).

The 2019 reference gives the *writer of the last message* the keys the other
way round than the Noise specification (``noise/noise.go``: ``res, ns.dec,
ns.enc, err = ns.hs.WriteMessage(...)``).  For XK, three messages, that is the
initiator, so both sides swap.  For KK, two messages, what comes out is the
specification's assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cryptography.exceptions import InvalidTag
from noise.noise_protocol import NoiseProtocol
from noise.state import CipherState, HandshakeState

from dmsg.errors import HandshakeError, KeyFormatError, LocalProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.noise.suite import BACKEND, Secp256k1KeyPair

TAG_SIZE = 16
MAX_FRAMED_MESSAGE = 4094
"""Bytes of the longest handshake message that any family asks for: with its length it fits into 4 KiB."""
MAX_HANDSHAKE_MESSAGE = 65535
"""Bytes; the Noise specification's maximum (section 3)."""
HANDSHAKE_FRAMES = 64
"""Of the frames of a read that are taken at a time: what the keys of one handshake cost, a third of a millisecond."""


class Pattern(Enum):
    """The two patterns of the reference."""

    XK = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49, 65 bytes
    KK = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"  # messages of 49, 49 bytes


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


class _SharedState:
    """Attribute of a template that drops what is written to it, and answers what the library asks of it.

    :ivar initiator: role; the library chooses by it where to write the two final ciphers, and both writes are dropped.
    """

    initiator = True

    def __get__(self, instance: object, owner: type) -> _SharedState:
        return self

    def __set__(self, instance: object, value: object) -> None:
        pass

    def has_key(self) -> bool:
        """Whether a static key in a message is encrypted: in both patterns it is."""
        return True


class _Template(NoiseProtocol):  # type: ignore[misc]  # noiseprotocol has no types
    """A pattern and its functions, looked up once and shared by all its handshakes.

    The library writes the state of a handshake into its protocol. Dropping these writes keeps handshakes apart,
    leaves no key behind, and makes no reference cycle: an abandoned handshake is freed at once.
    """

    handshake_state = cipher_state_handshake = cipher_state_encrypt = cipher_state_decrypt = _SharedState()

    def handshake_done(self) -> None:
        """Keep the functions; the library would delete them."""


TEMPLATES = {pattern: _Template(pattern.value, BACKEND) for pattern in Pattern}
"""The library's protocol of each pattern."""


class Handshake:
    """One side of one handshake.

    After any error it is damaged: drop it and close the connection.

    :param remote: the other side's static key; needed by all but the
        responder of XK.
    :param ephemeral: only for tests with recorded randomness.
    """

    __slots__ = ("_pattern", "_remote", "_state", "result")

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
        if remote is None and (initiator or pattern is Pattern.KK):
            raise LocalProtocolError(f"the remote key is needed for this side of {pattern.name}")
        self._pattern = pattern
        self._remote = remote
        self._state = HandshakeState.initialize(
            TEMPLATES[pattern],
            initiator,
            prologue,
            s=Secp256k1KeyPair.of(local),
            e=None if ephemeral is None else Secp256k1KeyPair.of(ephemeral),
            rs=None if remote is None else Secp256k1KeyPair.of_remote(remote),
        )
        self.result = None

    def write_message(self, payload: bytes = b"") -> bytes:
        """The next handshake message.

        :raises LocalProtocolError: it is the other side's turn.
        """
        self._check_turn(writes=True)
        message = bytearray()
        self._finish(self._state.write_message(payload, message))
        return bytes(message)

    def read_message(self, message: bytes) -> bytes:
        """Take the other side's message; returns its payload.

        :raises HandshakeError: too short or too long, a key that is no point,
            or a tag that does not fit.
        :raises LocalProtocolError: it is this side's turn.
        """
        if len(message) > MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError("handshake message is too long")
        self._check_turn(writes=False)
        payload = bytearray()
        try:
            ciphers = self._state.read_message(bytes(message), payload)
        except InvalidTag:
            raise HandshakeError("handshake message is not authentic") from None
        except (KeyFormatError, ValueError) as error:
            raise HandshakeError(f"handshake message is malformed: {error}") from None
        self._finish(ciphers)
        return bytes(payload)

    def _check_turn(self, *, writes: bool) -> None:
        if self.result is not None:
            raise LocalProtocolError("the handshake is done")
        state = self._state
        turn = len(TEMPLATES[self._pattern].pattern.tokens) - len(state.message_patterns)
        if (turn % 2 == 0) is not (state.initiator is writes):
            raise LocalProtocolError(f"it is {'the other' if writes else 'this'} side's turn to write")

    def _finish(self, ciphers: tuple[CipherState, CipherState] | None) -> None:
        """Take the result if there is one.

        :param ciphers: what the library makes of the last message: the specification's first cipher is the initiator's.
        """
        if ciphers is None:
            return
        state, self._state = self._state, None
        send, receive = (cipher.k for cipher in ciphers)
        # The specification's order is turned for the responder, and the reference turns XK's again.
        if state.initiator is (self._pattern is Pattern.XK):
            send, receive = receive, send
        self.result = HandshakeResult(
            remote=self._remote or state.rs.public,
            send_key=send,
            receive_key=receive,
            hash=state.symmetric_state.get_handshake_hash(),
        )
