"""Tables as rows in memory, read from their files by Arrow and without Spark.

A column is read when a rule first needs it.  If a table exceeds :data:`MEMORY_ROWS`, or the columns exceed
:data:`MEMORY_BYTES`, reading raises :class:`~dmsg.analytics.memory_columns.NotInMemory`, and Spark computes the table
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dmsg.analytics import silver
from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.expressions import as_column
from dmsg.analytics.file_columns import Budget, Dropped, FileColumns
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import GOLD, OF_TRANSPORTS, SILVER
from dmsg.analytics.store import BRONZE_KEY, Store
from dmsg.analytics.views import VIEWS

MEMORY_ROWS = 2_000_000
"""Maximum number of rows of a table, or of a family of events, that one computation reads into memory."""
MEMORY_BYTES = 768 * 1024 * 1024
"""Maximum number of bytes of all columns that the computations for the same days read into memory.  Producers choose
the lengths of texts, so the number of rows alone is no bound."""
OF_EVENTS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "transports": silver.transports,
    "refusals": silver.refusals,
    "entries": silver.entries,
    "receipts": silver.receipts,
}
"""Functions that compute the rows of a view from events, by view."""
assert OF_EVENTS.keys() == VIEWS.keys()


def as_frame(rows: MemoryRows) -> DataFrame:
    """Declare rows in memory as a ``DataFrame``, because the functions that compute tables have parameters of this
    type. The rows have all methods of ``DataFrame`` that these functions use."""
    return cast(DataFrame, rows)


def as_rows(rows: DataFrame) -> MemoryRows:
    """Declare the result of a rule as rows in memory. Use this function only if the rule was computed from rows in
    memory.
    """
    assert isinstance(rows, MemoryRows)
    return rows


def rows_of_table(table: pa.Table, schema: StructType) -> DataFrame:
    """Return the rows of a table that is in memory.  A column of the schema that the table lacks is NULL in all
    rows."""
    names = set(table.column_names)
    lacking = {
        one.name: partial(pa.nulls, table.num_rows, one.type) for one in arrow_schema(schema) if one.name not in names
    }
    found = MemoryRows.of(table)
    return as_frame(MemoryRows({**found.getters, **lacking}, table.num_rows))


def all_events(parts: Iterable[DataFrame], names: Sequence[str]) -> DataFrame:
    """Return some columns of the events of several families. The column ``dt`` is a date."""
    first, *others = (as_rows(part).select(*names) for part in parts)
    return as_frame(first.unionByName(*others).withColumn("dt", as_column("dt").cast("date")))


class MemoryTables:
    """Reader of the tables and of the events of some days.

    :param state: state to read; tables that it does not name are read in their newest version.
    :param days: days to read; None for all.
    :param partial_days: days, also in ``days``, of which only the transport events and receipts that can affect a
        neighbouring day are read: those near midnight, and receipts that were sent after a restart.
    :param dropped: rows of bronze to leave out, because they are copies of other events; None if the copies of these
        days are not known.
    """

    def __init__(
        self,
        store: Store,
        state: State,
        days: Iterable[str] | None = None,
        partial_days: Iterable[str] = (),
        dropped: Dropped | None = None,
    ) -> None:
        self._store = store
        self._state = state
        self._days: Container[str] | None = None if days is None else set(days)
        self._partial_days = set(partial_days)
        self._dropped = dropped
        self._budget = Budget(MEMORY_BYTES)
        self._read_events: dict[str, DataFrame] = {}

    def _rows(
        self,
        table: Delta,
        files: Iterable[File],
        partial_days: Container[str] = (),
        dropped: Dropped | None = None,
    ) -> MemoryRows:
        chosen = [
            one for one in files if self._days is None or one.values.get("dt", "") in self._days or not one.values
        ]
        read_whole = (one for one in chosen if one.rows is None or one.values.get("dt", "") not in partial_days)
        if sum(MEMORY_ROWS + 1 if one.rows is None else one.rows for one in read_whole) > MEMORY_ROWS:
            raise NotInMemory("the files have too many rows to compute the table in memory")
        columns = FileColumns(table.reading_storage(), chosen, self._budget, partial_days=partial_days, dropped=dropped)
        if columns.count > MEMORY_ROWS:
            raise NotInMemory("the files have too many rows to compute the table in memory")
        return columns.rows(arrow_schema(table.schema))

    def events(self, family: str) -> DataFrame:
        """Return the events of a family.

        :raises NotInMemory: there are too many events.
        """
        if (found := self._read_events.get(family)) is not None:
            return found
        bronze = self._store.table("", "bronze")
        files = bronze.files(self._state.versions.get(BRONZE_KEY))
        partial_days = self._partial_days if family in OF_TRANSPORTS else ()
        chosen = (one for one in files if one.values["family"] == family)
        rows = as_frame(self._rows(bronze, chosen, partial_days, self._dropped))
        self._read_events[family] = rows
        return rows

    def read(self, name: str) -> DataFrame:
        """Return the present rows of a silver or gold table.

        :raises NotInMemory: there are too many rows.
        """
        if name in VIEWS:
            self._check_view(name)
            return OF_EVENTS[name](self.events(VIEWS[name].family))
        layer = "gold" if name in GOLD else "silver"
        table = self._store.table(layer, name)
        return as_frame(self._rows(table, table.files(self._state.versions.get(f"{layer}/{name}"))))

    def view_by_file(self, name: str, day: str) -> Iterator[pa.Table]:
        """Return the rows of a view without keys on a day, one file of events at a time.

        :raises NotInMemory: a file is too large.
        """
        bronze = self._store.table("", "bronze")
        for file in bronze.files(self._state.versions.get(BRONZE_KEY)):
            if file.values["family"] == VIEWS[name].family and file.values["dt"] == day:
                # Each file has a budget of its own, because only the rows of one file are in memory.
                reader = MemoryTables(self._store, self._state, [day], dropped=self._dropped)
                events = as_frame(reader._rows(bronze, [file], dropped=self._dropped))
                yield as_rows(OF_EVENTS[name](events)).table(SILVER[name].schema)

    def _check_view(self, name: str) -> None:
        """Check that all rows of the view can be computed from events. For a day on which events arrived twice, this
        is possible only if the copies to leave out are known.

        :raises NotInMemory: rows of the view are stored for one of the days, and the copies are not known.
        """
        if self._dropped is not None:
            return
        stored = self._store.stored_days(name, self._state)
        if any(self._days is None or day in self._days for day in stored):
            raise NotInMemory(f"only Spark computes tables from the view {name} for days on which its rows are stored")

    def accepted_receipts(self) -> DataFrame:
        """Return the accepted receipts.  If one end of a transport sent several receipts, each of them has a row.

        :raises NotInMemory: there are too many receipts.
        """
        self._check_view("receipts")
        return silver.accepted_receipts(self.events(VIEWS["receipts"].family))

    def all_events(self, families: Iterable[str], names: Sequence[str]) -> DataFrame:
        """Return some columns of the events of several families.  The column ``dt`` is a date.

        :raises NotInMemory: there are too many events.
        """
        parts = [self.events(family) for family in families]
        if sum(as_rows(part).count_rows for part in parts) > MEMORY_ROWS:
            raise NotInMemory("there are too many events to read all of them into memory")
        return all_events(parts, names)
