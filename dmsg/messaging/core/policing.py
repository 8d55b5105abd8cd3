"""Rate limits for the requests of one client at a messaging server.  No I/O, no clock.

Each link has one token bucket for OpenChannels and one for stray control frames.  An OpenChannel above the rate is
refused; a stray frame above the rate gets no answer.  A client that continues to send too many loses its link
(:mod:`dmsg.base.policing`).  Frames that answer or close a channel are not charged, because the channel's opener was
charged for its OpenChannel. Frames that other clients provoke are not charged either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.options import LIMITS, Number, option
from dmsg.base.policing import ClientLimits, Policer as Counting
from dmsg.messaging.core.wire import ID_COUNT


class Kind(IntEnum):
    """Kinds of frames that have separate token buckets."""

    OPEN = 0
    STRAY = 1
    """Frame of unknown type, or control frame for a channel that does not exist or whose state does not allow the
    frame."""


@dataclass(frozen=True, slots=True)
class Limits(ClientLimits):
    """Limits of one client. An operator can change them while the server runs."""

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


class Policer(Counting):
    """Rate limits of one client of a messaging server."""

    __slots__ = ()
    kinds = Kind
