"""Which servers a client takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from dmsg.keys import PubKey

MIN_SERVERS = 2
"""Servers that a client stays connected to, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """Which servers a client takes, and how many.

    :ivar min_servers: stay connected to so many, when there are so many; at least 1.
    :ivar prefer: servers to take before others when they are there.
    :ivar only: take no others; empty means any.
    """

    min_servers: int = MIN_SERVERS
    prefer: Sequence[PubKey] = ()
    only: Sequence[PubKey] = ()

    def __post_init__(self) -> None:
        if self.min_servers < 1:
            raise ValueError("min_servers must be at least 1")


class ServerChoiceOptions(TypedDict, total=False):
    """Single fields of :class:`ServerChoice`, as keywords."""

    min_servers: int
    prefer: Sequence[PubKey]
    only: Sequence[PubKey]


ANY = ServerChoice()
"""Those that discovery names."""
