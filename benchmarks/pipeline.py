"""``python -m benchmarks.pipeline``: a run of the pipeline beside DuckDB, on the same files.

The benchmark makes the run that ``dmsg analytics run`` makes, in a process of its own for each size.  All figures are
CPU seconds of all processes, because the machine may be shared.  They include the start of Spark, which starts when a
step needs it.  DuckDB does the main part of the same work: it converts the same files to Parquet, asks the same
questions of the same silver tables, and writes the answers to Parquet.  Steps without a figure of DuckDB read gold
tables of a few thousand rows, or check what DuckDB does not check.  Then late events are added to the tables, and
copies of events.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
from rich.console import Console

from benchmarks.report import show
from dmsg.analytics import store
from dmsg.analytics.jobs import Pipeline
from dmsg.analytics.lake import Lake
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.analytics.schemas import EVENT, FAMILIES, SILVER
from dmsg.analytics.session import Load, SparkOnDemand, make_session
from dmsg.analytics.store import BRONZE_KEY
from dmsg.analytics.views import VIEWS
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.oracle import FIELDS

LAST_DAY = date(2026, 3, 10)
DAYS = 5
EVENTS_OF_SERVER, EVENTS_OF_CLIENT = 100_000, 1_000
"""The network grows with its events: at 20 million 200 servers, 20,000 clients."""
THREADS = 2
WHOLE = "the whole run"
LATE_DAY = "2026-03-08"
"""Day of the late events."""
LATE = (10_000, 1)
"""Numbers of late events that later runs add, one run for each number."""
COPIES = 10
"""Number of copies of late events that two further runs add, each in another file."""
SIMULATE = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()", "analytics", "simulate")
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
    """Maximum memory of Java in MB; 0 if Spark has not started."""
    for process in _java():
        for line in (process / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


def peak_memory_of_python() -> float:
    """Maximum memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(act: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    before, start = cpu(), time.perf_counter()
    act()
    return cpu() - before, time.perf_counter() - start


def _as_view(duck: duckdb.DuckDBPyConnection, name: str, files: list[str]) -> str:
    """A silver table that is a view, as DuckDB selects it from the events."""
    view = VIEWS[name]
    ours = view.changed | {"at": "make_timestamp(ts * 1000)", "hour": "CAST(ts // 3600000 % 24 AS INT)"}
    if name == "receipts":  # DuckDB needs no row for each end, because its query takes the minimum of several receipts.
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
    """Cost of each step of a run, from the run's messages of progress.  A run in parts begins a step several times."""

    def __init__(self, console: Console) -> None:
        self.costs: dict[str, tuple[float, float]] = {}
        self._console = console
        self._what = ""
        self._begin = (0.0, 0.0)

    def __call__(self, what: str, done: int, total: int) -> None:
        now = (cpu(), time.perf_counter())
        if self._what:
            spent = (now[0] - self._begin[0], now[1] - self._begin[1])
            former = self.costs.get(self._what, (0.0, 0.0))
            self.costs[self._what] = (former[0] + spent[0], former[1] + spent[1])
            self._console.print(f"[dim]{self._what}: {spent[0]:.1f} CPU-s, {spent[1]:.1f} s")
        self._what, self._begin = what, now


class Bench:
    """Benchmark with one size of data."""

    def __init__(self, directory: Path, events: int, console: Console) -> None:
        self.directory = directory
        self.events = events
        self.console = console
        self.spool, self.checked = directory / "sim" / "spool", directory / "sim" / "checked"
        self.late = directory / "late"
        self.steps = Steps(console)
        self.peaks: dict[str, float] = {}
        self.spark = SparkOnDemand(lambda: make_session(f"local[{THREADS}]", load=self._load()))
        self.lake = Lake(self.spark, str(directory / "out"))
        self.duck = duckdb.connect()
        self.duck.execute(f"SET threads = {THREADS}; SET TimeZone = 'UTC'; SET preserve_insertion_order = false")
        self.duck.execute("SET memory_limit = '4GB'")

    def _load(self) -> Load:
        """Return the load by which ``dmsg analytics run`` would configure Spark for a first run."""
        return Load.of_files(sum(path.stat().st_size for one in (self.spool, self.checked) for path in one.iterdir()))

    def prepare(self) -> None:
        """Simulate events, unless an earlier benchmark has left them, and hold back the late ones."""
        if not self.late.exists():
            servers, clients = max(2, self.events // EVENTS_OF_SERVER), max(20, self.events // EVENTS_OF_CLIENT)
            numbers = {"transports": self.events // 2, "servers": servers, "clients": clients, "days": DAYS}
            options = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
            where = ("--out", str(self.directory / "sim"), "--last-day", str(LAST_DAY))
            if not self.spool.exists():
                subprocess.run([*SIMULATE, *options, *where], check=True, stdout=subprocess.DEVNULL)
            self._hold_back()
        for path in self.spool.glob("events-late-*"):
            path.unlink()
        shutil.rmtree(self.directory / "out", ignore_errors=True)

    def _hold_back(self) -> None:
        """Move lines of one day from a file of the spool to the files of late events."""
        source = next(self.spool.glob("events-transports-*"))
        held: list[bytes] = []
        kept: list[bytes] = []
        wanted = sum(LATE)
        for line in gzip.decompress(source.read_bytes()).splitlines(keepends=True):
            row = json.loads(line)
            of_day = row["type"] != "segment_end" and str(datetime.fromtimestamp(row["ts"] / 1000, UTC).date())
            (held if of_day == LATE_DAY and len(held) < wanted else kept).append(line)
        source.write_bytes(gzip.compress(b"".join(kept), 6))
        assert len(held) == wanted, f"{source} has {len(held)} events of {LATE_DAY}"
        self.late.mkdir()
        for count in LATE:
            lines, held = held[:count], held[count:]
            # The last line of a file is an event, too. It names a process of its own, because it would otherwise have
            # arrived before.
            end = json.dumps(json.loads(kept[-1]) | {"boot": f"late-{count}"}).encode() + b"\n"
            (self.late / f"events-late-{count}.jsonl.gz").write_bytes(gzip.compress(b"".join([*lines, end])))

    def run(self, progress: Callable[[str, int, int], None]) -> None:
        """Run the pipeline as ``dmsg analytics run`` runs it."""
        now = datetime.combine(LAST_DAY, datetime.min.time(), UTC) + timedelta(1.5)
        pipeline = Pipeline(self.spark, str(self.directory / "out"), now=now, progress=progress)
        pipeline.run([spool_source(str(self.spool)), receipts_source(str(self.checked))])

    def run_late(self) -> list[dict[str, Any]]:
        """Return the cost of runs that add late events, and then copies of some of them."""
        found = []
        for count in LATE:
            shutil.copy(self.late / f"events-late-{count}.jsonl.gz", self.spool)
            found.append(self._late_cost(str(count)))
        for number in (1, 2):
            self._copy_events(number)
            found.append(self._late_cost(f"{COPIES} copies, run {number}"))
        return found

    def _late_cost(self, events: str) -> dict[str, Any]:
        """Return the cost of a run over the new files."""
        spent = measured(lambda: self.run(lambda what, done, total: None))
        return {"late_events": events, "cpu_s": spent[0], "wall_s": spent[1]}

    def _copy_events(self, number: int) -> None:
        """Write some late events to the spool once more."""
        late = gzip.decompress((self.late / f"events-late-{LATE[0]}.jsonl.gz").read_bytes()).splitlines(keepends=True)
        end = json.dumps(json.loads(late[-1]) | {"boot": f"late-copies-{number}"}).encode() + b"\n"
        lines = late[number * COPIES : (number + 1) * COPIES]
        (self.spool / f"events-late-copies-{number}.jsonl.gz").write_bytes(gzip.compress(b"".join([*lines, end])))

    def duck_receipts(self) -> None:
        """Convert the checked receipts to Parquet by day in DuckDB."""
        target = self.directory / "duck"
        self.duck.execute(
            f"""COPY (SELECT *, CAST(epoch_ms(ts) AS DATE) AS dt
            FROM read_json('{self.checked}/receipts-*.jsonl.gz', columns = {{{FIELDS}}}, filename = true,
                           format = 'newline_delimited', ignore_errors = true))
            TO '{target}' (FORMAT parquet, COMPRESSION zstd, COMPRESSION_LEVEL 1, PARTITION_BY (dt))"""
        )
        shutil.rmtree(target)

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
        """Return the cost of each step and of the whole run."""
        start = cpu()
        self.run(self.steps)
        self.peaks = {"peak_java_mb": peak_memory(), "peak_python_mb": peak_memory_of_python()}
        duck = {
            "bronze: spool": measured(self.duck_bronze),
            "bronze: receipts": measured(self.duck_receipts),
        }
        for name, sql in self.duck_tables().items():
            target = self.directory / "duck.parquet"
            layer = "silver" if name in SILVER else "gold"
            duck[f"{layer}: {name}"] = measured(lambda: self.duck.execute(f"COPY ({sql}) TO '{target}'"))  # noqa: B023
        # The imports of this program belong to the whole run, because a command pays for them, too.
        costs = {"imports": (start, 0.0)} | self.steps.costs
        total = (sum(spent[0] for spent in costs.values()), sum(spent[1] for spent in costs.values()))
        duck[WHOLE] = (sum(spent[0] for spent in duck.values()), sum(spent[1] for spent in duck.values()))
        found = []
        for name, spent in (costs | {WHOLE: total}).items():
            other = duck.get(name)
            found.append(
                {
                    "step": name,
                    "run_cpu_s": spent[0],
                    "duckdb_cpu_s": None if other is None else other[0],
                    "ratio": None if other is None else spent[0] / max(0.01, other[0]),
                    "run_wall_s": spent[1],
                }
            )
        return found


def _measure(events: int, directory: Path) -> dict[str, Any]:
    """Return the figures of one size."""
    console = Console(width=150)
    # A run merges small files if the run before was hours ago. The simulated days were, but here no time passes between
    # two runs.
    store.TIDY_SECONDS = sys.maxsize // 1000
    bench = Bench(directory / str(events), events, console)
    bench.prepare()
    rows = bench.rows()
    late = bench.run_late()
    show(f"{events:,} events of transports, driver of 1 GB, {THREADS} threads; {bench.peaks}", rows)
    show(f"late events and copies of one day, added to the tables of {events:,}", late)
    return {"rows": rows, "late": late, **bench.peaks}


def main() -> None:
    """Measure each size in a process of its own, because Spark's settings depend on the size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--events", type=int, nargs="*", default=[2_000_000, 20_000_000])
    parser.add_argument("--directory", type=Path, help="where events are, or go (default: a new one, which is removed)")
    parser.add_argument("--json", type=Path, default=Path("build/bench-pipeline.json"))
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="dmsg-pipeline-"))
    results: dict[str, Any] = {}
    try:
        if len(options.events) == 1:
            results[str(options.events[0])] = _measure(options.events[0], directory)
        else:
            for events in options.events:
                part = directory / f"{events}.json"
                own = ("--events", str(events), "--directory", str(directory), "--json", str(part))
                subprocess.run([sys.executable, "-m", "benchmarks.pipeline", *own], check=True)
                results |= json.loads(part.read_text())
    finally:
        if options.directory is None:
            shutil.rmtree(directory, ignore_errors=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(f"figures: {options.json}")


if __name__ == "__main__":
    main()
