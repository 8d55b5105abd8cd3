"""KK handshake in OpenChannel and ChannelOpened.  No I/O.

:class:`Proposal` is the opener's side and :class:`Offer` the responder's.  Each takes the other's message and ends with
the ciphers of the channel, or raises :exc:`~dmsg.errors.HandshakeError`.  An error changes only the handshake itself,
which cannot be used any more.

The pattern is ``Noise_KK_Secp256k1_ChaChaPoly_SHA256`` with empty prologue and payloads, so both messages have 49
bytes.  Both ends must know the other's static key, which the server tells the responder in OpenChannel.  A server that
tells a wrong key makes the handshake fail.  But it can replay a recorded OpenChannel, so the responder knows the opener
is live only from the first data.  Source: the seed document, section Noise Implementation in Channels.
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
    """Initiator's side of the handshake.

    :ivar message: Noise message 1, 49 bytes.
    """

    __slots__ = ("_handshake", "_profile", "message")

    def __init__(self, key: SecKey, remote: PubKey, profile: Profile, *, ephemeral: SecKey | None = None) -> None:
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=True, remote=remote, ephemeral=ephemeral)
        self.message = self._handshake.write_message()

    def process_answer(self, message: bytes) -> ChannelCiphers:
        """Process the remote's Noise message 2 and return the ciphers.

        :raises HandshakeError: the message is not an authentic answer to this OpenChannel.
        """
        _take(self._handshake, message)
        return _ciphers(self._handshake.result, self._profile)


class Offer:
    """Responder's side of the handshake, made from an authentic OpenChannel."""

    __slots__ = ("_handshake", "_profile")

    def __init__(
        self, key: SecKey, remote: PubKey, message: bytes, profile: Profile, *, ephemeral: SecKey | None = None
    ) -> None:
        """:raises HandshakeError: the message is malformed or not authentic."""
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=False, remote=remote, ephemeral=ephemeral)
        _take(self._handshake, message)

    def accept(self) -> tuple[ChannelCiphers, bytes]:
        """Return the ciphers, and Noise message 2 of 49 bytes."""
        message = self._handshake.write_message()
        return _ciphers(self._handshake.result, self._profile), message


def _take(handshake: Handshake, message: bytes) -> None:
    # A longer message can be valid Noise with a payload. Such a message is refused, because both ends use empty
    # payloads.
    if len(message) != NOISE_MESSAGE_SIZE:
        raise HandshakeError(f"noise message has {len(message)} bytes instead of {NOISE_MESSAGE_SIZE}")
    handshake.read_message(message)
