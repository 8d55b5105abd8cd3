"""``python -m benchmarks.pipeline``: bronze and gold tables on Spark, beside DuckDB, in one run.

CPU seconds of all processes, because the machine may be shared: a run as ``dmsg
analytics run`` makes it, step by step.  Starting Spark and compiling everything
once is a row of its own and is in no other.  DuckDB does the same work in the
same run: the same lines to Parquet, the same question to the same silver tables,
the answer to Parquet.  Steps without a figure of DuckDB read gold tables of a few
thousand rows, or exist in Spark's way alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import SparkSession
from rich.console import Console

from benchmarks.report import show
from dmsg.analytics.jobs import Pipeline
from dmsg.analytics.lake import Lake
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.analytics.schemas import EVENT, FAMILIES, SILVER
from dmsg.analytics.session import make_session
from dmsg.analytics.simulate import Network, Simulation
from dmsg.analytics.store import BRONZE_KEY
from dmsg.analytics.views import VIEWS
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.oracle import FIELDS

LAST_DAY = date(2026, 3, 10)
DAYS = 5
EVENTS_OF_SERVER, EVENTS_OF_CLIENT = 100_000, 1_000
"""The network grows with its events: at 20 million 200 servers, 20,000 clients."""
THREADS = 2
TICKS = os.sysconf("SC_CLK_TCK")


def _java() -> list[Path]:
    own = str(os.getpid())
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if name.endswith("(java") and own in rest.split()[1:2]:
            found.append(stat.parent)
    return found


_workers: dict[str, float] = {}
"""CPU seconds of each Python worker when it was last seen.  Spark's workers end without their parent's noticing."""


def cpu() -> float:
    """CPU seconds of this process, of the Java that it started, and of Java's Python workers."""
    total = time.process_time()
    spent, children = {}, defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        spent[stat.parent.name] = (int(rest[11]) + int(rest[12])) / TICKS
        children[rest[1]].append(stat.parent.name)
    for java in _java():
        total += spent.get(java.name, 0.0)
        below = list(children[java.name])
        while below:
            one = below.pop()
            _workers[one] = spent[one]
            below += children[one]
    return total + sum(_workers.values())


def peak_memory() -> float:
    """MB that the Java has had at most."""
    for process in _java():
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


