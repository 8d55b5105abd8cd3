"""Each gold table once more, in DuckDB, from the files of the spool: another engine, other ways.

Minutes are counted one by one instead of as bits, words are joined instead of
grouped, percentiles come from windows over buckets.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import duckdb

from dmsg.telemetry.schema import BUCKETS, Type, columns

_TYPES = {Type.STRING: "VARCHAR", Type.LONG: "BIGINT", Type.BOOLEAN: "BOOLEAN", Type.HISTOGRAM: "INTEGER[]"}
FIELDS = ", ".join(f"'{field.name}': '{_TYPES[field.type]}'" for field in columns())
"""An event's columns, as read_json wants them."""
_BOUND = "CASE WHEN {0} < 0 THEN 0 ELSE 0.1 * pow(2, {0} / 2.0) END"


def connect(spool: Path, checked: Path, *, threads: int = 2, memory: str = "6GB") -> duckdb.DuckDBPyConnection:
    """A database with the events ``e``: deduplicated, with day and hour."""
    base = duckdb.connect()
    base.execute(f"SET threads = {threads}; SET memory_limit = '{memory}'; SET TimeZone = 'UTC'")
    files = [str(path) for root in (spool, checked) for path in sorted(root.rglob("*.jsonl.gz"))]
    base.execute(
        f"""CREATE TABLE e AS
        SELECT DISTINCT ON (producer, boot, seq) *, CAST(epoch_ms(ts) AS DATE) AS dt, hour(epoch_ms(ts)) AS hr,
               ts // 60000 AS minute
        FROM read_json({files!r}, columns = {{{FIELDS}}}, format = 'newline_delimited')"""
    )
    base.execute("CREATE VIEW tr AS SELECT * FROM e WHERE type LIKE 'transport_%' AND type <> 'transport_refuse'")
    base.execute("CREATE VIEW closes AS SELECT * FROM e WHERE type = 'transport_close'")
    return base


def _quantiles(source: str, name: str) -> str:
    """server, dt, hr, bucket, n -> samples and three percentiles."""
    lower, upper = (
        _BOUND.format("(bucket - 1)"),
        f"CASE WHEN bucket = {BUCKETS - 1} THEN {_BOUND.format('(bucket - 1)')} ELSE {_BOUND.format('bucket')} END",
    )
    picks = ", ".join(
        f"max(CASE WHEN upto >= {share} * total AND upto - n < {share} * total THEN"
        f" ({lower}) + (({upper}) - ({lower})) * ({share} * total - (upto - n)) / n END)"
        f" AS {name}_p{int(share * 100)}"
        for share in (0.5, 0.9, 0.99)
    )
    return f"""
        WITH counts AS (SELECT server, dt, hr, bucket, sum(n) AS n FROM ({source}) GROUP BY ALL HAVING sum(n) > 0),
        running AS (SELECT *, sum(n) OVER (PARTITION BY server, dt, hr ORDER BY bucket) AS upto,
                    sum(n) OVER (PARTITION BY server, dt, hr) AS total FROM counts)
        SELECT server, dt, hr, max(total) AS {name}_samples, {picks} FROM running GROUP BY ALL"""


