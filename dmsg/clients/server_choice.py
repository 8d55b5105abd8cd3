"""Choice of the servers that a client may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from dmsg.keys import PubKey

MIN_SERVERS = 2
"""Number of servers to which a client stays connected, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """Choice of the servers that a client uses, and of their number.

    :ivar min_servers: number of servers to stay connected to, if discovery lists as many; at least 1.
    :ivar prefer: servers to use before others when they are available.
    :ivar only: servers to use exclusively; empty for any.
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
"""Any servers that discovery lists."""
