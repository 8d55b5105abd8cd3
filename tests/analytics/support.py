"""Helpers of the tests of the pipeline: one Spark session for all tests, and spools written by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.affected_rows import with_columns
from dmsg.analytics.jobs import Pipeline, RunOutcome
from dmsg.analytics.lake import Lake, with_types
from dmsg.analytics.listing import Source, receipts_source, spool_source
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.memory_tables import as_rows, rows_of_table
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import BRONZE, FAMILIES, GOLD, QUARANTINE, RAW, SILVER
from dmsg.analytics.session import JAVA_OPTIONS, SMALL_SETTINGS, Load, SparkOnDemand, make_session
from dmsg.analytics.store import NUMBERS, SUMS
from dmsg.analytics.table_plans import daily_tables, overall_tables, silver_tables
from dmsg.analytics.tuning import IN_MEMORY_SETTINGS, SMALL_JOB_SETTINGS
from dmsg.analytics.views import VIEWS
from dmsg.cli.pipeline.commands import analytics
from tests.analytics.comparison import compare, unlike, until
from tests.analytics.oracle import connect

DAY = date(2026, 3, 10)
NEXT = date(2026, 3, 11)
NOW = datetime(2026, 3, 13, 12, tzinfo=UTC)


def key(number: int) -> str:
    """Return the public key of server ``number``."""
    return f"02{number:064x}"


S1, S2, S3 = (key(number) for number in (1, 2, 3))
DISCOVERY = "discovery-1"

# With Java's own sizes, its garbage collector takes a tenth of the processor: the tests leave 250 MB of plans behind.
_HEAP = "-Xms1g -Xmn384m -XX:MetaspaceSize=256m"
# Java would verify the bytecode of 12,000 classes, which takes 2 s of the processor.
_UNVERIFIED = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


@cache
def spark() -> SparkSession:
    """Return the Spark session of all tests; its Java process ends with this process."""
    options = f"{SMALL_SETTINGS[JAVA_OPTIONS]} {_HEAP} {_UNVERIFIED}"
    settings = SMALL_JOB_SETTINGS | IN_MEMORY_SETTINGS | {JAVA_OPTIONS: options}
    return make_session("local[2]", load=Load.SMALL, settings=settings)


def ms(day: date, time: str) -> int:
    """Return ``HH:MM:SS[.fff]`` of a day as ms since 1970."""
    return int(datetime.fromisoformat(f"{day}T{time}+00:00").timestamp() * 1000)


class Boot:
    """Start of a process that writes events."""

    def __init__(self, producer: str, name: str, role: str = "server", *, started: int | None = None) -> None:
        self.producer, self.boot, self.role = producer, name, role
        self.rows: list[dict[str, Any]] = []
        self._first = started

    def event(self, kind: str, day: date, time: str, **fields: Any) -> dict[str, Any]:
        """Write an event and return it; sequence numbers are consecutive."""
        ts = ms(day, time)
        self._first = ts if self._first is None else self._first
        row = {
            "v": 1,
            "type": kind,
            "producer": self.producer,
            "role": self.role,
            "boot": self.boot,
            "seq": len(self.rows),
            "ts": ts,
            "mono": ts - self._first,
            **fields,
        }
        self.rows.append(row)
        return row

    def beats(self, day: date, first: str, count: int, **fields: Any) -> None:
        """Write ``count`` heartbeats, one each minute."""
        start = ms(day, first)
        for number in range(count):
            at = datetime.fromtimestamp(start / 1000 + 60 * number, UTC)
            self.event("heartbeat", at.date(), f"{at:%H:%M:%S}", interval_ms=60_000, **fields)


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode()


def write_file(
    path: Path,
    rows: Iterable[dict[str, Any]],
    *,
    end: bool = True,
    garbage: Iterable[bytes] = (),
    for_spark: bool = False,
) -> None:
    """Write a finished file of a spool, as entities write it.

    :param for_spark: give each line an array that no event has, so that Arrow refuses the file and Spark reads it.
    """
    other: dict[str, Any] = {"array": []} if for_spark else {}
    lines = [_line(row | other) for row in rows]
    lines += list(garbage)
    if end:
        last = {"v": 1, "type": "segment_end", "producer": S1, "role": "server", "boot": path.name, "seq": 0}
        stamp = json.loads(lines[0]) if lines and lines[0].startswith(b"{") else {"ts": ms(DAY, "00:00:00"), "mono": 0}
        last |= {"ts": stamp["ts"], "mono": 0, "lines": len(lines)}
        lines.append(_line(last | other))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in lines)))


def frame(rows: Iterable[dict[str, Any]], schema: StructType) -> DataFrame:
    """Return a data frame of these rows; a column that a row lacks is NULL."""
    return held(pa.Table.from_pylist(list(rows), schema=arrow_schema(schema)), schema)


def frame_in_memory(rows: Iterable[dict[str, Any]], schema: StructType) -> DataFrame:
    """Return the same rows for Arrow to compute with, without Spark."""
    return rows_of_table(pa.Table.from_pylist(list(rows), schema=arrow_schema(schema)), schema)


def held(rows: pa.Table, schema: StructType) -> DataFrame:
    """Return a data frame of a table, in one partition as the frames of a run."""
    return spark().createDataFrame(rows, schema).coalesce(1)


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: json.dumps(row, default=str, sort_keys=True))


def _naive(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as Spark's own ``collect`` returns them."""
    return _in_order(
        {key: value.replace(tzinfo=None) if isinstance(value, datetime) else value for key, value in row.items()}
        for row in rows
    )


