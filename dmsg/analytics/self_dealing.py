"""Self-dealing: signs that a server's operator also owns the clients for whose traffic the server is credited.

Anybody can create keys, so whether two keys have one owner cannot be proved. Therefore a flag changes neither the
credited bytes nor the weight of a server. Whoever pays for a flagged server should examine it, and may ask the server's
operator who the clients are. Like the credited bytes, the signs are computed from the receipts of both ends. Only the
hours of transports and the heartbeats are the server's own statements.

There are two signs:

*Closed groups*: a client is *apart* if it used only one server on the day and had few partners. A small share of its
bytes is ignored in this test. A group of clients is closed if all of the clients and all of their partners are apart.
An example is keys of one owner that exchange data in pairs or rings. In a real network, the partners of a client also
exchange data with other clients.

*Bursts*: most of a server's transports and bytes were in one hour in which the other servers were not busy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from heapq import nlargest
from statistics import median_low

from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.runs import State
from dmsg.analytics.store import Row, Store

CLOSED_GROUP_FLAG, BURST_FLAG = "closed group", "burst"
"""Flags of a server's day: for closed groups among its clients, and for a burst of traffic in one hour."""
MAX_PARTNERS = 10
"""Maximum number of partners of a client that counts as *apart*, see :data:`IGNORED_SHARE`."""
IGNORED_SHARE = 0.05
"""Share of a client's bytes that is ignored when the client is tested for being *apart* (one server, few partners).
Otherwise an operator could avoid a flag with a little faked traffic with other clients or over other servers.
"""
CLOSED_SHARE = 0.25
"""Minimum share of a server's credited bytes that must come from closed groups for the server to be flagged."""
CLOSED_TIMES = 3.0
"""A server is flagged for closed groups only if their share is at least this many times the median of the other
servers. Honest users who connect only their own two machines form closed groups, too, but at all servers.
"""
CLOSED_LEAST = 30
"""Minimum number of a server's transports that must come from closed groups for the server to be flagged. A smaller
number may be chance."""
NETWORK_SERVERS = 3
"""Minimum number of servers with credit on the day; with fewer, no server is flagged, because the clients have no
choice of servers."""
CLOSED_CLIENTS = 0.5
"""Maximum share of the network's clients in closed groups. Above it, no server is flagged for closed groups, because
the network is small or consists of private groups.
"""
BURST_SHARE = 0.5
"""Minimum share of a server's transports, and of its bytes, in its busiest hour for the server to be flagged for a
burst."""
BURST_LEAST = 50
"""Minimum number of transports in the busiest hour for the server to be flagged for a burst."""
OTHERS_SHARE = 0.2
"""Maximum share of the other servers' transports that may be in a server's busiest hour for the server to be flagged
for a burst. Above it, the hour was busy everywhere."""
AWAKE_HOURS = 12
"""Minimum number of hours with heartbeats for a server to be flagged for a burst. The traffic of a server that was up
for fewer hours is concentrated anyway."""
MAX_NAMES = 10
"""Maximum number of a server's clients whose names are shown."""

MAX_PAIRS = 1_000_000
"""Maximum number of pairs of clients of a day, because the pairs are read into memory."""
_CREDITED = """WITH ends AS (
    SELECT server, transport, initiator, min(hour) AS hour, min(signer) AS signer, min(partner) AS partner,
           min(delivered_out) AS sent, min(delivered_in) AS received
    FROM ({receipts}) AS r GROUP BY server, transport, initiator),
credited AS (
    SELECT one.server, one.signer AS a, one.partner AS b, least(one.hour, other.hour) AS hour,
           least(one.sent, other.received) + least(other.sent, one.received) AS bytes
    FROM ends AS one JOIN ends AS other ON one.server = other.server AND one.transport = other.transport
    WHERE one.initiator AND NOT other.initiator AND one.signer = other.partner AND one.partner = other.signer)
"""
"""SQL for the credited transports of a day."""
# The sums are floating-point numbers, because sums of integers could overflow: an operator's own keys may state any
# number up to 2^50 for each transport.
_SUMS = "count(*) AS transports, sum(CAST(bytes AS DOUBLE)) AS bytes FROM credited"
_PAIRS = f"SELECT server, a, b, {_SUMS} GROUP BY server, a, b"
_HOURS = f"SELECT server, hour, {_SUMS} GROUP BY server, hour"
_RECEIPTS = (
    "SELECT server, transport, signer, partner, initiator, delivered_out, delivered_in, {hour} AS hour FROM it WHERE "
)
_FROM_BRONZE = _RECEIPTS.format(hour="CAST(floor(ts % 86400000 / 3600000.0) AS INT)") + (
    "family = 'receipt' AND dt = '{day}' AND reason IS NULL AND transport IS NOT NULL AND signer IS NOT NULL"
)
_FROM_SILVER = _RECEIPTS.format(hour="CAST(date_part('hour', at) AS INT)") + "dt = DATE '{day}'"


