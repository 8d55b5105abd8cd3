"""Python functions in Spark's executors: settings of a worker, division of files among tasks, and collection of the
results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

_File = TypeVar("_File")
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

TASKS_PER_CORE = 4
"""Number of tasks for each core, so that a core with quick tasks takes more of them."""


class ExecutorsFailed(Exception):
    """The executors could not run a function. The machines of a cluster may lack Python, pyarrow or dmsg.

    Parquet files that a function has already written do no harm, because the table's log does not name them.
    """


def prepare_worker() -> None:
    """Limit the threads and the memory of Arrow in a Python worker of Spark."""
    # A single thread is enough for Arrow in each worker, because Spark runs as many workers as there are cores.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    # Arrow's own pool returns the memory of each block to the operating system, and gets it back for the next block.
    # With the system's pool, a worker needs less CPU time and less memory.
    pa.set_memory_pool(pa.system_memory_pool())


def divide_evenly(files: Iterable[_File], size: Callable[[_File], int], count: int) -> list[list[_File]]:
    """Divide files into at most ``count`` groups of about the same size.

    :param size: returns the size of a file.
    """
    ordered = sorted(files, key=lambda one: -size(one))
    groups: list[list[_File]] = [[] for _ in range(max(1, min(count, len(ordered))))]
    sizes = [0] * len(groups)
    for file in ordered:
        least = sizes.index(min(sizes))
        groups[least].append(file)
        sizes[least] += size(file)
    return groups


def run_each(
    session: SparkSession, function: Callable[[_Argument], _Result], arguments: Sequence[_Argument]
) -> list[_Result]:
    """Apply a function to each argument in the executors, and return the results in order.

    :raises ExecutorsFailed: the function failed, or the executors cannot run it.
    """
    if not arguments:
        return []
    context = session.sparkContext
    tasks = min(len(arguments), TASKS_PER_CORE * context.defaultParallelism)
    return collect(context.parallelize(arguments, tasks).map(function))


def collect(results: RDD[Any]) -> list[Any]:
    """Return the results of functions that the executors run.

    :raises ExecutorsFailed: a function failed, or the executors cannot run it.
    """
    try:
        return results.collect()
    except (PySparkException, Py4JError) as error:
        raise ExecutorsFailed(str(error).splitlines()[0]) from error
