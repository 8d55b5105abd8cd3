"""The connections of a server and the transports that each has.  No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dmsg.base.fair_rate import FairRate
from dmsg.base.policing import Provoked
from dmsg.base.ports import Port
from dmsg.keys import PubKey
from dmsg.telemetry.transports import Carried
from dmsg.v2019.core.policing import Police
from dmsg.v2019.core.wire import FWD, HEADER_SIZE, SECURE_OVERHEAD, SEQUENCE_SIZE, unpack_header


class ConnectionPort(Port, Protocol):
    """How bytes leave for a peer.

    :ivar address: where the peer is, or an empty string.
    :ivar places: blocks of addresses that the peer is in, the largest first; its rates are shared by them.
    :ivar left_behind: when the connection is gone: bytes that were queued for the peer and never left.
    """

    address: str
    places: Sequence[Hashable]
    left_behind: int


@dataclass(slots=True, eq=False, repr=False)
class Route:
    """One direction of one transport, kept at its source under the source's id."""

    peer: RelayPeer
    to_id: int
    back: Route = field(init=False)
    accepted: bool = False
    """The responder has sent ACCEPT."""
    carried: Carried | None = None
    """What an observer keeps of the transport."""
    frames: int = 0
    """FWD and ACK frames that went this way; ``wire``: their bytes, headers and all."""
    acks: int = 0
    """ACKs among them; ``ack_wire``: the bytes of those."""
    wire: int = 0
    ack_wire: int = 0
    dropped: int = 0
    """Bytes of user data, of those that were counted, which did not leave; for the observer."""
    tick: int = 0
    """The observer is told of frames when this is not the relay's."""
    seen: int = 0
    """The tick in which frames went this way last, for the observer."""
    asked_at: float | None = None
    """When the FWD passed whose ACK the observer waits for."""
    queued: int = 0
    """Bytes queued over this route since ``mark``, which moves on when all that was queued before it has left:
    what the route really has in the peer's queue is at most ``ROUTE_QUEUE_LIMIT`` more than that."""
    mark: int = 0

    def user_data(self, secure: bool) -> int:
        """Bytes of user data that went this way."""
        frames = self.frames - self.acks
        around = HEADER_SIZE + (SECURE_OVERHEAD if secure else SEQUENCE_SIZE)
        return max(0, self.wire - self.ack_wire - frames * around)


@dataclass(slots=True, eq=False, repr=False)
class RelayPeer:
    """One connection, as the relay sees it."""

    key: PubKey
    port: ConnectionPort
    next_id: int
    since: float = 0.0
    """When it connected."""
    routes: dict[int, Route] = field(default_factory=dict)
    destinations: dict[RelayPeer, int] = field(default_factory=dict)
    """How many routes lead to which peer."""
    congested: bool = False
    stalled: bool = False
    """Congested for so long that sources are no longer paused for it."""
    sent: int = 0
    """Bytes queued for it since it became congested."""
    paused_by: RelayPeer | None = None
    pausing: set[RelayPeer] = field(default_factory=set)
    closing: bool = False
    frames_in: int = 0
    bytes_in: int = 0
    police: Police = field(default_factory=Police)
    provoked: Provoked = field(default_factory=Provoked)
    """Frames that others have provoked from it."""
    requests: FairRate = field(default_factory=FairRate)
    """The rate of REQUESTs to it."""
    speaks_drain: bool = False
    """It has sent a PING, so it knows DRAIN."""
    instance: bytes = b""
    """Which program it is, if its PINGs say so."""
    told_of: bool = False
    """It was told of another program with its key."""


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
