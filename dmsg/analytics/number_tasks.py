"""Tasks of Spark that count the numbers of events on large days by columns, with Arrow.

First tasks count the events of files by process, day and bucket of numbers, and second tasks add these counts up. Only
for buckets in which numbers are missing or occur twice, further tasks read the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from dmsg.analytics import bronze, functions as F
from dmsg.analytics.data_files import File
from dmsg.analytics.executors import prepare_worker
from dmsg.analytics.memory_rows import MemoryRows
from dmsg.analytics.memory_tables import as_frame, as_rows, rows_of_table
from dmsg.analytics.parquet import arrow_schema
from dmsg.analytics.schemas import Table
from dmsg.analytics.shard_tasks import (
    bronze_storage,
    pack,
    read_columns,
    rows_as_read,
    shard_of,
    unpack,
)
from dmsg.analytics.store import NUMBERS, SUMS

_KEYS = ["producer", "boot", "dt", "bucket"]
_EVENT = ("producer", "boot", "seq", "ts", "mono")
_SUMS = arrow_schema(SUMS.schema)
Packed = tuple[int, bytes]
"""Element of the shuffle: the number of a partition, and rows for it in Arrow's IPC format."""


@dataclass(frozen=True)
class NumberJob:
    """Description of a computation.

    :ivar root: local directory of all tables.
    :ivar partitions: number of tasks among which the results of the first tasks are divided.
    :ivar most_bytes: maximum number of bytes of the columns of a row group.
    :ivar incomplete: rows of the table ``sums`` of the buckets whose numbers are read; empty for the first counts.
    """

    root: str
    partitions: int
    most_bytes: int
    incomplete: pa.Table


def sum_files(job: NumberJob, groups: Iterable[Sequence[File]]) -> Iterator[Packed]:
    """Count the events of files, and divide the counts by producer."""
    prepare_worker()
    storage = bronze_storage(job.root)
    found = [
        as_rows(bronze.sums(_events(rows, file))).table(SUMS.schema)
        for files in groups
        for file in files
        for rows in read_columns(storage, file, _EVENT, job.most_bytes)
    ]
    sums = _added_up(found)
    of_partition = as_rows(rows_of_table(sums, SUMS.schema)).values(shard_of("producer", job.partitions))
    for partition in pc.unique(of_partition).to_pylist():
        yield partition, pack(sums.filter(pc.equal(of_partition, partition)))


def add_sums(job: NumberJob, partition: int, pieces: Iterable[Packed]) -> Iterator[pa.Table]:
    """Add up the counts of several files; the results are rows of the table ``sums``."""
    prepare_worker()
    yield _added_up([_whole(unpack(rows), SUMS) for _, rows in pieces])


def _added_up(sums: Sequence[pa.Table]) -> pa.Table:
    every = rows_of_table(pa.concat_tables([_SUMS.empty_table(), *sums]), SUMS.schema)
    return as_rows(bronze.add_sums(every, rows_of_table(_SUMS.empty_table(), SUMS.schema))).table(SUMS.schema)


def select_numbers(job: NumberJob, groups: Iterable[Sequence[File]]) -> Iterator[Packed]:
    """Read the events of incomplete buckets from files, and divide them by bucket."""
    prepare_worker()
    storage = bronze_storage(job.root)
    place = pa.array([row % job.partitions for row in range(job.incomplete.num_rows)], pa.int64())
    buckets = as_frame(MemoryRows.of(job.incomplete.select(_KEYS).append_column("place", place)))
    producers = pc.unique(job.incomplete["producer"])
    for file in (file for files in groups for file in files):
        names = (one["producer"].combine_chunks() for one in read_columns(storage, file, ("producer",), job.most_bytes))
        if not any(pc.any(pc.is_in(one.dictionary, producers)).as_py() for one in names):
            # Most files contain no event of these producers.
            continue
        for rows in read_columns(storage, file, ("producer", "boot", "seq"), job.most_bytes):
            events = _events(rows, file).withColumn("bucket", F.floor(F.col("seq") / bronze.BUCKET_SIZE))
            kept = as_rows(events.join(buckets, _KEYS))
            table = pa.table({name: kept.column(name) for name in ("producer", "boot", "dt", "seq")})
            of_partition = kept.column("place")
            for partition in pc.unique(of_partition).to_pylist():
                yield partition, pack(table.filter(pc.equal(of_partition, partition)))


def count_numbers(job: NumberJob, partition: int, pieces: Iterable[Packed]) -> Iterator[pa.Table]:
    """Count the different numbers of some incomplete buckets; the results are rows of the table ``numbers``."""
    prepare_worker()
    events = [unpack(rows) for _, rows in pieces]
    if events:
        own = job.incomplete.take(pa.array(range(partition, job.incomplete.num_rows, job.partitions), pa.int64()))
        rows = as_frame(MemoryRows.of(pa.concat_tables(events)))
        yield as_rows(bronze.numbers(rows_of_table(own, SUMS.schema), rows)).table(NUMBERS.schema)


def _events(rows: pa.Table, file: File) -> DataFrame:
    """Return the rows of a file, with the day as a date."""
    day = pa.scalar(date.fromisoformat(file.values["dt"]), pa.date32())
    return as_frame(rows_as_read(rows.append_column("dt", pa.repeat(day, rows.num_rows))))


def _whole(rows: pa.Table, table: Table) -> pa.Table:
    """Return rows with all columns of a table. :func:`pack` leaves out columns that are NULL in all rows."""
    return as_rows(rows_of_table(rows, table.schema)).table(table.schema)
