"""Noise handshake without I/O: messages in and out, and two keys at the end.

A :class:`Handshake` decides whose turn it is and whether a message is authentic.  It takes the static keys, writes and
reads one message at a time, and ends with a :class:`HandshakeResult`: both sides then have the same two keys and the
same hash.  After any error the object cannot be used any more.  Message 1 of KK can be recorded and replayed.  So the
responder of KK knows that the initiator is live only from the initiator's first message under the new keys.

``noiseprotocol`` implements the two patterns of the reference (Noise specification, revision 34, sections 5 and 7)
with the functions of ``dmsg.noise.suite``.  ``->`` is sent by the initiator; without payloads the messages are::

    XK  <- s          known before
        -> e, es      49 bytes
        <- e, ee      49 bytes
        -> s, se      65 bytes
    KK  -> s          known before
        <- s          known before
        -> e, es, ss  49 bytes
        <- e, ee, se  49 bytes

This module adds checks of the turns, the errors of dmsg, and the assignment of keys that the reference uses. Length
prefixes are added by :mod:`dmsg.noise.xk`, records by :mod:`dmsg.noise.records`.

The 2019 reference gives the *writer of the last message* its two keys in the reverse order of the Noise specification.
In ``noise/noise.go`` this is ``res, ns.dec, ns.enc, err = ns.hs.WriteMessage(...)``. In XK, with three messages, the
writer is the initiator, so both sides swap. In KK, with two messages, the result is the assignment of the
specification.
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
"""Maximum size in bytes of a handshake message in any protocol family: with its length prefix it fits into 4 KiB."""
MAX_HANDSHAKE_MESSAGE = 65535
"""Maximum size of a handshake message in bytes by the Noise specification (section 3)."""
HANDSHAKE_FRAMES = 64
"""Number of frames for which one handshake counts in limits of frames per read, because computing its keys takes a
third of a millisecond."""


class Pattern(Enum):
    """Handshake patterns of the reference."""

    XK = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"
    KK = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """Result of a finished handshake.

    :ivar remote: static key of the other side, which it has proved to have.
    :ivar send_key: 32 bytes, the key that encrypts the data that this side sends.
    :ivar receive_key: 32 bytes, the key that decrypts the data that this side receives.
    :ivar hash: 32 bytes, the handshake hash (channel binding).
    """

    remote: PubKey
    send_key: bytes
    receive_key: bytes
    hash: bytes


class _SharedState:
    """Attribute of a template that ignores assignments and gives the library fixed answers.

    :ivar initiator: fixed role. From it the library chooses the attributes for the two final ciphers, and both
        assignments are ignored.
    """

    initiator = True

    def __get__(self, instance: object, owner: type) -> _SharedState:
        return self

    def __set__(self, instance: object, value: object) -> None:
        pass

    def has_key(self) -> bool:
        """Return True: in both patterns a static key in a message is encrypted."""
        return True


class _Template(NoiseProtocol):  # type: ignore[misc]  # noiseprotocol has no types
    """Pattern with its functions, looked up once and shared by all its handshakes.

    The library stores the state of a handshake in its protocol object. Here these assignments are ignored.  This keeps
    handshakes independent, leaves no key in the template, and avoids a reference cycle, so that an abandoned handshake
    is freed at once.
    """

    handshake_state = cipher_state_handshake = cipher_state_encrypt = cipher_state_decrypt = _SharedState()

    def handshake_done(self) -> None:
        """Do nothing, so that the functions are kept, which the library would delete."""


TEMPLATES = {pattern: _Template(pattern.value, BACKEND) for pattern in Pattern}
"""Protocol object of the library for each pattern."""


class Handshake:
    """State of one side of a handshake.

    After any error the object is unusable: drop it and close the connection.

    :param remote: static key of the other side, needed by all but the responder of XK.
    :param ephemeral: ephemeral key, only for tests with recorded randomness.
    """

    __slots__ = ("_pattern", "_remote", "_state", "result")

    result: HandshakeResult | None
    """Result; None until the last message was written or read."""

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
        """Return the next handshake message.

        :raises LocalProtocolError: it is the other side's turn.
        """
        self._check_turn(writes=True)
        message = bytearray()
        self._finish(self._state.write_message(payload, message))
        return bytes(message)

    def read_message(self, message: bytes) -> bytes:
        """Process a message of the other side and return its payload.

        :raises HandshakeError: the message is too short or too long, contains a key that is not a point of the curve,
            or is not authentic.
        :raises LocalProtocolError: it is this side's turn.
        """
        if len(message) > MAX_HANDSHAKE_MESSAGE:
            raise HandshakeError("handshake message is too long")
        # The turn is checked before the message: reading at the wrong time is an error of the caller, and not of the
        # peer.
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
            raise LocalProtocolError("the handshake is complete: it takes no further message")
        state = self._state
        turn = len(TEMPLATES[self._pattern].pattern.tokens) - len(state.message_patterns)
        if (turn % 2 == 0) is not (state.initiator is writes):
            raise LocalProtocolError(
                f"it is {'the other' if writes else 'this'} side's turn to write a handshake message"
            )

    def _finish(self, ciphers: tuple[CipherState, CipherState] | None) -> None:
        """Store the keys in ``result`` if the handshake is complete; otherwise do nothing.

        :param ciphers: two ciphers that the library returns after the last message, and None after the others. In the
            specification the initiator sends with the first one.
        """
        if ciphers is None:
            return
        # The library's state holds the ephemeral key. It is dropped here, for forward secrecy as early as possible.
        state, self._state = self._state, None
        send, receive = (cipher.k for cipher in ciphers)
        # The responder swaps the specification's order, and the reference swaps the order of XK once more.
        if state.initiator is (self._pattern is Pattern.XK):
            send, receive = receive, send
        self.result = HandshakeResult(
            remote=self._remote or state.rs.public,
            send_key=send,
            receive_key=receive,
            hash=state.symmetric_state.get_handshake_hash(),
        )
