"""Records of a server's connections, and of the routes of the transports on each connection. No I/O.

The rules are in :mod:`dmsg.v2019.core.relay`. A transport has two :class:`Route` objects, one in the table of each of
its two connections, under the id that the transport has on that connection.
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
    """Interface of a connection, through which the relay sends bytes to a peer.

    :ivar address: network address of the peer; empty if unknown.
    :ivar blocks: address blocks that contain the peer, the widest first. Clients of one block share rates.
    :ivar left_behind: number of queued bytes that were never sent. Set when the connection is lost.
    """

    address: str
    blocks: Sequence[Hashable]
    left_behind: int


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """One direction of a transport. It is stored in the table of its source, under the transport's id there."""

    peer: RelayPeer
    to_id: int
    # The field is set once both routes of the transport exist, because each refers to the other.
    back: Route = field(init=False)
    accepted: bool = False
    """Whether the responder has sent ACCEPT."""
    carried: TransportRecord | None = None
    """Observer's record of the transport; None without an observer."""
    frames: int = 0
    """Number of FWD and ACK frames over this route. ``wire`` is the number of their bytes, including headers."""
    acks: int = 0
    """Number of ACK frames over this route. ``ack_wire`` is the number of their bytes, including headers."""
    wire: int = 0
    ack_wire: int = 0
    dropped: int = 0
    """Number of bytes of user data that were dropped although ``wire`` includes them, for the observer."""
    tick: int = 0
    """Value of the relay's ``tick`` when frames of this route were last reported to the observer. Further frames are
    reported as soon as the relay's ``tick`` has another value."""
    seen: int = 0
    """Value of the relay's ``tick`` when frames last used this route. Only the observer needs it."""
    asked_at: float | None = None
    """Time at which a FWD was forwarded, from which the observer measures the round trip until the ACK. None while the
    observer waits for no ACK."""
    queued: int = 0
    """Number of bytes queued over this route since ``mark``, which is a position in the peer's output. ``mark``
    advances once all bytes counted here are sent. The bytes of the route that are really in the peer's queue may exceed
    this number by at most ``ROUTE_QUEUE_LIMIT``."""
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
    """Time at which the peer connected, in seconds of the relay's clock."""
    routes: dict[int, Route] = field(default_factory=dict)
    destinations: dict[RelayPeer, int] = field(default_factory=dict)
    """Number of this peer's routes to each other peer."""
    congested: bool = False
    stalled: bool = False
    """Whether the peer has been congested for so long that no sources are paused for it any more."""
    sent: int = 0
    """Number of bytes queued for the peer since it became congested."""
    paused_by: RelayPeer | None = None
    pausing: dict[RelayPeer, None] = field(default_factory=dict)
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0
    police: Policer = field(default_factory=Policer)
    provoked: ProvokedFrames = field(default_factory=ProvokedFrames)
    """Number of late frames that the peer may send without charge, because other clients have provoked them."""
    requests: FairRate = field(default_factory=FairRate)
    """Rate limit of the REQUESTs to this peer, which their sources share fairly."""
    speaks_drain: bool = False
    """Whether the peer has sent a PING and therefore understands DRAIN."""
    instance: bytes = b""
    """Bytes in the peer's PINGs that identify its program; empty if unknown."""
    noticed_same_key: bool = False
    """Whether the peer has received a NOTICE that another program uses its key."""


def data_in(run: memoryview, secure: bool) -> int:
    """Return the number of bytes of user data in ``run``, which consists of whole frames."""
    position = data = 0
    overhead = SECURE_OVERHEAD if secure else SEQUENCE_SIZE
    # The run ends at a frame boundary, so every frame in it is complete.
    while position < len(run):
        frame_type, _, size = unpack_header(run, position)
        if frame_type == FWD:
            data += max(0, size - overhead)
        position += HEADER_SIZE + size
    return data
