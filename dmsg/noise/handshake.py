"""Noise handshake without I/O: processes and produces handshake messages, and derives two keys.

A :class:`Handshake` checks whose turn it is and whether a message is authentic.  It is created with the static keys,
writes and reads one message at a time, and ends with a :class:`HandshakeResult`: both sides then have the same two keys
and the same hash.  After any error the object cannot be used any more.  An attacker can record message 1 of KK and
replay it.  So the responder of KK knows that the initiator is live only after the initiator's first message under the
new keys.

The package ``noiseprotocol`` implements the two patterns of the 2019 reference implementation (Noise specification,
revision 34, sections 5 and 7) with the functions of ``dmsg.noise.suite``.  The initiator sends the messages marked
``->``.  Sizes are those of messages without payload::

    XK  <- s          known before
        -> e, es      49 bytes
        <- e, ee      49 bytes
        -> s, se      65 bytes
    KK  -> s          known before
        <- s          known before
        -> e, es, ss  49 bytes
        <- e, ee, se  49 bytes

This module adds checks of the turns, the errors of dmsg, and the order in which the reference implementation assigns
the two keys. :mod:`dmsg.noise.xk` adds length prefixes, :mod:`dmsg.noise.records` encrypts records.

In the reference implementation, the *writer of the last message* always receives with the first key and sends with the
second. In ``noise/noise.go`` this is ``res, ns.dec, ns.enc, err = ns.hs.WriteMessage(...)``. In KK the writer is the
responder, and the Noise specification requires the same order of a responder. In XK the writer is the initiator, of
which the specification requires the reverse order. So both sides of XK use the two keys the other way round.
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

MAX_FRAMED_MESSAGE = 4094
"""Maximum size in bytes of a handshake message in any protocol family. With its 2-byte length prefix it fits into 4
KiB."""
MAX_HANDSHAKE_MESSAGE = 65535
"""Maximum size in bytes of a handshake message according to the Noise specification, section 3."""
HANDSHAKE_FRAMES = 64
"""Number of frames for which one handshake counts in the limit of frames per read. Computing the keys of a handshake
takes a third of a millisecond."""


class Pattern(Enum):
    """Noise handshake patterns that the reference implementation uses."""

    XK = b"Noise_XK_Secp256k1_ChaChaPoly_SHA256"
    KK = b"Noise_KK_Secp256k1_ChaChaPoly_SHA256"


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """Result of a finished handshake.

    :ivar remote: static key of the other side, which has proved that it has the secret key.
    :ivar send_key: 32 bytes, the key that encrypts the data that this side sends.
    :ivar receive_key: 32 bytes, the key that decrypts the data that this side receives.
    :ivar hash: 32 bytes, the handshake hash (channel binding).
    """

    remote: PubKey
    send_key: bytes
    receive_key: bytes
    hash: bytes


class _SharedState:
    """Descriptor that ignores assignments, so that ``noiseprotocol`` stores no state of a handshake in a shared
    template.

    A template's attributes for the state are such descriptors. If ``noiseprotocol`` reads such an attribute, it gets
    this object, which has only constants.

    :ivar initiator: constant from which ``noiseprotocol`` determines the two attributes to which it assigns the final
        ciphers. The value does not matter, because both assignments are ignored.
    """

    initiator = True

    def __get__(self, instance: object, owner: type) -> _SharedState:
        return self

    def __set__(self, instance: object, value: object) -> None:
        pass

    def has_key(self) -> bool:
        """Return True: a static key in a received message is encrypted in both patterns. ``noiseprotocol`` calls this
        method to determine the size of such a key."""
        return True


class _Template(NoiseProtocol):  # type: ignore[misc]  # noiseprotocol has no types
    """Object of ``noiseprotocol`` for one pattern, which all handshakes with this pattern share.

    The object looks up its cryptographic functions once. ``noiseprotocol`` also tries to store the state of a handshake
    in the object, but these assignments are ignored.  So handshakes are independent of each other, and no key remains
    in the template. There is also no reference cycle, so Python frees an abandoned handshake at once.
    """

    handshake_state = cipher_state_handshake = cipher_state_encrypt = cipher_state_decrypt = _SharedState()

    def handshake_done(self) -> None:
        """Do nothing. The overridden method deletes the cryptographic functions, which the next handshake needs."""


TEMPLATES = {pattern: _Template(pattern.value, BACKEND) for pattern in Pattern}
"""Shared object of ``noiseprotocol`` for each pattern."""


class Handshake:
    """State of one side of a handshake.

    After any error the object is unusable: drop it and close the connection.

    :param remote: static key of the other side. Only the responder of XK does not need it.
    :param ephemeral: ephemeral key, only for tests that replay a recorded handshake.
    """

    __slots__ = ("_pattern", "_remote", "_state", "result")

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
        # The turn is checked before the content of the message: reading out of turn is an error of the caller, not of
        # the peer.
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
            raise LocalProtocolError("the handshake is complete: no further message is allowed")
        state = self._state
        turn = len(TEMPLATES[self._pattern].pattern.tokens) - len(state.message_patterns)
        if (turn % 2 == 0) is not (state.initiator is writes):
            raise LocalProtocolError(
                f"it is {'the other' if writes else 'this'} side's turn to write a handshake message"
            )

    def _finish(self, ciphers: tuple[CipherState, CipherState] | None) -> None:
        """Store the keys in ``result`` if the handshake is complete; otherwise do nothing.

        :param ciphers: the two ciphers that ``noiseprotocol`` returns after the last message; None after earlier
            messages. By the specification, the initiator sends with the first cipher and receives with the second.
        """
        if ciphers is None:
            return
        # The state of ``noiseprotocol`` contains the ephemeral key. It is deleted as early as possible, for forward
        # secrecy.
        state, self._state = self._state, None
        send, receive = (cipher.k for cipher in ciphers)
        # By the specification, the initiator sends with the first key, and the responder with the second. In XK, the
        # reference implementation swaps the keys at both ends.
        if state.initiator is (self._pattern is Pattern.XK):
            send, receive = receive, send
        self.result = HandshakeResult(
            remote=self._remote or state.rs.public,
            send_key=send,
            receive_key=receive,
            hash=state.symmetric_state.get_handshake_hash(),
        )
