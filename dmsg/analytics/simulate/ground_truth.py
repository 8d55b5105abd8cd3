"""Anomalies planted in a simulated network: the ground truth with which the pipeline's findings are compared.

Each anomaly of a server affects one server on the last day. The server is chosen by its rank in traffic, from 0, so a
network with few servers has fewer anomalies. In a simulation with few events, some of the listed anomalies are too
small to be found.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from hashlib import md5

SLOW, LIAR, FULL, COLLUDER, SLOW_READERS, SKEWED, LOSER, SILENT, CRASHED, RING, OWN_KEYS, BURST = range(1, 13)
"""Ranks of the servers with an anomaly.

``SLOW`` answers slowly. ``LIAR`` claims more than it delivered; ``COLLUDER`` does so together with the initiators of
its transports. ``FULL`` is full. ``SLOW_READERS`` has receivers that are too slow. ``SKEWED`` has a wrong clock.
``LOSER`` has lost a file of events. ``SILENT`` fell silent. ``CRASHED`` crashed on the day before. ``RING`` carries
transports of a ring of keys that connect only to each other, ``OWN_KEYS`` those of two such keys. ``BURST`` carries
most of the day's transports within half an hour.
"""
RANKS_WITHOUT_OUTAGES = frozenset({SLOW, FULL, SKEWED, LOSER, SILENT, RING, OWN_KEYS, BURST})
"""Ranks of the servers that have no random outages or crashes besides their anomaly."""
LIE_FACTOR = 1.03
SCANNERS = 3
SKEW_MS = 180_000
SLOW_TIMES = 4.0
SILENT_FROM = 15 * 60
"""Minute of the last day at which the silent server stops writing events."""
FULL_FROM, FULL_MINUTES = 10 * 60, 180
LOST_FROM, LOST_MINUTES = 11 * 60, 120
"""Start and length of the period on the last day whose events are missing, as if a file of the spool was lost. Both are
in minutes; the start counts from midnight.
"""
SLOW_READER_ONE_IN = 3
SELF_DEALING_FACTOR = 2
"""Number of self-dealing transports of a server for each of its honest transports."""
RING_KEYS = 5
BURST_FROM, BURST_MINUTES = 4 * 60 + 10, 30


def server_key(server: int) -> str:
    """Return the key (66 hex digits) of the server of that rank."""
    return f"02{md5(f'server {server}'.encode()).hexdigest()}{server:032x}"[:66]  # noqa: S324


def tag(*words: object) -> str:
    """Return the pseudonym, of 16 hex digits, that the simulation uses for these words."""
    return md5("/".join(map(str, words)).encode()).hexdigest()[:16]  # noqa: S324


@dataclass(frozen=True)
class PlantedAnomaly:
    """Planted anomaly.

    :ivar kind: crash, slow, lie, collusion, full, slow readers, clock, lost file, silence, self-dealing, burst, scan,
        flood, handshakes, entries or lookups.
    :ivar about: key of a server, or name of an actor.
    :ivar day: day on which the anomaly is visible.
    """

    kind: str
    about: str
    day: date


def server_anomalies(servers: int, last_day: date, days: int) -> list[PlantedAnomaly]:
    """Return the anomalies of servers chosen by rank. Crashes are drawn at random and not included."""
    kinds = {
        SLOW: "slow",
        LIAR: "lie",
        FULL: "full",
        COLLUDER: "collusion",
        SLOW_READERS: "slow readers",
        SKEWED: "clock",
        LOSER: "lost file",
        SILENT: "silence",
        RING: "self-dealing",
        OWN_KEYS: "self-dealing",
        BURST: "burst",
    }
    there = [(server, kind) for server, kind in kinds.items() if server < servers]
    # A server counts as slow if it is slower than on the days before, so there must be earlier days.
    return [PlantedAnomaly(kind, server_key(server), last_day) for server, kind in there if kind != "slow" or days > 1]


def attackers(servers: int, last_day: date, days: int, *, fleet: bool) -> list[PlantedAnomaly]:
    """Return the actors that attack all servers and discovery every day."""
    found = []
    each = [(day, last_day - timedelta(days - 1 - day)) for day in range(days)]
    for where in ["fleet"] if fleet else [str(server) for server in range(servers)]:
        found += [PlantedAnomaly("scan", tag("scanner", where, scanner), last_day) for scanner in range(SCANNERS)]
        found.append(PlantedAnomaly("flood", tag("flooder", where), last_day))
        # The pseudonym of a network changes every day.
        found += [PlantedAnomaly("handshakes", tag("network", where, day), when) for day, when in each]
    for day, when in each:
        found += [
            PlantedAnomaly("entries", tag("poster", day), when),
            PlantedAnomaly("lookups", tag("asker", day), when),
        ]
    return found


def crash(server: str, day: int, last_day: date, days: int) -> PlantedAnomaly:
    """Return the anomaly for a crash that was drawn at random.

    :param day: index of the day, from 0.
    """
    return PlantedAnomaly("crash", server, last_day - timedelta(days - 1 - day))