class TooManyPairs(LakeError):
    """Error: a day has too many pairs of clients for the search for self-dealing."""


@dataclass
class Dealing:
    """Figures of one server on one day, from which its flags are computed.

    :ivar credited: bytes for which both ends signed.
    :ivar clients: number of the server's clients.
    :ivar closed_bytes: credited bytes that come from closed groups, as the docstring of this module defines them.
    :ivar others_closed_share: median of the other servers' :attr:`closed_share`; the lower of two middle values.
    :ivar names: some of the clients in closed groups.
    :ivar peak_hour: hour with most transports.
    :ivar others_share: share of the transports of all other servers together that was in this server's ``peak_hour``.
    :ivar awake_hours: number of hours with heartbeats.
    :ivar network: in the whole network, the numbers of servers, of clients, and of clients in closed groups.
    """

    server: str
    transports: int
    credited: int
    clients: int
    closed_transports: int
    closed_bytes: int
    closed_clients: int
    others_closed_share: float
    peak_hour: int
    peak_transports: int
    peak_bytes: int
    others_share: float
    awake_hours: int
    network: tuple[int, int, int]
    names: list[str] = field(default_factory=list)

    @property
    def closed_share(self) -> float:
        """Share of the credited bytes that comes from closed groups."""
        return self.closed_bytes / self.credited if self.credited else 0.0

    @property
    def flags(self) -> list[str]:
        """Flags of the server on this day."""
        found = []
        servers, clients, closed = self.network
        if (
            self.closed_transports >= CLOSED_LEAST
            and self.closed_share >= max(CLOSED_SHARE, CLOSED_TIMES * self.others_closed_share)
            and servers >= NETWORK_SERVERS
            and closed <= CLOSED_CLIENTS * clients
        ):
            found.append(CLOSED_GROUP_FLAG)
        if (
            self.peak_transports >= max(BURST_LEAST, BURST_SHARE * self.transports)
            and self.peak_bytes >= BURST_SHARE * self.credited
            and self.others_share <= OTHERS_SHARE
            and servers >= NETWORK_SERVERS
            and self.awake_hours >= AWAKE_HOURS
        ):
            found.append(BURST_FLAG)
        return found


def find_dealings(store: Store, state: State, day: date, most: int = MAX_PAIRS) -> list[Dealing]:
    """Return the figures of each server that was credited with traffic on a day; flagged servers come first.

    :param most: maximum number of pairs of clients. A day with more pairs is not examined.
    :raises LakeError: the tables cannot be read.
    :raises TooManyPairs: more than ``most`` pairs have credit.
    """
    stored = str(day) in store.stored_days("receipts", state)
    receipts = (_FROM_SILVER if stored else _FROM_BRONZE).format(day=day)
    layer, name = ("silver", "receipts") if stored else ("", "bronze")
    credited = _CREDITED.format(receipts=receipts)
    pairs = store.ask(layer, name, state, f"{credited}{_PAIRS} LIMIT {most + 1}")
    if len(pairs) > most:
        raise TooManyPairs(
            f"more than {most:,} pairs of clients have credit on {day}: too many to search for self-dealing"
        )
    awake: Counter[str] = Counter()
    for row in store.rows("gold", "server_hour", state, str(day)):
        awake[row["server"]] += bool(row["alive_minutes"])
    return judge(pairs, store.ask(layer, name, state, credited + _HOURS), awake)


@dataclass(slots=True)
class _Sums:
    transports: int = 0
    credited: int = 0
    closed_transports: int = 0
    closed_bytes: int = 0


