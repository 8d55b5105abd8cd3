"""What an operator chooses of discovery, and the limits that nobody chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmsg.base.memory import default_limit
from dmsg.base.options import FLAG, LIMITS, NETWORK, STORAGE, Number, burst_option, option, proxied_option, rate_option
from dmsg.discovery.checks.proof import OPENINGS, Openings
from dmsg.discovery.service.ranking import RankingFile
from dmsg.discovery.store import STORE_LIMIT
from dmsg.pages.settings import PageSettings
from dmsg.telemetry.service import TelemetrySettings

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
WORTHLESS = 5
"""Requests that an entry counts for which cannot be read, or is not signed by its key: verifying is what costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings(PageSettings):
    """What an operator chooses.

    Servers of 2019, which do not refresh their entry, are listed as long as they are there, if ``looks`` is on.  A
    ``store_limit`` of None is :func:`~dmsg.base.memory.default_limit` in memory, else ``STORE_LIMIT``.  Without
    ``metrics``, ``/metrics`` and ``/health`` are at its own port.

    :ivar openings: how servers are asked to prove their keys.
    :ivar of_place: bytes of entries of one public address.
    :ivar ranking: by which servers are preferred.
    :ivar telemetry: where to write events for the pipeline.
    """

    rate: float = rate_option(200.0)
    burst: float = burst_option(1000.0)
    post_rate: float = option(
        50.0, "Signed entries per second that one address may post", Number(1, 10**6, "entries a second"), group=LIMITS
    )
    post_burst: float = option(
        1000.0, "Signed entries that one address may post in a burst", Number(1, 10**6, "entries"), group=LIMITS
    )
    looks: bool = option(
        True,
        "List servers without first connecting to them to check that they exist and hold their keys",
        FLAG,
        name="no-looks",
        group=NETWORK,
    )
    private_servers: bool = option(
        False, "Also check servers in private networks, no matter who posted their entries", FLAG, group=NETWORK
    )
    openings: Openings = field(default_factory=lambda: OPENINGS)
    store_limit: float | None = option(
        None,
        "MiB of entries to keep; when they are reached, the address that posted most loses its oldest entry",
        Number(1, 10**7, "MiB"),
        name="memory",
        default_text="4096, in memory a quarter of the machine's",
        group=LIMITS,
    )
    entry_ttl: float = option(
        ENTRY_TTL,
        "Days to keep an entry that is not posted again, or of a server that is not seen",
        Number(1, 36500, "days"),
        group=STORAGE,
    )
    of_place: float = OF_PLACE
    proxied: bool = proxied_option()
    max_servers: int = option(10, "Number of servers in one answer", Number(1, 1000, "servers"), group=LIMITS)
    server_ttl: float = option(
        120.0,
        "Seconds after its last refresh until a server is no longer listed; 0 lists it forever",
        Number(0, 10**6, "seconds"),
        group=STORAGE,
    )
    ranking: RankingFile | None = None
    telemetry: TelemetrySettings | None = None

    def limit_of(self, store: str) -> float:
        """Bytes of entries that are kept.

        :param store: what ``--store`` says.
        """
        if self.store_limit is not None:
            return self.store_limit
        return default_limit() if store == "memory:" else STORE_LIMIT


DEFAULTS = DiscoverySettings()
