"""Refinement of a run: computation of the silver and gold tables of the days with new events, and of the gold tables
that are not divided into days."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import date, timedelta
from functools import cache, partial

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.affected_rows import WholeDays
from dmsg.analytics.affected_tables import IDENTITY, TABLES, AffectedTables
from dmsg.analytics.broadcasts import bounded
from dmsg.analytics.changes import ENDS, OBSERVED, Changes, changed_ends, days_around
from dmsg.analytics.copies import Copies, find_copies
from dmsg.analytics.day_parts import day_parts
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_tables import MemoryTables, as_rows, rows_of_table
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import DAILY, FAMILIES, GOLD, OVERALL, SILVER
from dmsg.analytics.shard_tasks import FAMILIES_OF
from dmsg.analytics.shards import LargeDays, only_shards
from dmsg.analytics.store import NUMBERS, SUMS
from dmsg.analytics.stored_views import StoredViews
from dmsg.analytics.table_plans import HISTORY_DAYS, Read, Tables, daily_tables, overall_tables, silver_tables
from dmsg.analytics.table_writer import TableWriter
from dmsg.analytics.views import VIEWS

SMALL_WORKERS = 4
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


Choose = Callable[[DataFrame], DataFrame]
"""Function that returns some of the rows of a table."""
Plan = Callable[..., Tables]
"""Function that returns the plans of the tables for some days. An optional second argument is a :data:`Choose`, which
limits the rows from which the tables are computed."""


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
        self._small = small
        self._hint = bounded(events)
        self._parts = day_parts(days, events_of_day, part_rows)
        self._memory = memory
        self._memory_tables = cache(self._open_in_memory)
        self._changes = Changes(days, changed)
        self._writer = TableWriter(
            lake,
            claim,
            before,
            self._changes,
            days,
            events=events,
            collects_all=collects_all,
            keeps_rows=len(self._parts) == 1,
        )
        if self._writer.can_compare and "life" in changed:
            # The last line of each file is an event of the family ``life``, so every new file has events of this
            # family. Only those about starts and stops of processes are a reason to compute a day again.
            self._changes.note("life", lake.days_of_lives(before.batches))
        self._step = step
        self._copies: Copies | None = None
        self._views = StoredViews(lake, claim.number, before, state)
        self._affected = AffectedTables(lake, before, state) if self._writer.can_compare else None
        if self._affected is not None and not self._affected.has_few_events:
            self._affected = None
        self._large: LargeDays | None = None
        if LargeDays.are_needed(lake, days, memory=memory, always=by_tasks):
            self._large = LargeDays(lake, state, self._changes, claim.number, self._writer.returned_rows)

    def _events(self, family: str, days: Iterable[str], doubtful: DataFrame | None) -> DataFrame:
        """Return the events of a family on these days, each once.

        :param doubtful: rows of the table ``numbers`` of the buckets in which numbers occur twice; None if there are
            none.
        """
        rows = self._lake.bronze([family], days)
        return rows if doubtful is None else bronze.deduplicate(rows, doubtful, self._hint)

    def _reader(self, days: Sequence[str] | None) -> Read:
        """Return a function that reads the tables with the rows that this run has written so far.

        :param days: limit the rows to these days; None for all.
        """

        # Opened tables are cached, because several queries read the same table, and Spark takes 0.1 s to open a table.
        @cache
        def read(name: str) -> DataFrame:
            if (collected := self._writer.collected_rows(name, days)) is not None:
                return self._lake.frame(collected, _schema(name))
            return self._lake.read("gold" if name in GOLD else "silver", name, self._state, days)

        return read

    def _open_in_memory(self, days: tuple[str, ...] | None, wider_days: tuple[str, ...] = ()) -> MemoryTables:
        partial_days = set(wider_days).difference(days or ())
        dropped = None if self._copies is None else self._copies.dropped
        return MemoryTables(self._lake, self._state, wider_days or days, partial_days, dropped)

    def _memory_reader(self, days: Sequence[str] | None, wider_days: Sequence[str] = ()) -> Read:
        """Return a function that reads the tables into memory, without Spark, with the rows that this run has written
        so far. It raises :class:`~dmsg.analytics.memory_columns.NotInMemory` if there are too many rows.

        :param wider_days: the days, the day before each and the day after each; empty to read only the days themselves.
        """
        tables = self._memory_tables(None if days is None else tuple(days), tuple(wider_days))

        @cache
        def read(name: str) -> DataFrame:
            if not wider_days and (collected := self._writer.collected_rows(name, days)) is not None:
                return rows_of_table(collected, _schema(name))
            return tables.read(name)

        return read

    def _compute(self, name: str, plan: Callable[[], DataFrame]) -> pa.Table | None:
        """Compute the rows of a table in memory; None if that is not possible.

        :param plan: computes the table from rows in memory.
        """
        if not self._memory:
            return None
        with suppress(NotInMemory):
            return as_rows(plan()).table(_schema(name))
        return None

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
            self._affected = None
            self._large = None

        @cache
        def doubtful() -> DataFrame | None:
            if not found:
                return None
            return self._reader(days)(NUMBERS.name).where(F.col("events") > F.col("distinct_events"))

        last_day = date.fromisoformat(max(state.days))

        @cache
        def plan(days: tuple[str, ...], choose: Choose = _all) -> Tables:
            wider_days = days_around(days)
            read, around = self._reader(days), self._reader(wider_days)
            return silver_tables(
                lambda family: choose(self._events(family, days, doubtful())),
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
                self._memory_tables(days, ()).events,
                self._memory_reader(days),
                self._memory_reader(days, wider_days),
                days,
                self._memory_tables(days, wider_days).accepted_receipts,
                last_day=last_day,
                accepted_on_days=self._memory_tables(days, ()).accepted_receipts,
            )

        names = [name for name in SILVER if name not in _DERIVED_SILVER]
        if not by_spark:
            self._views.choose_days(self._copies or Copies(), self._changes, days)
            names = [name for name in names if name not in VIEWS or self._views.days[name]]
        for some in (names, *([name] for name in _DERIVED_SILVER)):
            self._write_days("silver", some, plan, None if by_spark else plan_in_memory)
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
        self._copies = copies
        if copies.dropped:
            # Until now the events were read with their copies, because the counts of event numbers include the copies.
            self._memory_tables.cache_clear()
        if copies.replace_counted:
            # Numbers that were computed from the replaced event cannot be subtracted from stored sums.
            self._affected = None
        if self._affected is not None:
            try:
                self._affected.leave_out(copies.dropped)
            except WholeDays:
                self._affected = None
        if self._large is not None:
            self._large.leave_out(copies.dropped)
        return True

    def _number_events(self) -> None:
        """Write the tables with the counts of the event numbers that have arrived."""
        lake, days = self._lake, self._days
        if self._affected is not None:
            with suppress(WholeDays, NotInMemory):
                sums = self._affected.sums(days)
                numbers = self._affected.numbers(sums, days)
                for name, rows in ((SUMS.name, sums), (NUMBERS.name, numbers)):
                    self._writer.replace_changed(rows, "silver", name, days)
                return
        found = self._numbers_in_memory() if self._large is None else self._large.numbers(days)
        if found is not None:
            for name, rows in zip((SUMS.name, NUMBERS.name), found, strict=True):
                self._writer.replace_collected(rows, "silver", name, days)
            return
        everything = lake.bronze(FAMILIES, days)
        self._writer.replace(bronze.sums(everything), "silver", SUMS.name, days)
        counted = self._reader(days)(SUMS.name)
        doubt = not bronze.incomplete_sums(counted).isEmpty()
        rows = bronze.numbers(counted, everything if doubt else None, self._hint)
        self._writer.replace(rows, "silver", NUMBERS.name, days)

    def _numbers_in_memory(self) -> tuple[pa.Table, pa.Table] | None:
        """Return the rows of the tables of event numbers, computed in memory; None if that is not possible."""
        found: list[tuple[pa.Table, pa.Table]] = []
        for part in self._parts:
            tables = self._memory_tables(part, ())
            events = partial(tables.all_events, FAMILIES, IDENTITY)
            sums = self._compute(SUMS.name, partial(_sums, events))
            if sums is None:
                return None
            counted = rows_of_table(sums, SUMS.schema)
            doubt = not bronze.incomplete_sums(counted).isEmpty()
            numbers = self._compute(NUMBERS.name, partial(_numbers, counted, events if doubt else None))
            if numbers is None:
                return None
            found.append((sums, numbers))
            self._forget_part()
        return pa.concat_tables(one for one, _ in found), pa.concat_tables(one for _, one in found)

    def _forget_part(self) -> None:
        """Free the rows of the present part, unless the run has only this part."""
        if len(self._parts) > 1:
            self._memory_tables.cache_clear()
            pa.default_memory_pool().release_unused()

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

    def _write_days(
        self,
        layer: str,
        names: Iterable[str],
        plan: Plan,
        plan_in_memory: Callable[[tuple[str, ...]], Tables] | None,
    ) -> None:
        """Write each table for the days on which an input of it has changed.

        :param plan: returns the plans of the tables for some days.
        :param plan_in_memory: returns plans that compute the same tables in memory, without Spark; None if
            only Spark may compute the tables.
        """
        days = {name: self._views.days.get(name, self._changes.days_of(name)) for name in names}
        for name, some in days.items():
            if not some:
                self._lake.table(layer, name).ensure()
        wanted = {name: some for name, some in days.items() if some}
        for name, some in list(wanted.items()):
            if not self._is_affected(name) and (
                self._store_view(name, some) or self._replace_by_shards(layer, name, some, plan)
            ):
                del wanted[name]
        if plan_in_memory is not None and self._memory and len(self._parts) > 1:
            self._write_parts(layer, wanted, plan_in_memory)
            plan_in_memory = None
        in_memory = (
            {} if plan_in_memory is None else {name: plan_in_memory(some)[name] for name, some in wanted.items()}
        )
        self._write(layer, {name: plan(some)[name] for name, some in wanted.items()}, in_memory, days, plan)

    def _write_parts(
        self, layer: str, wanted: dict[str, tuple[str, ...]], plan_in_memory: Callable[[tuple[str, ...]], Tables]
    ) -> None:
        """Write tables in memory, part by part, and remove them from ``wanted``.

        :param wanted: days of each table. Tables that cannot be computed in memory stay in it.
        """
        changed: dict[str, set[str]] = {name: set() for name in wanted}
        for part in self._parts:
            plan = cache(plan_in_memory)

            def one(name: str, part: tuple[str, ...] = part, plan: Callable[..., Tables] = plan) -> None:
                some = tuple(day for day in wanted[name] if day in part)
                if not some or name not in changed:
                    return
                self._step(f"{layer}: {name}")
                self._claim.check()
                if not self._is_affected(name) and (found := self._compute(name, plan(some)[name])) is not None:
                    changed[name].update(self._writer.write_collected(found, layer, name, some))
                else:
                    del changed[name]

            with ThreadPoolExecutor(SMALL_WORKERS if self._small else 1) as pool:
                list(pool.map(one, wanted))
            self._forget_part()
        for name, some in changed.items():
            self._changes.note(name, some)
            del wanted[name]

    def _is_affected(self, name: str) -> bool:
        """Whether a table can be updated by replacing only the rows that the new events affect."""
        return self._affected is not None and (name in TABLES or name in self._views.to_extend)

    def _write(
        self,
        layer: str,
        tables: Tables,
        in_memory: Tables,
        days: Mapping[str, Sequence[str]] | None = None,
        plan: Plan | None = None,
    ) -> None:
        """Write tables that do not depend on each other. In a small job, several tables are written at the same time.

        :param in_memory: functions that compute tables in memory, without Spark, by the names of the tables. Tables
            that are not among them are computed by Spark.
        """

        def one(name: str) -> None:
            self._step(f"{layer}: {name}")
            self._claim.check()
            chosen = None if days is None else tuple(days[name])
            if chosen is not None and self._replace_affected(layer, name, chosen):
                return
            if chosen is not None and plan is not None and self._replace_by_shards(layer, name, chosen, plan):
                return
            found = self._compute(name, in_memory[name]) if name in in_memory else None
            if found is None:
                self._writer.replace(tables[name](), layer, name, chosen)
            else:
                self._writer.replace_collected(found, layer, name, chosen)

        with ThreadPoolExecutor(SMALL_WORKERS if self._small else 1) as pool:
            list(pool.map(one, tables))

    def _store_view(self, name: str, days: tuple[str, ...]) -> bool:
        """Store the rows of a view, computed in memory.

        :returns: whether this was possible.
        """
        if not self._views.is_stored_by_file(name):
            return False
        self._step(f"silver: {name}")
        self._claim.check()
        with suppress(NotInMemory):
            self._views.store(name, days, self._memory_tables(None))
            return True
        return False

    def _replace_by_shards(self, layer: str, name: str, days: tuple[str, ...], plan: Plan) -> bool:
        """Replace the rows of a table by rows that tasks of Spark compute with Arrow.

        :returns: whether this was possible.
        """
        if self._large is None or name not in FAMILIES_OF:
            return False
        self._step(f"{layer}: {name}")
        self._claim.check()
        found = self._large.rows(name, days, alone=self._affected is not None)
        if found is None:
            return False
        more: DataFrame | None = None
        for day, shards in found.too_large.items():
            of_day = plan((day,), partial(only_shards, shards=shards, count=found.shards))[name]()
            more = of_day if more is None else more.unionByName(of_day)
        self._writer.replace_sharded(found, more, layer, name, days)
        return True

    def _replace_affected(self, layer: str, name: str, days: tuple[str, ...]) -> bool:
        """Replace only the rows of a table that the new events affect.

        :returns: whether this was possible; if not, whole days have to be replaced.
        """
        if self._affected is None or not self._is_affected(name):
            return False
        try:
            found = self._affected.rows(name, days)
        except (WholeDays, NotInMemory):
            return False
        self._writer.replace_affected(found, layer, name, days)
        return True

    def gold_daily(self) -> None:
        """Write the gold tables of the days to recompute."""

        @cache
        def plan(days: tuple[str, ...], choose: Choose = _all) -> Tables:
            wider_days = days_around(days)
            read, around = self._reader(days), self._reader(wider_days)
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
                self._memory_reader(days),
                self._memory_reader(days, wider_days),
                accepted=self._memory_tables(days, wider_days).accepted_receipts,
            )

        self._write_days("gold", [name for name in DAILY if name not in _DERIVED_GOLD], plan, plan_in_memory)
        self._write_days("gold", _DERIVED_GOLD, plan, plan_in_memory)

    def gold_overall(self) -> None:
        """Write the gold tables without days."""
        since = str(self._today - timedelta(HISTORY_DAYS))
        recent = [day for day in self._state.days if day >= since]
        tables = overall_tables(self._reader(None), self._reader(recent), self._today)
        in_memory = overall_tables(self._memory_reader(None), self._memory_reader(recent), self._today)
        assert tables.keys() == OVERALL.keys()
        keeps = self._writer.can_compare and self._before.today == str(self._today)
        for names in ([name for name in tables if name not in _DERIVED_OVERALL], _DERIVED_OVERALL):
            # The tables of _DERIVED_OVERALL are computed from the other tables, and only if one of the other tables has
            # changed. So the other tables are written first.
            wanted = {name: tables[name] for name in names if not keeps or self._changes.has_changed(name)}
            self._write("gold", wanted, in_memory)


def _schema(name: str) -> StructType:
    """Return the columns of a silver or gold table."""
    return {**SILVER, **GOLD, SUMS.name: SUMS, NUMBERS.name: NUMBERS}[name].schema