def rows_of(rows: DataFrame | pa.Table) -> list[dict[str, Any]]:
    """Return the rows of either engine in a fixed order."""
    if isinstance(rows, MemoryRows):
        rows = pa.table({name: rows.column(name) for name in rows.columns})
    return _naive((rows if isinstance(rows, pa.Table) else rows.toArrow()).to_pylist())


class _Plans:
    """The plans of a run over tables in memory, each computed when a test first reads it.

    :param hold: makes the rows of a table: Spark's, or those that are computed without it.
    :param inputs: plans whose tables these plans read; None for the tables of these plans.
    """

    def __init__(
        self,
        hold: Callable[[pa.Table, StructType], DataFrame],
        events: pa.Table,
        numbers: pa.Table,
        inputs: _Plans | None = None,
    ) -> None:
        self._hold = hold
        rows = hold(events, BRONZE)
        days = {row["dt"] for row in events.select(["dt"]).to_pylist()}
        self.table = cache(self._computed)
        self._inputs = inputs or self
        read = cache(self._read)
        self._plans = {
            "numbers": lambda: hold(numbers, NUMBERS.schema),
            **silver_tables(
                lambda family: rows.where(F.col("family") == family),
                read,
                read,
                days,
                last_day=date.fromisoformat(max(days, default=str(DAY))),
            ),
            **daily_tables(read, read),
            **overall_tables(read, read, NOW.date()),
        }

    def _computed(self, name: str) -> pa.Table:
        return computed(self._plans[name](), _schema(name))

    def _read(self, name: str) -> DataFrame:
        return self._hold(self._inputs.table(name), _schema(name))


def _schema(name: str) -> StructType:
    return {**SILVER, **GOLD, "numbers": NUMBERS}[name].schema


def computed(rows: DataFrame, schema: StructType) -> pa.Table:
    """Return the rows of a table, which Spark or Arrow has computed."""
    return rows.table(schema) if isinstance(rows, MemoryRows) else with_types(rows, schema).toArrow()


