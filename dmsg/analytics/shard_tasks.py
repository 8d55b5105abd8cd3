"""Tasks of Spark that compute the tables of large days by columns, with Arrow.

The servers are divided into *shards*.  A first task reads files of bronze, and divides their rows by shard and day.
After Spark's shuffle, a second task has all rows of one shard and day.  It computes the tables by the same rules as a
run in memory, and writes their rows to Parquet files.  This works for tables whose rows depend only on the events and
receipts of one server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from dmsg.analytics import functions as F, silver
from dmsg.analytics.changes import days_around
from dmsg.analytics.data_files import File
from dmsg.analytics.executors import prepare_worker
from dmsg.analytics.expressions import Expression
from dmsg.analytics.file_columns import Dropped, can_affect_neighbours, is_kept
from dmsg.analytics.file_texts import server_column
from dmsg.analytics.memory_columns import NotInMemory
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.memory_tables import OF_EVENTS, as_frame, as_rows, rows_of_table
from dmsg.analytics.parquet import TEXTS, WITHOUT_DICTIONARY, Part, arrow_schema, column_bytes, write_part
from dmsg.analytics.rewrites import in_files
from dmsg.analytics.schemas import BRONZE, GOLD, OF_TRANSPORTS, SILVER
from dmsg.analytics.table_plans import daily_tables, silver_tables
from dmsg.analytics.views import VIEWS

PIECE_ROWS = 4096
"""Maximum number of rows that one element of the shuffle contains.  Spark's Python worker collects up to 1,000 elements
in memory."""
_COUNTS = tuple(f"{kind}_{way}" for kind in ("data", "frames", "acks", "total", "dropped") for way in ("ab", "ba"))
_COLUMNS = {
    "transport": (
        *("producer", "boot", "ts", "type", "transport", "src", "dst", "reason", "by"),
        *("accept_ms", "accept_us", "rtt", *_COUNTS),
    ),
    "receipt": (
        *("server", "ts", "transport", "signer", "partner", "initiator", "delivered_out", "delivered_in"),
        *("former", "peer", "reason"),
    ),
    "refusal": ("producer", "ts", "type", "src", "source", "reason", "n", "targets"),
    "entry": ("producer", "ts", "subject", "is_server", "result", "sequence", "available", "delegated", "clock_ms"),
}
"""Columns of bronze that the tables are computed from, by family of events."""
FAMILIES_OF = {
    **dict.fromkeys(("verdicts", "unfinished", "settlement_day", "settlement_conflict_day"), OF_TRANSPORTS),
    **dict.fromkeys(("traffic_hour", "close_day", "pair_day", "latency_hour"), ("transport",)),
    "abuse_day": ("transport", "refusal", "entry"),
}
"""Families of events from which the tables are computed, by table.  The tables are in the order in which they are
computed, because some of them are computed from verdicts."""
_FIELDS = {one.name: one for one in arrow_schema(BRONZE)}
_DICTIONARY = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class Job:
    """Description of a computation.

    :ivar root: local directory of all tables.
    :ivar directory: directory below each table to which the tasks write.
    :ivar shards: number of shards.
    :ivar days: days to compute, by table.
    :ivar last_day: the last of all days with events.
    :ivar most_rows: maximum number of rows of a family of events in one task.
    :ivar most_bytes: maximum number of bytes of all columns in one task.
    :ivar dropped: rows of bronze to leave out, because they are copies of other events.
    :ivar returned_rows: maximum number of rows of a table that a task returns instead of writing them to a file; None
        for any number. By table.
    """

    root: str
    directory: str
    shards: int
    days: Mapping[str, tuple[str, ...]]
    last_day: str
    most_rows: int
    most_bytes: int
    dropped: Dropped
    returned_rows: Mapping[str, int | None]

    @property
    def all_days(self) -> tuple[str, ...]:
        """Days on which at least one table is computed, in ascending order."""
        return tuple(sorted({day for some in self.days.values() for day in some}))

    @property
    def targets(self) -> int:
        """Number of pairs of a day and a shard."""
        return self.shards * len(self.all_days)


@dataclass(frozen=True)
class ShardRows:
    """Rows of one table that a task has computed.

    :ivar parts: files with the rows.
    :ivar rows: the rows themselves, if they are few; else None.
    """

    name: str
    day: str
    parts: tuple[Part, ...]
    rows: pa.Table | None


@dataclass(frozen=True)
class TooLarge:
    """Shard and day with too many rows for the memory of a task."""

    day: str
    shard: int


Piece = tuple[int, tuple[str, str, bytes]]
"""Element of the shuffle: the number of the target, and some rows for it: the family of events, the day of the events,
and the rows in Arrow's IPC format."""


