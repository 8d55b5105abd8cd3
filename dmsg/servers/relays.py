"""Interfaces of a relay, independent of its protocol family, that the server uses."""

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
    """Interface of the relay's record of a connected client.

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
        """Connection of the client."""

    @property
    def police(self) -> Policer:
        """Rate limits of the client's frames."""


PeerT = TypeVar("PeerT", bound=ServedPeer)
LimitsT = TypeVar("LimitsT", bound=ClientLimits)


class ServedRelay(Protocol[PeerT, LimitsT]):
    """Interface of the relay of a protocol family, without its sockets.

    :ivar limits: limits of one client, which may be changed at any time.
    :ivar drops: number of drops by :class:`~dmsg.errors.DropReason`.
    :ivar draining: whether new transports are refused.
    :ivar steps: number of frames of the last read that were handled one by one.
    :ivar strays: number of these ``steps`` for frames of no known transport, sent faster than a client may.
    :ivar refused: number of these ``steps`` for frames that exceeded the rate limit of their destination.
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
        """Serve a client."""

    def remove(self, peer: PeerT, limit: int) -> bool:
        """Close at most ``limit`` transports of a client that is lost; return whether none is left."""

    def receive_frames(self, peer: PeerT, buffer: bytearray, end: int, limit: int) -> int:
        """Process whole frames, at most ``limit`` of them one by one. Return the number of bytes processed."""

    def congest(self, peer: PeerT) -> None:
        """Mark a client congested, because its queue is above the high-water mark."""

    def relieve(self, peer: PeerT) -> None:
        """Send queued data to a client, because its queue is empty again."""
