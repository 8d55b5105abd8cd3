"""Late events: a run computes only what they affect, and the tables are those of a run over all events."""

from __future__ import annotations

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics.affected_rows import Groups, Subtraction, WholeDays, with_columns
from dmsg.analytics.affected_tables import TABLES
from dmsg.analytics.changes import _INPUTS, _INPUTS_AROUND, ENDS, Changes, are_equal, changed_ends
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.views import VIEWS
from tests.analytics.spark_tables import Story
from tests.analytics.support import DAY


class LateTests(SynchronousTestCase):
    """The story, of which a tenth of the events came late."""

    def test_a_second_run_computes_only_what_late_events_affect(self) -> None:
        """The tables after the second run are those of all events. ``spark_oracle`` compares them with DuckDB's."""
        story = Story.told()
        self.assertEqual(story.pipeline().lake.computed_state().run, 2)
        self.assertEqual(story.affected, set(TABLES))

    def test_the_inputs_of_a_table_are_what_its_plan_reads(self) -> None:
        """A missing input leaves a table as it was when it should change; one too many computes the table in vain."""
        found = Story.told().inputs
        # A view changes with its family of events. A run plans no view, unless events came twice.
        tables = {**SILVER, **GOLD}.keys() - VIEWS.keys()
        self.assertEqual(found.same.keys() | found.around.keys(), tables)
        for name in tables:
            self.assertEqual(found.same[name], set(_INPUTS.get(name, ())), name)
            self.assertEqual(found.around[name], set(_INPUTS_AROUND.get(name, ())), name)
        self.assertEqual({name: _INPUTS[name] for name in VIEWS}, {name: (one.family,) for name, one in VIEWS.items()})


class AffectedRowsTests(SynchronousTestCase):
    """Rows in memory, without Spark."""

    def test_a_row_is_found_as_often_as_it_is_given(self) -> None:
        stored = pa.table({"a": [1, 1, 1, None], "b": ["x", "x", "y", "x"]})
        for given, found, is_complete in (
            ({"a": [1], "b": ["x"]}, [True, False, False, False], True),
            ({"a": [1, 1, 1], "b": ["x", "x", "x"]}, [True, True, False, False], False),
            ({"a": pa.array([None], pa.int64()), "b": ["x"]}, [False, False, False, True], True),
            ({"a": [1, 1], "b": ["y", "y"]}, [False, False, True, False], False),
        ):
            former = Subtraction(pa.table(given))
            self.assertEqual((former.find(stored).to_pylist(), former.is_complete), (found, is_complete), given)
        # A row that was found in one file is not found again in the next.
        former = Subtraction(pa.table({"a": [1, 1], "b": ["y", "y"]}))
        for _ in range(2):
            self.assertEqual(former.find(stored).to_pylist(), [False, False, True, False])
        self.assertTrue(former.is_complete)
        self.assertEqual(former.find(stored).to_pylist(), [False] * 4)

    def test_groups_hold_events_with_the_same_values(self) -> None:
        events = pa.table({"a": ["1", "2"], "b": ["3", None]})
        self.assertEqual(Groups(["b"], [events]).contains(events).to_pylist(), [True, False])
        # Both texts of a row have to be those of one group. Columns may be dictionary-encoded, as they are read.
        pairs = pa.table({"a": ["1", "2"], "b": ["3", "4"]})
        rows = pa.table({"a": ["1", "1", None, "5", "2"], "b": ["3", "4", "4", "3", "4"]})
        for one in (rows, pa.table({name: rows[name].dictionary_encode() for name in rows.column_names})):
            found = Groups(["a", "b"], [pairs]).renamed(["c", "d"]).contains(one.rename_columns(["c", "d"]))
            self.assertEqual(found.to_pylist(), [True, False, False, False, True])
        self.assertEqual(Groups(["a", "b"], [pairs]).contains(rows.slice(0, 0)).to_pylist(), [])
        self.assertRaises(WholeDays, Groups, ["a", "b"], [events])
        groups = Groups(["a", "b"], [events.slice(0, 1)])
        other = pa.table({"c": ["1", "13"], "d": ["3", ""]})
        self.assertEqual(groups.renamed(["c", "d"]).contains(other).to_pylist(), [True, False])

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
