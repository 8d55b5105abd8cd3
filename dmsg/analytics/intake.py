"""Conversion of sealed files to Parquet files of bronze with Arrow, in executors or in this process. Spark reads the
files that Arrow cannot convert."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from pyspark.sql import SparkSession

from dmsg.analytics.executors import ExecutorsFailed, collect, divide_evenly, prepare_worker
from dmsg.analytics.object_stores import StoreFailure, is_remote, store_of
from dmsg.analytics.parquet import Part
from dmsg.analytics.sealed_files import Outcome, Sealed, Target, convert
from dmsg.analytics.session import is_connect

GROUP_BYTES = 64 * 1024 * 1024
"""Bytes of sealed files that one task converts. A higher number results in larger Parquet files, a lower number in more
tasks."""
MAX_THREADS = 4
"""Maximum number of threads that convert files in this process. Each takes up to about 0.75 GB of memory."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    :ivar parts: Parquet files that were written.
    :ivar refused: sealed files that Spark has to read.
    """

    parts: list[Part]
    refused: list[Sealed]


class LeftToSpark:
    """Object stores of which Spark reads the files, because tasks cannot access them with Arrow. The reason is logged
    once for each store."""

    def __init__(self) -> None:
        self._stores: set[str] = set()

    def __contains__(self, store: str) -> bool:
        return store in self._stores

    def add(self, store: str, reason: str) -> None:
        """Leave the files of a store to Spark from now on."""
        if store not in self._stores:
            self._stores.add(store)
            _log.warning("Spark reads the files of %s, because Arrow cannot access it: %s", store, reason)


def convert_files(
    spark: Callable[[], SparkSession],
    files: Sequence[tuple[Sealed, int]],
    target: Target,
    *,
    here: bool,
    left: LeftToSpark | None = None,
) -> Converted:
    """Convert sealed files to Parquet.

    :param spark: function that returns the Spark session; called only if the session is needed.
    :param files: the files, with their sizes in bytes.
    :param here: whether to convert the files in this process, because they are so small that starting Spark's Python
        workers would take longer.
    :param left: object stores that are left to Spark. This function adds those that cannot be accessed.
    """
    left = LeftToSpark() if left is None else left
    by_connect = not here and is_connect(spark())
    # The server of a Spark Connect session cannot run functions of this process. This process then converts files in
    # directories, and Spark reads the files of object stores.
    chosen = [
        (file, size)
        for file, size in files
        if all(
            not by_connect and _is_accessible(path, target, left)
            for path in (file.path, target.root)
            if is_remote(path)
        )
    ]
    if not chosen:
        found: list[Outcome] = []
    elif here or by_connect:
        tasks = min(MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(tasks) as pool:
            groups = _groups(chosen, tasks)
            found = [one for some in pool.map(partial(_convert_all, target), groups) for one in some]
    else:
        context = spark().sparkContext
        tasks = max(context.defaultParallelism, sum(size for _, size in chosen) // GROUP_BYTES)
        groups = _groups(chosen, tasks)
        try:
            rows = context.parallelize(groups, len(groups)).mapPartitions(partial(_convert_partition, target))
            found = collect(rows)
        except ExecutorsFailed as error:
            _log.warning("executors cannot read files with Arrow, so Spark reads them: %s", error)
            return Converted([], [file for file, _ in files])
    read = {file for file, _ in chosen}.difference(one for one in found if isinstance(one, Sealed))
    for failure in found:
        if isinstance(failure, StoreFailure) and failure.store not in {store_of(file.path) for file in read}:
            left.add(failure.store, failure.reason)
    return Converted([one for one in found if isinstance(one, Part)], [file for file, _ in files if file not in read])


def _is_accessible(uri: str, target: Target, left: LeftToSpark) -> bool:
    """Whether Arrow may be able to access the store of a URI."""
    store = store_of(uri)
    if store not in left and (reason := target.stores.lack(uri)) is not None:
        left.add(store, reason)
    return store not in left


def _groups(files: Sequence[tuple[Sealed, int]], count: int) -> list[list[Sealed]]:
    """Divide files into groups of about the same size."""
    return [[file for file, _ in group] for group in divide_evenly(files, lambda one: one[1], count)]


def _convert_all(target: Target, files: list[Sealed]) -> list[Outcome]:
    return list(convert(files, target))


def _convert_partition(target: Target, groups: list[list[Sealed]]) -> list[Outcome]:
    """Convert groups of files, in a Python worker of Spark."""
    prepare_worker()
    return [one for files in groups for one in convert(files, target)]
