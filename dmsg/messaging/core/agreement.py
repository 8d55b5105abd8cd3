"""The KK handshake in OpenChannel and ChannelOpened.  No I/O.

``Noise_KK_Secp256k1_ChaChaPoly_SHA256``, empty prologue, empty payloads: both
messages have 49 bytes.  Source: the seed document, section Noise Implementation in Channels.
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
    """The initiator's side.  :ivar message: noise message 1, 49 bytes."""

    __slots__ = ("_handshake", "_profile", "message")

    def __init__(self, key: SecKey, remote: PubKey, profile: Profile, *, ephemeral: SecKey | None = None) -> None:
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=True, remote=remote, ephemeral=ephemeral)
        self.message = self._handshake.write_message()

    def accepted(self, message: bytes) -> ChannelCiphers:
        """The remote's noise message 2 is there.

        :raises HandshakeError: it is not the answer to this OpenChannel.
        """
        _take(self._handshake, message)
        return _ciphers(self._handshake.result, self._profile)


class Offer:
    """The responder's side: an OpenChannel that is authentic."""

    __slots__ = ("_handshake", "_profile")

    def __init__(
        self, key: SecKey, remote: PubKey, message: bytes, profile: Profile, *, ephemeral: SecKey | None = None
    ) -> None:
        """:raises HandshakeError: the message is not authentic or malformed."""
        self._profile = profile
        self._handshake = Handshake(Pattern.KK, key, initiator=False, remote=remote, ephemeral=ephemeral)
        _take(self._handshake, message)

    def accept(self) -> tuple[ChannelCiphers, bytes]:
        """The ciphers, and noise message 2, 49 bytes."""
        message = self._handshake.write_message()
        return _ciphers(self._handshake.result, self._profile), message


def _take(handshake: Handshake, message: bytes) -> None:
    if len(message) != NOISE_MESSAGE_SIZE:
        raise HandshakeError(f"noise message has {len(message)} bytes instead of {NOISE_MESSAGE_SIZE}")
    handshake.read_message(message)
