"""Interfaces of the two objects that a link works with: its handshake, and its user."""

from __future__ import annotations

from typing import Protocol, TypeVar

from twisted.python.failure import Failure

from dmsg.keys import PubKey

LinkT_contra = TypeVar("LinkT_contra", contravariant=True)


class LinkHandshake(Protocol):
    """Interface of a handshake over a byte stream. After an error the handshake is unusable.

    A handshake does not know which frames follow. Any kind of link may use it that finds the attributes it needs in the
    handshake.

    :ivar remote: public key of the peer; None until the handshake is done.
    """

    remote: PubKey | None

    def data_to_send(self) -> bytes:
        """Return the bytes to send now, and clear them."""

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the peer.

        :raises HandshakeError: the handshake failed.
        """

    def trailing_data(self) -> bytes:
        """Return the bytes that followed the last message of the handshake."""


class LinkUser(Protocol[LinkT_contra]):
    """Interface of the user of a link: the object that handles its frames."""

    def link_up(self, link: LinkT_contra) -> None:
        """Start using the link. The handshake is done, and ``link.remote`` is the peer's key."""

    def frames_received(self, buffer: bytearray, end: int) -> int:
        """Process whole frames from the start of ``buffer``, which may be changed.

        :returns: number of bytes processed. The rest is offered again together with the next bytes.
        :raises RemoteProtocolError: the peer broke the protocol, and the link must end.
        """

    def link_congested(self) -> None:
        """Stop sending: more than ``HIGH_WATER`` bytes are queued."""

    def link_relieved(self) -> None:
        """Continue to send: the queue is empty again."""

    def link_lost(self, reason: Failure) -> None:
        """Handle the loss of the connection."""
