"""Rate limits for the requests of one client at a messaging server.  No I/O, no clock.

OpenChannels and stray control frames have a token bucket each, per link.  An OpenChannel above the rate is refused; a
stray frame gets no answer.  A client that continues nevertheless loses its link (:mod:`dmsg.base.policing`).  Answers
and the ends of channels are not charged, because the opener was charged for the channel, and frames that others provoke
are not charged either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.options import LIMITS, Number, option
from dmsg.base.policing import ANSWER_FACTOR, ClientLimits, Policer as Counting
from dmsg.messaging.core.wire import ID_COUNT


class Kind(IntEnum):
    """Kind of frame; each kind has a token bucket of its own."""

    OPEN = 0
    STRAY = 1
    """Frame of unknown type, control frame for a channel that does not exist, or one that the channel's state does not
    allow."""


@dataclass(frozen=True, slots=True)
class Limits(ClientLimits):
    """Limits of one client, which an operator can also change while the server runs."""

    max_per_pair: int = option(
        ID_COUNT,
        "Maximum number of channels between two clients",
        Number(1, ID_COUNT, "channels"),
        reloads=True,
        group=LIMITS,
    )
    open_rate: float = option(
        500.0,
        "OpenChannel frames per second of one link; more are refused; 0 disables the limit",
        Number(0, 10**6, "OpenChannels a second"),
        reloads=True,
        group=LIMITS,
    )

    def __post_init__(self) -> None:
        if not 0 < self.max_per_pair <= ID_COUNT:
            raise ValueError(f"max_per_pair must be from 1 to {ID_COUNT}")

    @property
    def basic_rate(self) -> float:
        return self.open_rate

    def rate(self, kind: IntEnum) -> float:
        return self.open_rate * (1.0 if kind is Kind.OPEN else ANSWER_FACTOR)


class Policer(Counting):
    """Token buckets of one client."""

    __slots__ = ()
    kinds = Kind
