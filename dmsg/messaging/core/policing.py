"""How much one client may ask of a messaging server.  No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from dmsg.base.options import Number, option
from dmsg.base.policing import ANSWER_FACTOR, DerivedRates, Police as Counting
from dmsg.messaging.core.wire import ID_COUNT


class Kind(IntEnum):
    """What is counted apart."""

    OPEN = 0
    STRAY = 1
    """Control frames of no channel, or that do not fit it, and what is no frame."""


@dataclass(frozen=True, slots=True)
class Limits(DerivedRates):
    """What an operator can set, also while the server runs."""

    max_connections: int = option(10_000, "clients at a time", Number(1, 10**6, "clients"), reloads=True)
    max_per_address: int = option(
        1024, "connections from one address; 0 means no limit", Number(0, 10**6, "connections"), reloads=True
    )
    max_per_pair: int = option(
        ID_COUNT, "channels between one client and another", Number(1, ID_COUNT, "channels"), reloads=True
    )
    open_rate: float = option(
        500.0,
        "OpenChannels a second of one link; 0 means no limit",
        Number(0, 10**6, "OpenChannels a second"),
        reloads=True,
    )

    def __post_init__(self) -> None:
        if not 0 < self.max_per_pair <= ID_COUNT:
            raise ValueError(f"max_per_pair is 1 to {ID_COUNT}")

    @property
    def basic_rate(self) -> float:
        return self.open_rate

    def rate(self, kind: Kind) -> float:
        return self.open_rate * (1.0 if kind is Kind.OPEN else ANSWER_FACTOR)


class Police(Counting):
    """The buckets of one client."""

    __slots__ = ()
    kinds = Kind
