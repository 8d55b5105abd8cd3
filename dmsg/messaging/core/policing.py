"""How much one client may ask of a messaging server.  No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.policing import ANSWER_FACTOR, DESTINATION_BURST, DESTINATION_FACTOR, FLOOD_FACTOR, Police as Counting
from dmsg.messaging.core.wire import ID_COUNT

MAX_CONNECTIONS = 10_000
"""Links of a server, by default."""
MAX_PER_ADDRESS = 1024
"""Links from one address, by default."""
MAX_PER_PAIR = ID_COUNT
"""Channels between one link and another, by default: the 256 that the seed document gives a link."""
OPEN_RATE = 500.0
"""OpenChannels a second of one link, by default; strays may be four times as many."""


class Kind(IntEnum):
    """What is counted apart."""

    OPEN = 0
    STRAY = 1
    """Control frames of no channel, or that do not fit it, and what is no frame."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator can set.

    :ivar open_rate: per second and client; 0 means no limit on control frames.
    :ivar max_per_address: 0 means no limit.
    """

    max_connections: int = MAX_CONNECTIONS
    max_per_address: int = MAX_PER_ADDRESS
    max_per_pair: int = MAX_PER_PAIR
    open_rate: float = OPEN_RATE

    def __post_init__(self) -> None:
        if not 0 < self.max_per_pair <= ID_COUNT:
            raise ValueError(f"max_per_pair is 1 to {ID_COUNT}")

    def rate(self, kind: Kind) -> float:
        """Frames of that kind a second."""
        return self.open_rate * (1.0 if kind is Kind.OPEN else ANSWER_FACTOR)

    @property
    def flood(self) -> float:
        """Refused frames a second, of all kinds, with which a link ends."""
        return self.open_rate * FLOOD_FACTOR

    @property
    def destination_rate(self) -> float:
        """OpenChannels a second to one link, from all others."""
        return self.open_rate * DESTINATION_FACTOR

    @property
    def destination_burst(self) -> float:
        """OpenChannels to one link at once."""
        return self.open_rate * DESTINATION_BURST


class Police(Counting):
    """The buckets of one client."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(len(Kind))

    def allows(self, kind: Kind, limits: Limits, now: float) -> bool:
        """Whether a frame of that kind is within its rate.

        :raises RemoteProtocolError: so many were not that the link ends.
        """
        if not limits.open_rate:
            return True
        return self.take(kind, limits.rate(kind), limits.flood, now)
