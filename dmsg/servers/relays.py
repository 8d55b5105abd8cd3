"""Interface of the relay of any family, as the server around it uses the relay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable
from typing import Protocol, TypeVar

from dmsg.base.policing import ClientLimits, Police
from dmsg.base.ports import Port
from dmsg.errors import DropReason
from dmsg.keys import PubKey
from dmsg.net.links.link import Link


class ServedPeer(Hashable, Protocol):
    """One connection, as the relay keeps it.

    :ivar congested: whether the client reads more slowly than the relay sends to it.
    :ivar frames_in: number of frames that the client has sent; ``bytes_in``: their bytes.
    """

    congested: bool
    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """Key of the client."""

    @property
    def port(self) -> Port:
        """The client's connection."""

    @property
    def police(self) -> Police:
        """Rates of the client's frames."""


PeerT = TypeVar("PeerT", bound=ServedPeer)
LimitsT = TypeVar("LimitsT", bound=ClientLimits)


class ServedRelay(Protocol[PeerT, LimitsT]):
    """Relay of a family, without its sockets.

    :ivar limits: what one client may have; may be set at any time.
    :ivar drops: how often each :class:`~dmsg.errors.DropReason` occurred.
    :ivar draining: whether new transports are refused.
    :ivar steps: frames that the last read had handled one by one; ``strays``: frames of no transport among them, beyond
        what a client may send; ``refused``: those that were over the rate of their destination.
    """

    limits: LimitsT
    drops: Counter[DropReason]
    draining: bool
    steps: int
    strays: int
    refused: int

    @property
    def peers(self) -> Collection[PeerT]:
        """The connected clients."""

    @property
    def frames(self) -> int:
        """Frames received since the start."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of frames received since the start."""

    def add(self, key: PubKey, port: Link) -> PeerT:
        """Serve a client."""

    def remove(self, peer: PeerT, most: int) -> bool:
        """Close at most ``most`` transports of a client that is gone; return whether none is left."""

    def receive_frames(self, peer: PeerT, buffer: bytearray, end: int, limit: int) -> int:
        """Take whole frames, ``limit`` of them one by one; return the number of bytes taken."""

    def congest(self, peer: PeerT) -> None:
        """Send less to a client: its queue is above the high-water mark."""

    def relieve(self, peer: PeerT) -> None:
        """Send to a client again: its queue is empty."""
