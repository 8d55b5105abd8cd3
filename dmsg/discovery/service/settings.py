"""Settings of discovery that an operator can change, and limits that are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dmsg.base.memory import default_limit
from dmsg.base.options import (
    FLAG,
    LIMITS,
    NETWORK,
    STORAGE,
    Number,
    Text,
    burst_option,
    option,
    proxied_option,
    rate_option,
)
from dmsg.discovery.checks.overrides import CheckTarget, parse_check_target
from dmsg.discovery.checks.proof import OPENINGS, Openings
from dmsg.discovery.service.ranking import RankingFile
from dmsg.discovery.store.opening import STORE_LIMIT
from dmsg.pages.settings import PageSettings
from dmsg.telemetry.settings import TelemetrySettings

MAX_ENTRY_BYTES_PER_ADDRESS = 64 * 1024 * 1024
"""Maximum number of bytes of the entries that one public address has posted; beyond that, its oldest entries are
dropped. For a wider address block, the number is multiplied by the factor of the block.
"""
CLIENT_TTL = 2 * 3600.0
"""Seconds after the last POST until the entry of a client is dropped, if the client is one that posts every half hour.
Entries of other clients last ``ENTRY_TTL``.
"""
REFRESHING_TTL = 86400.0
"""Seconds after the last POST until the entry of a server is dropped, if the server is one that posts every half
minute. Entries of other servers last ``ENTRY_TTL``.
"""
ENTRY_TTL = 90 * 86400.0
"""Default number of seconds until an entry is dropped if neither of the two shorter times applies. They are counted
from the last POST of the entry or, for a server, from its last successful check.
"""
MAX_SERVER_SIZE = 16 * 1024
"""Maximum size in bytes of an entry with a server part. It is small enough for a list of servers to fit into the
longest answer that clients accept.
"""
RANKED_POOL = 512
"""Number of servers that discovery draws from the operator's ranking, and number of random servers that it adds. From
these candidates it chooses the servers to return.
"""
INVALID_ENTRY_COST = 5
"""Number of requests that the rate limit counts for one malformed or wrongly signed entry, because verifying an entry
takes most of the time of a request.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings(PageSettings):
    """Settings of discovery.

    With ``checks``, servers of 2019, which post their entry only once, are listed as long as checks find them.
    ``store_limit`` None means :func:`~dmsg.base.memory.default_limit` for a store in memory, else ``STORE_LIMIT``.
    Without ``metrics``, discovery's own port serves ``/metrics`` and ``/health``.

    :ivar openings: handshakes that a check can make with a server, in which the server proves its key.
    :ivar bytes_per_address: maximum number of bytes of entries from one public address.
    :ivar ranking: ranking that decides which servers are returned first; None for a random order.
    :ivar telemetry: settings of the events that discovery writes for the pipeline; None to write none.
    """

    rate: float = rate_option(200.0)
    burst: float = burst_option(1000.0)
    post_rate: float = option(
        50.0, "Signed entries per second that one address may post", Number(1, 10**6, "entries a second"), group=LIMITS
    )
    post_burst: float = option(
        1000.0, "Signed entries that one address may post in a burst", Number(1, 10**6, "entries"), group=LIMITS
    )
    checks: bool = option(
        True,
        "List servers without first connecting to them to check that they run and have their keys",
        FLAG,
        name="no-checks",
        group=NETWORK,
    )
    private_servers: bool = option(
        False, "Also check servers in private networks, no matter who posted their entries", FLAG, group=NETWORK
    )
    check_at: Sequence[CheckTarget] = option(
        (),
        "Check the server with this key at HOST:PORT in place of the address in its entry, which may be unreachable "
        "from behind the same router; repeatable",
        Text("KEY@HOST:PORT", parse_check_target),
        repeated=True,
        group=NETWORK,
    )
    openings: Openings = field(default_factory=lambda: OPENINGS)
    store_limit: float | None = option(
        None,
        "MiB of entries to keep; above this, the address with most bytes of entries loses its oldest entry",
        Number(1, 10**7, "MiB"),
        name="memory",
        default_text="4096; with a store in memory, a quarter of the machine's memory",
        group=LIMITS,
    )
    durable: bool = option(
        False, "Answer a POST or DELETE only once it is on the disk (sqlite: only)", FLAG, group=STORAGE
    )
    entry_ttl: float = option(
        ENTRY_TTL,
        "Days to keep an entry after its last post or, for a server, after its last successful check",
        Number(1, 36500, "days"),
        group=STORAGE,
    )
    bytes_per_address: float = MAX_ENTRY_BYTES_PER_ADDRESS
    proxied: bool = proxied_option()
    max_servers: int = option(10, "Maximum number of servers in one answer", Number(1, 1000, "servers"), group=LIMITS)
    server_ttl: float = option(
        120.0,
        "Seconds after the last post of its entry until a server is no longer listed; 0 lists it forever",
        Number(0, 10**6, "seconds"),
        group=STORAGE,
    )
    ranking: RankingFile | None = None
    telemetry: TelemetrySettings | None = None

    def limit_of(self, store: str) -> float:
        """Return the maximum number of bytes of all entries in the store.

        :param store: value of ``--store``.
        """
        if self.store_limit is not None:
            return self.store_limit
        return default_limit() if store == "memory:" else STORE_LIMIT


DEFAULTS = DiscoverySettings()
