"""Rows that the report shows, from SQL queries of the gold tables without Spark.

At most :data:`MAX_ROWS` rows of a table are shown. If there are more, the page says so. The queries compute the sums,
so that even for a year and a thousand servers they return only a few thousand rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any

from dmsg.analytics.attention import Finding, needs_attention
from dmsg.analytics.gold.histograms import SHARES, percentile
from dmsg.analytics.gold.totals import SUM_LIMIT
from dmsg.analytics.schemas import AGREES
from dmsg.analytics.store import Row, Store
from dmsg.telemetry.schema import BUCKETS

MAX_ROWS = 1000
"""Maximum number of rows of a table that the page shows."""
SHOWN_DAYS = 7
"""Number of days that the page shows hour by hour."""
SERVER_STRIPS = 50
"""Maximum number of servers for which the page draws a strip with a cell for each hour."""
MAX_CONFLICTS = 20
ACTORS_OF_KIND = 20
MAX_SERVERS = 300
"""Maximum number of servers in the table of servers. Servers with problems come first."""
MAX_AGREEING_ROWS = 20
"""Maximum number of rows shown for a server's days on which all three counts agree."""
MAX_FILES = 100


@dataclass
class Content:
    """Rows that the page shows, by table.

    :ivar attention: findings that need an operator's attention, the most urgent first.
    :ivar totals: sums over all rows of tables, including rows that the page does not show.
    :ivar cut: names of tables that have more rows than the page shows.
    :ivar more: number of rows that the page does not show, by table, for tables whose section states the number.
    """

    generated: datetime
    run: int
    attention: list[Finding] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)
    totals: dict[str, Any] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[Row]:
        return self.tables[name]


def total(column: str, name: str | None = None) -> str:
    """Return an SQL aggregate: the sum of a column, or ``SUM_LIMIT`` if the sum is larger. It has the same result as
    ``bounded_sum`` of ``gold/totals.py``.

    :param name: name of the sum; None for the name of the column.
    """
    found = f"sum(CAST({column} AS DOUBLE))"
    within = (
        f"CASE WHEN {found} < {SUM_LIMIT} THEN CAST({found} AS BIGINT) WHEN {found} >= {SUM_LIMIT} THEN {SUM_LIMIT} END"
    )
    return f"{within} AS {name or column}"


def collect(store: Store, at: datetime | None = None) -> Content:
    """Read the rows that the page needs.

    :param at: show the tables as they were at this time; None for the newest state.
    :raises LakeError: there are no tables yet.
    """
    state = store.computed_state(at)
    # In a report of a past time, the age of the data is measured relative to that time, and not to now.
    content = Content(datetime.fromtimestamp(state.at / 1000, UTC), state.run)
    content.attention = needs_attention(store, state, now=datetime.now(UTC) if at is None else content.generated)
    since = date.fromisoformat(max(state.days)) - timedelta(SHOWN_DAYS - 1)
    recent = f"dt >= DATE '{since}'"

    def ask(name: str, sql: str, layer: str = "gold") -> list[Row]:
        return store.ask(layer, name, state, sql)

    def take(name: str, most: int = MAX_ROWS, order: str = "dt", where: str = recent) -> None:
        rows = ask(name, f"SELECT * FROM it WHERE {where} ORDER BY {order} LIMIT {most + 1}")
        if len(rows) > most:
            content.cut.append(name)
        content.tables[name] = rows[:most]

    take("network_day", where="true")
    _servers(content, ask, recent, max(state.days))
    take("placement", order="weight DESC NULLS LAST", where="true")
    take("capacity_forecast", order="growth_per_day DESC NULLS LAST", where="true")
    _collect_settlement(content, ask, recent)
    take("settlement_conflict_day", MAX_CONFLICTS, "claimed DESC NULLS LAST, transport")
    _actors(content, ask)
    take("quality_day", order="producer, dt")
    take("public_day", where="true")
    drawn = ", ".join(f"'{row['server']}'" for row in content["uptime"][:SERVER_STRIPS] if row["server"].isalnum())
    content.tables["server_hour"] = ask(
        "server_hour",
        f"""SELECT server, dt, hour, alive_minutes, agreed_minutes, seen_minutes, peak_sessions, capacity FROM it
            WHERE {recent} AND server IN ({drawn or "''"})""",
    )
    content.tables["observed"] = ask(
        "numbers",
        f"""SELECT dt, min(first_ts) / 60000 AS first, max(last_ts) / 60000 AS last FROM it
            WHERE {recent} GROUP BY dt""",
        "silver",
    )
    content.tables["traffic"] = ask(
        "traffic_hour",
        f"SELECT dt, hour, {total('bytes')}, sum(closed) AS closed FROM it WHERE {recent} GROUP BY dt, hour",
    )
    content.tables["latency"] = _latencies(ask, "latency_hour", ["dt", "hour"], recent)
    content.tables["refused"] = ask(
        "refusal_hour",
        f"""SELECT dt, hour, what, reason, {total("n")} FROM it WHERE {recent} AND what <> 'drop'
            GROUP BY dt, hour, what, reason""",
    )
    content.tables["discovery"] = ask(
        "discovery_hour",
        f"""SELECT producer, dt, sum(first) AS first, sum(next) AS next, sum(deleted) AS deleted,
                {total("refused")}, {total("absent")}, max(servers) AS servers
            FROM it WHERE {recent} GROUP BY producer, dt ORDER BY producer, dt LIMIT {MAX_ROWS}""",
    )
    content.tables["servers"] = _by_server(content, ask, recent, max(state.days))
    _totals(content, ask, recent)
    content.tables["quarantine"] = ask(
        "bronze",
        "SELECT problem, count(*) AS lines FROM it WHERE family = 'quarantine' GROUP BY problem ORDER BY problem",
        "",
    )
    content.tables["files"] = ask(
        "files",
        f"SELECT * FROM it WHERE problem IS NOT NULL ORDER BY file LIMIT {MAX_FILES}",
        "silver",
    )
    return content


