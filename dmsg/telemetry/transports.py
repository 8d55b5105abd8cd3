"""Counters of a transport for telemetry, and the interface through which its relay reports what happens to it. No I/O,
no clock.

A relay of any protocol family counts frames in each :class:`DirectionCounts`, with or without telemetry. An
:class:`Observer`, if there is one, is called when a transport is requested, accepted, refused or closed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dmsg.errors import DropReason
from dmsg.telemetry.receipts import transport_identity
from dmsg.telemetry.schema import BOUNDS, BUCKETS


class DirectionCounts(Protocol):
    """Interface of the counters of one direction of a transport, which the relay maintains.

    Calling the observer for every frame would be too slow. Telemetry increments the relay's ``tick`` once a second. The
    relay calls :meth:`Observer.progress` for frames of a direction only while the direction's ``tick`` differs from its
    own.

    :ivar frames: number of frames that passed in this direction: data, and ACKs for data of the opposite direction.
    :ivar acks: number of ACKs among these frames.
    :ivar wire: bytes of these frames, with their headers.
    :ivar dropped: bytes of user data that were counted but never sent to the receiver.
    :ivar queued: bytes of this direction that the relay may not have sent to the receiver yet.
    :ivar carried: record that telemetry keeps of the transport.
    :ivar tick: relay's tick in which frames of this direction were last reported; -1 to report the next frames at once.
    :ivar seen: relay's tick in which frames last passed in this direction.
    :ivar asked_at: time at which a data frame passed whose ACK is awaited, to measure the round trip; else None.
    """

    frames: int
    acks: int
    wire: int
    dropped: int
    queued: int
    carried: TransportRecord | None
    tick: int
    seen: int
    asked_at: float | None

    @property
    def back(self) -> DirectionCounts:
        """Opposite direction."""

    def user_data(self, secure: bool) -> int:
        """Return the bytes of user data accepted for this direction."""


class ClientAddress(Protocol):
    """Interface of an object that has the network address of a client."""

    address: str


class Peer(Protocol):
    """Interface of a relay's record of a client.

    :ivar frames_in: number of frames received from the client.
    :ivar bytes_in: bytes of these frames.
    """

    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """Public key of the client."""

    @property
    def port(self) -> ClientAddress:
        """Connection of the client."""


class CountingRelay(Protocol):
    """Interface through which telemetry reads the counters of a relay.

    :ivar tick: number that telemetry increments each second. The relay reports directions whose own ``tick`` differs.
    :ivar route_count: number of directions of the open transports, two for each transport.
    """

    tick: int
    drops: Counter[DropReason]
    route_count: int

    @property
    def frames(self) -> int:
        """Number of frames received since the start."""

    @property
    def frame_bytes(self) -> int:
        """Number of bytes in the frames received since the start."""


class Observer(Protocol):
    """Interface through which a relay reports its transports."""

    def requested(
        self, source: Peer, forward: DirectionCounts, back: DirectionCounts, payload: bytes, target: bytes, secure: bool
    ) -> TransportRecord:
        """Record a client's request for a transport that was forwarded.

        :param payload: payload of the request, which identifies the transport.
        :param target: public key of the client that was asked for.
        """

    def accepted(self, record: TransportRecord, payload: bytes) -> None:
        """Record that the answer to a request was forwarded."""

    def refused(self, source: Peer, target: bytes, reason: str) -> None:
        """Record a request that was refused instead of forwarded.

        :param target: public key of the client that was asked for, or the part of it that arrived.
        """

    def ended(self, record: TransportRecord, reason: int, by: str) -> None:
        """Record the end of a transport.

        :param by: src, dst or server.
        """

    def progress(self, record: TransportRecord, route: DirectionCounts, data: int, acks: int) -> None:
        """Record ``data`` data frames and ``acks`` ACKs of a direction; called only if the direction's tick differs
        from the relay's."""

    def receipt(self, source: Peer, payload: bytes) -> bool:
        """Record a client's receipt; return False if none was due or the receipt is invalid."""


def share_loss(ways: Sequence[DirectionCounts], left: int, congested: bool) -> None:
    """Count the bytes queued for a disconnected peer as dropped, shared among the directions that lead to it.

    The sum is exact except for frame headers. The share of each of several directions is an estimate.

    :param ways: directions that lead to the peer.
    :param left: number of bytes that were not sent.
    :param congested: whether the peer is congested. Only then does ``queued`` count the bytes of each direction;
        otherwise each direction may have had all of the bytes.
    """
    parts = [min(way.wire, way.queued if congested else left) for way in ways]
    total = sum(parts)
    for way, part in zip(ways, parts, strict=True):
        if part and way.carried is not None:
            lost = part if total <= left else part * left // total
            way.dropped += way.user_data(way.carried.secure) * lost // way.wire


@dataclass(slots=True, eq=False)
class TransportRecord:
    """Record of a transport, from the relay's reports.

    :ivar forward: direction from the client that asked.
    :ivar back: direction to that client.
    :ivar opened: time of the REQUEST, in seconds.
    :ivar accepted: time of the ACCEPT, or None.
    :ivar rtt: numbers of samples in the buckets of :data:`~dmsg.telemetry.schema.BOUNDS`, or None without samples.
    """

    forward: DirectionCounts
    back: DirectionCounts
    request: bytes | None
    source: bytes
    target: bytes
    secure: bool
    opened: float
    identity: bytes | None = None
    accepted: float | None = None
    rtt: list[int] | None = None
    reported: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """Counts that the last event reported: data, frames and ACKs, in both directions."""

    def accept(self, payload: bytes, now: float) -> None:
        """Record the ACCEPT."""
        if self.request is not None:
            self.identity = transport_identity(self.request, payload)
            self.request = None
            self.accepted = now

    def sample(self, seconds: float) -> None:
        """Add a sample: the seconds from a FWD to its ACK."""
        if self.rtt is None:
            self.rtt = [0] * BUCKETS
        self.rtt[bisect_left(BOUNDS, seconds)] += 1

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Return the numbers of bytes of user data, FWD frames and ACKs since the start, each for both directions."""
        there, back = self.forward, self.back
        return (
            there.user_data(self.secure),
            back.user_data(self.secure),
            there.frames - there.acks,
            back.frames - back.acks,
            back.acks,
            there.acks,
        )
