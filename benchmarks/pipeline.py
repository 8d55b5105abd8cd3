"""``python -m benchmarks.pipeline``: bronze and gold tables on Spark, beside DuckDB, in one run.

CPU seconds of all processes, because the machine may be shared.  Starting Spark
and compiling the first query is a row of its own and is in no other.  DuckDB does
the same work: the same lines to Parquet, the same question to the same Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from benchmarks.__main__ import show
from dmsg.analytics import bronze, silver
from dmsg.analytics.gold import settlement, traffic, uptime
from dmsg.analytics.schemas import CORRUPT, EVENT, RAW
from dmsg.analytics.session import make_session
from dmsg.analytics.simulate import Network, Simulation
from dmsg.telemetry.schema import BUCKETS, Type, columns

LAST_DAY = date(2026, 3, 10)
NOW_MS = 1_773_230_400_000
DAYS = 5
THREADS = 2
TICKS = os.sysconf("SC_CLK_TCK")
_TYPES = {Type.STRING: "VARCHAR", Type.LONG: "BIGINT", Type.BOOLEAN: "BOOLEAN", Type.HISTOGRAM: "INTEGER[]"}
_FIELDS = ", ".join(f"'{field.name}': '{_TYPES[field.type]}'" for field in columns())


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


def cpu() -> float:
    """CPU seconds of this process and of the Java that it started."""
    total = time.process_time()
    for process in _java():
        rest = (process / "stat").read_text().rpartition(")")[2].split()
        total += (int(rest[11]) + int(rest[12])) / TICKS
    return total


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


class Bench:
    """One size of data."""

    def __init__(self, spark: SparkSession, directory: Path, events: int) -> None:
        self.spark = spark
        self.directory = directory
        self.events = events
        self.spool = directory / "sim" / "spool"
        self.parquet = directory / "silver"
        self.duck = duckdb.connect()
        self.duck.execute(f"SET threads = {THREADS}; SET TimeZone = 'UTC'; SET preserve_insertion_order = false")

    def prepare(self) -> None:
        """Events, and silver tables for the questions."""
        network = Network(self.events // 2, 200, 20_000, DAYS, 1, LAST_DAY)
        Simulation(self.spark, network).write(self.directory / "sim")

    # --- bronze ---

    def bronze(self) -> None:
        """The lines of transports to Parquet, checked, by family and day."""
        lines = (
            self.spark.read.schema(RAW)
            .option("columnNameOfCorruptRecord", CORRUPT)
            .option("pathGlobFilter", "events-*.jsonl.gz")
            .json(str(self.spool))
            .withColumn("file", F.col("_metadata.file_path"))
        )
        rows = bronze.bronze(lines, now_ms=NOW_MS)
        rows.write.mode("overwrite").partitionBy("family", "dt").parquet(str(self.directory / "bronze"))

    def duck_bronze(self) -> None:
        """The same in DuckDB."""
        target = self.directory / "duck"
        shutil.rmtree(target, ignore_errors=True)
        self.duck.execute(
            f"""COPY (SELECT *, CASE WHEN v = 1 AND type IS NOT NULL AND seq >= 0 AND ts < {NOW_MS} THEN
                CASE WHEN type LIKE 'transport_%' AND type <> 'transport_refuse' THEN 'transport' ELSE 'other' END
                ELSE 'quarantine' END AS family, CAST(epoch_ms(ts) AS DATE) AS dt
            FROM read_json('{self.spool}/events-*.jsonl.gz', columns = {{{_FIELDS}}}, filename = true,
                           format = 'newline_delimited', ignore_errors = true))
            TO '{target}' (FORMAT parquet, COMPRESSION zstd, PARTITION_BY (family, dt))"""
        )
        shutil.rmtree(target, ignore_errors=True)

    def silver(self) -> None:
        """Tables that the questions read."""
        everything = self.spark.read.parquet(str(self.directory / "bronze"))
        for name, family, transform in (
            ("transports", "transport", silver.transports),
            ("heartbeats", "beat", silver.heartbeats),
            ("entries", "entry", silver.entries),
        ):
            rows = transform(everything.where(F.col("family") == family))
            rows.write.mode("overwrite").parquet(str(self.parquet / name))
        checked = self.spark.read.schema(EVENT).json(str(self.directory / "sim" / "checked"))
        days = checked.where("type = 'receipt_checked'").withColumn("dt", F.to_date(F.timestamp_millis("ts")))
        silver.receipts(days).write.mode("overwrite").parquet(str(self.parquet / "receipts"))

    # --- gold ---

    def table(self, name: str) -> DataFrame:
        """A silver table."""
        return self.spark.read.parquet(str(self.parquet / name))

    def questions(self) -> dict[str, tuple[Callable[[], DataFrame], str]]:
        """Name -> the transform, and DuckDB's way."""

        def at(name: str) -> str:
            return f"read_parquet('{self.parquet}/{name}/*.parquet')"

        sums = ", ".join(f"sum(rtt[{index + 1}])" for index in range(BUCKETS))
        minutes = "unnest(range(epoch(covers_from)::BIGINT // 60, epoch(at)::BIGINT // 60 + 1))"
        return {
            "traffic_hour": (
                lambda: traffic.traffic_hour(self.table("transports")),
                f"""SELECT server, dt, hour, count(*) FILTER (what = 'open'), count(*) FILTER (what = 'close'),
                    count(*) FILTER (what = 'close' AND accept_ms IS NOT NULL), sum(data_ab) + sum(data_ba),
                    sum(frames_ab) + sum(frames_ba), sum(acks_ab) + sum(acks_ba)
                    FROM {at("transports")} GROUP BY ALL""",
            ),
            "latency_hour": (
                lambda: traffic.latency_hour(self.table("transports")),
                f"""SELECT server, dt, hour, {sums} FROM {at("transports")} WHERE rtt IS NOT NULL GROUP BY ALL
                    UNION ALL BY NAME
                    SELECT server, dt, hour, ceil(2 * log2(accept_ms / 0.1)) AS b, count(*) FROM {at("transports")}
                    WHERE what = 'close' AND accept_ms IS NOT NULL GROUP BY ALL""",
            ),
            "close_day": (
                lambda: traffic.close_day(self.table("transports")),
                f"""SELECT server, dt, reason, "by", count(*) FROM {at("transports")} WHERE what = 'close'
                    GROUP BY ALL""",
            ),
            "pair_day": (
                lambda: traffic.pair_day(self.table("transports")),
                f"""SELECT server, dt, src, dst, count(*), sum(data_ab), sum(data_ba) FROM {at("transports")}
                    WHERE what <> 'open' GROUP BY ALL""",
            ),
            "server_hour (uptime)": (
                lambda: uptime.server_hour(self.table("heartbeats"), self.table("entries")),
                f"""WITH a AS (SELECT DISTINCT producer AS server, dt, {minutes} AS m FROM {at("heartbeats")}
                               WHERE role = 'server'),
                    s AS (SELECT DISTINCT subject AS server, dt,
                          unnest([epoch(at)::BIGINT // 60, epoch(at)::BIGINT // 60 + 1]) AS m
                          FROM {at("entries")} WHERE is_server),
                    l AS (SELECT producer AS server, dt, hour(at) AS h, max(sessions), max(transports), max(capacity),
                          sum(frames), sum(bytes), max(lag_ms), sum(cpu_ms) FROM {at("heartbeats")} GROUP BY ALL)
                    SELECT * FROM (SELECT server, dt, m // 60 % 24 AS h, count(*), count(s.m) FROM a
                    FULL JOIN s USING (server, dt, m) GROUP BY ALL) FULL JOIN l USING (server, dt, h)""",
            ),
            "settlement_day": (
                lambda: settlement.settlement_day(
                    settlement.judged(settlement.three_words(self.table("transports"), self.table("receipts")))
                ),
                f"""WITH j AS (SELECT coalesce(c.server, r.server) AS server, coalesce(c.dt, r.dt) AS dt, total_ab,
                        total_ba, ao, ai, bo, bi
                    FROM (SELECT * FROM {at("transports")} WHERE what = 'close' AND transport IS NOT NULL) c
                    FULL JOIN (SELECT server, transport, min(dt) AS dt, min(delivered_out) FILTER (initiator) AS ao,
                        min(delivered_in) FILTER (initiator) AS ai, min(delivered_out) FILTER (NOT initiator) AS bo,
                        min(delivered_in) FILTER (NOT initiator) AS bi FROM {at("receipts")} GROUP BY ALL) r
                    ON c.server = r.server AND c.transport = r.transport)
                    SELECT server, dt, count(*), sum(total_ab + total_ba), sum(least(ao, bi) + least(bo, ai)),
                        count(*) FILTER (ao IS NULL AND bo IS NULL), count(*) FILTER (total_ab IS NULL),
                        count(*) FILTER (abs(total_ab + total_ba - least(ao, bi) - least(bo, ai)) > 4096)
                    FROM j GROUP BY ALL""",
            ),
        }

    def rows(self) -> list[dict[str, Any]]:
        """All figures of this size."""
        found = []

        def row(name: str, spark: tuple[float, float], duck: tuple[float, float]) -> None:
            found.append(
                {
                    "table": name,
                    "events": self.events,
                    "spark_cpu_s": spark[0],
                    "duckdb_cpu_s": duck[0],
                    "ratio": spark[0] / max(0.01, duck[0]),
                    "events_per_s": self.events / spark[1],
                    "spark_wall_s": spark[1],
                    "peak_java_mb": peak_memory(),
                }
            )

        spark, duck = measured(self.bronze), measured(self.duck_bronze)
        row("bronze (JSON to Parquet)", spark, duck)
        self.silver()
        for name, (transform, sql) in self.questions().items():
            best = min(measured(lambda: transform().write.mode("overwrite").format("noop").save()) for _ in range(2))  # noqa: B023
            row(name, best, min(measured(lambda: self.duck.execute(sql).fetchall()) for _ in range(2)))  # noqa: B023
        return found


def main() -> None:
    """2 and 20 million events."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--events", type=int, nargs="*", default=[2_000_000, 20_000_000])
    parser.add_argument("--directory", type=Path, help="where the data goes (default: a new one, which is removed)")
    parser.add_argument("--json", type=Path, default=Path("build/bench-pipeline.json"))
    options = parser.parse_args()
    console = Console(width=150)
    directory = options.directory or Path(tempfile.mkdtemp(prefix="dmsg-pipeline-"))
    session: list[SparkSession] = []
    begin = measured(lambda: session.append(make_session(f"local[{THREADS}]", memory="1g")))
    spark = session[0]
    first = measured(lambda: spark.range(10**6).groupBy((F.col("id") % 100).alias("k")).count().collect())
    results = []
    show(console, "fixed cost, in no other row", [{"session_cpu_s": begin[0], "first_query_cpu_s": first[0]}])
    try:
        for events in options.events:
            bench = Bench(spark, directory / str(events), events)
            bench.prepare()
            rows = bench.rows()
            results += rows
            show(console, f"{events:,} transport events, driver of 1 GB, {THREADS} threads", rows)
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
