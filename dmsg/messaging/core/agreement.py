"""KK handshake in the frames OpenChannel and ChannelOpened.  No I/O.

:class:`Proposal` is the opener's side and :class:`Offer` is the responder's side.  Each processes the other side's
message, and returns the ciphers of the channel or raises :exc:`~dmsg.errors.HandshakeError`.  After an error the object
cannot be used any more; nothing else has changed.

The pattern is ``Noise_KK_Secp256k1_ChaChaPoly_SHA256`` with empty prologue and payloads, so both messages have 49
bytes.  Both ends must know the other's static key. The server writes the opener's key into the OpenChannel for the
responder; if it writes a wrong key, the handshake fails.  But the server can replay a recorded OpenChannel. So the
responder knows that the opener is live only after the opener's first data.  Source: the seed document, section Noise
Implementation in Channels.
"""

from __future__ import annotations

from dmsg.errors import HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.secure import ChannelCiphers
from dmsg.messaging.core.wire import NOISE_MESSAGE_SIZE, Profile
from dmsg.noise.handshake import Handshake, HandshakeResult, Pattern


def _ciphers(result: HandshakeResult | None, profile: Profile) -> ChannelCiphers:
    assert result is not None
    return ChannelCiphers(result.send_key, result.receive_key, rekey=profile is Profile.SKYWIRE)


class Proposal:
    """Opener's side of the handshake.

    :ivar message: Noise message 1, 49 bytes.
    """

    __slots__ = ("_handshake", "_profile", "message")

    def __init__(self, key: SecKey, remote: PubKey, profile: Profile, *, ephemeral: SecKey | None = None) -> None:
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=True, remote=remote, ephemeral=ephemeral)
        self.message = self._handshake.write_message()

    def process_answer(self, message: bytes) -> ChannelCiphers:
        """Process Noise message 2 of the remote, and return the ciphers of the channel.

        :raises HandshakeError: the message is not an authentic answer to this OpenChannel.
        """
        _take(self._handshake, message)
        return _ciphers(self._handshake.result, self._profile)


class Offer:
    """Responder's side of the handshake, created from an authentic OpenChannel."""

    __slots__ = ("_handshake", "_profile")

    def __init__(
        self, key: SecKey, remote: PubKey, message: bytes, profile: Profile, *, ephemeral: SecKey | None = None
    ) -> None:
        """:raises HandshakeError: the message is malformed or not authentic."""
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=False, remote=remote, ephemeral=ephemeral)
        _take(self._handshake, message)

    def accept(self) -> tuple[ChannelCiphers, bytes]:
        """Return the ciphers of the channel, and Noise message 2, which has 49 bytes."""
        message = self._handshake.write_message()
        return _ciphers(self._handshake.result, self._profile), message


def _take(handshake: Handshake, message: bytes) -> None:
    # A longer message could be valid Noise with a payload. It is refused, because both ends use empty payloads.
    if len(message) != NOISE_MESSAGE_SIZE:
        raise HandshakeError(f"noise message has {len(message)} bytes instead of {NOISE_MESSAGE_SIZE}")
    handshake.read_message(message)
