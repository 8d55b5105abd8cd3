"""Replacement of some rows of a table: other files stay, and small files are merged."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import rewrites
from dmsg.analytics.affected_rows import Groups, WholeDays
from dmsg.analytics.jobs import Pipeline, RunOutcome
from dmsg.analytics.lake import Lake
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.rewrites import SMALL_FILES_TO_MERGE, find_groups, in_files
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.session import SparkOnDemand
from tests.analytics.support import DAY, NEXT, NOW, S1, Boot, LakeCase, spark, write_file

SCHEMA = arrow_schema(GOLD["pair_day"].schema)
PAIR = ("server", "src", "dst")


def pairs(day: object, *sources: int, transports: int = 1) -> pa.Table:
    """Return a row of ``pair_day`` for each of the sources."""
    return pa.Table.from_pylist(
        [
            {
                "server": S1,
                "dt": day,
                "src": f"{source:04}",
                "dst": "d",
                "transports": transports,
                "bytes_ab": 0,
                "bytes_ba": 0,
            }
            for source in sources
        ],
        SCHEMA,
    )


class RewriteTests(SynchronousTestCase):
    """A table with 40 rows on one day and 10 on the next, in files of ten rows."""

    def setUp(self) -> None:
        self.lake = Lake(SparkOnDemand(spark), str(Path(self.mktemp()).absolute()))
        changed = patch.object(rewrites, "FILE_ROWS", 10)
        changed.start()
        self.addCleanup(changed.stop)
        days = [str(DAY), str(NEXT)]
        self.lake.put(pa.concat_tables([pairs(DAY, *range(40)), pairs(NEXT, *range(10))]), "gold", "pair_day", 1, days)

    def paths(self) -> set[str]:
        return {file.path for file in self.lake.table("gold", "pair_day").files()}

    def replace(self, rows: pa.Table, run: int) -> None:
        """Replace the rows of the same pairs and the first day."""
        groups = Groups(PAIR, [rows])
        table = self.lake.table("gold", "pair_day")
        found = find_groups(table, [str(DAY)], groups)
        self.lake.replace_some(rows, found, "gold", "pair_day", run, [str(DAY)])

    def rows(self) -> dict[tuple[str, str], int]:
        found = self.lake.table("gold", "pair_day").read().to_pylist()
        rows = {(str(row["dt"]), row["src"]): row["transports"] for row in found}
        self.assertEqual(len(rows), len(found))
        return rows

    def test_only_the_file_of_a_replaced_row_is_written_again(self) -> None:
        before, paths = self.rows(), self.paths()
        self.assertEqual(len(paths), 5)
        self.replace(pairs(DAY, 25, transports=7), 2)
        self.assertEqual(self.rows(), before | {(str(DAY), "0025"): 7})
        self.assertEqual(len(paths & self.paths()), 4)

    def test_a_new_row_is_added_in_a_file_of_its_own(self) -> None:
        before, paths = self.rows(), self.paths()
        self.replace(pairs(DAY, 77), 2)
        self.assertEqual(self.rows(), before | {(str(DAY), "0077"): 1})
        self.assertLess(paths, self.paths())

    def test_small_files_of_a_day_are_merged(self) -> None:
        expected = self.rows()
        # Four files of ten rows are there, and each replacement adds one more.
        for number in range(SMALL_FILES_TO_MERGE - 4):
            self.replace(pairs(DAY, 100 + number), 2 + number)
            expected[str(DAY), f"{100 + number:04}"] = 1
        self.assertEqual(len(self.paths()), SMALL_FILES_TO_MERGE + 1)
        self.replace(pairs(DAY, 200), 50)
        self.assertEqual(self.rows(), expected | {(str(DAY), "0200"): 1})
        self.assertLess(len(self.paths()), 9)

    def test_too_many_rows_are_not_searched(self) -> None:
        groups = Groups(PAIR, [pairs(DAY, 1, 2)])
        table = self.lake.table("gold", "pair_day")
        for name, most in (("MAX_SEARCHED_ROWS", 39), ("MAX_REPLACED_ROWS", 1)):
            with patch.object(rewrites, name, most):
                self.assertRaises(WholeDays, find_groups, table, [str(DAY)], groups)
        self.assertEqual(len(find_groups(table, [str(DAY)], groups)), 1)

    def test_rows_are_divided_into_files(self) -> None:
        found = [table.num_rows for table in in_files([pairs(DAY, *range(25)), pairs(DAY, 1), pairs(DAY, *range(8))])]
        self.assertEqual(sum(found), 34)
        self.assertTrue(all(10 <= count < 20 for count in found[:-1]), found)


class OneEventTests(LakeCase):
    """Runs over few events, of which one comes late."""

    def test_a_late_event_starts_no_spark_and_leaves_other_files(self) -> None:
        boot = Boot(S1, "1" * 32)
        boot.event("start", DAY, "10:00:00", capacity=5)
        boot.beats(DAY, "10:01:00", 3, sessions=1)
        for number in range(30):
            ends = {"transport": f"{number:032}", "src": f"{number:016}", "dst": "d" * 16, "secure": True, "by": "src"}
            boot.event("transport_close", DAY, "12:00:00", reason="unspecified", **ends, total_ab=9, total_ba=0)
        write_file(self.spool / "events-1.jsonl.gz", boot.rows[:-1])
        on_demand = SparkOnDemand(spark)

        def run() -> tuple[set[str], RunOutcome]:
            pipeline = Pipeline(on_demand, str(self.out), now=NOW)
            outcome = pipeline.run(self.sources())
            return {file.path for file in pipeline.lake.table("gold", "pair_day").files()}, outcome

        with patch.object(rewrites, "FILE_ROWS", 10):
            before, _ = run()
            write_file(self.spool / "events-2.jsonl.gz", boot.rows[-1:])
            after, _ = run()
        self.assertFalse(on_demand.has_started)
        self.assertEqual(len(before), 3)
        self.assertLess(before, after)
        # Lines that are no events are left to Spark's reader.
        write_file(self.spool / "events-3.jsonl.gz", [], garbage=[b"hello"])
        _, outcome = run()
        self.assertTrue(on_demand.has_started)
        self.assertEqual(outcome.quarantined, 1)
        pairs = {row["src"]: row["transports"] for row in self.table("pair_day")}
        self.assertEqual(pairs, {f"{number:016}": 1 for number in range(30)})
        (day,) = self.table("close_day")
        self.assertEqual(day["transports"], 30)
        (quality,) = self.table("quality_day")
        self.assertEqual((quality["duplicates"], quality["missing"]), (0, 0))
