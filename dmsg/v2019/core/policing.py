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

from dmsg.base.options import LIMITS, Number, option
from dmsg.base.policing import ANSWER_FACTOR, ClientLimits, Police as Counting
from dmsg.v2019.core.wire import IDS_PER_SIDE

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
class Limits(ClientLimits):
    """What an operator can set, also while the server runs."""

    max_transports: int = option(
        8192,
        "Number of transports of one connection",
        Number(1, IDS_PER_SIDE, "transports"),
        reloads=True,
        group=LIMITS,
    )
    max_per_pair: int = option(
        1024,
        "Number of transports between two connections",
        Number(1, IDS_PER_SIDE, "transports"),
        reloads=True,
        group=LIMITS,
    )
    request_rate: float = option(
        500.0,
        "REQUEST frames per second of one connection; 0 disables the limit",
        Number(0, 10**6, "REQUESTs a second"),
        reloads=True,
        group=LIMITS,
    )
    byte_rate: float = option(
        0.0,
        "Bytes per second that are read from one connection; 0 disables the limit",
        Number(0, 10**12, "bytes a second"),
        reloads=True,
        group=LIMITS,
    )

    def __post_init__(self) -> None:
        if not 0 < self.max_transports <= IDS_PER_SIDE:
            raise ValueError(f"max_transports is 1 to {IDS_PER_SIDE}")

    @property
    def basic_rate(self) -> float:
        return self.request_rate

    def rate(self, kind: IntEnum) -> float:
        if kind is Kind.PING:
            return PING_RATE
        return self.request_rate if kind is Kind.REQUEST else self.request_rate * ANSWER_FACTOR


class Police(Counting):
    """The buckets of one client."""

    __slots__ = ()
    kinds = Kind
    forgiven = frozenset({Kind.STRAY, Kind.RECEIPT})
