"""Settings that say which servers a client uses, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from dmsg.keys import PubKey

MIN_SERVERS = 2
"""Default number of servers to which a client stays connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """Settings for the servers that a client uses, and for their number.

    :ivar min_servers: number of servers to stay connected to, if discovery lists as many; at least 1.
    :ivar prefer: servers to which the client connects before others, if they are available.
    :ivar only: the only servers that the client uses; empty for any.
    """

    min_servers: int = MIN_SERVERS
    prefer: Sequence[PubKey] = ()
    only: Sequence[PubKey] = ()

    def __post_init__(self) -> None:
        if self.min_servers < 1:
            raise ValueError("min_servers must be at least 1")


class ServerChoiceOptions(TypedDict, total=False):
    """Fields of :class:`ServerChoice` as keyword arguments."""

    min_servers: int
    prefer: Sequence[PubKey]
    only: Sequence[PubKey]


ANY = ServerChoice()
"""Settings for any servers that discovery lists."""
