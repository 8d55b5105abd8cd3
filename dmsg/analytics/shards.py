"""Control of the tasks of Spark that compute the tables of large days: choice of shards, start of tasks, results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from dmsg.analytics import bronze, memory_tables
from dmsg.analytics.changes import Changes, days_around
from dmsg.analytics.data_files import File, run_directory
from dmsg.analytics.executors import ExecutorsFailed, collect, divide_evenly
from dmsg.analytics.file_columns import Dropped
from dmsg.analytics.lake import Lake
from dmsg.analytics.memory_tables import as_rows, rows_of_table
from dmsg.analytics.number_tasks import NumberJob, add_sums, count_numbers, select_numbers, sum_files
from dmsg.analytics.parquet import Part, arrow_schema
from dmsg.analytics.runs import State
from dmsg.analytics.schemas import FAMILIES, OF_TRANSPORTS
from dmsg.analytics.session import is_connect
from dmsg.analytics.shard_tasks import FAMILIES_OF, Job, TooLarge, compute_shard, divide_files, shard_of
from dmsg.analytics.store import NUMBERS, SUMS
from dmsg.analytics.views import VIEWS

SHARD_ROWS = 500_000
"""Approximate number of events or receipts of one shard and day. A task holds these rows in memory."""
LARGE_ROWS = 1_000_000
"""Minimum number of events and receipts of the days to compute for which a cluster computes tables by shards. With
fewer, the start of the Python workers takes longer than Spark's own plans."""
SUMMED_ROWS = 50_000_000
"""Number of events whose counts by process and bucket one task adds up."""
INCOMPLETE_BUCKETS = 10_000
"""Maximum number of buckets with missing or repeated event numbers whose numbers tasks count with Arrow. With more,
Spark counts them."""
FILE_GROUP_ROWS = 1_000_000
"""Number of rows of the files that one task divides by shards."""
_FROM_VERDICTS = ("unfinished", "settlement_day", "settlement_conflict_day")
"""Tables that are computed from verdicts."""
_log = logging.getLogger(__name__)


