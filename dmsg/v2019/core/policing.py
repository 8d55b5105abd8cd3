"""How much one client may ask of a server.  No I/O, no clock.

Control frames of each kind have a token bucket per connection (a key may have a few).  Over
the rate a REQUEST is refused with a reason, a PING and a stray frame get no answer, a
receipt is not kept; a client that goes on regardless loses its connection.  Answers are free: the first ACCEPT of a
transport and its CLOSE were paid for by whoever opened it, and what others provoke is forgiven
(:class:`~dmsg.base.policing.Provoked`).  So that nobody is asked for more than it can answer, REQUESTs to one
destination have a rate of their own, which sources share (:mod:`dmsg.base.fair_rate`); what is over it is refused to
the requester and counts as its flood.  Bytes have a bucket too, and over it the server reads
slower: nothing is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.policing import ANSWER_FACTOR, DESTINATION_BURST, DESTINATION_FACTOR, FLOOD_FACTOR, Police as Counting
from dmsg.v2019.core.wire import IDS_PER_SIDE

MAX_CONNECTIONS = 10_000
"""Connections of a server, by default."""
MAX_TRANSPORTS = 8192
"""Transports of one connection, by default."""
MAX_PER_PAIR = 1024
"""Transports between one connection and another, by default."""
MAX_PER_ADDRESS = 1024
"""Connections from one address, by default."""
REQUEST_RATE = 500.0
"""REQUESTs a second of one connection, by default; ACCEPTs and CLOSEs of no transport may be four times as many."""
PING_RATE = 20.0
"""PINGs a second of one connection."""


class Kind(IntEnum):
    """What is counted apart."""

    REQUEST = 0
    ACCEPT = 1
    CLOSE = 2
    PING = 3
    STRAY = 4
    """FWD and ACK of no transport: a window full of them is on its way when a remote is lost,
    so they are no reason to end a connection; what is over their rate is not answered."""
    RECEIPT = 5
    """At most one for each end of a transport; what is over the rate is not kept."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator can set, also while the server runs.

    :ivar request_rate: per second and connection; 0 means no limit on control frames.
    :ivar byte_rate: bytes of frames per second and connection; 0 means no limit.
    :ivar max_per_address: 0 means no limit.
    """

    max_connections: int = MAX_CONNECTIONS
    max_transports: int = MAX_TRANSPORTS
    max_per_pair: int = MAX_PER_PAIR
    max_per_address: int = MAX_PER_ADDRESS
    request_rate: float = REQUEST_RATE
    byte_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.max_transports <= IDS_PER_SIDE:
            raise ValueError(f"max_transports is 1 to {IDS_PER_SIDE}")

    def rate(self, kind: Kind) -> float:
        """Frames of that kind a second."""
        if kind is Kind.PING:
            return PING_RATE
        return self.request_rate if kind is Kind.REQUEST else self.request_rate * ANSWER_FACTOR

    @property
    def flood(self) -> float:
        """Refused frames a second, of all kinds, with which a connection ends."""
        return self.request_rate * FLOOD_FACTOR

    @property
    def destination_rate(self) -> float:
        """REQUESTs a second to one destination."""
        return self.request_rate * DESTINATION_FACTOR

    @property
    def destination_burst(self) -> float:
        """REQUESTs to one destination at once."""
        return self.request_rate * DESTINATION_BURST


class Police(Counting):
    """The buckets of one client."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(len(Kind))

    def allows(self, kind: Kind, limits: Limits, now: float) -> bool:
        """Whether a frame of that kind is within its rate.

        :raises RemoteProtocolError: so many were not that the connection ends.
        """
        if not limits.request_rate:
            return True
        forgiven = kind in (Kind.STRAY, Kind.RECEIPT)
        return self.take(kind, limits.rate(kind), limits.flood, now, forgiven=forgiven)
