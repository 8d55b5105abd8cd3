"""Ways to compute a table: its affected rows only, whole days in memory, by tasks of Spark, or by a query of Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial

import pyarrow as pa
from pyspark.sql import DataFrame

from dmsg.analytics.affected_rows import WholeDays
from dmsg.analytics.affected_tables import TABLES, AffectedTables
from dmsg.analytics.changes import Changes
from dmsg.analytics.copies import Copies
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_tables import as_rows
from dmsg.analytics.run_rows import RunRows, schema_of
from dmsg.analytics.runs import Claim
from dmsg.analytics.shard_tasks import FAMILIES_OF
from dmsg.analytics.shards import LargeDays, only_shards
from dmsg.analytics.stored_views import StoredViews
from dmsg.analytics.table_plans import Tables
from dmsg.analytics.table_writer import TableWriter

SMALL_WORKERS = 4
"""Number of tables that a small job computes and writes at the same time."""
Choose = Callable[[DataFrame], DataFrame]
"""Function that returns some of the rows of a table."""
Plan = Callable[..., Tables]
"""Function that returns the plans of the tables for some days. An optional second argument is a :data:`Choose`, which
limits the rows from which the tables are computed."""


class Computation:
    """Computation of the tables of one run: choice of the way for each table and its days, and writing of the rows.

    :param views: choice of the days on which rows of views are stored.
    :param parts: successive days that are computed in memory together.
    :param affected: tables of which only the rows are replaced that the new events affect; None for none.
    :param large: tables that tasks of Spark compute; None for none.
    :param memory: whether tables may be computed in memory, without Spark.
    :param small: whether to write several tables at the same time.
    :param step: called with the name of each step as it begins.
    """

    def __init__(
        self,
        lake: Lake,
        claim: Claim,
        changes: Changes,
        writer: TableWriter,
        rows: RunRows,
        views: StoredViews,
        *,
        parts: Sequence[tuple[str, ...]],
        affected: AffectedTables | None,
        large: LargeDays | None,
        memory: bool,
        small: bool,
        step: Callable[[str], None],
    ) -> None:
        self._lake = lake
        self._claim = claim
        self._changes = changes
        self._writer = writer
        self._rows = rows
        self._views = views
        self.parts = parts
        self.affected = affected
        self.large = large
        self._memory = memory
        self._workers = SMALL_WORKERS if small else 1
        self._step = step

    def leave_out(self, copies: Copies) -> None:
        """Leave out the copies of events in all tables."""
        if copies.replace_counted:
            # Numbers that were computed from the replaced event cannot be subtracted from stored sums.
            self.affected = None
        if self.affected is not None:
            try:
                self.affected.leave_out(copies.dropped)
            except WholeDays:
                self.affected = None
        if self.large is not None:
            self.large.leave_out(copies.dropped)

    def use_spark_only(self) -> None:
        """Compute all tables by queries of Spark over whole days."""
        self.affected = None
        self.large = None

    def compute(self, name: str, plan: Callable[[], DataFrame]) -> pa.Table | None:
        """Compute the rows of a table in memory; None if that is not possible.

        :param plan: computes the table from rows in memory.
        """
        if not self._memory:
            return None
        with suppress(NotInMemory):
            return as_rows(plan()).table(schema_of(name))
        return None

    def forget_part(self) -> None:
        """Free the rows of the present part, unless the run has only this part."""
        if len(self.parts) > 1:
            self._rows.forget()
            pa.default_memory_pool().release_unused()

    def write_days(
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
        if plan_in_memory is not None and self._memory and len(self.parts) > 1:
            self._write_parts(layer, wanted, plan_in_memory)
            plan_in_memory = None
        in_memory = (
            {} if plan_in_memory is None else {name: plan_in_memory(some)[name] for name, some in wanted.items()}
        )
        self.write(layer, {name: plan(some)[name] for name, some in wanted.items()}, in_memory, days, plan)

    def _write_parts(
        self, layer: str, wanted: dict[str, tuple[str, ...]], plan_in_memory: Callable[[tuple[str, ...]], Tables]
    ) -> None:
        """Write tables in memory, part by part, and remove them from ``wanted``.

        :param wanted: days of each table. Tables that cannot be computed in memory stay in it.
        """
        changed: dict[str, set[str]] = {name: set() for name in wanted}
        for part in self.parts:
            plan = cache(plan_in_memory)

            def one(name: str, part: tuple[str, ...] = part, plan: Callable[..., Tables] = plan) -> None:
                some = tuple(day for day in wanted[name] if day in part)
                if not some or name not in changed:
                    return
                self._step(f"{layer}: {name}")
                self._claim.check()
                if not self._is_affected(name) and (found := self.compute(name, plan(some)[name])) is not None:
                    changed[name].update(self._writer.write_collected(found, layer, name, some))
                else:
                    del changed[name]

            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(one, wanted))
            self.forget_part()
        for name, some in changed.items():
            self._changes.note(name, some)
            del wanted[name]

    def _is_affected(self, name: str) -> bool:
        """Whether a table can be updated by replacing only the rows that the new events affect."""
        return self.affected is not None and (name in TABLES or name in self._views.to_extend)

    def write(
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
            found = self.compute(name, in_memory[name]) if name in in_memory else None
            if found is None:
                self._writer.replace(tables[name](), layer, name, chosen)
            else:
                self._writer.replace_collected(found, layer, name, chosen)

        with ThreadPoolExecutor(self._workers) as pool:
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
            self._views.store(name, days, self._rows.in_memory(None))
            return True
        return False

    def _replace_by_shards(self, layer: str, name: str, days: tuple[str, ...], plan: Plan) -> bool:
        """Replace the rows of a table by rows that tasks of Spark compute with Arrow.

        :returns: whether this was possible.
        """
        if self.large is None or name not in FAMILIES_OF:
            return False
        self._step(f"{layer}: {name}")
        self._claim.check()
        found = self.large.rows(name, days, alone=self.affected is not None)
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
        if self.affected is None or not self._is_affected(name):
            return False
        try:
            found = self.affected.rows(name, days)
        except (WholeDays, NotInMemory):
            return False
        self._writer.replace_affected(found, layer, name, days)
        return True