def queries(today: date) -> dict[str, str]:
    """Table -> SQL."""
    rtt = _quantiles(
        f"""SELECT producer AS server, dt, hr, i AS bucket, rtt[i + 1] AS n
            FROM tr, range({BUCKETS}) AS r(i) WHERE rtt IS NOT NULL""",
        "rtt",
    )
    accept = _quantiles(
        f"""SELECT producer AS server, dt, hr, 1 AS n,
            CASE WHEN accept_ms <= 0.1 THEN 0
                 ELSE least({BUCKETS - 1}, ceil(2 * log2(accept_ms / 0.1)))::INT END AS bucket
            FROM closes WHERE accept_ms IS NOT NULL""",
        "accept",
    )
    minutes = """
        WITH beats AS (
            SELECT producer, role, dt, ts, coalesce(interval_ms, 0) AS told,
                   lag(ts) OVER (PARTITION BY producer, boot, dt ORDER BY ts, seq) AS before
            FROM e WHERE type = 'heartbeat'),
        spans AS (
            SELECT producer, role, dt, ts,
                   CASE WHEN ts - before <= 600000 THEN least(before, ts - told)
                        ELSE greatest(ts - told, ts - 600000) END AS since FROM beats),
        alive AS (
            SELECT DISTINCT producer, role, dt, unnest(range(since // 60000, ts // 60000 + 1)) AS minute FROM spans),
        within AS (SELECT * FROM alive WHERE minute // 1440 = epoch(dt)::BIGINT // 86400),
        seen AS (
            SELECT DISTINCT subject, dt, unnest([minute, minute + 1]) AS minute FROM e
            WHERE type = 'entry' AND is_server AND result IN ('first', 'next')),
        looked AS (SELECT * FROM seen WHERE minute // 1440 = epoch(dt)::BIGINT // 86400),
        watched AS (SELECT DISTINCT dt, minute // 60 % 24 AS hour FROM within WHERE role = 'discovery'),
        """
    server_minutes = (
        minutes
        + """both_ends AS (
            SELECT coalesce(w.producer, l.subject) AS server, coalesce(w.dt, l.dt) AS dt,
                   coalesce(w.minute, l.minute) AS minute, w.minute IS NOT NULL AS a, l.minute IS NOT NULL AS s
            FROM (SELECT * FROM within WHERE role = 'server') w
            FULL JOIN looked l ON w.producer = l.subject AND w.dt = l.dt AND w.minute = l.minute),
        hours AS (
            SELECT server, dt, minute // 60 % 24 AS hour, count(*) FILTER (a) AS alive_minutes,
                   count(*) FILTER (s) AS seen, count(*) FILTER (a AND s) AS agreed FROM both_ends GROUP BY ALL),
        known AS (
            SELECT server, dt, hour, alive_minutes, CASE WHEN w.hour IS NOT NULL THEN seen END AS seen_minutes,
                   CASE WHEN w.hour IS NOT NULL THEN agreed END AS agreed_minutes
            FROM hours LEFT JOIN watched w USING (dt, hour))
        """
    )
    words = """
        WITH claims AS (
            SELECT producer AS server, transport, dt, total_ab AS rab, total_ba AS rba
            FROM closes WHERE transport IS NOT NULL),
        said AS (
            SELECT server, transport, initiator, min(dt) AS dt, min(delivered_out) AS o, min(delivered_in) AS i,
                   min(signer) AS signer, min(partner) AS partner
            FROM e WHERE type = 'receipt_checked' AND reason IS NULL AND transport IS NOT NULL GROUP BY ALL),
        joined AS (
            SELECT server, transport, coalesce(c.dt, least(a.dt, b.dt)) AS dt, rab, rba,
                   a.o AS a_out, a.i AS a_in, b.o AS b_out, b.i AS b_in,
                   coalesce(a.signer = b.partner AND b.signer = a.partner, true) AS mutual
            FROM claims c FULL JOIN (FROM said WHERE initiator) a USING (server, transport)
            FULL JOIN (FROM said WHERE NOT initiator) b USING (server, transport)),
        credits AS (
            SELECT *, rab IS NOT NULL AS r, coalesce(rab + rba, 0) AS claimed, a_out + a_in AS aw, b_in + b_out AS bw,
                   CASE WHEN a_out IS NOT NULL AND b_out IS NOT NULL AND mutual
                        THEN least(a_out, b_in) + least(b_out, a_in) ELSE 0 END AS credited FROM joined),
        states AS (
            SELECT *, abs(aw - bw) <= greatest(4096, 0.01 * greatest(aw, bw)) AS agree,
                   abs(claimed - credited) <= greatest(4096, 0.01 * greatest(claimed, credited)) AS fits,
                   abs(claimed - greatest(aw, bw)) <= greatest(4096, 0.01 * greatest(claimed, aw, bw)) AS sides
            FROM credits),
        judged AS (
            SELECT *, CASE WHEN NOT r THEN 'unclaimed' WHEN a_out IS NULL AND b_out IS NULL THEN 'relay_only'
                           WHEN a_out IS NULL OR b_out IS NULL THEN 'one_sided'
                           WHEN NOT mutual THEN 'conflict'
                           WHEN agree AND fits THEN 'matched' ELSE 'conflict' END AS state FROM states)
        """
    return {
        "traffic_hour": """
            SELECT producer AS server, dt, hr AS hour, count(*) FILTER (type = 'transport_open') AS opened,
                   count(*) FILTER (type = 'transport_close' AND accept_ms IS NOT NULL) AS accepted,
                   count(*) FILTER (type = 'transport_close') AS closed,
                   count(*) FILTER (type = 'transport_close' AND accept_ms IS NULL) AS refused_by_peer,
                   coalesce(sum(data_ab), 0) + coalesce(sum(data_ba), 0) AS bytes,
                   coalesce(sum(frames_ab), 0) + coalesce(sum(frames_ba), 0) AS frames,
                   coalesce(sum(acks_ab), 0) + coalesce(sum(acks_ba), 0) AS acks
            FROM tr GROUP BY ALL""",
        "close_day": """SELECT producer AS server, dt, reason, "by", count(*) AS transports FROM closes GROUP BY ALL""",
        "pair_day": """
            SELECT producer AS server, dt, src, dst, count(*) FILTER (type = 'transport_close') AS transports,
                   coalesce(sum(data_ab), 0) AS bytes_ab, coalesce(sum(data_ba), 0) AS bytes_ba
            FROM tr WHERE type <> 'transport_open' GROUP BY ALL""",
        "latency_hour": f"""
            SELECT server, dt, hr AS hour, coalesce(rtt_samples, 0) AS rtt_samples, rtt_p50, rtt_p90, rtt_p99,
                   coalesce(accept_samples, 0) AS accept_samples, accept_p50, accept_p90, accept_p99
            FROM ({rtt}) FULL JOIN ({accept}) USING (server, dt, hr)""",
        "server_hour": f"""{server_minutes}
            SELECT k.*, l.* EXCLUDE (producer, dt, hour) FROM known k LEFT JOIN (
                SELECT producer, dt, hr AS hour, max(sessions) AS peak_sessions, max(transports) AS peak_transports,
                       max(capacity) AS capacity, sum(frames) AS frames, sum(bytes) AS bytes, max(lag_ms) AS max_lag_ms,
                       sum(cpu_ms) AS cpu_ms, max(rss_kb) AS max_rss_kb, sum(lost) AS lost_events
                FROM e WHERE type = 'heartbeat' AND role = 'server' GROUP BY ALL) l
            ON k.server = l.producer AND k.dt = l.dt AND k.hour = l.hour""",
        "uptime_day": f"""{server_minutes},
            sums AS (SELECT server, dt, sum(alive_minutes) AS alive, sum(seen_minutes) AS seen,
                            sum(agreed_minutes) AS agreed FROM known GROUP BY ALL),
            span AS (SELECT dt, max(minute) - min(minute) + 1 AS observed FROM e GROUP BY ALL),
            life AS (SELECT producer, dt, count(*) FILTER (type = 'start') AS starts,
                            count(*) FILTER (type = 'stop') AS stops
                     FROM e WHERE type IN ('start', 'stop') AND role = 'server' GROUP BY ALL)
            SELECT server, dt, alive AS alive_minutes, seen AS seen_minutes, agreed AS agreed_minutes,
                   observed AS observed_minutes, least(1, alive / observed) AS uptime,
                   CASE WHEN agreed IS NOT NULL THEN least(1, agreed / observed) END AS availability,
                   coalesce(starts, 0) AS starts,
                   coalesce(stops, 0) AS clean_stops,
                   greatest(0, coalesce(starts, 0) - coalesce(stops, 0) - 1) AS crashes
            FROM sums JOIN span USING (dt) LEFT JOIN life ON producer = server AND life.dt = sums.dt""",
        "session_day": """
            WITH ends AS (SELECT producer, boot, dt, max(ts) AS last FROM e GROUP BY ALL),
            pairs AS (
                SELECT producer, boot, session, dt, max(peer) AS peer, min(ts) FILTER (type = 'session_open') AS opened,
                       max(ts) FILTER (type = 'session_close') AS closed,
                       max(duration_ms) FILTER (type = 'session_close') AS lasted, max(bytes) AS bytes
                FROM e WHERE type IN ('session_open', 'session_close') GROUP BY ALL),
            judged AS (
                SELECT p.*, last, closed IS NULL AND last < (epoch(p.dt) + 86400) * 1000 - 300000 AS lost
                FROM pairs p JOIN ends USING (producer, boot, dt))
            SELECT producer AS server, dt, count(*) AS sessions, count(DISTINCT peer) AS clients,
                   count(*) FILTER (lost) AS lost, avg(coalesce(lasted, last - opened)) / 1000 AS mean_seconds,
                   coalesce(sum(bytes), 0) AS bytes
            FROM judged WHERE closed IS NOT NULL OR lost GROUP BY ALL""",
        "settlement_day": f"""{words}
            SELECT server, dt, count(*) AS transports, sum(claimed) AS claimed_bytes,
                   coalesce(sum(credited) FILTER (state <> 'unclaimed'), 0) AS credited_bytes,
                   count(*) FILTER (state = 'matched') AS matched, count(*) FILTER (state = 'conflict') AS conflict,
                   count(*) FILTER (state = 'one_sided') AS one_sided,
                   count(*) FILTER (state = 'relay_only') AS relay_only,
                   count(*) FILTER (state = 'unclaimed') AS unclaimed,
                   coalesce(sum(greatest(0, claimed - credited)) FILTER (state = 'conflict'), 0) AS inflated_bytes,
                   count(*) FILTER (state = 'conflict' AND (NOT mutual OR NOT agree AND sides)) AS sided_with_one
            FROM judged GROUP BY ALL""",
        "settlement_conflict_day": f"""{words}
            SELECT server, dt, transport, claimed, credited FROM judged WHERE state = 'conflict'""",
        "refusal_hour": """
            SELECT producer, dt, hr AS hour,
                   CASE type WHEN 'handshake_fail' THEN 'handshake' WHEN 'transport_refuse' THEN 'request'
                             WHEN 'entry_refuse' THEN 'entry' ELSE 'drop' END AS what,
                   reason, sum(coalesce(n, 1)) AS n, count(DISTINCT coalesce(src, source)) AS who
            FROM e WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse', 'drop') GROUP BY ALL""",
        "discovery_hour": """
            WITH taken AS (
                SELECT producer, dt, hr AS hour, count(*) FILTER (result = 'first') AS first,
                       count(*) FILTER (result = 'next') AS next, count(*) FILTER (result = 'deleted') AS deleted,
                       count(DISTINCT subject) FILTER (is_server) AS servers
                FROM e WHERE type = 'entry' GROUP BY ALL),
            refused AS (
                SELECT producer, dt, hr AS hour, sum(n) AS refused FROM e WHERE type = 'entry_refuse' GROUP BY ALL)
            SELECT producer, dt, hour, coalesce(first, 0) AS first, coalesce(next, 0) AS next,
                   coalesce(deleted, 0) AS deleted, coalesce(refused, 0) AS refused, coalesce(servers, 0) AS servers
            FROM taken FULL JOIN refused USING (producer, dt, hour)""",
        "capacity_day": """
            WITH beats AS (
                SELECT producer AS server, dt, hr, max(sessions) AS peak, max(capacity) AS capacity, sum(bytes) AS bytes
                FROM e WHERE type = 'heartbeat' AND role = 'server' GROUP BY ALL),
            full_ones AS (SELECT producer, dt, sum(n) AS n FROM e
                          WHERE type = 'drop' AND reason = 'too_many_connections' GROUP BY ALL)
            SELECT server, b.dt, max(peak) AS peak_sessions, max(capacity) AS capacity,
                   max(peak / capacity) AS peak_share, count(*) FILTER (peak >= 0.8 * capacity) AS busy_hours,
                   coalesce(any_value(f.n), 0) AS refused_full, coalesce(sum(bytes), 0) AS bytes
            FROM beats b LEFT JOIN full_ones f ON producer = server AND f.dt = b.dt
            WHERE capacity IS NOT NULL GROUP BY server, b.dt""",
        "capacity_forecast": f"""
            WITH days AS (
                SELECT producer AS server, dt, max(sessions) AS peak, max(capacity) AS capacity
                FROM e WHERE type = 'heartbeat' AND role = 'server' AND capacity IS NOT NULL GROUP BY ALL),
            recent AS (SELECT *, epoch(dt) / 86400 AS x FROM days
                       WHERE dt < DATE '{today}' AND dt >= DATE '{today}' - 28)
            SELECT server, count(*) AS days, max(peak) AS peak_sessions, arg_max(capacity, dt) AS capacity,
                   CASE WHEN count(*) >= 3 THEN round(regr_slope(peak, x), 3) END AS growth_per_day
            FROM recent GROUP BY ALL""",
        "quality_day": """
            WITH boots AS (SELECT producer, boot, dt, count(*) AS n, max(seq) - min(seq) + 1 AS expected,
                                  max(ts - mono) - min(ts - mono) AS steps FROM e GROUP BY ALL)
            SELECT producer, dt, sum(n) AS distinct_events, sum(expected) AS expected,
                   sum(expected) - sum(n) AS missing,
                   sum(n) / sum(expected) AS completeness, max(steps) AS clock_steps_ms FROM boots GROUP BY ALL""",
        "network_day": f"""{words}
            SELECT dt, (SELECT count(DISTINCT producer) FROM tr WHERE tr.dt = d.dt) AS servers,
                   (SELECT count(*) FROM closes WHERE closes.dt = d.dt) AS transports,
                   (SELECT coalesce(sum(coalesce(data_ab, 0) + coalesce(data_ba, 0)), 0) FROM tr
                    WHERE tr.dt = d.dt) AS bytes,
                   (SELECT coalesce(sum(2 * (state IN ('matched', 'conflict'))::INT + (state = 'one_sided')::INT), 0)
                    FROM judged WHERE judged.dt = d.dt) AS receipts,
                   (SELECT count(DISTINCT (producer, peer)) FROM e
                    WHERE e.dt = d.dt AND type IN ('session_open', 'session_close')) AS clients
            FROM (SELECT DISTINCT dt FROM tr) d""",
        "abuse_day": """
            WITH who AS (
                SELECT producer, dt, coalesce(src, source) AS who, type, sum(coalesce(n, 1)) AS n,
                       coalesce(sum(targets) FILTER (reason = 'no_such_peer'), 0) AS targets,
                       coalesce(sum(n) FILTER (reason IN ('rate_limited', 'flood')), 0) AS over
                FROM e WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse') GROUP BY ALL),
            scores AS (
                SELECT producer, dt, who, 'scan' AS kind, round(100.0 * targets / 100, 1) AS score FROM who
                WHERE type = 'transport_refuse'
                UNION ALL SELECT producer, dt, who, 'flood', round(100.0 * over / 1000, 1) FROM who
                WHERE type = 'transport_refuse'
                UNION ALL SELECT producer, dt, who, 'handshakes', round(100.0 * n / 200, 1) FROM who
                WHERE type = 'handshake_fail'
                UNION ALL SELECT producer, dt, who, 'entries', round(100.0 * n / 500, 1) FROM who
                WHERE type = 'entry_refuse'
                UNION ALL SELECT producer, dt, subject, 'churn', round(100.0 * count(*) / 5000, 1) FROM e
                WHERE type = 'entry' AND NOT coalesce(is_server, false) GROUP BY ALL
                UNION ALL SELECT producer, dt, src, 'unanswered',
                       round(100.0 * count(*) FILTER (accept_ms IS NULL) / 100, 1) FROM closes GROUP BY ALL
                       HAVING count(*) >= 50 AND count(*) FILTER (accept_ms IS NULL) > 0.9 * count(*))
            SELECT * FROM scores WHERE score >= 10""",
        "public_day": f"""
            WITH day AS (
                SELECT d.dt, (SELECT count(DISTINCT producer) FROM tr WHERE tr.dt = d.dt) AS s,
                       (SELECT count(DISTINCT (producer, peer)) FROM e WHERE e.dt = d.dt
                        AND type IN ('session_open', 'session_close')) AS c,
                       (SELECT count(*) FROM closes WHERE closes.dt = d.dt) AS t
                FROM (SELECT DISTINCT dt FROM tr) d WHERE d.dt <= DATE '{today}' - 2)
            SELECT dt, CASE WHEN s >= 3 AND c >= 10 THEN s END AS servers,
                   CASE WHEN s >= 3 AND c >= 10 THEN ceil(c / 8) * 8 END AS clients,
                   CASE WHEN s >= 3 AND c >= 10 THEN ceil(t / 8) * 8 END AS transports FROM day""",
        "placement": f"""{server_minutes},
            span AS (SELECT dt, max(minute) - min(minute) + 1 AS observed FROM e GROUP BY ALL),
            up AS (
                SELECT server, avg(coalesce(agreed / observed, alive / observed)) AS availability, count(*) AS days
                FROM (SELECT server, dt, sum(alive_minutes) AS alive, sum(agreed_minutes) AS agreed
                      FROM known GROUP BY ALL) JOIN span USING (dt)
                WHERE dt > DATE '{today}' - 7 AND dt <= DATE '{today}' GROUP BY ALL),
            room AS (
                SELECT server, avg(greatest(0, capacity - peak)) AS free FROM (
                    SELECT producer AS server, dt, max(sessions) AS peak, max(capacity) AS capacity FROM e
                    WHERE type = 'heartbeat' AND role = 'server' AND capacity IS NOT NULL GROUP BY ALL)
                WHERE dt > DATE '{today}' - 7 AND dt <= DATE '{today}' GROUP BY ALL)
            SELECT server, round(least(1, availability), 4) AS availability, days,
                   round(coalesce(free / (SELECT max(free) FROM room), 0), 4) AS headroom
            FROM up LEFT JOIN room USING (server)""",
    }


def differences(gold: list[dict[str, Any]], oracle: list[dict[str, Any]], keys: list[str]) -> list[str]:
    """What two answers to a question do not share; columns that only one has are passed over."""
    found: list[str] = []

    def keyed(rows: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
        result = {tuple(row[key] for key in keys): row for row in rows}
        if len(result) != len(rows):
            found.append("keys are not unique")
        return result

    one, other = keyed(gold), keyed(oracle)
    if one.keys() != other.keys():
        found.append(f"rows: {len(one)} and {len(other)}; {list(one.keys() ^ other.keys())[:3]}")
    for key in one.keys() & other.keys():
        for name in one[key].keys() & other[key].keys():
            mine, theirs = one[key][name], other[key][name]
            if mine is None or theirs is None or isinstance(mine, str):
                same = mine == theirs
            elif isinstance(mine, int | float):
                same = abs(float(mine) - float(theirs)) <= 1e-6 * max(1.0, abs(float(mine)))
            else:
                same = mine == theirs
            if not same:
                found.append(f"{key} {name}: {mine} and {theirs}")
    return found
