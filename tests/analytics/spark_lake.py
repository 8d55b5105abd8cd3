"""Storage of the tables: files that Spark writes, and tables that other programs read."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame

from dmsg.analytics import data_files, lake as lake_module
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.parquet import read_small
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import BRONZE, SILVER
from dmsg.analytics.store import Store
from dmsg.analytics.views import VIEWS
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NEXT, S1, LakeCase, frame, spark

TABLES = ("uptime_day", "server_hour", "quality_day", "boot")


class CountTests(LakeCase):
    """Numbers in the log about files that Spark wrote."""

    def test_executors_count_what_footers_tell(self) -> None:
        lake = self.pipeline().lake
        table = lake.table("", "bronze")
        times = [5, 7, 9_000_000, 4, None]
        rows = pa.table({"ts": pa.array(times, pa.int64()), "family": ["beat", "beat", "life", "life", "quarantine"]})
        written = (
            spark()
            .createDataFrame(rows)
            .selectExpr(
                *[
                    f"CAST({one.name if one.name in ('ts', 'family') else 'NULL'} AS {one.dataType.simpleString()})"
                    f" AS {one.name}"
                    for one in BRONZE.fields
                    if one.name != "dt"
                ],
                "date'2026-03-10' AS dt",
            )
        )
        lake._write(written.repartition(2), table, "run=a b.1.00")
        here = table.written_files("run=a b.1.00")
        self.patch(data_files, "MAX_FOOTERS_READ", 0)
        by_spark = table.written_files("run=a b.1.00", lambda directory: lake._count(table, directory))
        self.assertEqual(by_spark, here)
        self.assertEqual(sum(part.rows for part in here), 5)
        spans = {(part.first, part.last) for part in here}
        self.assertTrue({(None, None)} < spans, spans)


class FrameTests(LakeCase):
    """Frames of rows in memory."""

    def test_rows_behind_an_empty_chunk_are_kept(self) -> None:
        """``createDataFrame`` of Spark loses them."""
        chunks = pa.chunked_array([pa.array(some, pa.string()) for some in (["a", "b"], [], ["c"])])
        found = self.pipeline().lake.frame(pa.table({"file": chunks})).collect()
        self.assertEqual(sorted(row.file for row in found), ["a", "b", "c"])


class MemoryTests(LakeCase):
    """Rows that Arrow reads into memory are those that Spark reads from the files."""

    def test_rows_of_each_table(self) -> None:
        lake = Story.told().pipeline().lake
        state = lake.computed_state()
        names = [
            ("", "bronze"),
            ("silver", "heartbeats"),
            ("silver", "verdicts"),
            ("gold", "latency_hour"),
            ("gold", "boot"),
        ]
        for layer, name in names:

            def rows() -> pa.Table:
                found = lake.bronze() if name == "bronze" else lake.read(layer, name, state)  # noqa: B023
                return found.toArrow()

            held = rows()
            self.assertGreater(held.num_rows, 2, name)
            for limit in ("HELD_ROWS", "HELD_BYTES"):
                with patch.object(lake_module, limit, 1):
                    found = rows()
                self.assertEqual(found.schema, held.schema, name)
                self.assertEqual(sorted(map(str, found.to_pylist())), sorted(map(str, held.to_pylist())), name)

    def test_rows_that_spark_writes_replace_those_of_their_days(self) -> None:
        lake = self.pipeline().lake
        schema = lake.table("gold", "close_day").schema

        def some(*found: tuple[object, int]) -> DataFrame:
            return frame([{"server": S1, "dt": day, "transports": count} for day, count in found], schema)

        self.patch(lake_module, "HELD_ROWS", 0)
        lake.write(some((DAY, 1), (DAY, 2), (NEXT, 3)), "gold", "close_day", 1, [str(DAY), str(NEXT)])
        lake.write(some((DAY, 4)), "gold", "close_day", 2, [str(DAY)])
        lake.write(some((NEXT, 5)), "gold", "close_day", 3, more=True)
        found = lake.read("gold", "close_day", State()).collect()
        self.assertEqual(sorted((row.dt, row.transports) for row in found), [(DAY, 4), (NEXT, 3), (NEXT, 5)])
        found = lake.read("gold", "close_day", State(), [str(DAY)]).collect()
        self.assertEqual([(row.server, row.reason, row.transports) for row in found], [(S1, None, 4)])

    def test_a_text_that_many_rows_share_counts_in_each(self) -> None:
        place = Path(self.mktemp())
        place.mkdir()
        text = pa.array(["x" * 1000] * 1000)
        for column in (text, text.dictionary_encode()):
            pq.write_table(pa.table({"a": column, "n": range(1000)}), place / "a.parquet")
            self.assertLess((place / "a.parquet").stat().st_size, 20_000)
            files = pafs.SubTreeFileSystem(str(place), pafs.LocalFileSystem())
            self.assertIsNone(read_small(files, "a.parquet", 1_000_000))
            found = read_small(files, "a.parquet", 1_100_000)
            assert found is not None
            self.assertEqual(found["a"].cast(pa.string()).to_pylist(), text.to_pylist())


class OthersTests(LakeCase):
    """The tables of a run, for other programs and for later versions of this one."""

    def test_other_programs_read_the_tables(self) -> None:
        story = Story.told()
        places = {name: Store(str(story.out)).table("gold", name).uri for name in TABLES}
        uptime = DeltaTable(places["uptime_day"]).to_pyarrow_table()
        self.assertEqual(
            sorted(str(row["alive_minutes"]) for row in uptime.to_pylist()),
            sorted(str(row["alive_minutes"]) for row in story.lines["uptime_day"]),
        )
        hours = DeltaTable(places["server_hour"]).to_pyarrow_dataset()
        found = duckdb.connect().from_arrow(hours).aggregate("sum(alive_minutes)").fetchall()
        self.assertEqual(int(found[0][0]), sum(row["alive_minutes"] for row in story.lines["server_hour"]))

    def test_views_are_the_same_with_and_without_spark(self) -> None:
        story = Story.told()
        lake = story.pipeline().lake
        state = lake.state()
        # ``spark_sql`` compares all days of all views.
        for name in VIEWS:
            self.assertEqual(lake.stored_days(name, state), set())
            for day in sorted(state.days) if name == "receipts" else ():
                by_spark = lake.read("silver", name, state, [day]).toArrow().to_pylist()
                without = lake.rows("silver", name, state, day)
                self.assertEqual(sorted(map(str, without)), sorted(map(str, by_spark)), name)
                self.assertTrue(by_spark or day != str(DAY), name)
            self.assertEqual(lake.read("silver", name, state).columns, SILVER[name].schema.fieldNames())

    def test_a_path_that_cannot_be_used(self) -> None:
        self.assertRaisesRegex(LakeError, r"its path has a \[", Store, "/tmp/a[b]")
        self.assertRaisesRegex(LakeError, "is not a directory", Store, __file__)
        self.assertRaisesRegex(LakeError, "is not a directory", Store, f"file://{__file__}")
