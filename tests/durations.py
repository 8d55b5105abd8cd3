"""Durations of tests, measured where the tests run.

A worker of trial tells its manager that a test has ended, but not how long
it took.  So each worker writes the durations into a file of its directory.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "durations.jsonl"
"""Name of the file in the directory of a worker."""


TICKS = os.sysconf("SC_CLK_TCK")


def _of_children(process: int) -> float:
    """Return the processor seconds of the descendants of a process that still run, such as the Java of Spark and the
    Python workers of that Java."""
    spent = 0.0
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            for child in task.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                spent += sum(map(int, fields[11:15])) / TICKS + _of_children(int(child))
        except OSError:
            continue  # The thread or the child has ended.
    return spent


def _used() -> tuple[float, float]:
    """Return the seconds on the wall clock, and those of the processor with child processes included."""
    spent = _of_children(os.getpid())
    for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(which)
        spent += usage.ru_utime + usage.ru_stime
    return time.monotonic(), spent


def measure(reporter: Any, path: Path) -> None:
    """Make a reporter class of trial append a line per test to a file."""
    start, stop = reporter.startTest, reporter.stopTest
    began: dict[str, tuple[float, float]] = {}

    def start_measured(self: Any, test: Any) -> None:
        began[test.id()] = _used()
        start(self, test)

    def stop_measured(self: Any, test: Any) -> None:
        stop(self, test)
        wall, processor = (now - then for now, then in zip(_used(), began.pop(test.id()), strict=True))
        with path.open("a") as lines:
            lines.write(json.dumps([test.id(), round(wall, 4), round(processor, 4)]) + "\n")

    reporter.startTest, reporter.stopTest = start_measured, stop_measured


def measure_worker() -> None:
    """Measure the tests of this worker, into a file of its directory."""
    from twisted.trial._dist.workerreporter import WorkerReporter

    measure(WorkerReporter, Path(FILE).absolute())


def read(directory: Path) -> Iterator[tuple[str, float, float]]:
    """Yield identifier, seconds and processor seconds of each test that a run in this directory has measured."""
    for path in sorted({*directory.glob(FILE), *directory.glob(f"*/{FILE}")}):
        for line in path.read_text().splitlines():
            test, wall, processor = json.loads(line)
            yield test, wall, processor
