"""What an operator chooses of discovery, and the limits that nobody chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from dmsg.base.memory import default_limit
from dmsg.discovery.checks.proof import OPENINGS, Openings
from dmsg.discovery.service.ranking import RankingFile
from dmsg.discovery.store import STORE_LIMIT
from dmsg.telemetry.service import TelemetrySettings

MAX_SERVERS = 10
"""Servers in one answer of available_servers, by default."""
SERVER_TTL = 120.0
"""Seconds without a refresh after which a server is not listed, by default."""
OF_PLACE = 64 * 1024 * 1024
"""Bytes of entries that one public address, or block, may have posted; then its oldest are dropped."""
CLIENT_TTL = 2 * 3600.0
"""Seconds after its last POST when the entry of a client is dropped that posts it every half hour."""
REFRESHING_TTL = 86400.0
"""Seconds after its last POST when the entry of a server is dropped that posts it every half minute."""
ENTRY_TTL = 90 * 86400.0
"""Seconds after its last POST when any other entry is dropped, by default; a server's: after it was last seen."""
MAX_SERVER_SIZE = 16 * 1024
"""Bytes of an entry with a server: a list of them is to be no longer than clients take."""
RANKED_POOL = 512
"""Live servers of which a ranking chooses."""
RATE = 200.0
"""Requests a second and address, by default."""
BURST = 1000.0
"""Requests of an address at once, by default: some hundred clients behind one address that all start now."""
POST_RATE = 50.0
"""Entries a second that an address may post, by default; those that cannot be read or verified count as requests."""
POST_BURST = 1000.0
"""Entries that an address may post at once, by default."""
WORTHLESS = 5
"""Requests that an entry counts for which cannot be read, or is not signed by its key: verifying is what costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """What an operator chooses.

    :ivar rate: requests a second and address; 0: no limit.
    :ivar burst: requests of an address at once.
    :ivar post_rate: entries a second that an address may post.
    :ivar post_burst: entries that an address may post at once.
    :ivar looks: servers are looked at before they are listed; those of 2019, which do not refresh their entry, are
        listed as long as they are there.
    :ivar private_servers: servers in private networks are looked at, too, whoever posts their entries.
    :ivar openings: how servers are asked to prove their keys.
    :ivar store_limit: bytes of entries that are kept; None: in memory :func:`~dmsg.base.memory.default_limit`, else
        ``STORE_LIMIT``.
    :ivar entry_ttl: seconds after which entries of programs are dropped that do not post them again.
    :ivar of_place: bytes of entries of one public address.
    :ivar proxied: the address of who asks is the last of X-Forwarded-For.
    :ivar max_servers: in one answer.
    :ivar server_ttl: seconds after which a server that does not refresh its entry is not listed; 0: never.
    :ivar ranking: by which servers are preferred.
    :ivar telemetry: where to write events for the pipeline.
    :ivar metrics: endpoint string for the page, ``/metrics`` and ``/health``; None: the last two are at its own port.
    :ivar page_token: who has it may look at the page from anywhere; None: it is for this machine alone.
    """

    rate: float = RATE
    burst: float = BURST
    post_rate: float = POST_RATE
    post_burst: float = POST_BURST
    looks: bool = True
    private_servers: bool = False
    openings: Openings = field(default_factory=lambda: OPENINGS)
    store_limit: float | None = None
    entry_ttl: float = ENTRY_TTL
    of_place: float = OF_PLACE
    proxied: bool = False
    max_servers: int = MAX_SERVERS
    server_ttl: float = SERVER_TTL
    ranking: RankingFile | None = None
    telemetry: TelemetrySettings | None = None
    metrics: str | None = None
    page_token: bytes | None = None

    def limit_of(self, store: str) -> float:
        """Bytes of entries that are kept.

        :param store: what ``--store`` says.
        """
        if self.store_limit is not None:
            return self.store_limit
        return default_limit() if store == "memory:" else STORE_LIMIT


class DiscoveryOptions(TypedDict, total=False):
    """Single fields of :class:`DiscoverySettings`, as keywords."""

    rate: float
    burst: float
    post_rate: float
    post_burst: float
    looks: bool
    private_servers: bool
    openings: Openings
    store_limit: float | None
    entry_ttl: float
    of_place: float
    proxied: bool
    max_servers: int
    server_ttl: float
    ranking: RankingFile | None
    telemetry: TelemetrySettings | None
    metrics: str | None
    page_token: bytes | None


DEFAULTS = DiscoverySettings()