def shard_of(column: str, count: int) -> Expression:
    """Return the number of the shard to which the server in a column belongs."""
    return ((F.xxhash64(column) % count) + count) % count


# --- division by shards ---


def divide_files(job: Job, groups: Iterable[Sequence[File]]) -> Iterator[Piece]:
    """Read files of bronze, and divide their rows by shard and day.

    :raises NotInMemory: the columns of a file are too large for memory.
    """
    prepare_worker()
    storage = bronze_storage(job.root)
    numbers = {day: number for number, day in enumerate(job.all_days)}
    for file in (file for files in groups for file in files):
        family, day = file.values["family"], file.values["dt"]
        neighbours = set(days_around([day])) - {day} if family in OF_TRANSPORTS else ()
        around = [number for one, number in numbers.items() if one in neighbours]
        end = 0
        for found in read_columns(storage, file, _COLUMNS[family], job.most_bytes):
            start, end = end, end + found.num_rows
            kept = is_kept(job.dropped, file.path, start, found.num_rows)
            rows = found if kept is None else found.filter(kept)
            if day in numbers:
                yield from _divide(job, numbers[day], rows, family, day)
            if around:
                former = rows["former"] if "former" in rows.column_names else None
                near = rows.filter(can_affect_neighbours(rows["ts"], former))
                for number in around:
                    yield from _divide(job, number, near, family, day)


def bronze_storage(root: str) -> pafs.FileSystem:
    """Return the file system of the table bronze.

    :param root: local directory of all tables.
    """
    return pafs.SubTreeFileSystem(f"{root}/bronze", pafs.LocalFileSystem())


def read_columns(storage: pafs.FileSystem, file: File, wanted: Sequence[str], most_bytes: int) -> Iterator[pa.Table]:
    """Return columns of a file of bronze, one row group at a time. Nearly all texts are dictionary-encoded.

    :param most_bytes: maximum number of bytes of the columns of a row group.
    :raises NotInMemory: a row group is larger.
    """
    with storage.open_input_file(file.path) as opened:
        footer = pq.read_metadata(opened)
        there = set(footer.schema.to_arrow_schema().names)
        names = [name for name in wanted if name in there]
        texts = [name for name in names if _FIELDS[name].type in TEXTS and name not in WITHOUT_DICTIONARY]
        source = pq.ParquetFile(opened, metadata=footer, read_dictionary=texts)
        paths = [footer.schema.column(place).path for place in range(footer.num_columns)]
        places = [place for place, path in enumerate(paths) if path.partition(".")[0] in names]
        for group in range(footer.num_row_groups):
            if sum(footer.row_group(group).column(place).total_uncompressed_size for place in places) > most_bytes:
                raise NotInMemory("the columns of a file are too large for memory")
            rows = source.read_row_group(group, names)
            yield pa.table({name: _of_one_form(rows[name], name) for name in names})


def _of_one_form(column: pa.ChunkedArray, name: str) -> pa.Array:
    values = column.combine_chunks()
    if name in WITHOUT_DICTIONARY:
        return values.cast(pa.string())
    if _FIELDS[name].type in TEXTS:
        return values if values.type == _DICTIONARY else values.cast(pa.string()).dictionary_encode()
    return values.cast(_FIELDS[name].type)


