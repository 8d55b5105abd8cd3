"""Each gold table computed again in DuckDB, from the files of the spool: by another engine and in other ways.

Minutes are counted one by one instead of as bits, words are joined instead of grouped, percentiles come from windows
over buckets.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path

import duckdb

from dmsg.telemetry.schema import BUCKETS, Type, columns

_TYPES = {Type.STRING: "VARCHAR", Type.LONG: "BIGINT", Type.BOOLEAN: "BOOLEAN", Type.HISTOGRAM: "INTEGER[]"}
FIELDS = ", ".join(f"'{field.name}': '{_TYPES[field.type]}'" for field in columns())
"""Columns of an event, as DuckDB's read_json expects them."""
_BOUND = "CASE WHEN {0} < 0 THEN 0 ELSE 0.1 * pow(2, {0} / 2.0) END"


def connect(
    spool: Path, checked: Path, *, threads: int = 2, memory: str = "6GB", until: float = 2.0**53
) -> duckdb.DuckDBPyConnection:
    """Return a database with the table ``e`` of events: without duplicates, with day and hour.

    :param until: ms since 1970; later events count as events of the future.
    """
    base = duckdb.connect()
    base.execute(f"SET threads = {threads}; SET memory_limit = '{memory}'; SET TimeZone = 'UTC'")
    files = [str(path) for root in (spool, checked) for path in sorted(root.rglob("*.jsonl.gz"))]
    base.execute(
        f"""CREATE TABLE e AS
        SELECT DISTINCT ON (producer, boot, seq) *, CAST(epoch_ms(ts) AS DATE) AS dt, hour(epoch_ms(ts)) AS hr,
               ts // 60000 AS minute
        FROM read_json({files!r}, columns = {{{FIELDS}}}, format = 'newline_delimited') WHERE ts <= {until}"""
    )
    base.execute("CREATE VIEW tr AS SELECT * FROM e WHERE type LIKE 'transport_%' AND type <> 'transport_refuse'")
    base.execute(
        """CREATE VIEW due AS SELECT * FROM e
        WHERE type = 'receipt_checked' AND reason IS NULL AND transport IS NOT NULL
        AND (NOT coalesce(former, false) OR EXISTS (
            SELECT 1 FROM tr t WHERE t.producer = e.server AND t.transport = e.transport
            AND e.peer = CASE WHEN e.initiator THEN t.src ELSE t.dst END))"""
    )
    base.execute("CREATE VIEW closes AS SELECT * FROM e WHERE type = 'transport_close'")
    return base