Ask = Callable[..., list[Row]]


def _servers(content: Content, ask: Ask, recent: str, newest: str) -> None:
    """Collect a row for each server: first the servers that are silent, crashed or flagged, then the others by
    increasing uptime.

    :param newest: the newest day, as ``2026-01-31``.
    """
    content.tables["gone"] = ask(
        "boot",
        f"SELECT * FROM it WHERE role = 'server' AND ended = 'silent' AND next_at IS NULL LIMIT {MAX_ROWS}",
    )
    missing = {
        row["producer"]: row["missing"]
        for row in ask(
            "quality_day",
            f"SELECT producer, {total('missing')} FROM it WHERE {recent} AND missing > 0 GROUP BY producer",
        )
    }
    rows = ask(
        "uptime_day",
        f"""SELECT server, avg(uptime) AS uptime, avg(availability) AS availability, sum(crashes) AS crashes,
                array_agg(flags) AS flags,
                sum(CASE WHEN dt = DATE '{newest}' AND state IN ('up', 'unheard') THEN 1 ELSE 0 END) AS up
            FROM it WHERE {recent} GROUP BY server""",
    )
    shares = [row["uptime"] for row in rows if row["uptime"] is not None]
    content.totals |= {
        "servers": len(rows),
        "up": sum(row["up"] for row in rows),
        "uptime_servers": len(shares),
        "uptime": sum(shares) / len(shares) if shares else None,
    }
    gone = {row["producer"] for row in content["gone"]}
    for row in rows:
        row["missing"] = missing.get(row["server"], 0)
        row["flags"] = sorted({flag for flags in row["flags"] if flags for flag in flags.split(", ")})

    def quiet(row: Row) -> tuple[object, ...]:
        told = (row["server"] not in gone, -(row["crashes"] or 0), -len(row["flags"]), -row["missing"])
        return *told, 1.0 if row["uptime"] is None else row["uptime"], row["server"]

    rows.sort(key=quiet)
    content.tables["uptime"] = rows[:MAX_SERVERS]
    content.more["uptime"] = len(rows) - len(rows[:MAX_SERVERS])


def _totals(content: Content, ask: Ask, recent: str) -> None:
    """Add up the rows of the charts of traffic and refusals, and compute the share of all events that arrived."""
    (arrived,) = ask(
        "quality_day",
        f"SELECT {total('expected')}, sum(distinct_events) AS arrived FROM it WHERE {recent}",
    )
    refused = content["refused"]
    content.totals |= {
        "transports": sum(row["closed"] or 0 for row in content["traffic"]),
        "bytes": sum(row["bytes"] or 0 for row in content["traffic"]),
        "refused": sum(row["n"] for row in refused),
        "lookups": sum(row["n"] for row in refused if row["what"] == "lookup"),
        "complete": arrived["arrived"] / arrived["expected"] if arrived["expected"] else None,
    }


