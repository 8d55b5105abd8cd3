"""What an operator chooses of a relay of the bus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dmsg.base.options import FLAG, Number, Text, option
from dmsg.pages.settings import PageSettings
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.relay.ranker import PERIOD
from dmsg.rmb.twins import token
from dmsg.rmb.twins.twin import check_relay


def _two_numbers(text: str) -> tuple[int, int]:
    """Return what ``--limit`` says."""
    words = re.fullmatch(r"\s*([^\s,]+)(?:\s*,\s*|\s+)([^\s,]+)\s*", text)
    if words is None:
        raise ValueError("takes two numbers: messages and bytes a minute")
    return int(Number(1, 2**31, "messages").read(words[1])), int(Number(1, 2**40, "bytes").read(words[2]))


@dataclass(frozen=True)
class RelaySettings(PageSettings):
    """What a relay is told; ``memory`` is in bytes.

    Without ``metrics``, ``/metrics`` and ``/health`` are at its own port.

    :ivar queue: ``sqlite:PATH`` or ``redis://HOST:PORT/DB``.
    """

    listen: Sequence[str]
    registry: str
    domains: frozenset[str] = option(
        frozenset(),
        "Name by which twins list this relay, or its URL; may be repeated",
        Text("name or URL", check_relay),
        name="domain",
        short="m",
        repeated=True,
    )
    queue: str = "sqlite::memory:"
    limit: tuple[int, int] | None = option(
        None,
        "Messages and bytes a minute of each twin, as in --limit 1000,1048576 (or --limit 1000 1048576)",
        Text("two numbers", _two_numbers),
    )
    ranker_period: float = option(
        PERIOD, "seconds that a failure of another relay counts", Number(1, 10**6, "seconds"), short="p"
    )
    max_sessions: int = option(
        100_000,
        "sessions at once",
        Number(1, 10**7, "sessions"),
        default_text="100000, and what descriptors allow",
    )
    max_token_ttl: int | None = option(
        token.MAX_TTL,
        "seconds that a token may be good for; 0 means any",
        Number(0, 10**9, "seconds"),
        name="token-ttl",
    )
    proxied: bool = option(False, "take addresses from X-Forwarded-For (behind a proxy of your own)", FLAG)
    connect_rate: float = option(
        200.0, "connections a second of one address; 0 means no limit", Number(0, 10**6, "connections a second")
    )
    token_reuse: bool = option(False, "take a token for more than one connection", FLAG)
    durable: bool = option(
        False, "keep messages of clients that do not send them again before they are delivered", FLAG
    )
    memory: int | None = option(
        None,
        "MiB held in memory for sessions that read slowly, in all",
        Number(1, 2**20, "MiB"),
        default_text="a quarter of the machine's",
    )
    queue_limits: QueueLimits = field(default_factory=QueueLimits)
