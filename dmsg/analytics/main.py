"""Functions behind the commands ``dmsg analytics``, and a command line for ``spark-submit``.

``spark-submit`` has no option ``-m``, so it needs the path ``dmsg/analytics/__main__.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from dmsg.analytics import report, report_data
from dmsg.analytics.atomic_write import write_atomically
from dmsg.analytics.full_disk import explain_full_disk, is_of_full_disk, temporary_directories
from dmsg.analytics.jobs import Pipeline, Progress, RunOutcome
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.listing import Source, receipts_source, spool_source
from dmsg.analytics.runs import Claim
from dmsg.analytics.schemas import GOLD
from dmsg.analytics.session import (
    DRIVER_MEMORY,
    JavaNotFound,
    Spark,
    SparkFailed,
    SparkOnDemand,
    is_connect,
    is_local,
    make_session,
)
from dmsg.analytics.store import Store, local_path
from dmsg.telemetry.spool_listing import Reason, left_lines

Errors = (LakeError, JavaNotFound, SparkFailed)
"""Classes of errors that the user can correct. Their text is one line."""


REST_FACTOR = 1.0
"""Duration of the pause after a refinement, relative to the duration of the refinement. With 1, refining takes at most
half of a stream's time.
"""
MAX_SET_BACK = 2.0
"""Seconds by which the system's clock may be set back before the streaming queries are started again."""
BATCH_CHECK_INTERVAL = 0.1
"""Seconds between two checks, at the end of a stream, whether a query is still within a batch."""
MAX_CHECKS = 100
"""Maximum number of these checks. After them, a query is stopped that still lists files, as in an object store that
does not answer. A batch that writes to the tables is not interrupted."""


class TriggerClock:
    """Detector of a system clock that was set back.

    Spark starts a batch at a time of the system's clock. If the clock is set back by two hours, a streaming query would
    read no files for two hours. A query that is started again reads at once.

    :param wall: function that returns seconds since 1970; None for ``time.time``.
    :param monotonic: function that returns the seconds of a clock that nobody sets; None for ``time.monotonic``.
    """

    def __init__(self, wall: Callable[[], float] | None = None, monotonic: Callable[[], float] | None = None) -> None:
        self._wall, self._monotonic = wall or time.time, monotonic or time.monotonic
        self.restart()

    def restart(self) -> None:
        """Note that the queries have been started at the present time."""
        self._offset = self._wall() - self._monotonic()

    def was_set_back(self) -> bool:
        """Whether the clock shows an earlier time than the queries expect."""
        offset = self._wall() - self._monotonic()
        self._offset = max(self._offset, offset)
        return self._offset - offset > MAX_SET_BACK


class RefinementSchedule:
    """Schedule of a stream's refinements. A refinement is due when bronze may contain new lines and the pause after the
    previous refinement is over.

    During the pauses, the stream writes new lines to bronze. One refinement then processes all of these lines together,
    so the stream does not fall behind, however long a refinement takes.

    :ivar wanted: whether bronze may contain lines that no refinement has processed. True at the start, because an
        earlier stream may have been killed before it refined its lines.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._not_before = self._clock()
        self.wanted = True

    def due(self) -> bool:
        """Whether a refinement is wanted and the pause after the previous one is over."""
        return self.wanted and self._clock() >= self._not_before

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context manager around a refinement. It measures the refinement, and then begins a pause of
        :data:`REST_FACTOR` times the refinement's duration."""
        begun = self._clock()
        self.wanted = False
        yield
        self._not_before = self._clock() + REST_FACTOR * (self._clock() - begun)


def sources(spool: str, receipts: str | None) -> list[Source]:
    """Return the sources to read: the spool, and the checked receipts if a path is given."""
    return [spool_source(spool), *([] if receipts is None else [receipts_source(receipts)])]


def run(
    spark: Spark,
    spool: str,
    receipts: str | None,
    out: str,
    progress: Progress,
    left: Mapping[Reason, set[str]] | None = None,
    memory: int | None = None,
) -> RunOutcome:
    """Bring the tables under ``out`` up to date.

    :param left: paths of files whose receipts could not be verified, by reason.
    :param memory: number of bytes of memory that this process may use; None if it is large.
    """
    return Pipeline(spark, out, progress=progress, left=left, memory=memory).run(sources(spool, receipts))


