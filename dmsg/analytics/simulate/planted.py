"""What a simulated network hides, and where: the truth beside which answers can be laid.

Each of these befalls one server, by its rank from 0, on the last day; a network
that has fewer servers has fewer of them.  Some are too small for anybody to
see in a network of few events: ``Planted.truth`` names what is there,
whatever it takes to find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from hashlib import md5

SLOW, LIAR, FULL, COLLUDER, SLOW_READERS, SKEWED, LOSER, SILENT, CRASHED = range(1, 10)
"""Which server: answers slowly; claims more than it delivered; has no place; claims more, together with the initiators
of its transports; has receivers that are too slow; has a wrong clock; of its files one is lost; fell silent; crashed on
the day before, as others do by chance."""
QUIET = frozenset({SLOW, FULL, SKEWED, LOSER, SILENT})
"""Servers that are not away and do not crash by chance, too."""
LIE = 1.03
SCANNERS = 3
SKEW_MS = 180_000
SLOW_TIMES = 4.0
SILENT_FROM = 15 * 60
"""Minute of the last day."""
FULL_FROM, FULL_MINUTES = 10 * 60, 180
LOST_FROM, LOST_MINUTES = 11 * 60, 120
"""Of this time one server's events are lost, as with a file."""
SLOW_READER_ONE_IN = 3


def server_key(server: int) -> str:
    """66 hex digits of the server of that rank."""
    return f"02{md5(f'server {server}'.encode()).hexdigest()}{server:032x}"[:66]  # noqa: S324


def tag(*words: object) -> str:
    """16 hex digits that name somebody, as the simulation makes them."""
    return md5("/".join(map(str, words)).encode()).hexdigest()[:16]  # noqa: S324


@dataclass(frozen=True)
class Planted:
    """One thing.

    :ivar kind: crash, slow, lie, collusion, full, slow readers, clock, lost file, silence, scan, flood, handshakes,
        entries or lookups.
    :ivar about: a server's key, or the name of an actor.
    :ivar day: on which it is to be seen.
    """

    kind: str
    about: str
    day: date


def befalls_servers(servers: int, last_day: date, days: int) -> list[Planted]:
    """What befalls servers by their rank; crashes, which are drawn, are not among it."""
    kinds = {
        SLOW: "slow",
        LIAR: "lie",
        FULL: "full",
        COLLUDER: "collusion",
        SLOW_READERS: "slow readers",
        SKEWED: "clock",
        LOSER: "lost file",
        SILENT: "silence",
    }
    there = [(server, kind) for server, kind in kinds.items() if server < servers]
    # slow is who is slower than in the days before
    return [Planted(kind, server_key(server), last_day) for server, kind in there if kind != "slow" or days > 1]


def attackers(servers: int, last_day: date, days: int, *, fleet: bool) -> list[Planted]:
    """Who attacks all servers, and discovery, every day."""
    found = []
    each = [(day, last_day - timedelta(days - 1 - day)) for day in range(days)]
    for where in ["fleet"] if fleet else [str(server) for server in range(servers)]:
        found += [Planted("scan", tag("scanner", where, scanner), last_day) for scanner in range(SCANNERS)]
        found.append(Planted("flood", tag("flooder", where), last_day))
        # a network has another name each day
        found += [Planted("handshakes", tag("network", where, day), when) for day, when in each]
    for day, when in each:
        found += [Planted("entries", tag("poster", day), when), Planted("lookups", tag("asker", day), when)]
    return found


def crash(server: str, day: int, last_day: date, days: int) -> Planted:
    """One that was drawn.  :param day: counted from 0."""
    return Planted("crash", server, last_day - timedelta(days - 1 - day))
