"""Search for the events and stored rows that a few new events affect. Needs no Spark.

A table's rows are made from groups of events, such as the events of one transport. A few late events affect few groups.
Arrow reads all events of the affected groups from the files of bronze. The groups' rows are computed from these events
in memory, by the same rules as for a whole day. The new rows then replace the groups' stored rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from dmsg.analytics.data_files import File
from dmsg.analytics.delta import Delta
from dmsg.analytics.file_columns import (
    Budget,
    Dropped,
    FileColumns,
    Selection,
    can_affect_neighbours,
    is_kept,
    with_small_dictionary,
)
from dmsg.analytics.file_hashes import short_hashes
from dmsg.analytics.memory_columns import of_one_form
from dmsg.analytics.memory_rows import MemoryRows
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

    @cached_property
    def _hashes(self) -> list[tuple[int, pa.Array | None]]:
        """Places of the columns that are searched by hashes, and the hashes of their texts. Such a column has the same
        name in all tables."""
        places = [place for place, name in enumerate(self.columns) if name in WITHOUT_DICTIONARY]
        return [(place, short_hashes(self._texts[place])) for place in places]

    @property
    def first_texts(self) -> pa.Array:
        """Different texts in the first of the columns."""
        return self._texts[0]

    def is_in_file(self, table: Delta, path: str) -> bool:
        """Return whether a file of a table may contain a row of one of the groups.

        :raises pyarrow.lib.ArrowInvalid: the file is damaged.
        :raises OSError: the file cannot be read.
        """
        return table.search.texts.can_contain(path, self.columns[0], self.first_texts) and all(
            table.search.hashes.can_contain(path, self.columns[place], hashes) for place, hashes in self._hashes
        )

    def can_contain(self, rows: pa.Table) -> bool:
        """Return whether a row may belong to one of the groups, by the first of the columns alone."""
        return bool(pc.any(_are_in(rows[self.columns[0]].combine_chunks(), self.first_texts)).as_py())

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
        return pc.binary_join_element_wise(*texts, pa.scalar(_SEPARATOR, pa.string()))


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _are_in(column: pa.Array, texts: pa.Array) -> pa.Array:
    """Return for each row of a column whether its text is one of ``texts``."""
    if not pa.types.is_dictionary(column.type):
        return pc.is_in(column.cast(pa.string()), texts)
    return pc.fill_null(pc.is_in(column.dictionary.cast(pa.string()), texts).take(column.indices), False)


def read_events(table: Delta, files: Iterable[File], family: str, dropped: Dropped) -> pa.Table:
    """Return all events of one family in some files, with the columns of :func:`event_schema`.

    :param table: the table bronze.
    :param files: files of bronze with events of the family.
    :param dropped: events to leave out.
    :raises WholeDays: a file cannot be read.
    """
    schema, storage = arrow_schema(event_schema(family)), table.reading_storage()
    found = [schema.empty_table()]
    for file in files:
        with _whole_days_if_damaged(), storage.open_input_file(file.path) as opened:
            source = pq.ParquetFile(opened)
            there = set(source.schema_arrow.names)
            rows = source.read([name for name in schema.names if name in there])
            if (kept := is_kept(dropped, file.path, 0, rows.num_rows)) is not None:
                rows = rows.filter(kept)
            found.append(with_columns(rows, schema, file.values))
    return pa.concat_tables(found)


def find_events(
    table: Delta,
    files: Sequence[File],
    family: str,
    groups: Groups | None,
    budget: Budget,
    partial_days: Container[str] = (),
    dropped: Dropped | None = None,
) -> MemoryRows:
    """Return the events of one family, with the columns of :func:`event_schema`; otherwise as :func:`find_rows`.

    :param table: the table bronze.
    :param files: files of bronze with events of the family.
    :param partial_days: days of which only the events are returned that can affect a neighbouring day; see
        :func:`~dmsg.analytics.file_columns.can_affect_neighbours`.
    :param dropped: events to leave out; None for none.
    :raises WholeDays: there are more than :data:`MAX_AFFECTED_EVENTS` events, or a file cannot be read.
    """
    return find_rows(table, files, event_schema(family), groups, budget, MAX_AFFECTED_EVENTS, partial_days, dropped)


def find_rows(
    table: Delta,
    files: Sequence[File],
    schema: StructType,
    groups: Groups | None,
    budget: Budget,
    most: int,
    partial_days: Container[str] = (),
    dropped: Dropped | None = None,
) -> MemoryRows:
    """Return rows of a table. A column is read when a rule first needs it.

    :param files: files of the table.
    :param schema: the columns of the rows.
    :param groups: return only rows of these groups; None for all rows. Files that have none of the groups by
        :meth:`Groups.is_in_file` are not searched.
    :param budget: number of bytes that the columns may have.
    :param most: maximum number of rows.
    :param partial_days: as for :func:`find_events`. It is used only with groups.
    :param dropped: rows to leave out; None for none.
    :raises WholeDays: there are more than ``most`` rows, or a file cannot be read.
    """
    selections: dict[str, Selection] = {}
    if groups is not None:
        with _whole_days_if_damaged():
            selections = _select(table, files, groups, most, partial_days, dropped or {})
        files = [file for file in files if file.path in selections]
    elif sum(most + 1 if file.rows is None else file.rows for file in files) > most:
        raise WholeDays
    whole_files = None if selections else dropped
    columns = FileColumns(table.reading_storage(), files, budget, selections=selections, dropped=whole_files)
    return columns.rows(arrow_schema(schema))


@contextmanager
def _whole_days_if_damaged() -> Iterator[None]:
    try:
        yield
    except (pa.ArrowInvalid, OSError):
        # A file may be damaged. The caller lets Spark read the whole days then, and Spark's error names the damaged
        # file.
        raise WholeDays from None


def _select(
    table: Delta,
    files: Iterable[File],
    groups: Groups,
    most: int,
    partial_days: Container[str],
    dropped: Dropped,
) -> dict[str, Selection]:
    """Choose the rows of the groups. Return the choices by the paths of the files that contain such rows.

    :raises WholeDays: there are more than ``most`` rows.
    """
    storage = table.reading_storage()
    found: dict[str, Selection] = {}
    count = 0
    for file in files:
        if not groups.is_in_file(table, file.path):
            continue
        with storage.open_input_file(file.path) as opened:
            footer = pq.read_metadata(opened)
            if not set(footer.schema.to_arrow_schema().names).issuperset(groups.columns):
                # The file lacks a column that defines the groups, so none of its events belongs to a group.
                continue
            # Texts of which the file has a dictionary are compared in the dictionary, and not in each row.
            encoded = [name for name in groups.columns if name not in WITHOUT_DICTIONARY]
            source = pq.ParquetFile(opened, metadata=footer, read_dictionary=encoded)
            first = groups.columns[:1]
            numbers, chosen = [], []
            known: dict[str, list[pa.Array]] = {name: [] for name in groups.columns}
            end = 0
            for number in range(source.num_row_groups):
                start, end = end, end + footer.row_group(number).num_rows
                near = _near_midnight(source, number) if file.values["dt"] in partial_days else None
                if near is not None and not pc.any(near).as_py():
                    continue
                if source.num_row_groups > 1 and not groups.can_contain(source.read_row_group(number, first)):
                    # A merged file has several row groups, each with the events of other servers.
                    continue
                keys = source.read_row_group(number, groups.columns)
                belong = groups.contains(keys) if near is None else _contained(groups, keys, near)
                if (kept := is_kept(dropped, file.path, start, end - start)) is not None:
                    belong = pc.and_(belong, kept)
                if affected := pc.sum(belong).as_py() or 0:
                    numbers.append(number)
                    chosen.append(belong)
                    for name, texts in known.items():
                        texts.append(with_small_dictionary(keys[name].combine_chunks().filter(belong)))
                    count += affected
                if count > most:
                    raise WholeDays
        if numbers:
            columns = {name: pa.concat_arrays(of_one_form(texts)) for name, texts in known.items()}
            found[file.path] = Selection(numbers, pa.concat_arrays(chosen), columns)
    return found


def _near_midnight(source: pq.ParquetFile, row_group: int) -> pa.Array:
    """Return for each event or receipt of a row group whether it can affect a neighbouring day."""
    rows = source.read_row_group(row_group, [name for name in ("ts", "former") if name in source.schema_arrow.names])
    former = rows["former"].combine_chunks() if "former" in rows.column_names else None
    return can_affect_neighbours(rows["ts"].combine_chunks(), former)


def _contained(groups: Groups, rows: pa.Table, candidates: pa.Array) -> pa.Array:
    """Return for each row whether it is a candidate and belongs to one of the groups."""
    places = pc.indices_nonzero(candidates).filter(groups.contains(rows.filter(candidates)))
    return pc.is_in(pa.arange(0, rows.num_rows), places.cast(pa.int64()))


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
            columns[one.name] = pa.repeat(pa.scalar(values[one.name], pa.string()), rows.num_rows).cast(one.type)
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