def _divide(job: Job, number: int, rows: pa.Table, family: str, day: str) -> Iterator[Piece]:
    """Divide rows by shard.

    :param number: number of the day for which the rows are needed.
    """
    if not rows.num_rows:
        return
    server = server_column(family)
    if server in rows.column_names:
        # Few servers have many rows, so only the texts of the dictionary are hashed.
        column = rows[server].combine_chunks()
        texts = MemoryRows.of(pa.table({server: column.dictionary}))
        places = pc.fill_null(column.indices, len(column.dictionary))
        hashes = pa.concat_arrays([texts.values(shard_of(server, job.shards)), _shard_of_nothing(job.shards)])
        shards = hashes.take(places)
    else:
        shards = pa.repeat(_shard_of_nothing(job.shards)[0], rows.num_rows)
    order = pc.sort_indices(shards)
    rows, shards = rows.take(order), shards.take(order)
    counts = pc.value_counts(shards)
    start = 0
    for shard, count in zip(counts.field(0).to_pylist(), counts.field(1).to_pylist(), strict=True):
        for place in range(start, start + count, PIECE_ROWS):
            piece = rows.slice(place, min(PIECE_ROWS, start + count - place))
            yield number * job.shards + shard, (family, day, pack(piece))
        start += count


def _shard_of_nothing(count: int) -> pa.Array:
    nothing = MemoryRows.of(pa.table({"server": pa.nulls(1, pa.string())}))
    return nothing.values(shard_of("server", count))


