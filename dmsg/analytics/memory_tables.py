"""Tables as rows in memory, read from their files by Arrow and without Spark.

A column is read when a rule first needs it.  If a table exceeds :data:`MEMORY_ROWS`, or the columns exceed
:data:`MEMORY_BYTES`, reading raises :class:`~dmsg.analytics.memory_columns.NotInMemory`, and Spark computes the table
instead.
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
from dmsg.analytics.memory_columns import NotInMemory, of_one_form, plain
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
"""Families of events with the three counts of transports.  The events of one transport can be on both sides of
midnight."""
_TEXTS_ONCE = pa.dictionary(pa.int32(), pa.string())
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

        :raises NotInMemory: more bytes were read than the budget allows.
        """
        with self._lock:
            self._left -= size
            if self._left < 0:
                raise NotInMemory("the columns are too large for memory")

    def check(self, size: int) -> None:
        """Check that ``size`` more bytes may be read, without counting them.

        :raises NotInMemory: the budget does not allow them.
        """
        if size > self._left:
            raise NotInMemory("the columns are too large for memory")


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


def can_affect_neighbours(times: pa.Array, former: pa.Array | None) -> pa.Array:
    """Return for each event or receipt whether it is near midnight, or was sent after a restart. Only these can affect
    a neighbouring day.

    :param times: milliseconds since 1970.
    :param former: whether each receipt was sent after a restart; None if none was.
    """
    of_day = pc.subtract(times, pc.multiply(pc.divide(times, DAY_MS), DAY_MS))
    near = pc.or_(pc.less(of_day, MIDNIGHT_MS), pc.greater_equal(of_day, DAY_MS - MIDNIGHT_MS))
    return near if former is None else pc.or_(near, pc.fill_null(former, False))


