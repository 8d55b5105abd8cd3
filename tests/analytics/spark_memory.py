"""Rows in memory: each operation, each join and each table has the result that Spark has."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cache, partial
from itertools import product
from math import nextafter
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyspark.sql import DataFrame
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import file_columns, functions as F, memory_groups, memory_tables, shards, table_writer
from dmsg.analytics.event_rules import LARGEST_NUMBER
from dmsg.analytics.expressions import Expression
from dmsg.analytics.functions import Window
from dmsg.analytics.gold.histograms import bucket_of, count_buckets, quantile, sum_aggregate
from dmsg.analytics.gold.totals import SUM_LIMIT, bounded_sum
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_aggregates import AGGREGATES
from dmsg.analytics.memory_columns import OPERATIONS, NotInMemory
from dmsg.analytics.memory_groups import Groups, key_numbers
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.memory_tables import MemoryTables, as_rows
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.shard_tasks import FAMILIES_OF, Job
from dmsg.analytics.shards import LargeDays
from dmsg.analytics.table_writer import TableWriter
from dmsg.telemetry.schema import BUCKETS
from tests.analytics.comparison import unlike, until
from tests.analytics.oracle import connect
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NOW, S1, S2, Boot, LakeCase, rows_of, spark, write_file

ROWS = pa.table(
    {
        "key": ["a", "a", None, "b", "b", "b", None, "c"],
        "i": pa.array([1, None, -7, 3, 0, 25, 3, None], pa.int32()),
        "l": pa.array([5, 2**40, None, -3, 0, 61, 3, None], pa.int64()),
        "x": [0.5, None, -2.25, 2.675, 97.25, 1e9, 0.0, None],
        "t": ["one_two_three", "", None, "x", "ünï", "against one", "x_y", "a" * 70],
        "b": [True, None, False, True, True, None, False, None],
        "d": pa.array([DAY, None, date(1969, 12, 30), DAY, DAY, DAY, None, DAY], pa.date32()),
        "at": pa.array(
            [datetime(2026, 3, 10, 11, 12, 13, 14, UTC), None, datetime(1969, 12, 31, 23, 59, 59, 1, UTC), *[NOW] * 5],
            pa.timestamp("us", "UTC"),
        ),
        "h": pa.array(
            [[index * 3 for index in range(BUCKETS)], None, [0] * BUCKETS, *[[1] + [0] * (BUCKETS - 1)] * 4, None],
            pa.list_(pa.int64()),
        ),
        "bucket": pa.array([0, None, 5, 33, 33, 1, 2, None], pa.int32()),
        "order": pa.array([3, 1, 2, 6, 5, 4, 7, 8], pa.int64()),
    }
)
c = F.col


def in_dictionaries(table: pa.Table) -> MemoryRows:
    """Rows whose texts are in dictionaries, as columns are read from files."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    kept = {name: one.dictionary_encode() if one.type == pa.string() else one for name, one in columns.items()}
    return MemoryRows({name: partial(pa.concat_arrays, [one]) for name, one in kept.items()}, table.num_rows)


