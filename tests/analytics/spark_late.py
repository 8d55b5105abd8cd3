"""Late events: a run computes only what they affect, and the tables are those of a run over all events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.affected_rows import Groups, WholeDays, subtract, with_columns
from dmsg.analytics.affected_tables import TABLES, AffectedTables, Rows
from dmsg.analytics.changes import ENDS, Changes, are_equal, changed_ends
from dmsg.analytics.schemas import GOLD
from tests.analytics.comparison import compare
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY, NOW, LakeCase, write_file


def lines_of(directory: Path) -> list[dict[str, Any]]:
    """The events in all files of a directory, without the last line of each file."""
    rows = [
        json.loads(line) for file in sorted(directory.rglob("*.gz")) for line in gzip.open(file) if line[:1] == b"{"
    ]
    return [row for row in rows if row["type"] != "segment_end"]


class LateTests(LakeCase):
    """A day by hand that arrives in parts."""

    def arrive(self, number: int, events: list[dict[str, Any]], receipts: list[dict[str, Any]]) -> None:
        for root, name, rows in ((self.spool, "events", events), (self.checked, "receipts", receipts)):
            if rows:
                write_file(root / f"{name}-{number}.jsonl.gz", rows)

    def test_late_events_make_the_same_tables(self) -> None:
        """Events that were left out at random come in a second run, which computes only what they affect."""
        story = Story("write")
        story.setUp()
        story.write()
        random = Random(5)
        parts: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [([], []), ([], [])]
        for which, directory in enumerate((story.spool, story.checked)):
            # If events came twice, whole days would be computed.
            once = {(row["producer"], row["boot"], row["seq"]): row for row in lines_of(directory)}
            for row in once.values():
                parts[random.random() < 0.1][which].append(row)
        self.arrive(0, *parts[0])
        self.run_jobs()
        self.arrive(1, *parts[1])
        done: set[str] = set()
        rows = AffectedTables.rows

        def recorded(tables: AffectedTables, name: str, days: tuple[str, ...]) -> Rows:
            found = rows(tables, name, days)
            done.add(name)
            return found

        with patch.object(AffectedTables, "rows", recorded):
            self.run_jobs()
        self.assertEqual(done, set(TABLES))
        found = compare(self.pipeline().lake, self.spool, self.checked, NOW.date())
        self.assertEqual(set(found), set(GOLD))
        self.assertEqual({name: what[:3] for name, what in found.items() if what}, {})


class AffectedRowsTests(SynchronousTestCase):
    """Rows in memory, without Spark."""

    def test_a_row_is_taken_out_as_often_as_it_is_given(self) -> None:
        stored = pa.table({"a": [1, 1, 1, None], "b": ["x", "x", "y", "x"]})
        found = subtract(stored, pa.table({"a": [1], "b": ["x"]}))
        assert found is not None
        self.assertEqual(found.to_pylist(), [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": None, "b": "x"}])
        found = subtract(stored, pa.table({"a": pa.array([None], pa.int64()), "b": ["x"]}))
        assert found is not None
        self.assertEqual(found.num_rows, 3)
        self.assertIsNone(subtract(stored, pa.table({"a": [1, 1], "b": ["y", "y"]})))

    def test_groups_hold_events_with_the_same_values(self) -> None:
        events = pa.table({"a": ["1", "2"], "b": ["3", None]})
        self.assertEqual(Groups(["b"], [events]).hold(events).to_pylist(), [True, False])
        self.assertRaises(WholeDays, Groups, ["a", "b"], [events])
        groups = Groups(["a", "b"], [events.slice(0, 1)])
        other = pa.table({"c": ["1", "13"], "d": ["3", ""]})
        self.assertEqual(groups.hold(other, ["c", "d"]).to_pylist(), [True, False])

    def test_columns_that_a_file_lacks_are_null(self) -> None:
        schema = pa.schema([("ts", pa.int64()), ("rtt", pa.list_(pa.int32())), ("dt", pa.date32())])
        found = with_columns(pa.table({"ts": [1]}), schema, {"dt": "2026-03-10"})
        self.assertEqual(found.to_pylist(), [{"ts": 1, "rtt": None, "dt": DAY}])

    def test_a_table_is_computed_if_an_input_has_changed(self) -> None:
        changes = Changes(["2026-03-09", "2026-03-10", "2026-03-11"], {"transport": {"2026-03-10"}})
        self.assertEqual(changes.days_of("verdicts"), ("2026-03-09", "2026-03-10", "2026-03-11"))
        self.assertEqual(changes.days_of("pair_day"), ("2026-03-10",))
        self.assertEqual(changes.days_of("sessions"), ())
        changes.note(ENDS, {"2026-03-11", "2026-03-12"})
        self.assertEqual(changes.days_of("sessions"), ("2026-03-11",))
        self.assertFalse(changes.has_changed("actor"))

    def test_only_ends_of_known_processes_matter(self) -> None:
        def rows(*boots: tuple[str, str, int]) -> pa.Table:
            return pa.Table.from_pylist(
                [
                    {"producer": "p", "boot": boot, "dt": day, "first_ts": 0, "last_ts": last}
                    for boot, day, last in boots
                ]
            )

        before = rows(("a", "1", 60_000), ("a", "2", 60_000))
        after = rows(("a", "1", 60_000), ("a", "2", 60_001), ("b", "1", 59_000))
        self.assertEqual(changed_ends(before, after, "2"), ({"2"}, set()))
        after = rows(("a", "1", 60_000), ("a", "2", 60_000), ("b", "1", 120_000), ("b", "2", 60_001))
        self.assertEqual(changed_ends(before, after, "2"), ({"2"}, {"1"}))
        self.assertTrue(are_equal(before, before.take([1, 0])))
        self.assertFalse(are_equal(before, after))
