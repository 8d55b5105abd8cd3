"""Descriptions of a table's data files, from the table's log or from the footers of the files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction

from dmsg.analytics.parquet import Part

MAX_FOOTERS_READ = 64
"""Maximum number of new files in a transaction for which this process reads the footers. With more files, executors
count the rows."""
FOOTERS_AT_ONCE = 8
"""Number of footers that are read at the same time, because an object store takes long to answer."""
RowCount = tuple[int, int | None, int | None]
"""Number of rows of a file, and its smallest and largest ``ts``."""
Count = Callable[[str], Mapping[str, RowCount]]
"""Function that counts the rows of each file in a directory below the table. The keys of its result are paths below the
table's directory."""


def run_directory(label: str) -> str:
    """Return the start of the names of the directories below a table to which a run or a batch writes.

    Spark requires that each directory between a table and its files has the form ``COLUMN=VALUE``. Polars refuses such
    a directory if the table has no column of that name, but ignores a directory whose name has a second equals sign.

    :param label: number of the run, or the source and the number of the batch.
    """
    return f"run=={label}."


def is_of_run(path: str, label: str) -> bool:
    """Whether a run or a batch wrote the file at that path. Directories that earlier versions wrote, with names that
    begin with ``run=LABEL.``, are recognised, too.
    """
    return path.startswith((run_directory(label), f"run={label}."))


@dataclass(frozen=True)
class File:
    """Data file of a table.

    :ivar path: path below the table's directory.
    :ivar values: values of the partition columns.
    :ivar rows: number of rows; None if the log does not state it.
    :ivar first: smallest ``ts``; None if the log does not state it.
    :ivar last: largest ``ts``.
    """

    path: str
    size: int
    values: Mapping[str, str]
    rows: int | None = None
    first: int | None = None
    last: int | None = None


def added(part: Part, *, moved: bool = False) -> AddAction:
    """Return the log entry that adds a file to a table.

    :param moved: whether the rows were in the table before, in other files.
    """
    stats: dict[str, object] = {"numRecords": part.rows}
    if part.first is not None:
        stats |= {"minValues": {"ts": part.first}, "maxValues": {"ts": part.last}}
    return AddAction(
        path=part.path,
        size=part.size,
        partition_values=dict(part.values),
        modification_time=int(time.time() * 1000) if part.at is None else part.at,
        data_change=not moved,
        stats=json.dumps(stats),
    )


def removed(file: File, *, moved: bool = False) -> RemoveAction:
    """Return the log entry that removes a file from a table.

    :param moved: whether the same transaction adds the rows of this file to other files.
    """
    return RemoveAction(file.path, not moved, int(time.time() * 1000), file.size, dict(file.values))


def _milliseconds(info: pafs.FileInfo) -> int:
    return int((info.mtime_ns or 0) / 1_000_000)


def _count_rows(store: pafs.FileSystem, path: str) -> RowCount:
    """Return the number of rows and the times of a Parquet file, from its footer."""
    with store.open_input_file(path) as file:
        footer = pq.read_metadata(file)
    return (footer.num_rows, *_times(footer))


def _times(footer: pq.FileMetaData) -> tuple[int | None, int | None]:
    """Return the smallest and the largest ``ts`` of a file, from its footer."""
    names = footer.schema.to_arrow_schema().names
    if "ts" not in names:
        return None, None
    place = next(index for index in range(footer.num_columns) if footer.schema.column(index).path == "ts")
    found = [footer.row_group(index).column(place).statistics for index in range(footer.num_row_groups)]
    if not found or any(one is None or not one.has_min_max for one in found):
        return None, None
    return min(one.min for one in found), max(one.max for one in found)


def written_files(
    store: pafs.FileSystem, directory: str, partitions: Sequence[str], count: Count | None = None
) -> list[Part]:
    """Return the Parquet files that Spark wrote to a directory.

    :param store: file system whose root is the table's directory.
    :param count: counts the rows of many files in executors; without it, this process reads all footers.
    """
    selector = pafs.FileSelector(directory, recursive=True, allow_not_found=True)
    found = [
        one
        for one in store.get_file_info(selector)
        if one.type is pafs.FileType.File and one.base_name.endswith(".parquet")
    ]
    paths = [one.path.lstrip("/") for one in found]
    if count is not None and len(found) > MAX_FOOTERS_READ:
        counted = count(directory)
        counts = [counted.get(unquote(path), (0, None, None)) for path in paths]
    else:
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            counts = list(pool.map(partial(_count_rows, store), paths))
    return [
        Part(path, info.size, *counts_of_file[:1], _values(path, partitions), *counts_of_file[1:], _milliseconds(info))
        for path, info, counts_of_file in zip(paths, found, counts, strict=True)
    ]


def _values(path: str, partitions: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the values of the partition columns in the path of a file."""
    values = dict(part.split("=", 1) for part in path.split("/")[1:-1])
    return tuple((name, unquote(values[name])) for name in partitions)
