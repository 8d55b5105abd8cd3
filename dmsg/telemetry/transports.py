"""What telemetry keeps of one transport, and what it asks of the relay that carries it.  No I/O, no clock.

A relay of any family counts for each :class:`Way`, whether anybody looks or not.  An :class:`Observer`, if there is
one, is told when a transport begins, is accepted and ends, and of refusals.
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


class Way(Protocol):
    """One direction of a transport, as its relay counts it.

    :ivar frames: data and ACK frames that went this way; ``acks``: the ACKs among them.
    :ivar wire: bytes of these frames, with their headers.
    :ivar dropped: bytes of user data that were counted and never left.
    :ivar queued: bytes of this way that may wait in the receiver's queue.
    :ivar carried: what telemetry keeps of the transport.
    :ivar tick: telemetry is told of the next frames unless this is the relay's tick.
    :ivar seen: the tick in which frames went this way last.
    :ivar asked_at: when the data frame passed whose ACK telemetry waits for.
    """

    frames: int
    acks: int
    wire: int
    dropped: int
    queued: int
    carried: Carried | None
    tick: int
    seen: int
    asked_at: float | None

    @property
    def back(self) -> Way:
        """The other direction."""

    def user_data(self, secure: bool) -> int:
        """Return the bytes of user data that were taken to go this way."""


class Place(Protocol):
    """Where a client is connected from."""

    address: str


class Peer(Protocol):
    """A client of a relay.

    :ivar frames_in: frames that it has sent; ``bytes_in``: their bytes.
    """

    frames_in: int
    bytes_in: int

    @property
    def key(self) -> bytes:
        """The client's public key."""

    @property
    def port(self) -> Place:
        """Its connection."""


class CountingRelay(Protocol):
    """A relay, as far as telemetry looks at it.

    :ivar tick: counted up once a second.
    :ivar route_count: two for each transport.
    """

    tick: int
    drops: Counter[DropReason]
    route_count: int

    @property
    def frames(self) -> int:
        """Frames received since the start."""

    @property
    def frame_bytes(self) -> int:
        """Bytes of these frames."""


class Observer(Protocol):
    """What a relay tells of its transports."""

    def requested(self, source: Peer, there: Way, back: Way, payload: bytes, target: bytes, secure: bool) -> Carried:
        """A client's request to open a transport was passed on.

        :param payload: the request, which the transport is identified by; ``target``: the key of the client asked.
        """

    def accepted(self, carried: Carried, payload: bytes) -> None:
        """The answer was passed on."""

    def refused(self, source: Peer, target: bytes, reason: str) -> None:
        """A request was not passed on.  :param target: the key of the client asked, or less of it."""

    def ended(self, carried: Carried, reason: int, by: str) -> None:
        """A transport is over.  :param by: src, dst or server."""

    def look(self, carried: Carried, route: Way, data: int, acks: int) -> None:
        """Frames passed on a way whose tick was not the relay's: ``data`` data frames and ``acks`` ACKs."""

    def receipt(self, source: Peer, payload: bytes) -> bool:
        """Take a client's receipt; False: none was due, or it is no good."""


def share_loss(ways: Sequence[Way], left: int, congested: bool) -> None:
    """Count what was queued for a peer whose connection is gone as dropped, by what each way may have had there.

    The sum is exact but for what surrounds the data; the parts are an estimate where there are several.

    :param ways: those that lead to the peer.
    :param left: bytes that did not leave.
    :param congested: ``queued`` of the ways is kept; else any may have had all of it.
    """
    parts = [min(way.wire, way.queued if congested else left) for way in ways]
    total = sum(parts)
    for way, part in zip(ways, parts, strict=True):
        if part and way.carried is not None:
            lost = part if total <= left else part * left // total
            way.dropped += way.user_data(way.carried.secure) * lost // way.wire


@dataclass(slots=True, eq=False)
class Carried:
    """One transport, as its relay saw it.

    :ivar there: the way from the client that asked, ``back`` the way to it.
    :ivar opened: seconds, when the REQUEST came; ``accepted`` likewise, or None.
    :ivar rtt: counts by bucket of :data:`~dmsg.telemetry.schema.BOUNDS`, or None.
    """

    there: Way
    back: Way
    request: bytes | None
    source: bytes
    target: bytes
    secure: bool
    opened: float
    identity: bytes | None = None
    accepted: float | None = None
    rtt: list[int] | None = None
    told: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """What the last event said: data, frames and ACKs, both ways."""

    def accept(self, payload: bytes, now: float) -> None:
        """The ACCEPT came."""
        if self.request is not None:
            self.identity = transport_identity(self.request, payload)
            self.request = None
            self.accepted = now

    def sample(self, seconds: float) -> None:
        """A FWD was acknowledged after that time."""
        if self.rtt is None:
            self.rtt = [0] * BUCKETS
        self.rtt[bisect_left(BOUNDS, seconds)] += 1

    def counts(self) -> tuple[int, int, int, int, int, int]:
        """Bytes of user data, FWD frames and their ACKs, each both ways, since the beginning."""
        there, back = self.there, self.back
        return (
            there.user_data(self.secure),
            back.user_data(self.secure),
            there.frames - there.acks,
            back.frames - back.acks,
            back.acks,
            there.acks,
        )