class Memory:
    """The tables of events in memory. Spark and Arrow compute each of them from the same tables, with the same result.

    :param events: rows of events, as entities write them; ``receipts``: rows of checked receipts, as the check of
        receipts writes them.
    """

    def __init__(self, events: Iterable[dict[str, Any]], receipts: Iterable[dict[str, Any]] = ()) -> None:
        lines = self._lines(events, checked=False)
        if signed := list(receipts):
            lines = lines.unionByName(self._lines(signed, checked=True))
        bronze_rows = computed(lines, BRONZE)
        rows = held(bronze_rows, BRONZE).where(F.col("family") != QUARANTINE)
        sums = computed(bronze.sums(rows), SUMS.schema)
        doubt = as_rows(bronze.incomplete_sums(rows_of_table(sums, SUMS.schema))).count_rows > 0
        numbers = computed(bronze.numbers(held(sums, SUMS.schema), rows if doubt else None), NUMBERS.schema)
        kept = events_of(bronze_rows)
        of_arrow = _in_memory(kept)
        assert rows_of(computed(bronze.sums(of_arrow), SUMS.schema)) == rows_of(sums)
        by_arrow = bronze.numbers(rows_of_table(sums, SUMS.schema), of_arrow if doubt else None)
        assert rows_of(computed(by_arrow, NUMBERS.schema)) == rows_of(numbers)
        if pc.any(pc.greater(numbers["events"], numbers["distinct_events"])).as_py():
            again = held(numbers, NUMBERS.schema).where("events > distinct_events")
            kept = computed(bronze.deduplicate(rows, again), BRONZE)
        self._by_arrow = _Plans(rows_of_table, kept, numbers)
        self._by_spark = _Plans(held, kept, numbers, self._by_arrow)

    @staticmethod
    def _lines(rows: Iterable[dict[str, Any]], *, checked: bool) -> DataFrame:
        lines = frame(rows, RAW).withColumn("file", F.lit("file"))
        found = bronze.bronze_rows(lines, now_ms=int(NOW.timestamp() * 1000), checked=checked)
        return found.withColumns({"origin": F.lit("memory"), "batch": F.lit(0)})

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table in a fixed order."""
        rows = rows_of(self._by_spark.table(name))
        assert rows == rows_of(self._by_arrow.table(name)), name
        return rows


def events_of(rows: pa.Table) -> pa.Table:
    """Return those rows of bronze that are events or receipts."""
    return rows.filter(pc.is_in(rows["family"], pa.array(list(FAMILIES))))


def _in_memory(events: pa.Table) -> DataFrame:
    """Return events for Arrow to compute with."""
    return rows_of_table(events, BRONZE).withColumn("dt", F.col("dt").cast("date"))


def tables_at_once(lake: Lake) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that computes the rows of a table from all events in bronze at once, without Spark.

    The rows are those of one run over all files, and take less time, because no file is read again and no table is
    written.
    """
    table = lake.table("", "bronze")
    stored = Lake.hold(table, table.files())
    assert stored is not None
    events = events_of(with_columns(stored, arrow_schema(BRONZE), {}))
    sums = computed(bronze.sums(_in_memory(events)), SUMS.schema)
    chosen = _without_copies(events)
    rows = _in_memory(events) if chosen is not events else None
    numbers = computed(bronze.numbers(rows_of_table(sums, SUMS.schema), rows), NUMBERS.schema)
    plans = _Plans(rows_of_table, chosen, numbers)
    return lambda name: rows_of(plans.table(name))


def _without_copies(events: pa.Table) -> pa.Table:
    """Return one event for each process and number: the first of those with the smallest text."""
    kept: dict[tuple[Any, ...], tuple[bytes, int]] = {}
    for place, event in enumerate(events.to_pylist()):
        number = event["producer"], event["boot"], event["seq"]
        kept[number] = min((bronze.text_of_copy(event), place), kept.get(number, (b"\xff", place)))
    return events if len(kept) == len(events) else events.take(sorted(place for _, place in kept.values()))


def stored_rows(lake: Lake, layer: str, name: str, state: State | None = None) -> list[dict[str, Any]]:
    """Return the current rows of a table in a fixed order, read without Spark.

    :param state: current state of the lake; None to read it.
    """
    state = state or lake.state()
    if name in VIEWS:
        return _naive(row for day in state.days for row in lake.rows(layer, name, state, day))
    return _naive(lake.stored(layer, name, state).to_pylist())


