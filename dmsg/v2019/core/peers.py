"""Connections of a server, and the routes of the transports that each connection has.  No I/O.

These are plain records; the rules are in :mod:`dmsg.v2019.core.relay`.  A transport is a pair of :class:`Route`
objects, one in the table of each connection, under the id that the transport has there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmsg.base.fair_rate import FairRate
from dmsg.base.policing import ProvokedFrames
from dmsg.base.ports import Port
from dmsg.keys import PubKey
from dmsg.telemetry.transports import TransportRecord
from dmsg.v2019.core.policing import Policer
from dmsg.v2019.core.wire import FWD, HEADER_SIZE, SECURE_OVERHEAD, SEQUENCE_SIZE, unpack_header


class ConnectionPort(Port, Protocol):
    """Interface through which the relay sends bytes to a peer.

    :ivar address: network address of the peer, or an empty string.
    :ivar places: blocks of addresses that contain the peer, the largest first; clients of a block share rates.
    :ivar left_behind: number of queued bytes that were never sent; set when the connection is lost.
    """

    address: str
    places: Sequence[Hashable]
    left_behind: int


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """Route: one direction of a transport, stored at its source under the source's id."""

    peer: RelayPeer
    to_id: int
    # The relay sets this field when both routes of the transport exist, because each refers to the other.
    back: Route = field(init=False)
    accepted: bool = False
    """Whether the responder has sent ACCEPT."""
    carried: TransportRecord | None = None
    """Observer's record of the transport; None without an observer."""
    frames: int = 0
    """Number of FWD and ACK frames over this route; ``wire`` counts their bytes, headers included."""
    acks: int = 0
    """Number of ACK frames over this route; ``ack_wire`` counts their bytes, headers included."""
    wire: int = 0
    ack_wire: int = 0
    dropped: int = 0
    """Number of bytes of user data that were counted as received and never sent on; the observer reads it."""
    tick: int = 0
    """Tick for which the observer has seen this route; while it differs from the relay's tick, the next frames are
    reported to the observer."""
    seen: int = 0
    """Tick in which frames last used this route; for the observer."""
    asked_at: float | None = None
    """Time at which a FWD was forwarded whose ACK the observer waits for, to measure the round trip; None without
    one."""
    queued: int = 0
    """Number of bytes queued over this route since ``mark``, a position in the peer's output.  ``mark`` advances once
    everything queued before it has left.  The route's true share of the peer's queue is at most ``ROUTE_QUEUE_LIMIT``
    more than this number."""
    mark: int = 0

    def user_data(self, secure: bool) -> int:
        """Return the number of bytes of user data that were forwarded over this route."""
        frames = self.frames - self.acks
        around = HEADER_SIZE + (SECURE_OVERHEAD if secure else SEQUENCE_SIZE)
        # The minimum is 0, because a malformed frame may be shorter than the overhead.
        return max(0, self.wire - self.ack_wire - frames * around)


@dataclass(slots=True, eq=False, repr=False)
class RelayPeer:
    """Relay's record of one connection."""

    key: PubKey
    port: ConnectionPort
    next_id: int
    since: float = 0.0
    """Time of connecting, in seconds of the relay's clock."""
    routes: dict[int, Route] = field(default_factory=dict)
    destinations: dict[RelayPeer, int] = field(default_factory=dict)
    """Number of the peer's routes, by the peer to which they lead."""
    congested: bool = False
    stalled: bool = False
    """Whether the peer has been congested for so long that sources are no longer paused for it."""
    sent: int = 0
    """Number of bytes queued for the peer since it became congested."""
    paused_by: RelayPeer | None = None
    pausing: dict[RelayPeer, None] = field(default_factory=dict)
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0
    police: Policer = field(default_factory=Policer)
    provoked: ProvokedFrames = field(default_factory=ProvokedFrames)
    """Allowance for the frames that other clients have provoked from the peer."""
    requests: FairRate = field(default_factory=FairRate)
    """Rate limit of the REQUESTs to the peer, shared fairly by their sources."""
    speaks_drain: bool = False
    """Whether the peer has sent a PING and therefore understands DRAIN."""
    instance: bytes = b""
    """Bytes that name the peer's program, from its PINGs; empty if unknown."""
    told_of: bool = False
    """Whether the peer has received the NOTICE that another program uses its key."""


def data_in(run: memoryview, secure: bool) -> int:
    """Return the number of bytes of user data in ``run``, which holds whole frames."""
    position = data = 0
    overhead = SECURE_OVERHEAD if secure else SEQUENCE_SIZE
    # The relay has cut the run at frame boundaries, so no frame reaches beyond its end.
    while position < len(run):
        frame_type, _, size = unpack_header(run, position)
        if frame_type == FWD:
            data += max(0, size - overhead)
        position += HEADER_SIZE + size
    return data
