"""What a relay knows of one transport besides where it leads.  No I/O, no clock.

The relay's loop counts per :class:`~dmsg.v2019.core.peers.Route`, whether
anybody looks or not; an :class:`~dmsg.v2019.core.peers.Observer`, if there is one, is
told when a transport begins, is accepted and ends, and of refusals.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import sha256
from typing import Protocol

from dmsg.telemetry.schema import BOUNDS, BUCKETS
from dmsg.v2019.core.wire import FWD, HEADER_SIZE, SECURE_OVERHEAD, SEQUENCE_SIZE, unpack_header

IDENTITY_SIZE = 16
_IDENTITY = b"dmsg transport 1"


def transport_identity(request: bytes, accept: bytes) -> bytes:
    """16 bytes that both clients and the server know of a transport, and nobody else.

    The first half of SHA-256 over ``dmsg transport 1``, the payload of REQUEST
    and that of ACCEPT.  A secure transport's hold new keys, so no two
    are alike.
    """
    return sha256(_IDENTITY + request + accept).digest()[:IDENTITY_SIZE]


class Way(Protocol):
    """One direction, as :class:`~dmsg.v2019.core.peers.Route` counts it."""

    frames: int
    acks: int
    dropped: int
    queued: int
    wire: int
    carried: Carried | None

    def user_data(self, secure: bool) -> int:
        """Bytes of user data that were taken to go this way."""


def data_in(run: memoryview, secure: bool) -> int:
    """Bytes of user data in whole frames."""
    position = data = 0
    overhead = SECURE_OVERHEAD if secure else SEQUENCE_SIZE
    while position < len(run):
        frame_type, _, size = unpack_header(run, position)
        if frame_type == FWD:
            data += max(0, size - overhead)
        position += HEADER_SIZE + size
    return data


def share_loss(ways: list[Way], left: int, congested: bool) -> None:
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


class Carried:
    """One transport, as its relay saw it.

    :ivar there: the way from the client that asked, ``back`` the way to it.
    :ivar opened: seconds, when the REQUEST came; ``accepted`` likewise, or None.
    :ivar rtt: counts by bucket of :data:`~dmsg.telemetry.schema.BOUNDS`, or None.
    """

    __slots__ = (
        "accepted",
        "back",
        "identity",
        "opened",
        "request",
        "rtt",
        "secure",
        "source",
        "target",
        "there",
        "told",
    )

    def __init__(self, there: Way, back: Way, payload: bytes, source: bytes, secure: bool, now: float) -> None:
        self.there, self.back = there, back
        self.source, self.target = source, payload[33:66]
        self.request: bytes | None = payload
        self.identity: bytes | None = None
        self.secure = secure
        self.opened = now
        self.accepted: float | None = None
        self.rtt: list[int] | None = None
        self.told = (0, 0, 0, 0, 0, 0)
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