OF_ROWS: list[Any] = [
    c("i") + c("l"),
    1 - c("i"),
    2 * c("x") - c("i"),
    c("l") / c("i"),
    1.5 / c("x"),
    c("l") % 24,
    c("x") % 24,
    (c("i") == 3) & (c("l") > 0),
    (c("i") != 3) | c("b"),
    ~c("b"),
    (c("i") <= 1) | (c("l") >= 61) | (c("x") < 0),
    c("b") & F.lit(None).cast("boolean"),
    c("i").isNull() | c("t").isNotNull(),
    c("i").isin(3, 25),
    c("t").isin(["x", ""]),
    c("i").isin([]),
    c("t").contains("one"),
    F.when(c("i") > 0, "more").when(c("i") < 0, "less").alias("sign"),
    F.when(c("b"), c("i")).otherwise(F.lit(2**40)),
    F.coalesce("i", "l", F.lit(9)),
    F.greatest("i", "l"),
    F.least("x", "i", F.lit(1)),
    F.nullif(c("i"), F.lit(3)),
    F.round("x", 1),
    F.round(c("x") * 1.1, 2),
    F.floor("x") + F.ceil("x") + F.floor("l"),
    F.floor(c("l") / 3),
    F.pow(c("x"), F.lit(2.0)),
    F.abs(c("l")),
    F.shiftleft(F.lit(1).cast("long"), (F.abs(c("l")) % 60).cast("int")),
    c("l").bitwiseAND(c("i").cast("long")),
    F.bit_count(c("l")),
    F.xxhash64("t", "key"),
    F.xxhash64("t"),
    F.substring_index("t", "_", -1),
    F.substring_index("t", "_", 1),
    F.format_string("%d of %s, %.1f %%", "i", "t", "x"),
    F.concat_ws(", ", "key", F.when(c("i") > 0, "more"), F.lit("it's \\ so")),
    c("x").cast("long"),
    c("x").cast("int"),
    c("b").cast("int"),
    c("d").cast("string"),
    c("d").cast("timestamp"),
    F.lit("2026-01-31").cast("date"),
    F.lit(NOW.date()),
    F.lit(0.9),
    F.timestamp_millis(c("l")),
    F.unix_millis("at"),
    F.unix_seconds("at"),
    F.unix_date("d"),
    F.date_from_unix_date("i"),
    F.to_date("at"),
    F.date_add("d", 1),
    F.date_sub(F.lit(NOW.date()), 28),
    F.hour("at"),
    F.size(F.sequence(F.lit(1), F.abs(c("i")) + 1)),
    F.size(F.sequence("d", F.date_add("d", 2), F.one_day())),
    F.array("i", F.lit(3)),
    quantile("h", "total", 0.9),
]
"""Expressions over single rows."""
OF_GROUPS: list[Any] = [
    F.count(F.lit(1)),
    F.count("i"),
    F.count_if(c("i") > 0),
    F.count_distinct("i"),
    F.count_distinct("i", "t"),
    F.sum("l"),
    F.sum("x"),
    F.min("t"),
    F.max("d"),
    F.max("b"),
    F.min("at"),
    F.avg("i"),
    F.bool_or(c("i") > 0),
    F.bit_or("l"),
    F.max_by("t", "order"),
    F.min_by("l", "order"),
    F.size(F.collect_set("i")),
    F.size(F.collect_list("i")),
    F.bitmap_count(F.bitmap_construct_agg(F.bitmap_bit_position(F.abs(c("l")) % 100 + 1))),
    F.round(F.regr_slope("x", c("order").cast("double")), 6),
    F.round(F.regr_intercept("x", c("order").cast("double")), 6),
    F.round(F.regr_r2("x", c("order").cast("double")), 6),
    F.when(F.sum("i") > 3, F.sum("i") * 2).otherwise(F.max("l")),
    sum_aggregate("h"),
    count_buckets("bucket", "order"),
]
"""Aggregates."""
OF_WINDOWS: list[Expression] = [
    F.max("l").over(Window.partitionBy("key").orderBy("order").rowsBetween(-1, -1)),
    F.max("l").over(Window.partitionBy("key").orderBy("order").rowsBetween(1, 1)),
    F.max("l").over(Window.partitionBy("key").orderBy("order").rowsBetween(Window.unboundedPreceding, -1)),
    F.coalesce(F.max("x").over(Window.partitionBy(F.lit(0))), F.lit(0.0)) + c("order"),
    F.first("l").over(
        Window.partitionBy("key")
        .orderBy(c("order").desc())
        .rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    ),
]
"""Aggregates over windows."""


def operations(expressions: list[Any]) -> set[str]:
    """The operations in some expressions."""
    found = set()
    for one in expressions:
        if isinstance(one, Expression):
            found |= {one.op} | operations(list(one.args))
    return found


def named(expressions: list[Expression]) -> list[Expression]:
    return [one.alias(f"c{index}") for index, one in enumerate(expressions)]


