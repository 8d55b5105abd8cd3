"""Columns of a table's files, read by Arrow when a rule first needs them. Needs no Spark.

Often only some rows of a file are needed, such as the events of a few transports. Then only the groups of rows in which
these rows lie are read, and only the needed rows stay in memory.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from dmsg.analytics.data_files import File
from dmsg.analytics.event_rules import MIDNIGHT_MS
from dmsg.analytics.memory_columns import NotInMemory, of_one_form, plain
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.parquet import TEXTS, column_bytes
from dmsg.analytics.schemas import DAY_MS

_TEXTS_ONCE = pa.dictionary(pa.int32(), pa.string())
Dropped = Mapping[str, pa.Array]
"""Numbers of the rows of files to leave out, by the paths of the files. Rows are numbered from 0."""


def is_kept(dropped: Dropped, path: str, first: int, count: int) -> pa.Array | None:
    """Return for each of some successive rows of a file whether it is kept; None if all rows of the file are kept.

    :param first: number of the first of these rows in the file.
    """
    if (numbers := dropped.get(path)) is None:
        return None
    return pc.invert(pc.is_in(pa.arange(first, first + count), numbers))


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


def can_affect_neighbours(times: pa.Array, former: pa.Array | None) -> pa.Array:
    """Return for each event or receipt whether it is near midnight, or was sent after a restart. Only these can affect
    a neighbouring day.

    :param times: milliseconds since 1970.
    :param former: whether each receipt was sent after a restart; None if none was.
    """
    of_day = pc.subtract(times, pc.multiply(pc.divide(times, DAY_MS), DAY_MS))
    near = pc.or_(pc.less(of_day, MIDNIGHT_MS), pc.greater_equal(of_day, DAY_MS - MIDNIGHT_MS))
    return near if former is None else pc.or_(near, pc.fill_null(former, False))


def with_small_dictionary(texts: pa.Array) -> pa.Array:
    """Return some texts of a file. Dictionary-encoded texts stay so, because the dictionary contains each different
    text once. A dictionary with more texts than rows is replaced, because the dictionaries of all files are unified."""
    if not pa.types.is_dictionary(texts.type) or len(texts.dictionary) <= len(texts):
        return texts
    return plain(texts).dictionary_encode()


@dataclass(frozen=True)
class Selection:
    """Choice of some rows of a file.

    :ivar row_groups: numbers of the file's row groups that contain chosen rows; None for all row groups.
    :ivar chosen: for each row of these row groups, whether it is chosen.
    :ivar known: text columns of the chosen rows that are in memory already.
    """

    row_groups: Sequence[int] | None
    chosen: pa.Array
    known: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of chosen rows."""
        return pc.sum(self.chosen).as_py() or 0


class FileColumns:
    """Columns of some files of a table.

    :param storage: file system whose root is the table's directory.
    :param budget: number of bytes that the columns may have.
    :param partial_days: days of which not all rows are read, but only events and receipts near midnight, and receipts
        that were sent after a restart. Only these rows can affect a neighbouring day.
    :param selections: chosen rows of the files, by path; all rows of a file that is not in it.
    :param dropped: rows to leave out. It must not name files of ``selections``.
    """

    def __init__(
        self,
        storage: pafs.FileSystem,
        files: Sequence[File],
        budget: Budget,
        *,
        partial_days: Container[str] = (),
        selections: Mapping[str, Selection] | None = None,
        dropped: Dropped | None = None,
    ) -> None:
        self._storage = storage
        self._files = files
        self._budget = budget
        self._footers: dict[str, pq.FileMetaData] = {}
        self._selections: dict[str, Selection] = dict(selections or {})
        for file in files:
            needed = self._needed_rows(file) if file.values.get("dt", "") in partial_days else None
            kept = is_kept(dropped or {}, file.path, 0, file.rows or 0)
            if needed is not None or kept is not None:
                chosen = kept if needed is None else needed if kept is None else pc.and_(needed, kept)
                self._selections[file.path] = Selection(None, chosen)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(
            self._selections[file.path].count if file.path in self._selections else file.rows or 0
            for file in self._files
        )

    def rows(self, schema: pa.Schema) -> MemoryRows:
        """Return the rows with the columns of a schema, which are not read yet. A column that a file lacks is NULL in
        its rows."""
        columns = {one.name: (partial(self.column, one.name, one.type), one.type) for one in schema}
        return MemoryRows.with_types(columns, self.count)

    def _needed_rows(self, file: File) -> pa.Array:
        """Return for each event or receipt of a file whether it can affect a neighbouring day."""
        return can_affect_neighbours(self._of_file(file, "ts", pa.int64()), self._of_file(file, "former", pa.bool_()))

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Read a column of all files.

        :raises NotInMemory: the columns exceed the budget, or a file cannot be read.
        """
        parts = [self._of_file(file, name, kind) for file in self._files]
        return pa.concat_arrays(of_one_form(parts)) if parts else pa.array([], kind)

    def _of_file(self, file: File, name: str, kind: pa.DataType) -> pa.Array:
        selection = self._selections.get(file.path)
        rows = (file.rows or 0) if selection is None else selection.count
        if name in file.values:
            found = pa.repeat(pa.scalar(file.values[name], pa.string()).cast(kind), rows)
            self._budget.take(found.nbytes)
            return found.dictionary_encode() if kind in TEXTS else found
        if selection is not None and name in selection.known:
            self._budget.take(column_bytes(pa.chunked_array([selection.known[name]])))
            return selection.known[name]
        try:
            column = self._read(file.path, name, None if selection is None else selection.row_groups)
        except (pa.ArrowInvalid, OSError):
            # The file is damaged. Spark then reads it, and Spark's error names the file.
            raise NotInMemory(f"{file.path} cannot be read") from None
        if column is None:
            return pa.nulls(rows, _TEXTS_ONCE if kind in TEXTS else kind)
        if selection is not None:
            column = column.filter(selection.chosen)
        self._budget.take(column_bytes(column))
        found = column.combine_chunks()
        return with_small_dictionary(found) if kind in TEXTS else plain(found).cast(kind)

    def _read(self, path: str, name: str, row_groups: Sequence[int] | None) -> pa.ChunkedArray | None:
        with self._storage.open_input_file(path) as opened:
            source = pq.ParquetFile(opened, metadata=self._footers.get(path))
            self._footers[path] = source.metadata
            there = source.schema_arrow
            if name not in there.names:
                return None
            wanted = list(range(source.num_row_groups) if row_groups is None else row_groups)
            if there.field(name).type in TEXTS:
                if (size := _plain_bytes(source.metadata, name, wanted)) is None:
                    # With dictionary encoding, each different text is in memory once. So the size of the plain texts
                    # can be counted before the texts are copied for each row.
                    source = pq.ParquetFile(opened, metadata=source.metadata, read_dictionary=[name])
                else:
                    self._budget.check(size)
            return source.read_row_groups(wanted, [name])[name]


def _plain_bytes(footer: pq.FileMetaData, name: str, row_groups: Sequence[int]) -> int | None:
    """Return the size of a text column in memory; None if the file has a dictionary of its texts, and so does not state
    this size."""
    place = next(index for index in range(footer.num_columns) if footer.schema.column(index).path == name)
    groups = [footer.row_group(index).column(place) for index in row_groups]
    if any(one.has_dictionary_page or not {"PLAIN", "RLE"}.issuperset(one.encodings) for one in groups):
        return None
    return int(sum(one.total_uncompressed_size for one in groups))