def rows_by_spark(lake: Lake, layer: str, name: str) -> list[dict[str, Any]]:
    """Return the same as :func:`stored_rows`, read by Spark, which takes ten times as long."""
    return _in_order(row.asDict(recursive=True) for row in lake.read(layer, name, lake.state()).collect())


def run_here(*arguments: str) -> tuple[str, str, int]:
    """Run a command of ``dmsg analytics`` in this process. Return its output, its errors and its exit status.

    A program takes a second of the processor to start. So each command runs once as a program, in an environment
    without Java, and this function runs it with other arguments. ``--json`` would stay in effect for later commands.
    """
    done = CliRunner().invoke(analytics, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout, done.stderr, done.exit_code


class LakeCase(SynchronousTestCase):
    """Test case with a spool and with tables made of the spool, in directories of the test."""

    def setUp(self) -> None:
        self.root = Path(self.mktemp()).absolute()
        self.spool, self.checked, self.out = (self.root / name for name in ("spool", "checked", "out"))
        self.spool.mkdir(parents=True)
        self.checked.mkdir()

    def pipeline(self, out: Path | None = None, **options: Any) -> Pipeline:
        """Return a pipeline with this test's tables."""
        return Pipeline(SparkOnDemand(spark), str(out or self.out), now=NOW, **options)

    def sources(self) -> list[Source]:
        """Return the sources that a run reads."""
        return [spool_source(str(self.spool)), receipts_source(str(self.checked))]

    def run_jobs(self, out: Path | None = None, **options: Any) -> RunOutcome:
        """Run the pipeline once."""
        return self.pipeline(out, **options).run(self.sources())

    def table(self, name: str, layer: str = "gold", out: Path | None = None) -> list[dict[str, Any]]:
        """Return the current rows of a table in a fixed order."""
        return stored_rows(self.pipeline(out).lake, layer, name)

    def tables(self, names: Iterable[str], out: Path | None = None) -> dict[str, list[dict[str, Any]]]:
        """Return the current rows of several tables."""
        lake = self.pipeline(out).lake
        state = lake.state()
        return {name: stored_rows(lake, "gold", name, state) for name in names}


class RulesCase(LakeCase):
    """Test case that computes tables from events in memory and compares each table with DuckDB's answer.
    :class:`ByRuns` repeats its tests with runs.

    :cvar ended: whether files of the spool end with the line that marks their end, which is an event, too.
    """

    ended = False

    def setUp(self) -> None:
        super().setUp()
        self._events: list[dict[str, Any]] = []
        self._receipts: list[dict[str, Any]] = []
        self._files = 0

    def refine(self, events: Iterable[dict[str, Any]], receipts: Iterable[dict[str, Any]] = ()) -> None:
        """Compute the tables from these rows and from those of earlier calls."""
        for root, name, all_rows, rows in (
            (self.spool, "events", self._events, list(events)),
            (self.checked, "receipts", self._receipts, list(receipts)),
        ):
            all_rows += rows
            self._files += 1
            if rows:
                write_file(root / f"{name}-{self._files}.jsonl.gz", rows, end=self.ended)
        self.compute()

    def compute(self) -> None:
        """Compute the tables from all rows so far."""
        self._memory = Memory(self._events, self._receipts)
        self._oracle = connect(self.spool, self.checked, until=until(NOW.date()))
        self.addCleanup(self._oracle.close)

    def made(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a gold table, after comparing them with DuckDB's."""
        rows = self._memory.table(name)
        self.assertEqual(unlike(name, rows, self._oracle, NOW.date())[:3], [], name)
        return rows


class ByRuns(RulesCase):
    """Repeat the tests with files, and with a run over the new files each time; all tables are compared."""

    ended = True

    def compute(self) -> None:
        self.run_jobs()
        found = compare(self.pipeline().lake, self.spool, self.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])

    def made(self, name: str) -> list[dict[str, Any]]:
        return self.table(name)