class OperationsTests(SynchronousTestCase):
    """Each operation by both engines, over rows with NULL and odd numbers."""

    def setUp(self) -> None:
        self.rows = ROWS.append_column("total", pa.array([sum(one or []) for one in ROWS["h"].to_pylist()]))
        self.frame = spark().createDataFrame(self.rows).coalesce(1)
        self.memory = MemoryRows.of(self.rows)

    def check(self, expressions: list[Any], spark_rows: pa.Table, memory: MemoryRows) -> None:
        for index, one in enumerate(expressions):
            self.assertEqual(memory.column(f"c{index}").to_pylist(), spark_rows[f"c{index}"].to_pylist(), one.sql)

    def test_single_rows(self) -> None:
        wanted = named(OF_ROWS)
        self.check(OF_ROWS, self.frame.select(*wanted).toArrow(), self.memory.select(*wanted))

    def test_groups(self) -> None:
        wanted = named(OF_GROUPS)
        for keys in ([], ["key"], ["key", c("b").alias("flag")]):
            found = self.frame.groupBy(*keys).agg(*wanted, F.min("order").alias("first")).orderBy("first").toArrow()
            mine = self.memory.groupBy(*keys).agg(*wanted, F.min("order").alias("first"))
            mine = MemoryRows.of(pa.table({name: mine.column(name) for name in mine.columns}).sort_by("first"))
            self.check(OF_GROUPS, found, mine)

    def test_sums_of_large_numbers_are_bounded(self) -> None:
        """A sum beyond 2^63 would wrap around. ``spark_rules`` has the rules that add up numbers of servers."""
        numbers: dict[str, list[int | None]] = {
            "a": [LARGEST_NUMBER] * 9000,
            "b": [LARGEST_NUMBER] * 3,
            "c": [None],
            "d": [0, None],
        }
        rows = pa.table(
            {
                "key": [key for key, some in numbers.items() for _ in some],
                "n": pa.array([one for some in numbers.values() for one in some], pa.int64()),
            }
        )
        engines: tuple[Any, ...] = (spark().createDataFrame(rows), MemoryRows.of(rows))
        for engine in engines:
            sums = rows_of(engine.groupBy("key").agg(bounded_sum("n").alias("n")))
            found = {row["key"]: row["n"] for row in sums}
            self.assertEqual(found, {"a": SUM_LIMIT, "b": 3 * LARGEST_NUMBER, "c": None, "d": 0}, type(engine))

    def test_no_rows_have_one_group_without_keys(self) -> None:
        wanted = named([F.count(F.lit(1)), F.sum("l"), F.count_if(c("b")), F.max("t")])
        nothing = F.lit(1) == 2
        self.check(wanted, self.frame.where(nothing).agg(*wanted).toArrow(), self.memory.where(nothing).agg(*wanted))
        self.assertEqual(self.memory.where(nothing).groupBy("key").agg(*wanted).count_rows, 0)

    def test_windows(self) -> None:
        wanted = named(OF_WINDOWS)
        found = self.frame.select("order", *wanted).orderBy("order").toArrow()
        mine = self.memory.select("order", *wanted)
        mine = MemoryRows.of(pa.table({name: mine.column(name) for name in mine.columns}).sort_by("order"))
        self.check(OF_WINDOWS, found, mine)

    def test_every_operation_is_compared(self) -> None:
        """Three are missing here that the comparison of all tables has."""
        found = operations([*OF_ROWS, *OF_GROUPS, *OF_WINDOWS])
        self.assertEqual((OPERATIONS.keys() | AGGREGATES.keys()) - found, {"array_distinct", "flatten"})

    def test_an_operation_of_spark_alone_is_refused(self) -> None:
        self.assertRaises(NotInMemory, self.memory.select(F.to_json("t").alias("j")).column, "j")
        self.assertRaises(NotInMemory, self.memory.column, "absent")

    def test_rows_are_grouped_by_many_columns(self) -> None:
        """The number of combinations of the columns' values exceeds the range of 64-bit numbers."""
        random, count = Random(5), 2000
        keys = [random.sample(range(2**40), count) for _ in range(7)]
        # Rows in pairs differ in the last column only, and every third pair does not differ at all.
        columns = [[values[row // 2] for row in range(count)] for values in keys]
        columns[-1] = [keys[-1][row // 2 if row // 2 % 3 == 0 else row] for row in range(count)]
        expected: dict[tuple[int, ...], int] = {}
        numbers = [expected.setdefault(row, len(expected)) for row in zip(*columns, strict=True)]
        for texts in (False, True):
            arrays = [pa.array(values).cast(pa.string()) if texts else pa.array(values) for values in columns]
            found = key_numbers([one.dictionary_encode() if texts else one for one in arrays], nulls=True)
            self.assertEqual(found.to_pylist(), numbers)

    def test_the_lists_of_a_group_are_summed(self) -> None:
        groups = Groups.of([pa.array(["b", "a", "b", "c", "a"])], 5)
        lists = pa.array([[1, 2**31 - 1], None, [3, 2**31 - 1], None, [5, 6]], pa.list_(pa.int32()))
        self.assertEqual(groups.sum_lists(lists, 2).to_pylist(), [[4, 2**32 - 2], [5, 6], None])
        self.assertRaises(NotInMemory, groups.sum_lists, lists, 3)

    def test_times_at_the_bounds_of_buckets(self) -> None:
        """Each bound is the last time of its bucket, for both engines."""
        bounds = [0.1 * 2 ** (index / 2) for index in range(-2, 40)]
        times = [*bounds, *(nextafter(one, 0) for one in bounds), *(nextafter(one, 1e9) for one in bounds)]
        rows = pa.table({"x": [*times, *(index / 1000 for index in range(100, 60_000, 7)), None]})
        wanted = [bucket_of(c("x")).alias("c0")]
        found = spark().createDataFrame(rows).coalesce(1).select(*wanted).toArrow()
        mine = MemoryRows.of(rows).select(*wanted)
        self.check(wanted, found, mine)
        self.assertEqual(mine.column("c0").to_pylist()[2:34], [*range(32)])

    def test_joins(self) -> None:
        left = pa.table(
            {"k": ["a", "a", None, "b", "d"], "n": pa.array([1, 1, 1, None, 2], pa.int64()), "v": [*range(5)]}
        )
        right = pa.table(
            {"k": ["a", None, "b", "c", "a"], "n": pa.array([1, 1, None, 3, 1], pa.int64()), "w": [*range(5)]}
        )
        for on in (["k"], ["k", "n"]):
            for how in ("inner", "left", "full_outer", "left_semi", "left_anti"):
                frames = [spark().createDataFrame(one.select([*on, one.column_names[2]])) for one in (left, right)]
                expected = frames[0].join(frames[1], on, how)
                wanted = sorted(map(tuple, expected.collect()), key=repr)
                # The two sides have different dictionaries, or only one side has dictionaries. Rows of the left side
                # are filtered before the join or not.
                for forms, few in product(product((MemoryRows.of, in_dictionaries), repeat=2), (0, 8)):
                    with patch.object(memory_groups, "_PREFILTER_RATIO", few):
                        mine = forms[0](left.select([*on, "v"])).join(forms[1](right.select([*on, "w"])), on, how)
                    self.assertEqual(mine.columns, expected.columns)
                    rows = [
                        tuple(row)
                        for row in zip(*(mine.column(name).to_pylist() for name in mine.columns), strict=True)
                    ]
                    self.assertEqual(sorted(rows, key=repr), wanted, (on, how, forms, few))

    def test_unions_of_texts_with_and_without_dictionaries(self) -> None:
        parts = [pa.table({"t": texts}) for texts in (["b", "a", "b"], ["a", None, "a"], ["c", "b", "c"])]
        for forms in product((MemoryRows.of, in_dictionaries), repeat=3):
            first, *others = (form(part) for form, part in zip(forms, parts, strict=True))
            found = first.unionByName(*others)
            self.assertEqual(found.column("t").to_pylist(), ["b", "a", "b", "a", None, "a", "c", "b", "c"])
            self.assertEqual(found.distinct().column("t").to_pylist(), ["b", "a", None, "c"])
            self.assertEqual(found.where(F.col("t") == "c").distinct().column("t").to_pylist(), ["c"])


@dataclass
class _InParts:
    """Run over the story in parts, of one day each. The heartbeats of the first day are too many for memory.

    :ivar steps: progress of the run.
    :ivar written: the step of each table that was written, in order.
    :ivar unnamed: those of them that had not begun.
    :ivar by_spark: tables that Spark has computed.
    """

    story: Story
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    by_spark: set[str] = field(default_factory=set)

    @classmethod
    @cache
    def run(cls) -> _InParts:
        """Run the jobs once for all tests."""
        found = cls(Story.written())

        def put(lake: Lake, rows: pa.Table, layer: str, name: str, *rest: Any, **more: Any) -> None:
            step = f"{layer}: {name}"
            found.written.append(step)
            if step not in [what for what, _, _ in found.steps]:
                found.unnamed.append(step)
            put_rows(lake, rows, layer, name, *rest, **more)

        def replace_rows(writer: TableWriter, rows: DataFrame, layer: str, name: str, *rest: Any) -> None:
            found.by_spark.add(name)
            replace_by_spark(writer, rows, layer, name, *rest)

        put_rows, replace_by_spark = Lake.put, TableWriter.replace
        with (
            # The heartbeats of the first day are more, and so are all its events together.
            patch.object(memory_tables, "MEMORY_ROWS", 200),
            patch.object(TableWriter, "replace", replace_rows),
            patch.object(Lake, "put", put),
        ):
            found.story.run_jobs(progress=lambda *step: found.steps.append(step), memory=1)
        return found


class TablesTests(LakeCase):
    """Tables of runs by either engine."""

    def check_story(self, story: Story, *silver: str) -> None:
        """Compare the tables of a run with those that Spark has computed."""
        names = [name for name in GOLD if name != "quality_day"]
        self.assertEqual(story.tables(names), {name: Story.told().lines[name] for name in names})
        for name in silver:
            self.assertEqual(story.table(name, "silver"), Story.told().table(name, "silver"), name)

    def test_a_run_in_memory_gives_the_tables_of_runs_by_spark(self) -> None:
        """The story was told by Spark, and its late events by rows in memory; here a run takes all events at once."""
        story = Story.written()
        with patch.object(Lake, "read", side_effect=AssertionError("Spark computes nothing")):
            story.run_jobs()
        self.check_story(story)

    def test_a_run_in_parts_gives_the_same_tables(self) -> None:
        """A run over many events computes its days in parts; here each day is a part."""
        story = _InParts.run().story
        self.assertGreater(len(story.pipeline().lake.state().days), 1)
        self.check_story(story, "heartbeats", "boots")
        oracle = connect(story.spool, story.checked, until=until(NOW.date()))
        self.addCleanup(oracle.close)
        self.assertEqual(unlike("quality_day", story.table("quality_day"), oracle, NOW.date()), [])

    def test_a_part_that_is_too_large_is_left_to_spark(self) -> None:
        """Spark computes the table of such a part for all days, and no other table."""
        self.assertEqual(_InParts.run().by_spark, {"sums", "numbers", "heartbeats", "boots", "server_hour"})

    def test_progress_names_a_table_before_its_rows_are_written(self) -> None:
        """A run in parts begins most tables once for each part, but counts each of them as one step."""
        run = _InParts.run()
        # The counts of event numbers and the list of files have steps whose names are not those of the tables.
        others = ["silver: files", "silver: numbers", "silver: sums"]
        self.assertEqual(sorted(run.unnamed), others)
        self.assertGreater(run.written.count("silver: verdicts"), 1)
        begun = [what for what, _, _ in run.steps]
        # A table that is left to Spark begins again.
        in_memory = {step for step in run.written if step.partition(": ")[2] not in run.by_spark}
        for step in in_memory.difference(others):
            self.assertEqual(begun.count(step), run.written.count(step), step)
        counts = [done for _, done, _ in run.steps]
        self.assertEqual(counts, sorted(counts))
        self.assertLessEqual(counts[-1], run.steps[-1][2])

    def run_by_shards(self, shard_rows: int, most_rows: int | None = None) -> tuple[Story, set[str], list[Any]]:
        """Run the story's jobs with limits that its days exceed.

        :param most_rows: maximum number of rows of a family of events in one task; None for the usual one.
        :returns: the story, the tables and views that Spark has read, and the results of the shards' jobs.
        """
        story = Story.written()
        read: set[str] = set()
        results: list[Any] = []
        read_table, run_job = Lake.read, shards.run_job

        def noted(lake: Lake, layer: str, name: str, *rest: Any) -> Any:
            read.add(name)
            return read_table(lake, layer, name, *rest)

        def recorded(start: Any, job: Job, *rest: Any) -> Any:
            job = job if most_rows is None else replace(job, most_rows=most_rows)
            results.append(run_job(start, job, *rest))
            return results[-1]

        with (
            patch.object(shards, "SHARD_ROWS", shard_rows),
            patch.object(LargeDays, "are_needed", return_value=True),
            patch.object(Lake, "read", noted),
            patch.object(shards, "run_job", recorded),
        ):
            story.run_jobs()
        return story, read, results

    def test_a_day_in_shards_gives_the_same_tables(self) -> None:
        """Tasks of Spark compute the large tables with Arrow and write their files; Spark has no plan of them."""
        # Tasks return the rows of small tables to the driver. Here no table is small.
        with patch.object(table_writer, "COMPARED_ROWS", 0), patch.object(table_writer, "MEMORY_EVENTS", 0):
            story, read, results = self.run_by_shards(60)
        (result,) = results
        self.assertGreater(len({one.shards for one in result.tables.values()} - {1}), 0)
        self.assertEqual({name for name, _ in result.tables}, set(FAMILIES_OF))
        self.assertTrue(any(one.parts for one in result.tables.values()))
        self.assertEqual(sum(rows.num_rows for one in result.tables.values() for rows in one.rows), 0)
        self.assertEqual(result.too_large, {})
        self.assertEqual(read, set())
        self.check_story(story, "verdicts", "unfinished")

    def test_a_shard_that_is_too_large_is_left_to_spark(self) -> None:
        """Spark computes the tables of its servers. Tasks compute those of the others, and return the rows."""
        story, read, results = self.run_by_shards(40, 10)
        (result,) = results
        self.assertTrue(result.too_large)
        of_tasks = {row["server"] for rows in result.tables["traffic_hour", str(DAY)].rows for row in rows.to_pylist()}
        self.assertEqual(of_tasks, {S2})
        self.assertEqual([one.parts for one in result.tables.values() if one.parts], [])
        self.assertTrue(read)
        self.check_story(story, "verdicts", "unfinished")

    def test_executors_without_arrow_leave_all_to_spark(self) -> None:
        """Spark computed the tables of the story because its tasks had failed."""
        self.assertEqual(len(Story.told().warnings), 2)
        for text in Story.told().warnings:
            self.assertIn("executors cannot compute tables with Arrow", text)

    def test_what_is_too_large_for_memory_is_left_to_spark(self) -> None:
        """Spark has computed all tables of the story because of the first limit."""
        boot = Boot(S1, "b")
        boot.beats(DAY, "10:01:00", 3, sessions=1)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        self.run_jobs()
        lake = self.pipeline().lake
        rows = as_rows(MemoryTables(lake, lake.state()).events("beat"))
        self.assertEqual(len(rows.column("sessions")), 3)
        with patch.object(memory_tables, "MEMORY_ROWS", 2):
            self.assertRaises(NotInMemory, MemoryTables(lake, lake.state()).events, "beat")
        with patch.object(memory_tables, "MEMORY_BYTES", 10):
            rows = as_rows(MemoryTables(lake, lake.state()).events("beat"))
            self.assertRaises(NotInMemory, rows.column, "sessions")

    def test_a_text_counts_as_often_as_it_is_repeated(self) -> None:
        """A file of a few hundred bytes may hold a long text in a million rows."""
        boot = Boot(S1, "b")
        for second in range(50):
            boot.event("session_open", DAY, f"10:00:{second:02d}", peer="p" * 4000, session=second, handshake_ms=1)
            boot.event("transport_open", DAY, f"10:00:{second:02d}", transport="t" * 4000, src="a", dst="b")
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        self.run_jobs()
        lake = self.pipeline().lake
        with patch.object(memory_tables, "MEMORY_BYTES", 100_000):
            rows = as_rows(MemoryTables(lake, lake.state()).events("session"))
            rows.column("session")
            self.assertRaises(NotInMemory, rows.column, "peer")
            # The file has no dictionary of the transports, so their size is known before they are read.
            rows = as_rows(MemoryTables(lake, lake.state()).events("transport"))
            rows.column("seq")
            with patch.object(file_columns, "column_bytes", side_effect=AssertionError("the column was read")):
                self.assertRaises(NotInMemory, rows.column, "transport")

    def test_a_damaged_file_is_left_to_spark_which_names_it(self) -> None:
        boot = Boot(S1, "b")
        boot.beats(DAY, "10:01:00", 3, sessions=1)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows)
        self.run_jobs()
        lake = self.pipeline().lake
        table = lake.table("", "bronze")
        for file in table.files():
            Path(table.uri, file.path).write_bytes(b"PAR1 no more PAR1")
        rows = as_rows(MemoryTables(lake, lake.state()).events("beat"))
        self.assertRaises(NotInMemory, rows.column, "sessions")