def _collect_settlement(content: Content, ask: Ask, recent: str) -> None:
    """Collect the days of servers on which the byte counts of the server and of both clients differ, and some days on
    which they agree."""
    order = "dt DESC, inflated_bytes DESC NULLS LAST, claimed_bytes DESC, server"
    differ = ask(
        "settlement_day",
        f"SELECT * FROM it WHERE {recent} AND verdict <> '{AGREES}' ORDER BY {order} LIMIT {MAX_ROWS}",
    )
    where = f"WHERE {recent} AND verdict = '{AGREES}'"
    agree = ask("settlement_day", f"SELECT * FROM it {where} ORDER BY {order} LIMIT {MAX_AGREEING_ROWS}")
    count = ask("settlement_day", f"SELECT count(*) AS n FROM it {where}")
    differ.sort(key=lambda row: not row["verdict"].startswith("claims"))
    content.tables["settlement_day"] = differ + agree
    content.tables["lost"] = ask(
        "lost_transport",
        f"""SELECT server, dt, count(least_bytes) AS witnessed, {total("least_bytes", "least")},
                {total("most_bytes", "most")}
            FROM it WHERE {recent} GROUP BY server, dt LIMIT {MAX_ROWS}""",
    )
    content.more["settlement_day"] = sum(row["n"] for row in count) - len(agree)


def _actors(content: Content, ask: Ask) -> None:
    """Collect the actors with the highest scores of each kind."""
    rows = ask(
        "actor",
        f"""SELECT * FROM (
                SELECT *, row_number() OVER (PARTITION BY kind ORDER BY score DESC, who) AS place FROM it) AS ranked
            WHERE place <= {ACTORS_OF_KIND} ORDER BY score DESC, who""",
    )
    count = ask("actor", "SELECT count(*) AS n FROM it")
    content.tables["actor"] = rows
    content.more["actor"] = sum(row["n"] for row in count) - len(rows)


def _latencies(ask: Ask, table: str, keys: list[str], recent: str, name: str = "rtt") -> list[Row]:
    """Return percentiles of all samples of each group. They are computed from the sums of the counts in each bucket."""
    by = ", ".join(keys)
    counted: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0] * BUCKETS)
    for row in ask(
        table,
        f"""SELECT {by}, bucket, sum(n) AS n FROM (
                SELECT {by}, unnest({name}) AS n, unnest(range(0, {BUCKETS})) AS bucket FROM it
                WHERE {recent} AND {name} IS NOT NULL)
            GROUP BY {by}, bucket""",
    ):
        counted[tuple(row[key] for key in keys)][row["bucket"]] += row["n"] or 0
    return [
        dict(zip(keys, key, strict=True))
        | {f"{name}_samples": sum(counts)}
        | {f"{name}_p{share}": percentile(counts, share / 100) for share in SHARES}
        for key, counts in counted.items()
    ]


def _by_server(content: Content, ask: Ask, recent: str, newest: str) -> list[Row]:
    """Return a row for each server with its sums over the days shown.

    :param newest: the newest day. Only its clients are counted.
    """
    found: dict[str, Row] = defaultdict(dict)
    of_newest = f"sum(CASE WHEN dt = DATE '{newest}' THEN clients ELSE 0 END)"
    for table, sums in (
        ("traffic_hour", f"{total('bytes')}, sum(closed) AS transports, sum(refused_by_peer) AS refused_by_peer"),
        ("session_day", f"sum(sessions) AS sessions, sum(lost) AS lost, {of_newest} AS clients"),
        (
            "capacity_day",
            f"max(peak_share) AS peak_share, sum(busy_hours) AS busy_hours, {total('refused_full', 'full')}",
        ),
    ):
        for row in ask(table, f"SELECT server, {sums} FROM it WHERE {recent} GROUP BY server"):
            found[row.pop("server")].update(row)
    for row in _latencies(ask, "latency_day", ["server"], recent):
        found[row.pop("server")].update(row)
    for row in ask(
        "refusal_hour",
        f"SELECT producer, {total('n')} FROM it WHERE {recent} AND what <> 'drop' GROUP BY producer",
    ):
        if row["producer"] in found:
            found[row["producer"]]["refused"] = row["n"]
    ends: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row in ask(
        "close_day",
        f"SELECT server, reason, sum(transports) AS n FROM it WHERE {recent} GROUP BY server, reason",
    ):
        ends[row["server"]].append((row["n"], row["reason"]))
    for server, reasons in ends.items():
        found[server]["ends"] = sorted(reasons, reverse=True)
    rows = [{"server": server, **row} for server, row in found.items()]
    clients = [row.get("clients") or 0 for row in rows]
    content.totals |= {"clients": sum(clients), "clients_of_one": max(clients, default=0)}
    return sorted(rows, key=lambda row: (-(row.get("bytes") or 0), row["server"]))[:MAX_ROWS]
