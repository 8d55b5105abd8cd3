"""Tables as rows in memory, read from their files by Arrow, up to named limits.  Needs no Spark.

A column is read when a rule first needs it.  More rows or bytes than the limits raise
:class:`~dmsg.analytics.memory_columns.NotInMemory`, and Spark computes the table instead.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dmsg.analytics import silver
from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.expressions import as_column
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.parquet import TEXTS, arrow_schema, column_bytes
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import DAY_MS, GOLD
from dmsg.analytics.store import BRONZE_KEY, Store
from dmsg.analytics.views import VIEWS

MEMORY_ROWS = 2_000_000
"""Maximum number of rows of a table, or of a family of events, that one computation reads into memory."""
MEMORY_BYTES = 768 * 1024 * 1024
"""Maximum number of bytes of all columns that the computations for the same days read into memory.  Producers choose
the lengths of texts, so the number of rows alone is no bound."""
OF_TRANSPORTS = ("transport", "receipt")
"""Families of events with the three counts of transports, which can lie on both sides of midnight."""
OF_EVENTS: dict[str, Callable[[DataFrame], DataFrame]] = {
    "transports": silver.transports,
    "refusals": silver.refusals,
    "entries": silver.entries,
    "receipts": silver.receipts,
}
"""Functions that compute the rows of a view from events, by view."""
assert OF_EVENTS.keys() == VIEWS.keys()


class Budget:
    """Number of bytes that may still be read into memory."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._lock = Lock()

    def take(self, size: int) -> None:
        """Count bytes that were read.

        :raises NotInMemory: there are more than allowed.
        """
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise NotInMemory("the columns are too large for memory")


def as_frame(rows: MemoryRows) -> DataFrame:
    """Return rows in memory under the type that the rules name: they have the methods of a ``DataFrame`` that rules
    use."""
    return cast(DataFrame, rows)


def as_rows(rows: DataFrame) -> MemoryRows:
    """Return the rows in memory that a rule has returned for rows in memory."""
    assert isinstance(rows, MemoryRows)
    return rows


def rows_of_table(table: pa.Table, schema: StructType) -> DataFrame:
    """Return the rows of a table in memory; a column of the schema that the table lacks is NULL."""
    names = set(table.column_names)
    lacking = {
        one.name: partial(pa.nulls, table.num_rows, one.type) for one in arrow_schema(schema) if one.name not in names
    }
    found = MemoryRows.of(table)
    return as_frame(MemoryRows({**found.getters, **lacking}, table.num_rows))


