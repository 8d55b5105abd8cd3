"""The connections of a server and the transports that each has.  No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


class Route:
    """One direction of one transport, kept at its source under the source's id."""

    __slots__ = (
        "accepted",
        "ack_wire",
        "acks",
        "asked_at",
        "back",
        "carried",
        "dropped",
        "frames",
        "mark",
        "peer",
        "queued",
        "seen",
        "tick",
        "to_id",
        "wire",
    )

    def __init__(self, peer: RelayPeer, to_id: int) -> None:
        self.peer = peer
        self.to_id = to_id
        self.back: Route
        self.accepted = False
        """The responder has sent ACCEPT."""
        self.carried: Carried | None = None
        """What an observer keeps of the transport."""
        self.frames = 0
        """FWD and ACK frames that went this way; ``wire``: their bytes, headers and all."""
        self.acks = 0
        """ACKs among them; ``ack_wire``: the bytes of those."""
        self.wire = 0
        self.ack_wire = 0
        self.dropped = 0
        """Bytes of user data, of those that were counted, which did not leave; for the observer."""
        self.tick = 0
        """The observer is told of frames when this is not the relay's."""
        self.seen = 0
        """The tick in which frames went this way last, for the observer."""
        self.asked_at: float | None = None
        """When the FWD passed whose ACK the observer waits for."""
        self.queued = 0
        """Bytes queued over this route since ``mark``, which moves on when all that was queued before it has left:
        what the route really has in the peer's queue is at most ``ROUTE_QUEUE_LIMIT`` more than that."""
        self.mark = 0

    def user_data(self, secure: bool) -> int:
        """Bytes of user data that went this way."""
        frames = self.frames - self.acks
        around = HEADER_SIZE + (SECURE_OVERHEAD if secure else SEQUENCE_SIZE)
        return max(0, self.wire - self.ack_wire - frames * around)


class RelayPeer:
    """One connection, as the relay sees it."""

    __slots__ = (
        "bytes_in",
        "closing",
        "congested",
        "destinations",
        "frames_in",
        "instance",
        "key",
        "next_id",
        "paused_by",
        "pausing",
        "police",
        "port",
        "provoked",
        "requests",
        "routes",
        "sent",
        "since",
        "speaks_drain",
        "stalled",
        "told_of",
    )

    def __init__(self, key: PubKey, port: ConnectionPort, first_id: int, since: float = 0.0) -> None:
        self.key = key
        self.port = port
        self.routes: dict[int, Route] = {}
        self.next_id = first_id
        self.destinations: dict[RelayPeer, int] = {}
        """How many routes lead to which peer."""
        self.congested = False
        self.stalled = False
        """Congested for so long that sources are no longer paused for it."""
        self.sent = 0
        """Bytes queued for it since it became congested."""
        self.paused_by: RelayPeer | None = None
        self.pausing: set[RelayPeer] = set()
        self.closing = False
        self.frames_in = 0
        self.bytes_in = 0
        self.police = Police()
        self.provoked = Provoked()
        """Frames that others have provoked from it."""
        self.requests = FairRate()
        """The rate of REQUESTs to it."""
        self.speaks_drain = False
        """It has sent a PING, so it knows DRAIN."""
        self.since = since
        """When it connected."""
        self.instance = b""
        """Which program it is, if its PINGs say so."""
        self.told_of = False
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
