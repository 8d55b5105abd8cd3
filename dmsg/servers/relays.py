"""Interfaces of a relay that servers use. They are the same for all protocol families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Protocol, TypeVar

from dmsg.base.policing import ClientLimits, Policer
from dmsg.base.ports import Port
from dmsg.errors import DropReason
from dmsg.keys import PubKey
from dmsg.net.links.link import Link


class ServedPeer(Hashable, Protocol):
    """Interface of the object with which a relay represents a connected client.

    :ivar congested: whether the client reads more slowly than the relay sends to it.
    :ivar frames_in: number of frames that the client has sent.
    :ivar bytes_in: number of bytes in these frames.
    """

    congested: bool
    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """Key of the client."""

    @property
    def port(self) -> Port:
        """Output of the connection to the client; the relay sends frames through it."""

    @property
    def police(self) -> Policer:
        """Limiter of the rates at which the client may send frames."""


PeerT = TypeVar("PeerT", bound=ServedPeer)
LimitsT = TypeVar("LimitsT", bound=ClientLimits)


class ServedRelay(Protocol[PeerT, LimitsT]):
    """Interface of the relay of a protocol family: the part of a server without sockets.

    :ivar limits: limits for each client, which may be changed at any time.
    :ivar drops: number of dropped frames and refused clients, by :class:`~dmsg.errors.DropReason`.
    :ivar draining: whether new transports are refused, because the server shuts down.
    :ivar steps: number of frames of the last read that the relay handled one by one. The other frames each belonged to
        the same transport as the frame before, and were forwarded together with it.
    :ivar strays: number of the frames in ``steps`` that belonged to no transport and exceeded the client's limit of
        such frames.
    :ivar refused: number of the frames in ``steps`` that exceeded the rate limit of their destination.
    """

    limits: LimitsT
    drops: Counter[DropReason]
    draining: bool
    steps: int
    strays: int
    refused: int

    @property
    def peers(self) -> Collection[PeerT]:
        """Connected clients."""

    @property
    def frames(self) -> int:
        """Number of frames received since the start."""

    @property
    def frame_bytes(self) -> int:
        """Number of bytes in the frames received since the start."""

    def add(self, key: PubKey, port: Link) -> PeerT:
        """Add a client, and return the object that represents it."""

    def remove(self, peer: PeerT, limit: int) -> bool:
        """Close at most ``limit`` transports of a client that has disconnected; return whether none is left."""

    def receive_frames(self, peer: PeerT, buffer: bytearray, end: int, limit: int) -> int:
        """Process whole frames from the start of ``buffer``; return the number of bytes processed.

        :param end: number of bytes in ``buffer`` that may be processed.
        :param limit: maximum number of frames that are handled one by one.
        """

    def congest(self, peer: PeerT) -> None:
        """Mark a client as congested, because its send queue is above the high-water mark."""

    def relieve(self, peer: PeerT) -> None:
        """End the congestion of a client, because its send queue is empty again, and send it queued data."""