class _Files:
    """Columns of the files of a table.

    :param beside: days of which only those rows are read that can matter to the day before or after.
    """

    def __init__(
        self, storage: pafs.FileSystem, files: Sequence[File], budget: Budget, beside: Container[str] = ()
    ) -> None:
        self._storage = storage
        self._files = files
        self._budget = budget
        self._footers: dict[str, pq.FileMetaData] = {}
        self._kept = {file.path: self._matter(file) for file in files if file.values.get("dt", "") in beside}

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(
            pc.sum(self._kept[file.path]).as_py() or 0 if file.path in self._kept else file.rows or 0
            for file in self._files
        )

    def _matter(self, file: File) -> pa.Array:
        """Return which events and receipts of a file are near midnight, or were sent after a restart."""
        of_day = pc.modulo(self._of_file(file, "ts", pa.int64()), DAY_MS)
        near = pc.or_(pc.less(of_day, MIDNIGHT_MS), pc.greater_equal(of_day, DAY_MS - MIDNIGHT_MS))
        return pc.or_(near, pc.fill_null(self._of_file(file, "former", pa.bool_()), False))

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Read a column of all files."""
        parts = []
        for file in self._files:
            values = self._of_file(file, name, kind)
            parts.append(values.filter(self._kept[file.path]) if file.path in self._kept else values)
        return pa.concat_arrays(parts) if parts else pa.array([], kind)

    def _of_file(self, file: File, name: str, kind: pa.DataType) -> pa.Array:
        rows = file.rows or 0
        if name in file.values:
            found = pa.repeat(pa.scalar(file.values[name]).cast(kind), rows)
            self._budget.take(found.nbytes)
            return found
        try:
            column = self._read(file.path, name)
        except (pa.ArrowInvalid, OSError):
            # Spark names the damaged file in its error.
            raise NotInMemory(f"{file.path} cannot be read") from None
        if column is None:
            return pa.nulls(rows, kind)
        self._budget.take(column_bytes(column))
        # A dictionary of texts becomes texts by the cast.
        return column.combine_chunks().cast(kind)

    def _read(self, path: str, name: str) -> pa.ChunkedArray | None:
        with self._storage.open_input_file(path) as opened:
            source = pq.ParquetFile(opened, metadata=self._footers.get(path))
            self._footers[path] = source.metadata
            there = source.schema_arrow
            if name not in there.names:
                return None
            if there.field(name).type in TEXTS:
                # A text that many rows share is read once, so that its size is known before it is copied.
                source = pq.ParquetFile(opened, metadata=source.metadata, read_dictionary=[name])
            return source.read([name])[name]


class MemoryTables:
    """Reader of the tables and of the events of some days.

    :param state: state to read; tables that it does not name are read in their newest version.
    :param days: days to read; None for all.
    :param beside: those of the days of which only events and receipts of transports are read that can matter to the
        day before or after.
    """

    def __init__(
        self, store: Store, state: State, days: Iterable[str] | None = None, beside: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._state = state
        self._days: Container[str] | None = None if days is None else set(days)
        self._beside = set(beside)
        self._budget = Budget(MEMORY_BYTES)
        self._read_events: dict[str, DataFrame] = {}

    def _rows(self, table: Delta, files: Iterable[File], beside: Container[str] = ()) -> MemoryRows:
        chosen = [
            one for one in files if self._days is None or one.values.get("dt", "") in self._days or not one.values
        ]
        read_whole = (one for one in chosen if one.rows is None or one.values.get("dt", "") not in beside)
        if sum(MEMORY_ROWS + 1 if one.rows is None else one.rows for one in read_whole) > MEMORY_ROWS:
            raise NotInMemory("too many rows for memory")
        columns = _Files(table.reading_storage(), chosen, self._budget, beside)
        if (count := columns.count) > MEMORY_ROWS:
            raise NotInMemory("too many rows for memory")
        return MemoryRows(
            {one.name: partial(columns.column, one.name, one.type) for one in arrow_schema(table.schema)}, count
        )

    def events(self, family: str) -> DataFrame:
        """Return the events of a family.

        :raises NotInMemory: there are too many.
        """
        if (found := self._read_events.get(family)) is not None:
            return found
        bronze = self._store.table("", "bronze")
        files = bronze.files(self._state.versions.get(BRONZE_KEY))
        beside = self._beside if family in OF_TRANSPORTS else ()
        rows = as_frame(self._rows(bronze, (one for one in files if one.values["family"] == family), beside))
        self._read_events[family] = rows
        return rows

    def read(self, name: str) -> DataFrame:
        """Return the rows that a silver or gold table has now.

        :raises NotInMemory: there are too many.
        """
        if name in VIEWS:
            self._check_view(name)
            return OF_EVENTS[name](self.events(VIEWS[name].family))
        layer = "gold" if name in GOLD else "silver"
        table = self._store.table(layer, name)
        return as_frame(self._rows(table, table.files(self._state.versions.get(f"{layer}/{name}"))))

    def _check_view(self, name: str) -> None:
        """Check that no rows are stored for the view; rows are stored only if events of a day came twice."""
        stored = self._store.stored_days(name, self._state)
        if any(self._days is None or day in self._days for day in stored):
            raise NotInMemory("stored rows of a view")

    def accepted_receipts(self) -> DataFrame:
        """Return the accepted receipts; several receipts of one end of a transport stay separate rows.

        :raises NotInMemory: there are too many.
        """
        self._check_view("receipts")
        return silver.accepted_receipts(self.events(VIEWS["receipts"].family))

    def all_events(self, families: Iterable[str], names: Sequence[str]) -> DataFrame:
        """Return some columns of the events of several families; ``dt`` is a date.

        :raises NotInMemory: there are too many.
        """
        parts = [as_rows(self.events(family)).select(*names) for family in families]
        if sum(part.count_rows for part in parts) > MEMORY_ROWS:
            raise NotInMemory("too many events for memory")
        found = parts[0]
        for part in parts[1:]:
            found = found.unionByName(part)
        return as_frame(found.withColumn("dt", as_column("dt").cast("date")))
