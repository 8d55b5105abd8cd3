"""Writing of the tables that a run has computed: whole days, only the days whose rows have changed, or only the rows
that new events affect."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from dmsg.analytics.affected_tables import Rows
from dmsg.analytics.changes import COMPARED_ROWS, Changes, are_equal, rows_of_day
from dmsg.analytics.lake import Lake, with_types
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.runs import Claim, State
from dmsg.analytics.schemas import GOLD, SILVER
from dmsg.analytics.shards import Sharded

_CLIENT_TABLES = {
    *("sessions", "heartbeats", "verdicts", "unfinished", "transports", "refusals", "entries", "receipts"),
    *("pair_day", "settlement_conflict_day", "abuse_day", "lost_transport", "actor"),
}
"""Tables whose size grows with clients, transports or events. The size of all other tables grows with servers and
hours."""
_USUALLY_SMALL = ("abuse_day", "actor", "lost_transport")
"""Tables of :data:`_CLIENT_TABLES` that usually have few rows. Their rows are collected and compared with the stored
ones, unless there are more than :data:`~dmsg.analytics.changes.COMPARED_ROWS`, as during an attack.
"""
MEMORY_EVENTS = 50_000_000
"""Maximum number of events of the days to recompute for which the tables of servers and hours are collected and written
by Arrow. With more events, Spark writes these tables, so that the driver's memory does not grow with the number of
days.
"""
KEPT_ROWS = 50_000
"""Maximum number of rows of a computed table that stay in memory for the tables made from it. A run that computes its
days in parts keeps none."""


class TableWriter:
    """Writer of the silver and gold tables of one run. It records in ``changes`` on which days a table has changed.

    :param before: state that the newest finished run left.
    :param days: days whose rows are rewritten.
    :param events: number of events of these days.
    :param collects_all: whether to collect every table and write it with Arrow, because there are few events.
    :param keeps_rows: whether computed rows stay in memory for the tables made from them.
    :ivar can_compare: whether computed rows are compared with the stored ones, so that only changed days are written.
        Rows are not compared in a first run, with more than ``MEMORY_EVENTS`` events, or if a killed run has written to
        the tables, so that ``before`` does not describe the stored rows.
    """

    def __init__(
        self,
        lake: Lake,
        claim: Claim,
        before: State,
        changes: Changes,
        days: Sequence[str],
        *,
        events: int,
        collects_all: bool,
        keeps_rows: bool,
    ) -> None:
        self._lake = lake
        self._claim = claim
        self._before = before
        self._changes = changes
        self._days = days
        self._collects_all = collects_all
        self._keeps_rows = keeps_rows
        self._in_memory = events <= MEMORY_EVENTS
        self._collected: dict[tuple[str, tuple[str, ...]], pa.Table] = {}
        self.can_compare = self._in_memory and before.run > 0 and lake.is_as_left(before)

    def collected_rows(self, name: str, days: Sequence[str] | None) -> pa.Table | None:
        """Return the rows of a table that this run has computed for exactly these days, if they are in memory."""
        return None if days is None else self._collected.get((name, tuple(days)))

    def replace_affected(self, found: Rows, layer: str, name: str, days: Sequence[str]) -> None:
        """Replace only the rows of a table that the new events affect."""
        if found.rewrites is None:
            self.replace_changed(found.rows, layer, name, days)
            return
        former = pa.concat_tables([found.rows.slice(0, 0), *(one.former for one in found.rewrites)])
        changed = [day for day in days if not are_equal(rows_of_day(found.rows, day), rows_of_day(former, day))]
        if changed:
            self._lake.replace_some(found.rows, found.rewrites, layer, name, self._claim.number, changed)
        self._changes.note(name, changed)

    def replace(self, rows: DataFrame, layer: str, name: str, days: Sequence[str] | None) -> None:
        """Replace the rows of a table. Small tables are collected and written with Arrow, which takes 0.02 CPU seconds
        for a table. Spark takes 0.3."""
        lake = self._lake
        schema = lake.table(layer, name).schema
        collected = None
        if self._collects_all or (self._in_memory and name not in _CLIENT_TABLES):
            collected = with_types(rows, schema).toArrow()
        elif self.can_compare and name in _USUALLY_SMALL:
            collected = with_types(rows.limit(COMPARED_ROWS + 1), schema).toArrow()
            if collected.num_rows > COMPARED_ROWS:
                collected = None
        if collected is None:
            lake.write(rows, layer, name, self._claim.number, days)
            self._changes.note(name, days or self._days)
            return
        self.replace_collected(collected.cast(arrow_schema(schema)), layer, name, days)

    def replace_collected(self, rows: pa.Table, layer: str, name: str, days: Sequence[str] | None) -> None:
        """Replace the rows of a table by rows in memory. Keep these rows for the tables of this run that are computed
        from them."""
        self._changes.note(name, self.write_collected(rows, layer, name, days))

    def replace_changed(self, rows: pa.Table, layer: str, name: str, days: Sequence[str] | None) -> None:
        """Replace the rows of the days on which they differ from the stored rows."""
        self._changes.note(name, self._write_changed(rows, layer, name, days))

    @property
    def returned_rows(self) -> dict[str, int | None]:
        """Maximum number of rows that tasks of Spark return to the driver for each table and day; None for any number.
        Tasks write the rows of larger tables themselves."""
        other = None if self._in_memory else 0
        return {name: COMPARED_ROWS if name in _CLIENT_TABLES else other for name in (*SILVER, *GOLD)}

    def replace_sharded(
        self, found: Sharded, more: DataFrame | None, layer: str, name: str, days: Sequence[str]
    ) -> None:
        """Replace the rows of a table by rows that tasks of Spark have computed.

        :param more: further rows, which Spark has to compute; None if there are none.
        """
        schema = self._lake.table(layer, name).schema
        rows = pa.concat_tables([arrow_schema(schema).empty_table(), *found.rows])
        if more is not None and self.returned_rows[name] is None:
            rows = pa.concat_tables([rows, with_types(more, schema).toArrow().cast(arrow_schema(schema))])
            more = None
        if more is None and not found.parts:
            self.replace_collected(rows, layer, name, days)
            return
        self._lake.put_parts(found.parts, rows, more, layer, name, self._claim.number, days)
        self._changes.note(name, days)

    def write_collected(self, rows: pa.Table, layer: str, name: str, days: Sequence[str] | None) -> Sequence[str]:
        """Write rows as :meth:`replace_collected` does, but do not record the change.

        :returns: the days written; for a changed table without days, all days of the run.
        """
        if days is not None and self._keeps_rows and rows.num_rows <= KEPT_ROWS:
            self._collected[name, tuple(days)] = rows
        return self._write_changed(rows, layer, name, days)

    def _write_changed(self, rows: pa.Table, layer: str, name: str, days: Sequence[str] | None) -> Sequence[str]:
        """Write only the rows of the days on which they differ from the stored rows.

        :returns: the days written; for a changed table without days, all days of the run.
        """
        lake, number = self._lake, self._claim.number
        if self.can_compare:
            stored = lake.stored(layer, name, self._before, days)
            if days is None:
                if are_equal(rows, stored):
                    return ()
            else:
                days = [day for day in days if not are_equal(rows_of_day(rows, day), rows_of_day(stored, day))]
                if not days:
                    return ()
                wanted = pa.array(days).cast(rows["dt"].type)
                rows = rows.filter(pc.is_in(rows["dt"], wanted))
        lake.put(rows, layer, name, number, days)
        return days or self._days
