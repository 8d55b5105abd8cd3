"""Search for the events and stored rows that a few new events affect. Needs no Spark.

A table's rows are made from groups of events, such as the events of one transport. A few late events affect few groups.
Arrow reads all events of the affected groups from the files of bronze. The groups' rows are computed from these events
in memory, by the same rules as for a whole day. The new rows then replace the groups' stored rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.parquet import WITHOUT_DICTIONARY, arrow_schema
from dmsg.analytics.schemas import BRONZE, FAMILIES
from dmsg.telemetry.schema import ENVELOPE, EVENTS

MAX_NEW_EVENTS = 100_000
"""Maximum number of new events with which a run computes only the affected rows. With more events, the run computes
whole days."""
MAX_AFFECTED_EVENTS = 300_000
"""Maximum number of events of the affected groups to read into memory (about 100 MB)."""
MAX_STORED_ROWS = 1_000_000
"""Maximum number of stored rows of a table to read into memory in order to replace some of them (about 200 MB)."""
_SEPARATOR = "\x1f"


class WholeDays(Exception):
    """Error: the affected rows cannot be computed separately, so the run has to compute whole days. Either too many
    rows are affected, or the stored rows lack information that is needed to replace some of them."""


def event_schema(family: str) -> StructType:
    """Return those columns of bronze that the events of a family use."""
    wanted = {field.name for field in ENVELOPE} | {"family", "dt"}
    wanted |= {field.name for event in EVENTS if event.name in FAMILIES[family] for field in event.fields}
    return StructType([one for one in BRONZE.fields if one.name in wanted])


class Groups:
    """Groups of events: the events of a group have the same values in ``columns``.

    :param columns: names of text columns. If there is only one column, an event in which that column is NULL belongs to
        no group.
    :param events: events from which the groups are made: one group for each combination of values in ``columns``.
    :raises WholeDays: there are several columns, and an event has NULL in one of them.
    """

    def __init__(self, columns: Sequence[str], events: Iterable[pa.Table]) -> None:
        self.columns = list(columns)
        parts = list(events)
        found = [self._keys(rows) for rows in parts]
        if len(self.columns) > 1 and any(keys.null_count for keys in found):
            raise WholeDays
        self._wanted = pc.unique(pa.chunked_array(found, pa.string())).drop_null()
        self._texts = [
            pc.unique(pa.chunked_array([one for rows in parts for one in _texts(rows[name]).chunks], pa.string()))
            for name in self.columns
        ]

    def renamed(self, columns: Sequence[str]) -> Groups:
        """Return the same groups for rows in which the columns have other names."""
        found = copy(self)
        found.columns = list(columns)
        return found

    @property
    def first_texts(self) -> pa.Array:
        """Different texts in the first of the columns."""
        return self._texts[0]

    def contains(self, rows: pa.Table) -> pa.Array:
        """Return for each row whether it belongs to one of the groups."""
        if len(self.columns) == 1:
            return _are_in(rows[self.columns[0]].combine_chunks(), self._wanted)
        # To join the texts of all rows is expensive. So each row with a text that occurs in the same column of no group
        # is first dropped, one column after the other.
        left, places = rows.select(self.columns), None
        for name, texts in zip(self.columns, self._texts, strict=True):
            own = pc.indices_nonzero(_are_in(left[name].combine_chunks(), texts))
            if len(own) < left.num_rows:
                left, places = left.take(own), own if places is None else places.take(own)
        belongs = pc.is_in(self._keys(left), self._wanted)
        if places is None:
            return belongs
        return pc.is_in(pa.arange(0, rows.num_rows), places.filter(belongs).cast(pa.int64()))

    def _keys(self, rows: pa.Table) -> pa.Array:
        texts = [_texts(rows[name]).combine_chunks() for name in self.columns]
        if len(texts) == 1:
            return texts[0]
        return pc.binary_join_element_wise(*texts, _SEPARATOR)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _are_in(column: pa.Array, texts: pa.Array) -> pa.Array:
    """Return for each row of a column whether its text is one of ``texts``."""
    if not pa.types.is_dictionary(column.type):
        return pc.is_in(column.cast(pa.string()), texts)
    return pc.fill_null(pc.is_in(column.dictionary.cast(pa.string()), texts).take(column.indices), False)


def read_events(
    table: Delta,
    files: Iterable[File],
    family: str,
    groups: Groups | None = None,
    most: int = MAX_AFFECTED_EVENTS,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return the events of one family, with the columns of :func:`event_schema`.

    :param table: the table bronze.
    :param files: files of bronze with events of the family.
    :param groups: return only events of these groups; None for all events. Files in which the first column of the
        groups has none of the groups' texts are not searched.
    :param most: maximum number of events to return.
    :param columns: return only these of the columns; None for all.
    :raises WholeDays: there are more than ``most`` events, or a file cannot be read.
    """
    schema = arrow_schema(event_schema(family))
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    try:
        return _read_events(table, files, schema, groups, most)
    except (pa.ArrowInvalid, OSError):
        # A file may be damaged. The caller lets Spark read the whole days then, and Spark's error names the damaged
        # file.
        raise WholeDays from None


