"""What a link stands between: a handshake before it, and what lies above it."""

from __future__ import annotations

from typing import Protocol, TypeVar

from twisted.python.failure import Failure

from dmsg.keys import PubKey

LinkT_contra = TypeVar("LinkT_contra", contravariant=True)


class LinkHandshake(Protocol):
    """A handshake over a byte stream; after an error it is damaged.

    Which frames follow is not its matter: any handshake may stand before any kind of
    link that finds in it what it needs.

    :ivar remote: the peer's key, once the handshake is done.
    """

    remote: PubKey | None

    def data_to_send(self) -> bytes:
        """What has to be sent now, and forget it."""

    def receive_data(self, data: bytes) -> None:
        """Take bytes of the peer.

        :raises HandshakeError: it failed.
        """

    def trailing_data(self) -> bytes:
        """What came after the last message."""


class LinkUser(Protocol[LinkT_contra]):
    """What lies above a link."""

    def link_up(self, link: LinkT_contra) -> None:
        """The handshake is done; ``link.remote`` is the peer's key."""

    def frames_received(self, buffer: bytearray, end: int) -> int:
        """Take whole frames from the start of ``buffer``; may change it.

        :returns: the number of bytes taken; the rest comes again with more.
        :raises RemoteProtocolError: the link is to be ended.
        """

    def link_congested(self) -> None:
        """More than ``HIGH_WATER`` bytes wait to be sent."""

    def link_relieved(self) -> None:
        """All of them are sent."""

    def link_lost(self, reason: Failure) -> None:
        """The connection is gone."""
