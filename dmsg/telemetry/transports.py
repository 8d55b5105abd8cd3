"""Counters of a transport for telemetry, and the interface through which a relay reports events of transports. No I/O,
no clock.

A relay of any protocol family counts frames in :class:`DirectionCounts`, with or without telemetry. With telemetry, the
relay calls an :class:`Observer` when a transport is requested, accepted, refused or closed.
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

    A call of the observer for every frame would be too slow. Therefore telemetry increments the relay's ``tick`` once a
    second, and the relay calls :meth:`Observer.progress` only while the ``tick`` of the frame's direction differs from
    the relay's ``tick``.

    :ivar frames: number of frames forwarded in this direction: data frames, and ACKs for data of the opposite
        direction.
    :ivar acks: number of ACKs among the frames in ``frames``.
    :ivar wire: number of bytes of the frames in ``frames``, with their headers.
    :ivar dropped: bytes of user data that were counted as accepted, but never sent to the receiver.
    :ivar queued: bytes of this direction that the relay has perhaps not sent to the receiver yet.
    :ivar carried: telemetry's record of the transport; None without telemetry.
    :ivar tick: relay's tick in which frames of this direction were last reported; -1 to report the next frames at once.
    :ivar seen: relay's tick in which :meth:`Observer.progress` was last called for this direction.
    :ivar asked_at: time at which a data frame was forwarded whose ACK is awaited to measure the round trip; None if no
        ACK is awaited.
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
        """Counters of the opposite direction."""

    def user_data(self, secure: bool) -> int:
        """Return the bytes of user data accepted for this direction."""


class ClientAddress(Protocol):
    """Interface of an object that has the network address of a client."""

    address: str


class Peer(Protocol):
    """Interface of the object in which a relay records a client.

    :ivar frames_in: number of frames received from the client.
    :ivar bytes_in: number of bytes of the frames in ``frames_in``.
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

    :ivar tick: number that telemetry increments each second; see :class:`DirectionCounts`.
    :ivar drops: number of drops by reason.
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
        """Record that a client's request for a transport was forwarded.

        :param payload: payload of the request, which is part of the transport's id.
        :param target: public key of the requested client.
        """

    def accepted(self, record: TransportRecord, payload: bytes) -> None:
        """Record that the ACCEPT of a transport was forwarded.

        :param payload: payload of the ACCEPT.
        """

    def refused(self, source: Peer, target: bytes, reason: str) -> None:
        """Record a request that was refused instead of forwarded.

        :param target: public key of the requested client, or the part of the key that arrived.
        """

    def ended(self, record: TransportRecord, reason: int, by: str) -> None:
        """Record the end of a transport.

        :param by: party that ended it: ``src``, ``dst`` or ``server``.
        """

    def progress(self, record: TransportRecord, route: DirectionCounts, data: int, acks: int) -> None:
        """Record that ``data`` data frames and ``acks`` ACKs were forwarded in a direction. The relay calls this method
        only if the direction's ``tick`` differs from the relay's."""

    def receipt(self, source: Peer, payload: bytes) -> bool:
        """Record a client's receipt. Return False if the receipt is invalid, or was not due."""


def share_loss(directions: Sequence[DirectionCounts], unsent: int, congested: bool) -> None:
    """Count the bytes that were queued for a disconnected peer as dropped, in the directions that lead to this peer.

    The sum over all directions is exact, except for frame headers. With several directions, the share of each is an
    estimate.

    :param directions: directions that lead to the peer.
    :param unsent: number of queued bytes that were not sent.
    :param congested: whether the peer was congested. The relay counts ``queued`` of each direction only for a congested
        peer. For any other peer, each direction may have had up to ``unsent`` queued bytes.
    """
    parts = [min(direction.wire, direction.queued if congested else unsent) for direction in directions]
    total = sum(parts)
    for direction, part in zip(directions, parts, strict=True):
        if part and direction.carried is not None:
            lost = part if total <= unsent else part * unsent // total
            direction.dropped += direction.user_data(direction.carried.secure) * lost // direction.wire


@dataclass(slots=True, eq=False)
class TransportRecord:
    """Telemetry's record of a transport.

    :ivar forward: direction from the initiator to the responder.
    :ivar back: direction from the responder to the initiator.
    :ivar request: payload of the REQUEST; None once the transport is accepted.
    :ivar opened: time of the REQUEST, in seconds.
    :ivar identity: id of the transport; None before it is accepted.
    :ivar accepted: time of the ACCEPT, in seconds; None before it.
    :ivar rtt: number of round-trip samples in each bucket of :data:`~dmsg.telemetry.schema.BOUNDS`; None without
        samples.
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
    """The result of :meth:`counts` at the transport's last event."""

    def accept(self, payload: bytes, now: float) -> None:
        """Record the first ACCEPT, and compute the transport's id. A repeated ACCEPT is ignored."""
        if self.request is not None:
            self.identity = transport_identity(self.request, payload)
            self.request = None
            self.accepted = now

    def sample(self, seconds: float) -> None:
        """Add a sample of the round trip: the seconds from a FWD to its ACK."""
        if self.rtt is None:
            self.rtt = [0] * BUCKETS
        self.rtt[bisect_left(BOUNDS, seconds)] += 1

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Return the bytes of user data, the number of FWD frames, and the number of ACKs for FWD frames since the
        transport was opened, each for both directions."""
        there, back = self.forward, self.back
        return (
            there.user_data(self.secure),
            back.user_data(self.secure),
            there.frames - there.acks,
            back.frames - back.acks,
            back.acks,
            there.acks,
        )