class _Files:
    """Columns of the files of a table.

    :param partial_days: days of which not all rows are read, but only events and receipts near midnight, and receipts
        that were sent after a restart. Only these rows can affect a neighbouring day.
    """

    def __init__(
        self, storage: pafs.FileSystem, files: Sequence[File], budget: Budget, partial_days: Container[str] = ()
    ) -> None:
        self._storage = storage
        self._files = files
        self._budget = budget
        self._footers: dict[str, pq.FileMetaData] = {}
        self._kept = {file.path: self._needed_rows(file) for file in files if file.values.get("dt", "") in partial_days}

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(
            pc.sum(self._kept[file.path]).as_py() or 0 if file.path in self._kept else file.rows or 0
            for file in self._files
        )

    def _needed_rows(self, file: File) -> pa.Array:
        """Return for each event or receipt of a file whether it can affect a neighbouring day."""
        return can_affect_neighbours(self._of_file(file, "ts", pa.int64()), self._of_file(file, "former", pa.bool_()))

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Read a column of all files."""
        parts = []
        for file in self._files:
            values = self._of_file(file, name, kind)
            parts.append(values.filter(self._kept[file.path]) if file.path in self._kept else values)
        return pa.concat_arrays(of_one_form(parts)) if parts else pa.array([], kind)

    def _of_file(self, file: File, name: str, kind: pa.DataType) -> pa.Array:
        rows = file.rows or 0
        if name in file.values:
            found = pa.repeat(pa.scalar(file.values[name], pa.string()).cast(kind), rows)
            self._budget.take(found.nbytes)
            return found.dictionary_encode() if kind in TEXTS else found
        try:
            column = self._read(file.path, name)
        except (pa.ArrowInvalid, OSError):
            # The file is damaged. Spark then reads it, and Spark's error names the file.
            raise NotInMemory(f"{file.path} cannot be read") from None
        if column is None:
            return pa.nulls(rows, _TEXTS_ONCE if kind in TEXTS else kind)
        self._budget.take(column_bytes(column))
        found = column.combine_chunks()
        # Texts stay in Arrow's dictionary encoding, which contains each different text once.
        return found if pa.types.is_dictionary(found.type) and kind in TEXTS else plain(found).cast(kind)

    def _read(self, path: str, name: str) -> pa.ChunkedArray | None:
        with self._storage.open_input_file(path) as opened:
            source = pq.ParquetFile(opened, metadata=self._footers.get(path))
            self._footers[path] = source.metadata
            there = source.schema_arrow
            if name not in there.names:
                return None
            if there.field(name).type in TEXTS:
                if (size := _plain_bytes(source.metadata, name)) is None:
                    # With dictionary encoding, each different text is in memory once. So the size of the plain texts
                    # can be counted before the texts are copied for each row.
                    source = pq.ParquetFile(opened, metadata=source.metadata, read_dictionary=[name])
                else:
                    self._budget.check(size)
            return source.read([name])[name]


def _plain_bytes(footer: pq.FileMetaData, name: str) -> int | None:
    """Return the size of a text column in memory; None if the file has a dictionary of its texts, and so does not state
    this size."""
    place = next(index for index in range(footer.num_columns) if footer.schema.column(index).path == name)
    groups = [footer.row_group(index).column(place) for index in range(footer.num_row_groups)]
    if any(one.has_dictionary_page or not {"PLAIN", "RLE"}.issuperset(one.encodings) for one in groups):
        return None
    return int(sum(one.total_uncompressed_size for one in groups))


class MemoryTables:
    """Reader of the tables and of the events of some days.

    :param state: state to read; tables that it does not name are read in their newest version.
    :param days: days to read; None for all.
    :param partial_days: days, also in ``days``, of which only the transport events and receipts that can affect a
        neighbouring day are read: those near midnight, and receipts that were sent after a restart.
    """

    def __init__(
        self, store: Store, state: State, days: Iterable[str] | None = None, partial_days: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._state = state
        self._days: Container[str] | None = None if days is None else set(days)
        self._partial_days = set(partial_days)
        self._budget = Budget(MEMORY_BYTES)
        self._read_events: dict[str, DataFrame] = {}

    def _rows(self, table: Delta, files: Iterable[File], partial_days: Container[str] = ()) -> MemoryRows:
        chosen = [
            one for one in files if self._days is None or one.values.get("dt", "") in self._days or not one.values
        ]
        read_whole = (one for one in chosen if one.rows is None or one.values.get("dt", "") not in partial_days)
        if sum(MEMORY_ROWS + 1 if one.rows is None else one.rows for one in read_whole) > MEMORY_ROWS:
            raise NotInMemory("the files have too many rows to compute the table in memory")
        columns = _Files(table.reading_storage(), chosen, self._budget, partial_days)
        if (count := columns.count) > MEMORY_ROWS:
            raise NotInMemory("the files have too many rows to compute the table in memory")
        return MemoryRows(
            {one.name: partial(columns.column, one.name, one.type) for one in arrow_schema(table.schema)}, count
        )

    def events(self, family: str) -> DataFrame:
        """Return the events of a family.

        :raises NotInMemory: there are too many events.
        """
        if (found := self._read_events.get(family)) is not None:
            return found
        bronze = self._store.table("", "bronze")
        files = bronze.files(self._state.versions.get(BRONZE_KEY))
        partial_days = self._partial_days if family in OF_TRANSPORTS else ()
        rows = as_frame(self._rows(bronze, (one for one in files if one.values["family"] == family), partial_days))
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

    def _check_view(self, name: str) -> None:
        """Check that all rows of the view can be computed from events. For a day on which events arrived twice,
        the rows are stored instead.

        :raises NotInMemory: rows of the view are stored for one of the days.
        """
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
        parts = [as_rows(self.events(family)).select(*names) for family in families]
        if sum(part.count_rows for part in parts) > MEMORY_ROWS:
            raise NotInMemory("there are too many events to read all of them into memory")
        found = parts[0].unionByName(*parts[1:])
        return as_frame(found.withColumn("dt", as_column("dt").cast("date")))