def judge(pairs: Sequence[Row], hours: Sequence[Row], awake: Mapping[str, int]) -> list[Dealing]:
    """Return the figures of each server that was credited with traffic on a day.

    :param pairs: rows with the credited ``transports`` and ``bytes`` of each ``server`` and pair of clients ``a`` and
        ``b``.
    :param hours: rows with the credited ``transports`` and ``bytes`` of each ``server`` and ``hour``.
    :param awake: number of hours with heartbeats by server.
    """
    closed = _closed_clients(pairs)
    clients: dict[str, set[str]] = defaultdict(set)
    sums: dict[str, _Sums] = defaultdict(_Sums)
    for row in pairs:
        server, a, b = row["server"], row["a"], row["b"]
        there, total = clients[server], sums[server]
        there.add(a)
        there.add(b)
        total.transports += row["transports"]
        total.credited += int(row["bytes"])
        if closed.get(a) == closed.get(b) == server:
            total.closed_transports += row["transports"]
            total.closed_bytes += int(row["bytes"])
    network = len(sums), len(set().union(*clients.values())), len(closed)
    shares = {server: total.closed_bytes / max(1, total.credited) for server, total in sums.items()}
    found = []
    for server, total in sums.items():
        peak = max((one for one in hours if one["server"] == server), key=lambda one: (one["transports"], one["hour"]))
        own = sorted(client for client in clients[server] if closed.get(client) == server)
        dealing = Dealing(
            server=server,
            transports=total.transports,
            credited=total.credited,
            clients=len(clients[server]),
            closed_transports=total.closed_transports,
            closed_bytes=total.closed_bytes,
            closed_clients=len(own),
            others_closed_share=_median_of_others(shares, server),
            peak_hour=peak["hour"],
            peak_transports=peak["transports"],
            peak_bytes=int(peak["bytes"]),
            others_share=_share_of_others(hours, server, peak["hour"]),
            awake_hours=awake.get(server, 0),
            network=network,
        )
        if CLOSED_GROUP_FLAG in dealing.flags:
            dealing.names = own[:MAX_NAMES]
        found.append(dealing)
    return sorted(found, key=lambda one: (not one.flags, -one.closed_share, one.server))


def _closed_clients(pairs: Iterable[Row]) -> dict[str, str]:
    """Return the clients in closed groups, with the server that each uses."""
    of_servers: dict[str, dict[str, int]] = defaultdict(dict)
    of_partners: dict[str, dict[str, int]] = defaultdict(dict)
    for row in pairs:
        server, a, b, count = row["server"], row["a"], row["b"], row["bytes"]
        for client, other in ((a, b), (b, a)):
            servers, partners = of_servers[client], of_partners[client]
            servers[server] = servers.get(server, 0) + count
            partners[other] = partners.get(other, 0) + count
    whole = {client: sum(servers.values()) for client, servers in of_servers.items()}
    apart = {}
    for client, servers in of_servers.items():
        server, most = min(servers.items(), key=lambda one: (-one[1], one[0]))
        few = sum(nlargest(MAX_PARTNERS, of_partners[client].values()))
        if min(most, few) >= (1 - IGNORED_SHARE) * whole[client]:
            apart[client] = server
    return {
        client: server
        for client, server in apart.items()
        if all(other in apart for other, count in of_partners[client].items() if count >= IGNORED_SHARE * whole[client])
    }


def _median_of_others(shares: Mapping[str, float], server: str) -> float:
    others = [share for name, share in shares.items() if name != server]
    return median_low(others) if others else 0.0


def _share_of_others(hours: Iterable[Row], server: str, hour: int) -> float:
    there = whole = 0
    for row in hours:
        if row["server"] != server:
            whole += row["transports"]
            there += row["transports"] if row["hour"] == hour else 0
    return there / whole if whole else 0.0


def lines_of(dealing: Dealing) -> list[str]:
    """Return the evidence as lines of text for people, each number with its limit."""
    servers, clients, closed = dealing.network
    lines = [
        f"{dealing.closed_clients:,} of {dealing.clients:,} clients deal with nobody else: {dealing.closed_bytes:,} of "
        f"{dealing.credited:,} credited bytes, {dealing.closed_share * 100:.1f} % (limit {CLOSED_SHARE * 100:g} %, and "
        f"{CLOSED_LEAST} transports), in {dealing.closed_transports:,} transports; the median of the other servers is "
        f"{dealing.others_closed_share * 100:.1f} % (at most 1/{CLOSED_TIMES:g} of this server's share for a flag)",
        f"in the whole network {closed:,} of {clients:,} clients deal with nobody else (at most "
        f"{CLOSED_CLIENTS * 100:g} % for a flag), and {servers:,} servers have credit (at least {NETWORK_SERVERS})",
        f"{dealing.peak_transports:,} of {dealing.transports:,} transports and {dealing.peak_bytes:,} bytes came in "
        f"the hour from {dealing.peak_hour:02d}h (limit {BURST_SHARE * 100:g} % of both, and {BURST_LEAST} "
        f"transports); at other servers {dealing.others_share * 100:.1f} % (at most {OTHERS_SHARE * 100:g} % for a "
        f"flag); heartbeats in {dealing.awake_hours} hours (at least {AWAKE_HOURS})",
    ]
    if dealing.names:
        more = dealing.closed_clients - len(dealing.names)
        lines.append(f"these clients: {', '.join(dealing.names)}" + (f" and {more:,} more" if more > 0 else ""))
    return lines
