"""Rate limits for the requests and bytes of one client at a server. No I/O, no clock.

There is a token bucket for each connection and kind of control frame; a key may have a few connections. Above its rate,
a REQUEST is refused with a reason, a PING or a stray frame gets no answer, and a receipt is discarded. A client that
still continues to exceed its rates is disconnected.

Answers are not charged. The charge for the REQUEST that opened a transport also covers the transport's first ACCEPT and
its CLOSE. Frames that other clients provoke are not charged either (:class:`~dmsg.base.policing.ProvokedFrames`).

The REQUESTs to one destination have a rate limit, too, so that no client receives more of them than it can answer. The
requesters share this rate fairly (:mod:`dmsg.base.fair_rate`). A REQUEST above the rate is refused, and counts as
flooding by the requester.

Bytes have a token bucket as well. Above the rate, the server reads more slowly and drops nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.options import LIMITS, Number, option
from dmsg.base.policing import ClientLimits, Policer as Counting
from dmsg.v2019.core.wire import IDS_PER_SIDE

PING_RATE = 20.0
"""Number of PINGs per second that one connection may send."""


class Kind(IntEnum):
    """Kind of control frame; each kind has a token bucket of its own."""

    REQUEST = 0
    ACCEPT = 1
    CLOSE = 2
    PING = 3
    STRAY = 4
    """FWD or ACK of a transport that does not exist. When a remote is lost, a whole window of such frames may be in
    flight. So these frames never end a connection; above the rate, they get no answer."""
    RECEIPT = 5
    """Receipt. An honest client sends at most one for each end of a transport. Above the rate, a receipt is
    discarded."""


@dataclass(frozen=True, slots=True)
class Limits(ClientLimits):
    """Limits of one client. An operator can change them while the server runs."""

    max_transports: int = option(
        8192,
        "Maximum number of transports of one connection",
        Number(1, IDS_PER_SIDE, "transports"),
        reloads=True,
        group=LIMITS,
    )
    max_per_pair: int = option(
        1024,
        "Maximum number of transports between two connections",
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
            raise ValueError(f"max_transports must be from 1 to {IDS_PER_SIDE}")

    @property
    def basic_rate(self) -> float:
        return self.request_rate

    def rate(self, kind: IntEnum) -> float:
        # The decorator for slots replaces the class, so that super() would not find it.
        return PING_RATE if kind is Kind.PING else ClientLimits.rate(self, kind)


class Policer(Counting):
    """Token buckets of one client, one for each kind of control frame."""

    __slots__ = ()
    kinds = Kind
    forgiven = frozenset({Kind.STRAY, Kind.RECEIPT})
