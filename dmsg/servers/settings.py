"""What an operator chooses of a server of any family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypedDict

from dmsg.discovery.lookup.lookups import Lookups
from dmsg.servers.admission import Admission

DRAIN_TIMEOUT = 8.0
"""Seconds that stopping leaves to what clients have open, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What an operator chooses.

    :ivar public_address: ``host:port`` at which clients reach it; None takes
        the first listening port, which must then be on one interface.
    :ivar discovery: URLs, or a Lookups; empty means it is not registered.
    :ivar admission: whom it admits; None: everybody.
    :ivar drain_timeout: seconds that stopping leaves to clients to go elsewhere.  The Messaging System
        knows no way to move channels: there it is for channels to end.
    :ivar metrics: endpoint string for the page, ``/metrics`` and ``/health``, or None.
    :ivar page_token: who has it may look at the page from anywhere; None: it is for this machine alone.
    :ivar memory: bytes that are held for clients, in all; None: a quarter of what the machine has.
    :ivar random: when its entry is posted again; None: the system's.
    """

    public_address: str | None = None
    discovery: Sequence[str] | Lookups = ()
    admission: Admission | None = None
    drain_timeout: float = DRAIN_TIMEOUT
    metrics: str | None = None
    page_token: bytes | None = None
    memory: int | None = None
    random: Random | None = None


class ServerOptions(TypedDict, total=False):
    """Single fields of :class:`ServerSettings`, as keywords."""

    public_address: str | None
    discovery: Sequence[str] | Lookups
    admission: Admission | None
    drain_timeout: float
    metrics: str | None
    page_token: bytes | None
    memory: int | None
    random: Random | None


DEFAULTS = ServerSettings()