def pack(rows: pa.Table) -> bytes:
    """Return rows in Arrow's IPC format, without columns that are NULL in all rows. Each dictionary contains only the
    texts of these rows."""
    columns = {}
    for name in rows.column_names:
        values = rows[name].combine_chunks()
        if values.null_count == len(values):
            continue
        if pa.types.is_dictionary(values.type):
            used = values.indices.dictionary_encode()
            values = pa.DictionaryArray.from_arrays(used.indices, values.dictionary.take(used.dictionary))
        columns[name] = values
    batch = pa.record_batch(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def unpack(packed: bytes) -> pa.Table:
    """Return the rows that :func:`pack` has packed."""
    return pa.ipc.open_stream(packed).read_all()


def rows_as_read(table: pa.Table) -> MemoryRows:
    """Return the rows of a table. Their texts stay dictionary-encoded."""
    return MemoryRows({name: partial(_column, table, name) for name in table.column_names}, table.num_rows)


# --- computation of a shard ---


class _Shard:
    """Rows of one shard that are needed for one day.

    :raises NotInMemory: there are too many of them.
    """

    def __init__(self, job: Job, day: str, pieces: Iterable[Piece]) -> None:
        self._day = day
        self._computed: dict[str, pa.Table] = {}
        found: dict[tuple[str, str], list[pa.Table]] = {}
        counts: dict[str, int] = {}
        for _, (family, of_day, packed) in pieces:
            rows = unpack(packed)
            counts[family] = counts.get(family, 0) + rows.num_rows
            if counts[family] > job.most_rows:
                raise NotInMemory("the shard has too many rows")
            found.setdefault((family, of_day), []).append(rows)
        left = job.most_bytes
        self._tables: dict[tuple[str, str], pa.Table] = {}
        while found:
            key, tables = found.popitem()
            table = pa.concat_tables(tables, promote_options="default").unify_dictionaries().combine_chunks()
            left -= sum(map(column_bytes, table.columns))
            if left < 0:
                raise NotInMemory("the columns of the shard are too large")
            self._tables[key] = table

    def _events(self, family: str, *, around: bool) -> DataFrame:
        parts = [
            _rows(table, family, day)
            for (of_family, day), table in self._tables.items()
            if of_family == family and (around or day == self._day)
        ]
        if not parts:
            parts = [_rows(pa.table({}), family, self._day)]
        return as_frame(parts[0].unionByName(*parts[1:]) if len(parts) > 1 else parts[0])

    def read(self, name: str) -> DataFrame:
        """Return the rows of a table on the day."""
        if (computed := self._computed.get(name)) is not None:
            return rows_of_table(computed, {**SILVER, **GOLD}[name].schema)
        return OF_EVENTS[name](self.events(VIEWS[name].family))

    def around(self, name: str) -> DataFrame:
        """Return the rows of a table on the day, and those near midnight of the day before and the day after."""
        return OF_EVENTS[name](self._events(VIEWS[name].family, around=True))

    def events(self, family: str) -> DataFrame:
        """Return the events of a family on the day."""
        return self._events(family, around=False)

    def accepted(self, *, around: bool) -> DataFrame:
        """Return the accepted receipts."""
        return silver.accepted_receipts(self._events("receipt", around=around))

    def compute(self, name: str, last_day: str) -> pa.Table:
        """Return the rows of a table on the day."""
        plans = {
            **silver_tables(
                *(self.events, self.read, self.around, (self._day,)),
                accepted=partial(self.accepted, around=True),
                last_day=date.fromisoformat(last_day),
                accepted_on_days=partial(self.accepted, around=False),
            ),
            **daily_tables(self.read, self.around, accepted=partial(self.accepted, around=True)),
        }
        found = self._computed[name] = as_rows(plans[name]()).table({**SILVER, **GOLD}[name].schema)
        return found


def _rows(table: pa.Table, family: str, day: str) -> MemoryRows:
    """Return events. Their texts stay dictionary-encoded."""
    count = table.num_rows
    columns: dict[str, Any] = {"dt": partial(_repeated, day, count), **rows_as_read(table).getters}
    for name in _COLUMNS[family]:
        if name not in columns:
            kind = _FIELDS[name].type
            columns[name] = partial(
                pa.nulls, count, _DICTIONARY if kind in TEXTS and name not in WITHOUT_DICTIONARY else kind
            )
    # The rules name all columns of a family, but the tables of this module use only those above.
    for name, field in _FIELDS.items():
        columns.setdefault(name, partial(_refuse, name, field.type))
    return MemoryRows(columns, count)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _repeated(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), count), pa.array([text]))


def _refuse(name: str, kind: pa.DataType) -> pa.Array:
    raise NotInMemory(f"the column {name} was not read")


def compute_shard(job: Job, target: int, pieces: Iterable[Piece]) -> Iterator[ShardRows | TooLarge]:
    """Compute the tables of one shard and day.

    :param target: number of the pair of day and shard.
    """
    prepare_worker()
    pieces = iter(pieces)
    day = job.all_days[target // job.shards]
    try:
        shard = _Shard(job, day, pieces)
        for name in FAMILIES_OF:
            if day in job.days.get(name, ()):
                yield _store(job, name, day, shard.compute(name, job.last_day))
    except NotInMemory:
        # Spark's worker requires that all elements are read.
        for _ in pieces:
            pass
        yield TooLarge(day, target % job.shards)


def _store(job: Job, name: str, day: str, rows: pa.Table) -> ShardRows:
    """Write rows to files, or return them if they are few."""
    limit = job.returned_rows[name]
    if limit is None or rows.num_rows <= limit:
        return ShardRows(name, day, (), rows)
    table = f"{job.root}/{'gold' if name in GOLD else 'silver'}/{name}"
    os.makedirs(f"{table}/{job.directory}/dt={day}", exist_ok=True)
    storage = pafs.SubTreeFileSystem(table, pafs.LocalFileSystem())
    parts = [write_part(storage, one.drop_columns(["dt"]), job.directory, {"dt": day}) for one in in_files([rows])]
    return ShardRows(name, day, tuple(parts), None)
