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
from dmsg.analytics.parquet import Part
from dmsg.analytics.sealed_files import Sealed, Target, convert
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


def convert_files(
    spark: Callable[[], SparkSession], files: Sequence[tuple[Sealed, int]], target: Target, *, here: bool
) -> Converted:
    """Convert sealed files to Parquet.

    :param spark: function that returns the Spark session; called only if the session is needed.
    :param files: the files, with their sizes in bytes.
    :param here: whether to convert the files in this process, because they are so small that starting Spark's Python
        workers would take longer.
    """
    if here or is_connect(spark()):
        tasks = min(MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(tasks) as pool:
            groups = _groups(files, tasks)
            found = [one for some in pool.map(partial(_convert_all, target), groups) for one in some]
    else:
        context = spark().sparkContext
        tasks = max(context.defaultParallelism, sum(size for _, size in files) // GROUP_BYTES)
        groups = _groups(files, tasks)
        try:
            rows = context.parallelize(groups, len(groups)).mapPartitions(partial(_convert_partition, target))
            found = collect(rows)
        except ExecutorsFailed as error:
            _log.warning("executors cannot read files with Arrow, so Spark reads them: %s", error)
            return Converted([], [file for file, _ in files])
    return Converted([one for one in found if isinstance(one, Part)], [one for one in found if isinstance(one, Sealed)])


def _groups(files: Sequence[tuple[Sealed, int]], count: int) -> list[list[Sealed]]:
    """Divide files into groups of about the same size."""
    return [[file for file, _ in group] for group in divide_evenly(files, lambda one: one[1], count)]


def _convert_all(target: Target, files: list[Sealed]) -> list[Part | Sealed]:
    return list(convert(files, target))


def _convert_partition(target: Target, groups: list[list[Sealed]]) -> list[Part | Sealed]:
    """Convert groups of files, in a Python worker of Spark."""
    prepare_worker()
    return [one for files in groups for one in convert(files, target)]