@dataclass
class Sharded:
    """Rows of one table that tasks have computed.

    :ivar shards: number of shards.
    :ivar too_large: shards that have too many rows for the memory of a task, by day. Their rows are missing.
    :ivar parts: files with rows.
    :ivar rows: further rows.
    """

    shards: int
    too_large: Mapping[str, Sequence[int]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    rows: list[pa.Table] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """Result of a computation.

    :ivar tables: rows by table and day.
    :ivar too_large: shards that have too many rows for memory, by day.
    """

    tables: Mapping[tuple[str, str], Sharded]
    too_large: Mapping[str, Sequence[int]]


def run_tasks(
    spark: Callable[[], SparkSession],
    files: Sequence[File],
    divide: Callable[[Iterable[Sequence[File]]], Iterable[tuple[int, Any]]],
    partitions: int,
    compute: Callable[[int, Iterable[tuple[int, Any]]], Iterable[Any]],
) -> list[Any] | None:
    """Run functions in Spark's tasks.

    :param files: files to divide among the first tasks.
    :param divide: function of the first tasks. It gets groups of files, and returns elements with the numbers of their
        partitions.
    :param partitions: number of the second tasks.
    :param compute: function of the second tasks. It gets the number of a partition, and the partition's elements.
    :returns: results of the second tasks; None if the executors cannot run the functions.
    """
    session = spark()
    if is_connect(session):
        return None
    context = session.sparkContext
    count = max(context.defaultParallelism, sum(map(_row_count, files)) // FILE_GROUP_ROWS)
    groups = divide_evenly(files, _row_count, count)
    try:
        pieces = context.parallelize(groups, len(groups)).mapPartitions(divide)
        return collect(pieces.partitionBy(partitions, int).mapPartitionsWithIndex(compute))
    except ExecutorsFailed as error:
        _log.warning("executors cannot compute tables with Arrow, so Spark does: %s", error)
        return None


def run_job(spark: Callable[[], SparkSession], job: Job, files: Sequence[File]) -> Result | None:
    """Compute tables in Spark's tasks.

    :param files: files of bronze with the events of the days to compute and of the days around them.
    :returns: None if the executors cannot compute the tables.
    """
    found = run_tasks(spark, files, partial(divide_files, job), job.targets, partial(compute_shard, job))
    if found is None:
        return None
    tables: dict[tuple[str, str], Sharded] = {}
    too_large: dict[str, list[int]] = {}
    for one in found:
        if isinstance(one, TooLarge):
            too_large.setdefault(one.day, []).append(one.shard)
        else:
            of_table = tables.setdefault((one.name, one.day), Sharded(job.shards))
            of_table.parts += one.parts
            if one.rows is not None:
                of_table.rows.append(one.rows)
    return Result(tables, too_large)


def _row_count(file: File) -> int:
    return file.rows or 0


def _rows_by_family_and_day(files: Iterable[File]) -> Counter[tuple[str, str]]:
    """Return the numbers of rows of files of bronze."""
    counts: Counter[tuple[str, str]] = Counter()
    for file in files:
        counts[file.values["family"], file.values["dt"]] += _row_count(file)
    return counts


class LargeDays:
    """Tables of one run that are computed by shards, because the days have too many events for memory.

    :param changes: days on which the inputs of each table have changed.
    :param number: number of the run.
    :param returned_rows: as for :class:`~dmsg.analytics.shard_tasks.Job`, for all shards of a day together.
    """

    def __init__(
        self, lake: Lake, state: State, changes: Changes, number: int, returned_rows: Mapping[str, int | None]
    ) -> None:
        self._lake = lake
        self._state = state
        self._changes = changes
        self._number = number
        self._returned_rows = returned_rows
        self._dropped: Dropped | None = None
        self._results: dict[str, tuple[Job, Result] | None] = {}
        self._computing = Lock()

    @classmethod
    def are_needed(cls, lake: Lake, days: Iterable[str], *, memory: bool, always: bool = False) -> bool:
        """Whether tables have to be computed by shards.

        :param memory: whether the run computes tables in its own memory if they fit.
        :param always: whether to compute them by shards however few events there are.
        """
        if not lake.local:
            return False
        chosen = set(days)
        counts = _rows_by_family_and_day(
            file
            for file in lake.table("", "bronze").files()
            if file.values["family"] in OF_TRANSPORTS and file.values["dt"] in chosen
        )
        if always:
            return bool(counts)
        if memory:
            return max(counts.values(), default=0) > memory_tables.MEMORY_ROWS
        return sum(counts.values()) >= LARGE_ROWS

    def leave_out(self, dropped: Dropped) -> None:
        """Leave out copies of events when tables are computed.

        :param dropped: the copies on the days of the run and on the days around them.
        """
        self._dropped = dropped

    def numbers(self, days: Iterable[str]) -> tuple[pa.Table, pa.Table] | None:
        """Return the rows of the tables of event numbers for these days; None if Spark has to compute them."""
        chosen = set(days)
        files = [
            file
            for file in self._lake.table("", "bronze").files()
            if file.values["family"] in FAMILIES and file.values["dt"] in chosen
        ]
        count = sum(map(_row_count, files))
        schema = arrow_schema(SUMS.schema)
        job = NumberJob(self._lake.root, max(1, count // SUMMED_ROWS), memory_tables.MEMORY_BYTES, schema.empty_table())
        found = run_tasks(
            lambda: self._lake.spark, files, partial(sum_files, job), job.partitions, partial(add_sums, job)
        )
        if found is None:
            return None
        sums = pa.concat_tables([schema.empty_table(), *found])
        rows = rows_of_table(sums, SUMS.schema)
        incomplete = as_rows(bronze.incomplete_sums(rows)).table(SUMS.schema)
        numbers = as_rows(bronze.numbers(rows, None)).table(NUMBERS.schema)
        if not incomplete.num_rows:
            return sums, numbers
        if incomplete.num_rows > INCOMPLETE_BUCKETS or pc.max(incomplete["events"]).as_py() > memory_tables.MEMORY_ROWS:
            return None
        partitions = min(incomplete.num_rows, 1 + pc.sum(incomplete["events"]).as_py() // SHARD_ROWS)
        job = replace(job, partitions=partitions, incomplete=incomplete)
        found = run_tasks(
            lambda: self._lake.spark, files, partial(select_numbers, job), partitions, partial(count_numbers, job)
        )
        if found is None:
            return None
        keys = ["producer", "boot", "dt", "bucket"]
        complete = rows_of_table(numbers, NUMBERS.schema).join(
            rows_of_table(incomplete, SUMS.schema), keys, "left_anti"
        )
        return sums, pa.concat_tables([as_rows(complete).table(NUMBERS.schema), *found])

    def rows(self, name: str, days: Sequence[str], *, alone: bool) -> Sharded | None:
        """Return the rows of a table for these days; None if they cannot be computed by shards.

        :param alone: whether only this table is needed, and tables that are computed from it. Otherwise all tables are
            computed at once, and later calls return their rows.
        """
        if name not in FAMILIES_OF:
            return None
        with self._computing:
            if name not in self._results:
                self._compute(name, days, alone=alone)
            found = self._results[name]
        if found is None:
            return None
        job, result = found
        if not set(days).issubset(job.days[name]):
            return None
        too_large = {day: tuple(shards) for day, shards in result.too_large.items() if day in days}
        sharded = Sharded(job.shards, too_large)
        for day in days:
            if (of_day := result.tables.get((name, day))) is not None:
                sharded.parts += of_day.parts
                sharded.rows += of_day.rows
        return sharded

    def _compute(self, name: str, days: Sequence[str], *, alone: bool) -> None:
        if name in _FROM_VERDICTS:
            # The verdicts were computed otherwise, and Spark reads them.
            self._results[name] = None
            return
        names = [name, *(_FROM_VERDICTS if name == "verdicts" else ())] if alone else list(FAMILIES_OF)
        verdict_days = self._changes.days_of("verdicts")
        wanted = {}
        for one in names:
            of_table = set(days) if one == name else set(self._changes.days_of(one))
            wanted[one] = tuple(sorted(of_table.union(verdict_days if one in _FROM_VERDICTS else ())))
        found = self._run(wanted)
        for one in names:
            self._results[one] = found

    def _run(self, days: Mapping[str, tuple[str, ...]]) -> tuple[Job, Result] | None:
        every = {day for some in days.values() for day in some}
        around = set(days_around(every))
        for view in VIEWS:
            # The rows of a view are stored for days on which events arrived twice. If the copies to leave out are not
            # known, only Spark can read the stored rows.
            if self._dropped is None and not self._lake.stored_days(view, self._state).isdisjoint(around):
                return None
        wanted: dict[str, set[str]] = {}
        for name, some in days.items():
            for family in FAMILIES_OF[name]:
                wanted.setdefault(family, set()).update(days_around(some) if family in OF_TRANSPORTS else some)
        files = [
            file
            for file in self._lake.table("", "bronze").files()
            if file.values["dt"] in wanted.get(file.values["family"], ())
        ]
        counts = _rows_by_family_and_day(files)
        dropped = self._dropped or {}
        most_rows = memory_tables.MEMORY_ROWS
        of_shard = max(1, min(SHARD_ROWS, most_rows // 2))
        shards = -(-max((count for (_, day), count in counts.items() if day in every), default=1) // of_shard)
        job = Job(
            root=self._lake.root,
            directory=run_directory(str(self._number)) + token_hex(4),
            shards=shards,
            days=days,
            last_day=max(self._state.days),
            most_rows=most_rows,
            most_bytes=memory_tables.MEMORY_BYTES,
            dropped={file.path: dropped[file.path] for file in files if file.path in dropped},
            returned_rows={
                name: None if limit is None else limit // shards for name, limit in self._returned_rows.items()
            },
        )
        result = run_job(lambda: self._lake.spark, job, files)
        return None if result is None else (job, result)


def only_shards(rows: DataFrame, shards: Sequence[int], count: int) -> DataFrame:
    """Return the rows of some shards.

    :param shards: numbers of the shards.
    :param count: number of all shards.
    """
    server = "server" if "server" in rows.columns else "producer"
    return rows.where(shard_of(server, count).isin(list(shards)))