def measured(act: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    before, start = cpu(), time.perf_counter()
    act()
    return cpu() - before, time.perf_counter() - start


def _as_view(duck: duckdb.DuckDBPyConnection, name: str, files: list[str]) -> str:
    """A silver table that is a view, as DuckDB selects it from the events."""
    view = VIEWS[name]
    ours = view.changed | {"at": "make_timestamp(ts * 1000)", "hour": "CAST(ts // 3600000 % 24 AS INT)"}
    if name == "receipts":  # DuckDB needs no row for each end: its query takes the least of several receipts
        ours = {"former": "false", "words": "1", "at": ours["at"], "dt": "CAST(dt AS DATE)"}
    events = f"read_parquet({files!r}, hive_partitioning = true, union_by_name = true)"
    # Arrow writes no columns in which a file has nothing.
    there = {row[0] for row in duck.execute(f"DESCRIBE SELECT * FROM {events}").fetchall()}
    absent = "".join(f', NULL AS "{one.name}"' for one in EVENT if one.name not in there)
    columns = ", ".join(
        f'{ours[column]} AS "{column}"' if column in ours else f'"{column}"'
        for column in SILVER[name].schema.fieldNames()
    )
    return f"(SELECT {columns} FROM (SELECT *{absent} FROM {events}) WHERE {view.where})"


class Steps:
    """Cost of each step of a run, from the run's messages of progress."""

    def __init__(self, console: Console) -> None:
        self.costs: dict[str, tuple[float, float]] = {}
        self._console = console
        self._what = ""
        self._begin = (0.0, 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = (cpu(), time.perf_counter())
        if self._what:
            spent = (now[0] - self._begin[0], now[1] - self._begin[1])
            self.costs[self._what] = spent
            self._console.print(f"[dim]{self._what}: {spent[0]:.1f} CPU-s, {spent[1]:.1f} s")
        self._what, self._begin = what, now


class Bench:
    """Benchmark with one size of data."""

    def __init__(self, spark: SparkSession, directory: Path, events: int, console: Console) -> None:
        self.spark = spark
        self.directory = directory
        self.events = events
        self.spool = directory / "sim" / "spool"
        self.steps = Steps(console)
        self.lake = Lake(spark, str(directory / "out"))
        self.duck = duckdb.connect()
        self.duck.execute(f"SET threads = {THREADS}; SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        self.duck.execute("SET memory_limit = '4GB'")

    def prepare(self) -> None:
        """Events, unless they are there from a run before."""
        if self.directory.exists():
            shutil.rmtree(self.directory / "out", ignore_errors=True)
            return
        servers, clients = max(2, self.events // EVENTS_OF_SERVER), max(20, self.events // EVENTS_OF_CLIENT)
        network = Network(self.events // 2, servers, clients, DAYS, 1, LAST_DAY)
        Simulation(self.spark, network).write(self.directory / "sim")

    def run(self) -> None:
        """The pipeline as ``dmsg analytics run`` runs it."""
        pipeline = Pipeline(
            self.spark,
            str(self.directory / "out"),
            now=datetime.combine(LAST_DAY, datetime.min.time(), UTC) + timedelta(1.5),
            progress=self.steps,
            tune=False,
        )
        pipeline.run([spool_source(str(self.spool)), receipts_source(str(self.directory / "sim" / "checked"))])

    def duck_bronze(self) -> None:
        """The same lines to Parquet by family and day in DuckDB."""
        target = self.directory / "duck"
        families = " ".join(
            f"WHEN type IN ({', '.join(repr(one) for one in types)}) THEN '{name}'" for name, types in FAMILIES.items()
        )
        self.duck.execute(
            f"""COPY (SELECT *, CASE WHEN v <> 1 OR type IS NULL OR seq IS NULL OR seq < 0 OR ts IS NULL
                OR producer IS NULL OR boot IS NULL OR mono IS NULL THEN 'quarantine' {families} ELSE 'quarantine' END
                AS family, CAST(epoch_ms(ts) AS DATE) AS dt
            FROM read_json('{self.spool}/events-*.jsonl.gz', columns = {{{FIELDS}}}, filename = true,
                           format = 'newline_delimited', ignore_errors = true))
            TO '{target}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, PARTITION_BY (family, dt))"""
        )
        shutil.rmtree(target)

    def _bronze(self) -> list[str]:
        table = self.lake.table("", "bronze")
        return [table.location(file) for file in table.files(self.lake.state().versions[BRONZE_KEY])]

    def duck_tables(self) -> dict[str, str]:
        """Gold table -> the same question to the same silver tables, as DuckDB answers it best."""
        state = self.lake.state()

        def at(name: str) -> str:
            if name in VIEWS:
                return _as_view(
                    self.duck, name, [file for file in self._bronze() if f"family={VIEWS[name].family}/" in file]
                )
            table = self.lake.table("silver", name)
            files = [table.location(file) for file in table.files(state.versions[f"silver/{name}"])]
            return f"read_parquet({files!r}, hive_partitioning = true, union_by_name = true)"

        sums = ", ".join(f"sum(rtt[{index + 1}])" for index in range(BUCKETS))
        return {
            "traffic_hour": f"""SELECT server, dt, hour, count(*) FILTER (what = 'open'),
                count(*) FILTER (what = 'close'), count(*) FILTER (what = 'close' AND accept_ms IS NOT NULL),
                sum(data_ab) + sum(data_ba), sum(frames_ab) + sum(frames_ba), sum(acks_ab) + sum(acks_ba)
                FROM {at("transports")} GROUP BY ALL""",
            "latency_hour": f"""SELECT server, dt, hour, {sums}, NULL AS b, NULL AS n
                FROM {at("transports")} WHERE rtt IS NOT NULL GROUP BY server, dt, hour
                UNION ALL BY NAME
                SELECT server, dt, hour, ceil(2 * log2(accept_ms / 0.1)) AS b, count(*) AS n FROM {at("transports")}
                WHERE what = 'close' AND accept_ms > 0 GROUP BY ALL""",
            "close_day": f"""SELECT server, dt, reason, "by", count(*) FROM {at("transports")} WHERE what = 'close'
                GROUP BY ALL""",
            "pair_day": f"""SELECT server, dt, src, dst, count(*) FILTER (what = 'close'), sum(data_ab), sum(data_ba)
                FROM {at("transports")} WHERE what <> 'open' GROUP BY ALL""",
            "session_day": f"""SELECT server, dt, count(*), count(DISTINCT peer), count(*) FILTER (reason = 'lost'),
                avg(duration_ms), sum(bytes) FROM {at("sessions")} WHERE reason <> 'open' GROUP BY ALL""",
            "server_hour": f"""
                WITH w AS (
                    SELECT producer, role, dt, greatest(epoch(covers_from)::BIGINT // 60, epoch(dt)::BIGINT // 60) AS a,
                           epoch("at")::BIGINT // 60 AS z FROM {at("heartbeats")}),
                h AS (
                    SELECT producer, role, dt, unnest(range(a // 60, z // 60 + 1)) AS hr, a, z FROM w),
                m AS (
                    SELECT producer, role, dt, hr, bit_or((((1::BIGINT << (least(z, hr * 60 + 59)
                           - greatest(a, hr * 60) + 1)::INT) - 1) << (greatest(a, hr * 60) - hr * 60)::INT)) AS mask
                    FROM h GROUP BY ALL),
                s AS (
                    SELECT subject, dt, m // 60 AS hr, bit_or(1::BIGINT << (m % 60)::INT) AS mask FROM (
                        SELECT subject, dt, unnest([epoch("at")::BIGINT // 60, epoch("at")::BIGINT // 60 + 1]) AS m
                        FROM {at("entries")} WHERE is_server AND result IN ('first', 'next')) GROUP BY ALL),
                l AS (
                    SELECT producer, dt, epoch("at")::BIGINT // 3600 AS hr, max(sessions) AS a, max(transports) AS b,
                           max(capacity) AS c, sum(frames) AS d, sum(bytes) AS e, max(lag_ms) AS f, sum(cpu_ms) AS g,
                           max(rss_kb) AS h, sum(lost) AS i
                    FROM {at("heartbeats")} WHERE role = 'server' GROUP BY ALL)
                SELECT m.producer, m.dt, m.hr, bit_count(m.mask), bit_count(s.mask), bit_count(m.mask & s.mask),
                       a, b, c, d, e, f, g, h, i
                FROM m LEFT JOIN s ON m.producer = s.subject AND m.dt = s.dt AND m.hr = s.hr
                LEFT JOIN l ON m.producer = l.producer AND m.dt = l.dt AND m.hr = l.hr WHERE role = 'server'""",
            "verdicts": f"""
                WITH w AS (
                    SELECT server, transport, dt, total_ab AS ab, total_ba AS ba, NULL::BIGINT AS ao,
                           NULL::BIGINT AS ai, NULL::BIGINT AS bo, NULL::BIGINT AS bi,
                           NULL::VARCHAR AS sa, NULL::VARCHAR AS pa, NULL::VARCHAR AS sb, NULL::VARCHAR AS pb
                    FROM {at("transports")} WHERE what = 'close' AND transport IS NOT NULL
                    UNION ALL
                    SELECT server, transport, dt, NULL, NULL, CASE WHEN initiator THEN delivered_out END,
                           CASE WHEN initiator THEN delivered_in END, CASE WHEN NOT initiator THEN delivered_out END,
                           CASE WHEN NOT initiator THEN delivered_in END,
                           CASE WHEN initiator THEN signer END, CASE WHEN initiator THEN partner END,
                           CASE WHEN NOT initiator THEN signer END, CASE WHEN NOT initiator THEN partner END
                    FROM {at("receipts")}),
                j AS (SELECT server, transport, min(dt) AS dt, min(ab) + min(ba) AS claimed, min(ao) AS ao,
                             min(ai) AS ai, min(bo) AS bo, min(bi) AS bi, min(sa) AS sa, min(pa) AS pa, min(sb) AS sb,
                             min(pb) AS pb FROM w GROUP BY server, transport),
                c AS (SELECT *, CASE WHEN sa = pb AND sb = pa THEN least(ao, bi) + least(bo, ai) ELSE 0 END AS credited
                      FROM j)
                SELECT server, dt, claimed, credited,
                       CASE WHEN claimed IS NULL THEN 'unclaimed' WHEN ao IS NULL AND bo IS NULL THEN 'relay_only'
                            WHEN ao IS NULL OR bo IS NULL THEN 'one_sided'
                            WHEN abs(claimed - credited) > greatest(4096, 0.01 * claimed) THEN 'conflict'
                            ELSE 'matched' END AS state,
                       CASE WHEN state = 'conflict' THEN transport END, CASE WHEN state = 'conflict' THEN ao END,
                       CASE WHEN state = 'conflict' THEN bo END FROM c""",
            "settlement_day": f"""
                SELECT server, dt, count(*), sum(claimed), sum(credited), count(*) FILTER (state = 'matched'),
                       count(*) FILTER (state = 'conflict'), count(*) FILTER (state = 'one_sided'),
                       count(*) FILTER (state = 'relay_only'), count(*) FILTER (state = 'unclaimed')
                FROM {at("verdicts")} GROUP BY ALL""",
            "refusal_hour": f"""SELECT producer, dt, hour, what, reason, sum(n), count(DISTINCT who)
                FROM {at("refusals")} GROUP BY ALL""",
            "abuse_day": f"""SELECT producer, dt, who, what, sum(n), sum(targets), 0 FROM {at("refusals")} GROUP BY ALL
                UNION ALL SELECT producer, dt, subject, 'churn', count(*), 0, 0 FROM {at("entries")}
                WHERE NOT is_server GROUP BY ALL HAVING count(*) >= 500
                UNION ALL SELECT server, dt, src, 'unanswered', count(*), 0, count(*) FILTER (accept_ms IS NULL)
                FROM {at("transports")} WHERE what = 'close' GROUP BY ALL HAVING count(*) >= 50""",
            "discovery_hour": f"""SELECT producer, dt, hour, count(*) FILTER (result = 'first'),
                count(*) FILTER (result = 'next'), count(*) FILTER (result = 'deleted'),
                count(DISTINCT subject) FILTER (is_server) FROM {at("entries")} GROUP BY ALL""",
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return all figures of this size."""
        self.run()
        duck = {"bronze: spool": measured(self.duck_bronze)}
        for name, sql in self.duck_tables().items():
            target = self.directory / "duck.parquet"
            layer = "silver" if name in SILVER else "gold"
            duck[f"{layer}: {name}"] = measured(lambda: self.duck.execute(f"COPY ({sql}) TO '{target}'"))  # noqa: B023
        found = []
        for name, spent in self.steps.costs.items():
            other = duck.get(name)
            found.append(
                {
                    "step": name,
                    "spark_cpu_s": spent[0],
                    "duckdb_cpu_s": None if other is None else other[0],
                    "ratio": None if other is None else spent[0] / max(0.01, other[0]),
                    "spark_wall_s": spent[1],
                    "events_per_s": self.events / spent[1],
                }
            )
        total = [sum(spent[index] for spent in self.steps.costs.values()) for index in (0, 1)]
        found.append(
            {
                "step": "the whole run",
                "spark_cpu_s": total[0],
                "duckdb_cpu_s": None,
                "ratio": None,
                "spark_wall_s": total[1],
                "events_per_s": self.events / total[1],
            }
        )
        return found


def _compare(row: dict[str, Any], smaller: dict[str, Any]) -> None:
    """Add the factors to the smaller size, and the ratio of the added time to DuckDB's.  The fixed cost of each query,
    a hundred times as large in Spark, does not count then.
    """
    more = row["spark_cpu_s"] - smaller["spark_cpu_s"]
    row["growth"] = row["spark_cpu_s"] / max(0.01, smaller["spark_cpu_s"])
    if row["duckdb_cpu_s"] is not None:
        row["ratio_of_growth"] = more / max(0.01, row["duckdb_cpu_s"] - smaller["duckdb_cpu_s"])


def main() -> None:
    """2 and 20 million events."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--events", type=int, nargs="*", default=[2_000_000, 20_000_000])
    parser.add_argument("--directory", type=Path, help="where events are, or go (default: a new one, which is removed)")
    parser.add_argument("--json", type=Path, default=Path("build/bench-pipeline.json"))
    options = parser.parse_args()
    console = Console(width=150)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="dmsg-pipeline-"))
    session: list[SparkSession] = []
    begin = measured(lambda: session.append(make_session(f"local[{THREADS}]", memory="1g")))
    spark = session[0]
    warm = Bench(spark, directory / "warm", 20_000, console)
    warm.prepare()
    first = measured(warm.run)
    fixed = {"session_cpu_s": begin[0], "first_small_run_cpu_s": first[0]}
    results: dict[str, Any] = {"fixed": fixed}
    show("fixed cost, in no other row: start, and a run over 20,000 events that compiles everything", [fixed])
    before: dict[str, dict[str, Any]] = {}
    try:
        for events in options.events:
            bench = Bench(spark, directory / str(events), events, console)
            spent = measured(bench.prepare)
            console.print(f"simulated {events:,} events of transports: {spent[0]:.0f} CPU-s")
            rows = bench.rows()
            for row in rows:
                if row["step"] in before:
                    _compare(row, before[row["step"]])
            before = {row["step"]: row for row in rows}
            results[str(events)] = {"rows": rows, "peak_java_mb": peak_memory()}
            title = (
                f"{events:,} events of transports, driver of 1 GB, {THREADS} threads, {peak_memory():.0f} MB at most"
            )
            show(title, rows)
            if options.directory is None:
                shutil.rmtree(bench.directory, ignore_errors=True)
    finally:
        if options.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"figures: {options.json}")
    spark.stop()


if __name__ == "__main__":
    main()
