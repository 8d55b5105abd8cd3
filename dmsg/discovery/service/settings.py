"""What an operator chooses of discovery, and the limits that nobody chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmsg.base.memory import default_limit
from dmsg.base.options import FLAG, Number, option
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

    rate: float = option(
        200.0,
        "requests a second of one address; 0 means no limit",
        Number(0, 10**6, "requests a second"),
        name="rate-limit",
    )
    burst: float = option(1000.0, "requests of one address at once", Number(1, 10**6, "requests"))
    post_rate: float = option(50.0, "signed entries a second of one address", Number(1, 10**6, "entries a second"))
    post_burst: float = option(1000.0, "signed entries of one address at once", Number(1, 10**6, "entries"))
    looks: bool = option(
        True,
        "list servers without connecting to them to see whether they are there and have their key",
        FLAG,
        name="no-looks",
    )
    private_servers: bool = option(
        False, "connect to servers in private networks, too, whoever posts their entries", FLAG
    )
    openings: Openings = field(default_factory=lambda: OPENINGS)
    store_limit: float | None = option(
        None,
        "MiB of entries that are kept; then who posted most loses the oldest",
        Number(1, 10**7, "MiB"),
        name="memory",
        default_text="4096, in memory a quarter of the machine's",
    )
    entry_ttl: float = option(
        ENTRY_TTL,
        "days after which an entry is dropped whose owner does not post it again and again; servers: are not seen",
        Number(1, 36500, "days"),
    )
    of_place: float = OF_PLACE
    proxied: bool = option(False, "take addresses from X-Forwarded-For (behind a proxy of your own)", FLAG)
    max_servers: int = option(10, "servers in one answer", Number(1, 1000, "servers"))
    server_ttl: float = option(
        120.0,
        "seconds without a refresh after which a server is not listed; 0: never",
        Number(0, 10**6, "seconds"),
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