def _read_events(table: Delta, files: Iterable[File], schema: pa.Schema, groups: Groups | None, most: int) -> pa.Table:
    storage = table.reading_storage()
    found, count = [schema.empty_table()], 0
    for file in files:
        if groups is not None and not table.texts.can_contain(file.path, groups.columns[0], groups.first_texts):
            continue
        with storage.open_input_file(file.path) as opened:
            footer = pq.read_metadata(opened)
            there = set(footer.schema.to_arrow_schema().names)
            names = [name for name in schema.names if name in there]
            if groups is not None and not there.issuperset(groups.columns):
                # The file lacks a column that defines the groups, so none of its events belongs to a group.
                continue
            # Texts of which the file has a dictionary are compared in the dictionary, and not in each row.
            encoded = [] if groups is None else [name for name in groups.columns if name not in WITHOUT_DICTIONARY]
            source = pq.ParquetFile(opened, metadata=footer, read_dictionary=encoded)
            for group in range(source.num_row_groups):
                if groups is not None:
                    keep = groups.contains(source.read_row_group(group, groups.columns))
                    affected = pc.sum(keep).as_py() or 0
                else:
                    keep, affected = None, source.metadata.row_group(group).num_rows
                count += affected
                if count > most:
                    raise WholeDays
                if affected:
                    rows = source.read_row_group(group, names)
                    found.append(with_columns(rows if keep is None else rows.filter(keep), schema, file.values))
    return pa.concat_tables(found)


def with_columns(rows: pa.Table, schema: pa.Schema, values: Mapping[str, str], *, lacking: bool = True) -> pa.Table:
    """Convert the rows of a data file to the columns and types of its table.

    :param values: values of the partition columns, which are not in the file.
    :param lacking: whether to add each column that the file lacks, with NULL in all rows.
    """
    columns = {}
    for one in schema:
        if one.name in rows.column_names:
            columns[one.name] = rows[one.name].cast(one.type)
        elif one.name in values:
            columns[one.name] = pa.repeat(pa.scalar(values[one.name]), rows.num_rows).cast(one.type)
        elif lacking:
            columns[one.name] = pa.nulls(rows.num_rows, one.type)
    return pa.table(columns, pa.schema([one for one in schema if one.name in columns]))


class Subtraction:
    """Search for stored rows that equal given rows. Each given row matches at most one stored row, so a row that is
    given twice matches two equal stored rows.

    :param rows: the rows to find.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows.combine_chunks()
        self._left: dict[str, int] = {}
        for row in rows.to_pylist():
            text = repr(row)
            self._left[text] = self._left.get(text, 0) + 1

    @property
    def is_complete(self) -> bool:
        """Whether all given rows were found."""
        return not any(self._left.values())

    def find(self, stored: pa.Table) -> pa.Array:
        """Return for each stored row whether it matches a given row. Each given row matches at most one stored row."""
        stored = stored.combine_chunks()
        # Comparing whole rows is expensive. So a filter first drops each stored row with an integer that does not occur
        # in the same column of the given rows. Only the others are compared as a whole.
        alike = pa.array([True] * stored.num_rows, pa.bool_())
        for one in stored.schema:
            if pa.types.is_int64(one.type):
                wanted = self._rows[one.name].combine_chunks()
                alike = pc.and_(alike, pc.is_in(stored[one.name].combine_chunks(), wanted))
        places = pc.indices_nonzero(alike)
        found = []
        for place, row in zip(places.to_pylist(), stored.take(places).to_pylist(), strict=True):
            text = repr(row)
            if self._left.get(text):
                self._left[text] -= 1
                found.append(place)
        return pc.is_in(pa.array(range(stored.num_rows), pa.int64()), pa.array(found, pa.int64()))
