"""Refinement of a run: computation of the silver and gold tables of the days with new events, and of the gold tables
that are not divided into days."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date, timedelta
from functools import cache, partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.affected_rows import WholeDays
from dmsg.analytics.affected_tables import IDENTITY, AffectedTables
from dmsg.analytics.broadcasts import bounded
from dmsg.analytics.changes import ENDS, OBSERVED, Changes, changed_ends, days_around
from dmsg.analytics.copies import Copies, find_copies
from dmsg.analytics.day_parts import day_parts
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_tables import rows_of_table
from dmsg.analytics.run_rows import RunRows
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import DAILY, FAMILIES, OVERALL, SILVER
from dmsg.analytics.shards import LargeDays
from dmsg.analytics.store import NUMBERS, SUMS
from dmsg.analytics.stored_views import StoredViews
from dmsg.analytics.table_computation import Choose, Computation
from dmsg.analytics.table_plans import HISTORY_DAYS, Tables, daily_tables, overall_tables, silver_tables
from dmsg.analytics.table_writer import TableWriter
from dmsg.analytics.views import VIEWS

_DERIVED_GOLD = ("minute_day", "capacity_day", "latency_day", "network_day")
"""Gold tables that are computed from other gold tables of the same days."""
_DERIVED_OVERALL = ("boot", "placement")
"""Gold tables without days that are computed from other tables without days."""
_DERIVED_SILVER = ("verdicts", "unfinished")
"""Silver tables that are computed from other silver tables, in the order in which they are computed."""


def _sums(events: Callable[[], DataFrame]) -> DataFrame:
    return bronze.sums(events())


def _numbers(sums: DataFrame, events: Callable[[], DataFrame] | None) -> DataFrame:
    return bronze.numbers(sums, None if events is None else events())


def _all(rows: DataFrame) -> DataFrame:
    return rows


class Refinement:
    """Computation of the silver and gold tables by one run.

    :param before: state that the newest finished run left.
    :param state: state that the run will leave.
    :param days: days whose rows are rewritten.
    :param today: day of the run.
    :param changed: days that have new events, by family of events.
    :param events_of_day: number of events of each of these days.
    :param part_rows: number of events of successive days that are computed in memory together.
    :param collects_all: whether to collect every table and write it with Arrow, because there are few events.
    :param memory: whether tables may be computed in memory, without Spark.
    :param by_tasks: whether tasks of Spark compute the large tables however few events there are.
    :param small: whether to write several tables at the same time.
    :param step: called with the name of each step as it begins. A run that computes its days in parts begins the steps
        of tables once for each part.
    """

    def __init__(
        self,
        lake: Lake,
        claim: Claim,
        before: State,
        state: State,
        days: list[str],
        *,
        today: date,
        changed: Mapping[str, Iterable[str]],
        events_of_day: Mapping[str, int],
        part_rows: int,
        collects_all: bool,
        memory: bool,
        by_tasks: bool = False,
        small: bool,
        step: Callable[[str], None],
    ) -> None:
        self._lake = lake
        self._claim = claim
        self._before = before
        self._state = state
        events = sum(events_of_day.values())
        self._days = days
        self._today = today
        self._hint = bounded(events)
        parts = day_parts(days, events_of_day, part_rows)
        self._memory = memory
        self._changes = Changes(days, changed)
        self._writer = TableWriter(
            lake,
            claim,
            before,
            self._changes,
            days,
            events=events,
            collects_all=collects_all,
            keeps_rows=len(parts) == 1,
        )
        if self._writer.can_compare and "life" in changed:
            # The last line of each file is an event of the family ``life``, so every new file has events of this
            # family. Only those about starts and stops of processes are a reason to compute a day again.
            self._changes.note("life", lake.days_of_lives(before.batches))
        self._step = step
        self._views = StoredViews(lake, claim.number, before, state)
        affected = AffectedTables(lake, before, state) if self._writer.can_compare else None
        if affected is not None and not affected.has_few_events:
            affected = None
        large: LargeDays | None = None
        if LargeDays.are_needed(lake, days, memory=memory, always=by_tasks):
            large = LargeDays(lake, state, self._changes, claim.number, self._writer.returned_rows)
        self._rows = RunRows(lake, state, self._writer, self._hint)
        self._computation = Computation(
            lake,
            claim,
            self._changes,
            self._writer,
            self._rows,
            self._views,
            parts=parts,
            affected=affected,
            large=large,
            memory=memory,
            small=small,
            step=step,
        )

    def silver(self) -> int:
        """Write the silver tables of the days to recompute.

        :returns: number of duplicate events.
        """
        lake, state, days = self._lake, self._state, self._days
        self._step("duplicates")
        self._number_events()
        self._note_ends()
        numbers = lake.stored("silver", NUMBERS.name, state, days)
        found = pc.sum(pc.subtract(numbers["events"], numbers["distinct_events"])).as_py() or 0
        by_spark = not self._find_copies() and found > 0
        if by_spark:
            # All days of the run are recomputed together, because the choice among duplicate events depends on the
            # events of all these days.
            self._changes.note_everything()
            self._computation.use_spark_only()

        @cache
        def doubtful() -> DataFrame | None:
            if not found:
                return None
            return self._rows.reader(days)(NUMBERS.name).where(F.col("events") > F.col("distinct_events"))

        last_day = date.fromisoformat(max(state.days))

        @cache
        def plan(days: tuple[str, ...], choose: Choose = _all) -> Tables:
            wider_days = days_around(days)
            read, around = self._rows.reader(days), self._rows.reader(wider_days)
            return silver_tables(
                lambda family: choose(self._rows.events(family, days, doubtful())),
                lambda name: choose(read(name)),
                lambda name: choose(around(name)),
                days,
                lambda: choose(lake.accepted_receipts(state, wider_days)),
                self._hint,
                last_day=last_day,
            )

        def plan_in_memory(days: tuple[str, ...]) -> Tables:
            wider_days = tuple(days_around(days))
            return silver_tables(
                self._rows.in_memory(days, ()).events,
                self._rows.memory_reader(days),
                self._rows.memory_reader(days, wider_days),
                days,
                self._rows.in_memory(days, wider_days).accepted_receipts,
                last_day=last_day,
                accepted_on_days=self._rows.in_memory(days, ()).accepted_receipts,
            )

        names = [name for name in SILVER if name not in _DERIVED_SILVER]
        if not by_spark:
            self._views.choose_days(self._rows.copies or Copies(), self._changes, days)
            names = [name for name in names if name not in VIEWS or self._views.days[name]]
        for some in (names, *([name] for name in _DERIVED_SILVER)):
            self._computation.write_days("silver", some, plan, None if by_spark else plan_in_memory)
        return int(found)

    def _find_copies(self) -> bool:
        """Search for copies of events, which all tables that are computed in memory then leave out.

        :returns: whether it is known which events are copies. If not, Spark has to choose among the copies.
        """
        if not self._memory:
            return False
        try:
            copies = find_copies(self._lake, self._before, self._state, self._days)
        except NotInMemory:
            return False
        self._rows.leave_out(copies)
        self._computation.leave_out(copies)
        return True

    def _number_events(self) -> None:
        """Write the tables with the counts of the event numbers that have arrived."""
        lake, days = self._lake, self._days
        affected, large = self._computation.affected, self._computation.large
        if affected is not None:
            with suppress(WholeDays, NotInMemory):
                sums = affected.sums(days)
                numbers = affected.numbers(sums, days)
                for name, rows in ((SUMS.name, sums), (NUMBERS.name, numbers)):
                    self._writer.replace_changed(rows, "silver", name, days)
                return
        found = self._numbers_in_memory() if large is None else large.numbers(days)
        if found is not None:
            for name, rows in zip((SUMS.name, NUMBERS.name), found, strict=True):
                self._writer.replace_collected(rows, "silver", name, days)
            return
        everything = lake.bronze(FAMILIES, days)
        self._writer.replace(bronze.sums(everything), "silver", SUMS.name, days)
        counted = self._rows.reader(days)(SUMS.name)
        doubt = not bronze.incomplete_sums(counted).isEmpty()
        rows = bronze.numbers(counted, everything if doubt else None, self._hint)
        self._writer.replace(rows, "silver", NUMBERS.name, days)

    def _numbers_in_memory(self) -> tuple[pa.Table, pa.Table] | None:
        """Return the rows of the tables of event numbers, computed in memory; None if that is not possible."""
        found: list[tuple[pa.Table, pa.Table]] = []
        for part in self._computation.parts:
            tables = self._rows.in_memory(part, ())
            events = partial(tables.all_events, FAMILIES, IDENTITY)
            sums = self._computation.compute(SUMS.name, partial(_sums, events))
            if sums is None:
                return None
            counted = rows_of_table(sums, SUMS.schema)
            doubt = not bronze.incomplete_sums(counted).isEmpty()
            numbers = self._computation.compute(NUMBERS.name, partial(_numbers, counted, events if doubt else None))
            if numbers is None:
                return None
            found.append((sums, numbers))
            self._computation.forget_part()
        return pa.concat_tables(one for one, _ in found), pa.concat_tables(one for _, one in found)

    def _note_ends(self) -> None:
        """Record the days on which the inputs :data:`~dmsg.analytics.changes.ENDS` and
        :data:`~dmsg.analytics.changes.OBSERVED` have changed."""
        ends = observed = set(self._days)
        if self._writer.can_compare:
            stored = self._lake.stored("silver", "numbers", self._before, self._days)
            now = self._lake.stored("silver", "numbers", self._state, self._days)
            ends, observed = changed_ends(stored, now, max(self._state.days))
        self._changes.note(ENDS, ends)
        self._changes.note(OBSERVED, observed)

    def gold_daily(self) -> None:
        """Write the gold tables of the days to recompute."""

        @cache
        def plan(days: tuple[str, ...], choose: Choose = _all) -> Tables:
            wider_days = days_around(days)
            read, around = self._rows.reader(days), self._rows.reader(wider_days)
            tables = daily_tables(
                lambda name: choose(read(name)),
                lambda name: choose(around(name)),
                self._hint,
                accepted=lambda: choose(self._lake.accepted_receipts(self._state, wider_days)),
            )
            assert tables.keys() == DAILY.keys()
            return tables

        def plan_in_memory(days: tuple[str, ...]) -> Tables:
            wider_days = tuple(days_around(days))
            return daily_tables(
                self._rows.memory_reader(days),
                self._rows.memory_reader(days, wider_days),
                accepted=self._rows.in_memory(days, wider_days).accepted_receipts,
            )

        self._computation.write_days(
            "gold", [name for name in DAILY if name not in _DERIVED_GOLD], plan, plan_in_memory
        )
        self._computation.write_days("gold", _DERIVED_GOLD, plan, plan_in_memory)

    def gold_overall(self) -> None:
        """Write the gold tables without days."""
        since = str(self._today - timedelta(HISTORY_DAYS))
        recent = [day for day in self._state.days if day >= since]
        tables = overall_tables(self._rows.reader(None), self._rows.reader(recent), self._today)
        in_memory = overall_tables(self._rows.memory_reader(None), self._rows.memory_reader(recent), self._today)
        assert tables.keys() == OVERALL.keys()
        keeps = self._writer.can_compare and self._before.today == str(self._today)
        for names in ([name for name in tables if name not in _DERIVED_OVERALL], _DERIVED_OVERALL):
            # The tables of _DERIVED_OVERALL are computed from the other tables, and only if one of the other tables has
            # changed. So the other tables are written first.
            wanted = {name: tables[name] for name in names if not keeps or self._changes.has_changed(name)}
            self._computation.write("gold", wanted, in_memory)
