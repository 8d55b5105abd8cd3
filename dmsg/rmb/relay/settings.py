"""Settings of a relay of the bus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmsg.base.options import FLAG, LIMITS, NETWORK, STORAGE, Number, Text, option, proxied_option
from dmsg.pages.settings import PageSettings
from dmsg.rmb.errors import QueueUnavailable
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.relay.ranker import FAILURE_PERIOD
from dmsg.rmb.twins import token
from dmsg.rmb.twins.twin import check_relay


def _two_numbers(text: str) -> tuple[int, int]:
    """Parse the value of ``--limit``."""
    words = re.fullmatch(r"\s*([^\s,]+)(?:\s*,\s*|\s+)([^\s,]+)\s*", text)
    if words is None:
        raise ValueError("two numbers are needed: messages and bytes per minute")
    return int(Number(1, 2**31, "messages").read(words[1])), int(Number(1, 2**40, "bytes").read(words[2]))


def check_queue(description: str) -> str:
    """Check a value of ``--queue`` without opening the queue.

    :raises QueueUnavailable: the value is not a valid description of a queue.
    """
    kind, _, rest = description.partition(":")
    if kind not in ("sqlite", "redis") or not rest:
        raise QueueUnavailable(f"{description[:80]!r} is not a queue: sqlite:PATH or redis://HOST:PORT/DB")
    return description


@dataclass(frozen=True)
class RelaySettings(PageSettings):
    """Settings of a relay; ``memory`` is in bytes.

    Without ``metrics``, ``/metrics`` and ``/health`` are served at the relay's own port.

    :ivar queue: ``sqlite:PATH`` or ``redis://HOST:PORT/DB``.
    """

    listen: Sequence[str]
    registry: str
    domains: frozenset[str] = option(
        frozenset(),
        "Domain or URL under which twins list this relay; repeatable",
        Text("name or URL", check_relay),
        name="domain",
        short="m",
        repeated=True,
        group=NETWORK,
    )
    queue: str = "sqlite::memory:"
    limit: tuple[int, int] | None = option(
        None,
        "Messages and bytes that one twin may send per minute, as in --limit 1000,1048576 (or --limit 1000 1048576)",
        Text("two numbers", _two_numbers),
        group=LIMITS,
    )
    ranker_period: float = option(
        FAILURE_PERIOD,
        "Seconds for which a failure lowers the rank of another relay",
        Number(1, 10**6, "seconds"),
        short="p",
        group=NETWORK,
    )
    max_sessions: int = option(
        100_000,
        "Maximum number of simultaneous sessions",
        Number(1, 10**7, "sessions"),
        default_text="100000, or less if file descriptors are limited",
        group=LIMITS,
    )
    max_token_ttl: int | None = option(
        token.MAX_TTL,
        "Longest validity of a token in seconds; 0 accepts any",
        Number(0, 10**9, "seconds"),
        name="token-ttl",
        group=LIMITS,
    )
    proxied: bool = proxied_option()
    connect_rate: float = option(
        200.0,
        "Connections per second that one address may open; 0 disables the limit",
        Number(0, 10**6, "connections a second"),
        group=LIMITS,
    )
    token_reuse: bool = option(False, "Accept a token for more than one connection", FLAG, group=LIMITS)
    durable: bool = option(
        False,
        "Store a message before its delivery if the sending client never sends a message again, and wait for the disk "
        "before confirming any stored message",
        FLAG,
        group=STORAGE,
    )
    memory: int | None = option(
        None,
        "MiB to buffer in memory for all slow sessions together",
        Number(1, 2**20, "MiB"),
        default_text="a quarter of the machine's memory",
        group=LIMITS,
    )
    queue_limits: QueueLimits = field(default_factory=QueueLimits)