def _quantiles(source: str, name: str, keys: str = "server, dt, hr") -> str:
    """Return the SQL that turns rows of server, dt, hr, bucket and n into number of samples and three percentiles."""
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
        WITH counts AS (SELECT {keys}, bucket, sum(n) AS n FROM ({source}) GROUP BY ALL HAVING sum(n) > 0),
        running AS (SELECT *, sum(n) OVER (PARTITION BY {keys} ORDER BY bucket) AS upto,
                    sum(n) OVER (PARTITION BY {keys}) AS total FROM counts)
        SELECT {keys}, max(total) AS {name}_samples, {picks} FROM running GROUP BY ALL"""


def queries(today: date) -> dict[str, str]:
    """Return the SQL query of each table, by the table's name."""
    answers = f"""SELECT producer AS server, dt, hr, i AS bucket, rtt[i + 1] AS n
                  FROM tr, range({BUCKETS}) AS r(i) WHERE rtt IS NOT NULL"""
    openings = f"""SELECT producer AS server, dt, hr, 1 AS n, coalesce(accept_us / 1000, accept_ms) AS took,
                   CASE WHEN took <= 0.1 THEN 0
                        ELSE least({BUCKETS - 1}, ceil(2 * log2(took / 0.1)))::INT END AS bucket
                   FROM closes WHERE accept_ms IS NOT NULL"""
    rtt, accept = _quantiles(answers, "rtt"), _quantiles(openings, "accept")
    of_day = {
        keys: (_quantiles(answers, "rtt", keys), _quantiles(openings, "accept", keys)) for keys in ("server, dt", "dt")
    }
    abuse = """
            WITH who AS (
                SELECT producer, dt, coalesce(src, source) AS who, type, sum(coalesce(n, 1)) AS n,
                       coalesce(sum(targets) FILTER (reason = 'no_such_peer' OR type = 'lookup_fail'), 0) AS targets,
                       coalesce(sum(n) FILTER (reason IN ('rate_limited', 'flood')), 0) AS over
                FROM e WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse', 'lookup_fail')
                GROUP BY ALL),
            scores AS (
                SELECT producer, dt, who, 'scan' AS kind, round(100.0 * targets / 100, 1) AS score FROM who
                WHERE type = 'transport_refuse'
                UNION ALL SELECT producer, dt, who, 'flood', round(100.0 * over / 1000, 1) FROM who
                WHERE type = 'transport_refuse'
                UNION ALL SELECT producer, dt, who, 'handshakes', round(100.0 * n / 200, 1) FROM who
                WHERE type = 'handshake_fail'
                UNION ALL SELECT producer, dt, who, 'entries', round(100.0 * n / 500, 1) FROM who
                WHERE type = 'entry_refuse'
                UNION ALL SELECT producer, dt, who, 'lookups', round(100.0 * targets / 1000, 1) FROM who
                WHERE type = 'lookup_fail'
                UNION ALL SELECT producer, dt, subject, 'churn', round(100.0 * count(*) / 5000, 1) FROM e
                WHERE type = 'entry' AND NOT coalesce(is_server, false) GROUP BY ALL
                UNION ALL SELECT producer, dt, src, 'unanswered',
                       round(100.0 * count(*) FILTER (accept_ms IS NULL) / 100, 1) FROM closes GROUP BY ALL
                       HAVING count(*) >= 50 AND count(*) FILTER (accept_ms IS NULL) > 0.9 * count(*))
            SELECT * FROM scores WHERE score >= 1"""
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
    boots = """
        wrote AS (SELECT DISTINCT producer, boot FROM e WHERE type IN ('start', 'stop', 'heartbeat')),
        processes AS (
            SELECT producer, boot, min(role) FILTER (type IN ('start', 'stop', 'heartbeat')) AS role,
                   min(ts) AS first_ts, max(ts) AS last_ts, bool_or(type = 'stop') AS stopped
            FROM e SEMI JOIN wrote USING (producer, boot) GROUP BY ALL),
        ends AS (
            SELECT p.*, (SELECT min(o.first_ts) FROM processes o WHERE o.producer = p.producer
                         AND (o.first_ts, o.boot) > (p.first_ts, p.boot)) AS next_ts,
                   (SELECT max(last_ts) FROM processes) // 1000 - last_ts // 1000 > 900 AS gone FROM processes p),
        lives AS (
            SELECT *, CASE WHEN stopped THEN 'stopped'
                           WHEN next_ts IS NOT NULL AND (next_ts >= last_ts OR gone) THEN 'crashed'
                           WHEN gone THEN 'silent' ELSE 'running' END AS ended FROM ends)
        """
    words = """
        WITH claims AS (
            SELECT producer AS server, transport, dt,
                   CASE WHEN total_ab IS NOT NULL THEN greatest(0, total_ab - coalesce(dropped_ab, 0)) END AS rab,
                   CASE WHEN total_ba IS NOT NULL THEN greatest(0, total_ba - coalesce(dropped_ba, 0)) END AS rba,
                   coalesce("by", 'server') AS closer,
                   reason = 'unspecified' AS orderly
            FROM closes WHERE transport IS NOT NULL),
        said AS (
            SELECT server, transport, initiator, min(dt) AS dt, min(delivered_out) AS o, min(delivered_in) AS i,
                   min(signer) AS signer, min(partner) AS partner
            FROM due GROUP BY ALL),
        joined AS (
            SELECT server, transport, coalesce(c.dt, least(a.dt, b.dt)) AS dt, rab, rba, closer, orderly,
                   a.o AS a_out, a.i AS a_in, b.o AS b_out, b.i AS b_in, a.signer AS asker,
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
        ways AS (
            SELECT server, transport, rab AS claim, a_out AS told, b_in AS got,
                   closer IN ('dst', 'server') AS left_by_receiver, closer = 'src' AND orderly AS waited, mutual
            FROM states WHERE r AND a_out + b_out IS NOT NULL
            UNION ALL
            SELECT server, transport, rba, b_out, a_in, closer IN ('src', 'server'), closer = 'dst' AND orderly, mutual
            FROM states WHERE r AND a_out + b_out IS NOT NULL),
        bounded AS (
            SELECT *, least(33554432, 262144 + 4 * told) AS on_its_way,
                   abs(told - got) <= greatest(4096, 0.01 * greatest(told, got)) AS ends_agree,
                   abs(claim - got) <= greatest(4096, 0.01 * greatest(claim, got)) AS claim_fits FROM ways),
        explained AS (
            SELECT *, got BETWEEN told AND told + on_its_way AS possible, NOT waited AND possible AS behind,
                   left_by_receiver AND claim > got AND claim - got <= on_its_way AS not_taken FROM bounded),
        fitting AS (
            SELECT server, transport, bool_and((ends_agree OR behind) AND (claim_fits OR not_taken)) AS all_fit,
                   coalesce(sum(claim) FILTER (NOT left_by_receiver AND mutual AND possible), 0)
                       AS sure_claimed,
                   coalesce(sum(got) FILTER (NOT left_by_receiver AND mutual AND possible), 0)
                       AS sure_word
            FROM explained GROUP BY ALL),
        judged AS (
            SELECT *, CASE WHEN NOT r THEN 'unclaimed' WHEN a_out IS NULL AND b_out IS NULL THEN 'relay_only'
                           WHEN a_out IS NULL OR b_out IS NULL THEN 'one_sided'
                           WHEN NOT mutual THEN 'conflict'
                           WHEN agree AND fits THEN 'matched' WHEN all_fit THEN 'cut'
                           ELSE 'conflict' END AS state
            FROM states LEFT JOIN fitting USING (server, transport))
        """
    many = """WITH many AS (
                SELECT producer, dt, count(DISTINCT reason) > 100 AS many
                FROM e WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse', 'lookup_fail', 'drop')
                GROUP BY ALL)"""
    return {
        "traffic_hour": """
            SELECT producer AS server, dt, hr AS hour, count(*) FILTER (type = 'transport_open') AS opened,
                   count(*) FILTER (type = 'transport_close' AND accept_ms IS NOT NULL) AS accepted,
                   count(*) FILTER (type = 'transport_close') AS closed,
                   count(*) FILTER (type = 'transport_close' AND accept_ms IS NULL) AS refused_by_peer,
                   coalesce(sum(coalesce(dropped_ab, 0) + coalesce(dropped_ba, 0)), 0)::BIGINT AS dropped_bytes,
                   greatest(0, coalesce(sum(data_ab), 0) + coalesce(sum(data_ba), 0) - dropped_bytes) AS bytes,
                   coalesce(sum(frames_ab), 0) + coalesce(sum(frames_ba), 0) AS frames,
                   coalesce(sum(acks_ab), 0) + coalesce(sum(acks_ba), 0) AS acks
            FROM tr GROUP BY ALL""",
        "close_day": """
            WITH each AS (SELECT producer AS server, dt, reason, "by", count(*) AS transports FROM closes GROUP BY ALL),
            many AS (SELECT server, dt, count(*) > 100 AS many FROM each GROUP BY ALL)
            SELECT server, dt, if(many, 'more than 100 reasons', reason) AS reason, if(many, NULL, "by") AS "by",
                   sum(transports) AS transports
            FROM each JOIN many USING (server, dt) GROUP BY ALL""",
        "pair_day": """
            SELECT producer AS server, dt, src, dst, count(*) FILTER (type = 'transport_close') AS transports,
                   greatest(0, coalesce(sum(data_ab), 0) - coalesce(sum(dropped_ab), 0)) AS bytes_ab,
                   greatest(0, coalesce(sum(data_ba), 0) - coalesce(sum(dropped_ba), 0)) AS bytes_ba
            FROM tr WHERE type <> 'transport_open' GROUP BY ALL""",
        "latency_hour": f"""
            SELECT server, dt, hr AS hour, coalesce(rtt_samples, 0) AS rtt_samples, rtt_p50, rtt_p90, rtt_p99,
                   coalesce(accept_samples, 0) AS accept_samples, accept_p50, accept_p90, accept_p99
            FROM ({rtt}) FULL JOIN ({accept}) USING (server, dt, hr)""",
        "latency_day": f"""
            SELECT server, dt, coalesce(rtt_samples, 0) AS rtt_samples, rtt_p50, rtt_p90, rtt_p99,
                   coalesce(accept_samples, 0) AS accept_samples, accept_p50, accept_p90, accept_p99
            FROM ({of_day["server, dt"][0]}) FULL JOIN ({of_day["server, dt"][1]}) USING (server, dt)""",
        "server_hour": f"""{server_minutes}
            SELECT k.*, l.* EXCLUDE (producer, dt, hour) FROM known k LEFT JOIN (
                SELECT producer, dt, hr AS hour, max(sessions) AS peak_sessions, max(transports) AS peak_transports,
                       max(capacity) AS capacity, sum(frames) AS frames, sum(bytes) AS bytes, max(lag_ms) AS max_lag_ms,
                       sum(cpu_ms) AS cpu_ms, max(rss_kb) AS max_rss_kb, sum(lost) AS lost_events
                FROM e WHERE type = 'heartbeat' AND role = 'server' GROUP BY ALL) l
            ON k.server = l.producer AND k.dt = l.dt AND k.hour = l.hour""",
        "minute_day": f"""{server_minutes},
            span AS (SELECT dt, max(minute) - min(minute) + 1 AS observed FROM e GROUP BY ALL)
            SELECT server, dt, sum(alive_minutes) AS alive_minutes, sum(seen_minutes) AS seen_minutes,
                   sum(agreed_minutes) AS agreed_minutes, any_value(observed) AS observed_minutes
            FROM known JOIN span USING (dt) GROUP BY ALL""",
        "boot": f"""WITH {boots}
            SELECT producer, role, boot, ended, CASE WHEN next_ts IS NOT NULL
                   THEN greatest(0, next_ts - last_ts) / 1000 END AS down_seconds FROM lives""",
        "uptime_day": f"""{server_minutes}, {boots},
            sums AS (SELECT server, dt, sum(alive_minutes) AS alive, sum(seen_minutes) AS seen,
                            sum(agreed_minutes) AS agreed FROM known GROUP BY ALL),
            span AS (SELECT dt, max(minute) - min(minute) + 1 AS observed FROM e
                     WHERE dt IN (SELECT dt FROM sums) GROUP BY ALL),
            watching AS (SELECT DISTINCT dt FROM sums WHERE seen IS NOT NULL),
            heard AS (SELECT server, min(dt) AS since, max(dt) AS until FROM sums GROUP BY ALL),
            pages AS (
                SELECT server, unnest(generate_series(
                    since::TIMESTAMP, least(until + 28, (SELECT max(dt) FROM sums))::TIMESTAMP, INTERVAL 1 DAY
                ))::DATE AS dt FROM heard),
            life AS (SELECT producer, dt, count(*) FILTER (type = 'start') AS starts,
                            count(*) FILTER (type = 'stop') AS stops
                     FROM e WHERE type IN ('start', 'stop') AND role = 'server' GROUP BY ALL),
            lost AS (SELECT producer, epoch_ms(last_ts)::DATE AS dt, count(*) AS crashes FROM lives
                     WHERE role = 'server' AND ended = 'crashed' GROUP BY ALL),
            put AS (
                SELECT p.server, p.dt, observed, coalesce(alive, 0) AS alive, coalesce(seen, 0) AS seen,
                       coalesce(agreed, 0) AS agreed, w.dt IS NOT NULL AS watched,
                       CASE WHEN observed IS NULL THEN 'unknown' WHEN alive > 0 THEN 'up' WHEN seen > 0 THEN 'unheard'
                            ELSE 'down' END AS state
                FROM pages p LEFT JOIN sums USING (server, dt) LEFT JOIN span USING (dt)
                LEFT JOIN watching w USING (dt))
            SELECT server, put.dt, state, observed AS observed_minutes,
                   CASE WHEN state IN ('up', 'down') THEN alive END AS alive_minutes,
                   CASE WHEN watched THEN seen END AS seen_minutes,
                   CASE WHEN watched AND state IN ('up', 'down') THEN agreed END AS agreed_minutes,
                   CASE WHEN state IN ('up', 'down') THEN least(1, alive / observed) END AS uptime,
                   CASE WHEN watched AND state IN ('up', 'down') THEN least(1, agreed / observed) END AS availability,
                   coalesce(starts, 0) AS starts, coalesce(stops, 0) AS clean_stops, coalesce(crashes, 0) AS crashes
            FROM put LEFT JOIN life ON life.producer = server AND life.dt = put.dt
            LEFT JOIN lost ON lost.producer = server AND lost.dt = put.dt""",
        "lost_transport": f"""WITH {boots},
            said AS (SELECT server, transport, initiator, min(delivered_out) AS o, min(delivered_in) AS i,
                            min(signer) AS signer, min(partner) AS partner
                     FROM due GROUP BY ALL),
            carried AS (
                SELECT producer, boot, transport, bool_or(type = 'transport_open') AS opened,
                       bool_or(type = 'transport_close') AS closed,
                       coalesce(sum(data_ab) FILTER (type = 'transport_progress'), 0)
                       + coalesce(sum(data_ba) FILTER (type = 'transport_progress'), 0) AS counted_bytes
                FROM e WHERE type IN ('transport_open', 'transport_progress', 'transport_close')
                AND transport IS NOT NULL GROUP BY ALL),
            both_words AS (
                SELECT c.producer AS server, c.transport, c.boot, counted_bytes,
                       (a.o IS NOT NULL)::INT + (b.o IS NOT NULL)::INT AS words,
                       a.signer = b.partner AND b.signer = a.partner AS mutual,
                       a.o AS ao, a.i AS ai, b.o AS bo, b.i AS bi
                FROM carried c JOIN lives l ON l.producer = c.producer AND l.boot = c.boot
                     AND l.ended IN ('crashed', 'silent')
                LEFT JOIN (FROM said WHERE initiator) a ON a.server = c.producer AND a.transport = c.transport
                LEFT JOIN (FROM said WHERE NOT initiator) b ON b.server = c.producer AND b.transport = c.transport
                WHERE opened AND NOT closed)
            SELECT server, transport, boot, counted_bytes, words,
                   mutual AND bi BETWEEN ao AND ao + least(33554432, 262144 + 4 * ao)
                   AND ai BETWEEN bo AND bo + least(33554432, 262144 + 4 * bo) AS believed,
                   CASE WHEN believed THEN ao + bo END AS least_bytes,
                   CASE WHEN believed THEN bi + ai END AS most_bytes FROM both_words""",
        "session_day": """
            WITH ends AS (SELECT producer, boot, dt, max(ts) AS last FROM e GROUP BY ALL),
            pairs AS (
                SELECT producer, boot, session, dt, max(peer) AS peer, min(ts) FILTER (type = 'session_open') AS opened,
                       max(ts) FILTER (type = 'session_close') AS closed,
                       max(duration_ms) FILTER (type = 'session_close') AS lasted, max(bytes) AS bytes
                FROM e WHERE type IN ('session_open', 'session_close') GROUP BY ALL),
            judged AS (
                SELECT p.*, last, closed IS NULL AND (coalesce(started > last, false) OR CASE
                       WHEN dt < (SELECT max(dt) FROM e) THEN (epoch(dt) + 86400) * 1000 ELSE newest END - last > 900000
                       ) AS lost
                FROM pairs p JOIN ends USING (producer, boot, dt)
                JOIN (SELECT dt, max(ts) AS newest FROM e GROUP BY ALL) USING (dt)
                LEFT JOIN (SELECT producer, dt, max(ts) AS started FROM e WHERE type = 'start' GROUP BY ALL)
                USING (producer, dt))
            SELECT producer AS server, dt, count(*) AS sessions, count(DISTINCT peer) AS clients,
                   count(*) FILTER (lost) AS lost, avg(coalesce(lasted, last - opened)) / 1000 AS mean_seconds,
                   coalesce(sum(bytes), 0) AS bytes
            FROM judged WHERE closed IS NOT NULL OR lost GROUP BY ALL""",
        "settlement_day": f"""{words}
            SELECT server, dt, count(*) AS transports, sum(claimed) AS claimed_bytes,
                   coalesce(sum(credited) FILTER (state <> 'unclaimed'), 0) AS credited_bytes,
                   count(*) FILTER (state = 'matched') AS matched, count(*) FILTER (state = 'conflict') AS conflict,
                   count(*) FILTER (state = 'cut') AS cut,
                   coalesce(sum(greatest(0, claimed - credited)) FILTER (state = 'cut'), 0) AS uncertain_bytes,
                   sum(sure_claimed) / nullif(sum(sure_word), 0) - 1 AS inflation,
                   coalesce(any_value(told_by), 0) AS witnesses, coalesce(any_value(said_so), 0) AS accusers,
                   count(*) FILTER (state = 'one_sided') AS one_sided,
                   count(*) FILTER (state = 'relay_only') AS relay_only,
                   count(*) FILTER (state = 'unclaimed') AS unclaimed,
                   coalesce(sum(greatest(0, claimed - credited)) FILTER (state = 'conflict'), 0) AS inflated_bytes,
                   count(*) FILTER (state = 'conflict' AND mutual AND NOT agree AND sides) AS sided_with_one
            FROM judged LEFT JOIN (
                SELECT server, dt, count(*) AS told_by, count(*) FILTER (claims > 1.02 * words) AS said_so FROM (
                    SELECT server, dt, asker, sum(sure_claimed) AS claims, sum(sure_word) AS words FROM judged
                    GROUP BY ALL HAVING sum(sure_claimed) > 0)
                GROUP BY ALL) USING (server, dt)
            GROUP BY ALL""",
        "settlement_conflict_day": f"""{words}
            SELECT server, dt, transport, claimed, credited FROM judged WHERE state = 'conflict'""",
        "refusal_hour": f"""
            {many}
            SELECT producer, dt, hr AS hour,
                   CASE type WHEN 'handshake_fail' THEN 'handshake' WHEN 'transport_refuse' THEN 'request'
                             WHEN 'entry_refuse' THEN 'entry' WHEN 'lookup_fail' THEN 'lookup' ELSE 'drop' END AS what,
                   if(many, 'more than 100 reasons', reason) AS reason, sum(coalesce(n, 1)) AS n,
                   count(DISTINCT coalesce(src, source)) AS who
            FROM e JOIN many USING (producer, dt)
            WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse', 'lookup_fail', 'drop')
            GROUP BY ALL""",
        "clock_day": """
            SELECT subject AS server, dt, count(clock_ms) AS posts, max(clock_ms) AS skew_ms, min(clock_ms) AS least_ms,
                   count(DISTINCT producer) AS witnesses
            FROM e WHERE type = 'entry' AND is_server AND clock_ms IS NOT NULL GROUP BY ALL""",
        "refusal_day": f"""
            {many}
            SELECT dt, CASE type WHEN 'handshake_fail' THEN 'handshake' WHEN 'transport_refuse' THEN 'request'
                            WHEN 'entry_refuse' THEN 'entry' WHEN 'lookup_fail' THEN 'lookup' ELSE 'drop' END AS what,
                   if(many, 'more than 100 reasons', reason) AS reason, sum(coalesce(n, 1)) AS n,
                   count(DISTINCT producer) AS producers,
                   count(DISTINCT (producer, coalesce(src, source))) FILTER (coalesce(src, source) IS NOT NULL) AS who
            FROM e JOIN many USING (producer, dt)
            WHERE type IN ('handshake_fail', 'transport_refuse', 'entry_refuse', 'lookup_fail', 'drop')
            GROUP BY ALL""",
        "actor": f"""
            WITH named AS (SELECT producer, arg_max(names, ts) AS names FROM e
                           WHERE type = 'start' AND names IS NOT NULL GROUP BY ALL),
            days AS (SELECT who, kind, dt, coalesce(names, producer) AS space, any_value(names) AS names,
                            sum(score) AS score FROM ({abuse}) LEFT JOIN named USING (producer) GROUP BY ALL),
            whole AS (SELECT who, kind, space, any_value(names) AS names, count(*) AS days, min(dt) AS first_day,
                             max(dt) AS last_day, round(max(score), 1) AS score FROM days GROUP BY ALL)
            SELECT who, kind, names, days, first_day, last_day, score,
                   (SELECT count(DISTINCT producer) FROM ({abuse}) a LEFT JOIN named USING (producer)
                    WHERE a.who = whole.who AND a.kind = whole.kind
                    AND coalesce(named.names, producer) = space) AS servers
            FROM whole WHERE score >= 10""",
        "discovery_hour": """
            WITH taken AS (
                SELECT producer, dt, hr AS hour, count(*) FILTER (result = 'first') AS first,
                       count(*) FILTER (result = 'next') AS next, count(*) FILTER (result = 'deleted') AS deleted,
                       count(DISTINCT subject) FILTER (is_server) AS servers
                FROM e WHERE type = 'entry' GROUP BY ALL),
            refused AS (
                SELECT producer, dt, hr AS hour, sum(n) FILTER (type = 'entry_refuse') AS refused,
                       sum(n) FILTER (type = 'lookup_fail') AS absent
                FROM e WHERE type IN ('entry_refuse', 'lookup_fail') GROUP BY ALL)
            SELECT producer, dt, hour, coalesce(first, 0) AS first, coalesce(next, 0) AS next,
                   coalesce(deleted, 0) AS deleted, coalesce(refused, 0) AS refused, coalesce(servers, 0) AS servers,
                   coalesce(absent, 0) AS absent
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
            WITH boots AS (SELECT producer, boot, dt, count(*) AS n, min(seq) AS low, max(seq) AS high,
                                  max(ts - mono) - min(ts - mono) AS steps FROM e GROUP BY ALL),
            told AS (SELECT *, lag(dt) OVER w AS before,
                            low - 1 - coalesce(max(high) OVER (w ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), -1)
                                AS gap
                     FROM boots WINDOW w AS (PARTITION BY producer, boot ORDER BY dt)),
            parts AS (
                SELECT producer, dt, n, high - low + 1 AS expected, steps FROM told
                UNION ALL SELECT producer, CASE WHEN dt - before > 1 THEN before + 1 ELSE dt END, 0, gap, 0 FROM told
                WHERE gap > 0)
            SELECT producer, dt, sum(n) AS distinct_events, sum(expected) AS expected,
                   sum(expected) - sum(n) AS missing,
                   sum(n) / sum(expected) AS completeness, max(steps) AS clock_steps_ms FROM parts GROUP BY ALL""",
        "network_day": f"""{words}
            SELECT dt, (SELECT count(DISTINCT producer) FROM tr WHERE tr.dt = d.dt) AS servers,
                   (SELECT count(*) FROM closes WHERE closes.dt = d.dt) AS transports,
                   (SELECT coalesce(sum(coalesce(data_ab, 0) + coalesce(data_ba, 0)
                                        - coalesce(dropped_ab, 0) - coalesce(dropped_ba, 0)), 0) FROM tr
                    WHERE tr.dt = d.dt) AS bytes,
                   (SELECT coalesce(sum(2 * (state IN ('matched', 'cut', 'conflict'))::INT
                                        + (state = 'one_sided')::INT), 0)
                    FROM judged WHERE judged.dt = d.dt) AS receipts,
                   (SELECT count(DISTINCT (producer, peer)) FROM e
                    WHERE e.dt = d.dt AND type IN ('session_open', 'session_close')) AS clients,
                   coalesce(rtt_samples, 0) AS rtt_samples, rtt_p50, rtt_p90, rtt_p99,
                   accept_p50, accept_p90, accept_p99
            FROM (SELECT DISTINCT dt FROM tr) d LEFT JOIN ({of_day["dt"][0]}) USING (dt)
            LEFT JOIN ({of_day["dt"][1]}) USING (dt)""",
        "abuse_day": abuse,
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
            sums AS (SELECT server, dt, sum(alive_minutes) AS alive, sum(seen_minutes) AS seen,
                            sum(agreed_minutes) AS agreed FROM known GROUP BY ALL),
            span AS (SELECT dt, max(minute) - min(minute) + 1 AS observed FROM e
                     WHERE dt IN (SELECT dt FROM sums) GROUP BY ALL),
            pages AS (
                SELECT server, unnest(generate_series(
                    min(dt)::TIMESTAMP, least(max(dt) + 28, (SELECT max(dt) FROM sums))::TIMESTAMP, INTERVAL 1 DAY
                ))::DATE AS dt FROM sums GROUP BY server),
            up AS (
                SELECT server, avg(CASE WHEN observed IS NULL THEN NULL
                                        WHEN coalesce(alive, 0) = 0 AND seen > 0 THEN least(1, seen / observed)
                                        WHEN s.server IS NULL THEN 0
                                        ELSE coalesce(agreed / observed, alive / observed) END) AS availability,
                       count(*) AS days
                FROM pages LEFT JOIN sums s USING (server, dt) LEFT JOIN span USING (dt)
                WHERE dt > DATE '{today}' - 7 AND dt <= DATE '{today}' GROUP BY ALL),
            room AS (
                SELECT server, avg(greatest(0, capacity - peak)) AS free FROM (
                    SELECT producer AS server, dt, max(sessions) AS peak, max(capacity) AS capacity FROM e
                    WHERE type = 'heartbeat' AND role = 'server' AND capacity IS NOT NULL GROUP BY ALL)
                WHERE dt > DATE '{today}' - 7 AND dt <= DATE '{today}' GROUP BY ALL)
            SELECT server, round(least(1, availability), 4) AS availability, days,
                   round(CASE WHEN free IS NULL THEN 0.5
                              ELSE coalesce(free / (SELECT nullif(max(free), 0) FROM room), 0) END, 4) AS headroom
            FROM up LEFT JOIN room USING (server)""",
    }
