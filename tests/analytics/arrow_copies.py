"""Events that arrived twice: the tables are computed without Spark, and are those of a run without the copies."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pyarrow as pa
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import copies, refine
from dmsg.analytics.affected_tables import TABLES, AffectedTables, Rows
from dmsg.analytics.copies import choose, find_copies
from dmsg.analytics.jobs import RunOutcome
from dmsg.analytics.lake import Lake
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_groups import Groups
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.views import VIEWS
from tests.analytics.arrow_late_files import STORED, TwoServersCase
from tests.analytics.comparison import compare
from tests.analytics.support import DAY, NEXT, NOW, S1, S2, stored_rows, write_file


class ChosenCopyTests(SynchronousTestCase):
    """The choice among events with the same number, without Spark and by Spark."""

    def chosen(self, events: list[dict[str, Any]]) -> list[int]:
        """Return the places of the events that stay, of events with the number 0."""
        rows = pa.Table.from_pylist([{"boot": "b", "seq": 0} | one for one in events])
        dropped = choose(rows, Groups.of([rows["seq"].combine_chunks()], rows.num_rows))
        return [place for place, gone in enumerate(dropped.to_pylist()) if not gone]

    def test_of_equal_events_the_first_stays(self) -> None:
        self.assertEqual(self.chosen([{"rtt": [1, 2]}, {"rtt": [1, 2]}, {"rtt": [1, 2]}]), [0])

    def test_of_events_that_differ_the_one_with_the_smallest_text_stays(self) -> None:
        self.assertEqual(self.chosen([{"bytes": 3}, {"bytes": 20}, {"bytes": 3}]), [1])
        self.assertEqual(self.chosen([{"rtt": [1, 3]}, {"rtt": [1, 2]}]), [1])
        # An absent field is not in the text.
        self.assertEqual(self.chosen([{"src": "x", "dst": None}, {"src": None, "dst": "x"}]), [1])


class CopiesCase(TwoServersCase):
    """Runs over events of two servers, some of which arrive twice."""

    compared = (*VIEWS, *STORED)  # Rows of views are stored for days with copies.

    def many(self, server: str, name: str, day: Any = DAY, hour: int = 12) -> None:
        """Write events of most families, of which the first can belong to the day before."""
        boot = self.boots[server]
        self.closed(server, f"{name}-early", day, f"{hour - 12:02d}:01:00")
        boot.event("start", day, f"{hour - 12:02d}:02:00", capacity=5)
        boot.beats(day, f"{hour}:00:00", 3, sessions=1, transports=0, capacity=5, bytes=7)
        for minute in range(3):
            self.closed(server, f"{name}{minute}", day, f"{hour}:1{minute}:00", rtt=[1] * 34)
            self.signed(server, f"{name}{minute}", True, day, f"{hour}:1{minute}:30")
            ended = {"peer": "p", "session": hour + minute, "reason": "connection_lost"}
            boot.event("session_close", day, f"{hour}:1{minute}:40", **ended)
            refused = {"src": f"c-{server[-1]}", "reason": "rate_limited", "n": 20}
            boot.event("transport_refuse", day, f"{hour}:1{minute}:50", **refused)

    def again(self, server: str, *, receipts: bool = False) -> list[dict[str, Any]]:
        """Return copies of the events that were written so far."""
        rows = (self.receipts if receipts else self.boots)[server].rows
        return [{name: value for name, value in row.items() if name != "done"} for row in rows]

    def arrive(self, name: str, rows: list[dict[str, Any]], *, receipts: bool = False) -> None:
        """Write a file for the next run."""
        root, kind = (self.new_checked, "receipts") if receipts else (self.new, "events")
        write_file(root / f"{kind}-{name}.jsonl.gz", rows)

    def two_runs(self) -> None:
        """Make runs over events of each server."""
        for server in (S1, S2):
            self.many(server, "t")
            self.taken_in()

    def without_spark(self) -> RunOutcome:
        """Make a run in which Spark computes nothing."""
        read = patch.object(Lake, "read", side_effect=AssertionError("Spark computes nothing"))
        of_bronze = patch.object(Lake, "bronze", side_effect=AssertionError("Spark reads nothing"))
        with read, of_bronze:
            return self.taken_in()

    def affected(self) -> tuple[RunOutcome, set[str]]:
        """Make such a run, and return the tables of which only the affected rows were computed, too."""
        tables: set[str] = set()
        original = AffectedTables.rows

        def recorded(affected: AffectedTables, name: str, days: tuple[str, ...]) -> Rows:
            found = original(affected, name, days)
            tables.add(name)
            return found

        with patch.object(AffectedTables, "rows", recorded):
            return self.without_spark(), tables

    def check_oracle(self) -> None:
        found = compare(self.pipeline().lake, self.spool, self.checked, NOW.date())
        self.assertEqual([(name, one) for name, what in found.items() for one in what[:3]], [])

    def differ(self, reason: str) -> set[str]:
        """Make a run over copies with another reason, and return the tables as :meth:`affected`."""
        self.begin_with("two_runs")
        rows = [row | {"reason": reason} if "reason" in row else row for row in self.again(S1)]
        self.arrive("other", [row for row in rows if row["type"] != "transport_refuse"])
        outcome, tables = self.affected()
        self.assertEqual(outcome.duplicates, 11)
        return tables


class CopiesInMemoryTests(CopiesCase):
    """Runs without Spark."""

    def test_copies_in_a_first_run(self) -> None:
        for server in (S1, S2):
            self.many(server, "t")
        self.many(S1, "u", NEXT)
        self.arrive("again", [*self.again(S1), *self.again(S1)[4:9]])
        self.arrive("again", self.again(S1, receipts=True), receipts=True)
        self.assertEqual(self.without_spark().duplicates, 28 + 5 + 6)
        self.check_oracle()

    def test_late_copies_change_no_table(self) -> None:
        """Only the rows that new events affect are computed, and stored sums do not count a copy again."""
        self.begin_with("two_runs")
        lake = self.pipeline().lake
        before = {name: stored_rows(lake, "gold", name) for name in GOLD if name != "quality_day"}
        self.arrive("again", self.again(S1))
        self.arrive("again", self.again(S1, receipts=True), receipts=True)
        outcome, tables = self.affected()
        self.assertEqual(outcome.duplicates, 14 + 3)
        self.assertIn("traffic_hour", tables)
        self.assertIn("verdicts", tables)
        lake = self.pipeline().lake
        self.assertEqual({name: stored_rows(lake, "gold", name) for name in before}, before)
        self.check_tables()

    def test_late_events_of_a_day_with_copies(self) -> None:
        """New events arrive, some of them twice, and copies of copies."""
        self.begin_with("two_runs")
        self.arrive("again", self.again(S1)[3:12])
        self.affected()
        first = len(self.boots[S2].rows)
        self.many(S1, "u", hour=14)
        self.many(S2, "u", hour=14)
        self.arrive("more", [*self.again(S2)[first:], *self.again(S1)[3:5]])
        outcome, tables = self.affected()
        self.assertEqual(outcome.duplicates, 9 + 14 + 2)
        self.assertTrue(tables.issuperset(set(TABLES) - {"sessions"}), tables)
        self.check_oracle()
        self.check_tables()

    def test_late_events_of_the_day_after_copies(self) -> None:
        """The verdicts on the neighbouring day are computed from its events without the copies."""
        self.many(S1, "t")
        self.closed(S1, "m", DAY, "23:59:00")
        self.taken_in()
        self.arrive("again", self.again(S1))
        self.arrive("again", self.again(S1, receipts=True), receipts=True)
        self.taken_in()
        self.signed(S1, "m", True, NEXT, "00:00:10")
        self.signed(S1, "m", False, NEXT, "00:00:10")
        outcome, tables = self.affected()
        self.assertEqual(outcome.days, [str(DAY), str(NEXT)])
        self.assertIn("verdicts", tables)
        self.check_tables()

    def test_a_late_copy_that_differs_is_left_out(self) -> None:
        self.assertIn("traffic_hour", self.differ("zzz"))
        self.check_tables()


class CopiesForSparkTests(CopiesCase):
    """Copies that are left to Spark."""

    def copies(self, lake: Lake) -> copies.Copies:
        return find_copies(lake, State(), lake.state(), [str(DAY)])

    def test_the_same_number_on_two_days(self) -> None:
        self.many(S1, "t")
        rows = self.again(S1)
        self.arrive("again", [*rows[:5], rows[5] | {"ts": rows[5]["ts"] + 86_400_000}])

        def searched(*arguments: Any) -> copies.Copies:
            self.assertRaises(NotInMemory, find_copies, *arguments)
            raise LakeError("the rest of the run is not needed")

        with patch.object(refine, "find_copies", searched):
            self.assertRaisesRegex(LakeError, "is not needed", self.taken_in)

    def test_too_many_copies(self) -> None:
        self.many(S1, "t")
        self.arrive("again", self.again(S1))
        self.taken_in()
        lake = self.pipeline().lake
        self.assertTrue(self.copies(lake).dropped)
        for name in ("MAX_COPIES", "MAX_COMPARED_EVENTS"):
            with patch.object(copies, name, 1):
                self.assertRaises(NotInMemory, self.copies, lake)
