"""Interfaces of the two objects that a link uses: its handshake, and its user."""

from __future__ import annotations

from typing import Protocol, TypeVar

from twisted.python.failure import Failure

from dmsg.keys import PubKey

LinkT_contra = TypeVar("LinkT_contra", contravariant=True)


class LinkHandshake(Protocol):
    """Interface of a handshake over a byte stream.

    A handshake cannot be used any more after an error. A handshake does not depend on the frames that follow it. Any
    kind of link can use any handshake that has the attributes which the link needs.

    :ivar remote: public key of the peer; None until the handshake is complete.
    """

    remote: PubKey | None

    def data_to_send(self) -> bytes:
        """Return the bytes to send now, and clear them."""

    def receive_data(self, data: bytes) -> None:
        """Process bytes from the peer.

        :raises HandshakeError: the handshake failed.
        """

    def trailing_data(self) -> bytes:
        """Return the received bytes after the last handshake message."""


class LinkUser(Protocol[LinkT_contra]):
    """Interface of the user of a link: the object that handles its frames."""

    def link_up(self, link: LinkT_contra) -> None:
        """Start to use the link. The handshake is complete, and ``link.remote`` is the peer's key."""

    def frames_received(self, buffer: bytearray, end: int) -> int:
        """Process the whole frames at the start of ``buffer``, which may be modified.

        :param end: number of received bytes in ``buffer``.
        :returns: number of bytes processed. The link passes the rest again, together with the next bytes.
        :raises RemoteProtocolError: the peer violated the protocol, and the link must end.
        """

    def link_congested(self) -> None:
        """Stop sending, because more than ``HIGH_WATER`` bytes are queued."""

    def link_relieved(self) -> None:
        """Continue to send, because the queue is empty again."""

    def link_lost(self, reason: Failure) -> None:
        """Handle the loss of the connection."""