def stream(
    spark: SparkSession,
    spool: str,
    receipts: str | None,
    out: str,
    every: str,
    on_outcome: Callable[[RunOutcome], None],
    stop: threading.Event,
    check: Callable[[], object] = lambda: None,
    memory: int | None = None,
) -> None:
    """Read new files continuously and refine the tables after each batch, until ``stop`` is set.

    :param on_outcome: called with the outcome of each refinement that changed the tables.
    :param check: function to call about once a second, which verifies new receipts.
    :param memory: number of bytes of memory that this process may use; None if it is large.
    :raises SparkFailed: ``spark`` is a Spark Connect session.
    :raises LakeError: one of the streaming queries failed or was stopped.
    """
    if is_connect(spark):
        raise SparkFailed(
            "a stream needs Spark on this machine; with a Spark Connect server, repeat `dmsg analytics run`"
        )
    pipeline = Pipeline(spark, out, memory=memory)
    pipeline.begin_small()
    one_at_a_time = threading.Lock()
    turns = RefinementSchedule()

    def refine(claim: Claim) -> None:
        """Refine the tables if a refinement is due; otherwise a later refinement processes the batch. The caller must
        hold the lock."""
        turns.wanted = True
        if not turns.due():
            return
        with turns.measure():
            pipeline.now = datetime.now(UTC)
            pipeline.note_unreadable(sources(spool, receipts))
            before = pipeline.lake.state()
            outcome = pipeline.refine(before, claim, [])
        if outcome.state.run != before.run:
            on_outcome(outcome)

    def start_queries() -> list[StreamingQuery]:
        return [pipeline.follow(source, every, refine, one_at_a_time, stop) for source in sources(spool, receipts)]

    queries = start_queries()
    clock = TriggerClock()
    try:
        while not stop.wait(1.0):
            check()
            if turns.due():
                with one_at_a_time:
                    pipeline.run_claimed(refine)
            _check_active(queries)
            if clock.was_set_back() and _stop_idle(queries, one_at_a_time):
                queries = start_queries()
                clock.restart()
    finally:
        end_queries(queries, one_at_a_time)


def _check_active(queries: Sequence[StreamingQuery]) -> None:
    """:raises LakeError: one of the queries has ended."""
    for query in queries:
        if not query.isActive:
            error = query.exception()
            raise LakeError(f"the stream {query.name} ended: {_reason(error)}") from error


def end_queries(
    queries: Sequence[StreamingQuery],
    lock: AbstractContextManager[object],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Stop the queries after their batches.

    :param lock: lock that a query holds while it writes a batch.
    """
    for _ in range(MAX_CHECKS):
        if _stop_idle(queries, lock):
            return
        sleep(BATCH_CHECK_INTERVAL)
    # No batch waits for the lock any more, because the lock was free during the checks.
    _stop_idle(queries, lock, also_active=True)


def _stop_idle(
    queries: Sequence[StreamingQuery], lock: AbstractContextManager[object], *, also_active: bool = False
) -> bool:
    """Stop the queries and return True, unless one of them is within a batch.

    Stopping a query within a batch would interrupt its commit. If the batch waited for ``lock``, stopping would not
    return.

    :param also_active: stop the queries even if one of them is within a batch.
    """
    with lock:
        if not also_active and any(query.status["isTriggerActive"] for query in queries):
            return False
        for query in queries:
            query.stop()
    return True


def _reason(error: BaseException | None) -> str:
    return "it was stopped" if error is None else str(error).splitlines()[0]


def write_report(out: str, target: Path, at: datetime | None = None) -> None:
    """Write the report page atomically, without Spark.

    :param at: report the tables as they were at this time; None for the newest state.
    :raises DmsgError: the file cannot be written.
    """
    page = report.render(report_data.collect(Store(out), at))
    write_atomically(target, page.encode())


def check_free(out: str) -> None:
    """Check that the tables are usable, and that no run is writing to them. Callers do this before expensive work.

    :raises LakeError: another run writes to the tables, or they cannot be used.
    """
    store = Store(out)
    store.state()
    store.runs.check_free()


def table_paths(out: str) -> dict[str, str]:
    """Return the path or URI of each gold table, for other programs that read Delta Lake."""
    store = Store(out)
    store.computed_state()
    return {name: store.table("gold", name).uri for name in GOLD}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line for ``spark-submit`` and return the exit status."""
    parser = argparse.ArgumentParser(prog="dmsg-analytics", description="dmsg's data pipeline, for spark-submit")
    parser.add_argument("command", choices=("run", "report", "tables"))
    parser.add_argument("--spool", help="Directory or URI of the files that entities wrote.")
    parser.add_argument("--receipts", help="Directory or URI of the checked receipts.")
    parser.add_argument("--out", required=True, help="Directory or URI of the tables.")
    parser.add_argument("--html", default="report.html", help="File to which to write the report.")
    parser.add_argument("--master", help="Spark master, unless spark-submit names one.")
    parser.add_argument("--memory", default=DRIVER_MEMORY, help="Heap size of the driver.")
    options = parser.parse_args(arguments)
    if options.command == "run" and options.spool is None:
        parser.error("run needs --spool")

    def progress(what: str, done: int, total: int) -> None:
        sys.stderr.write(f"{done}/{total} {what}\n")

    try:
        if options.command == "run":
            session = make_session(options.master, memory=options.memory)
            local = is_local(session)
            spark = SparkOnDemand(lambda: session, is_local=local, is_wanted=local)
            outcome = run(spark, options.spool, options.receipts, options.out, progress)
            for line in left_lines(outcome.left):
                sys.stderr.write(f"dmsg-analytics: {line}\n")
            sys.stdout.write(
                json.dumps({"run": outcome.state.run, "days": outcome.days, "events": outcome.events}) + "\n"
            )
            session.stop()
        elif options.command == "report":
            write_report(options.out, Path(options.html))
        else:
            sys.stdout.write(json.dumps(table_paths(options.out), indent=1) + "\n")
    except Exception as error:
        if is_of_full_disk(error):
            out = local_path(options.out)
            text = explain_full_disk([] if out is None else [out], temporary_directories())
        elif isinstance(error, Errors):
            text = str(error)
        else:
            raise
        sys.stderr.write(f"dmsg-analytics: {text}\n")
        return 1
    return 0
