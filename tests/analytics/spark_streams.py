"""Streams of the pipeline while clocks are set, with files of any age."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread, current_thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from py4j.protocol import Py4JNetworkError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import jobs, main
from dmsg.analytics.intake import convert_files
from dmsg.analytics.jobs import Pipeline, RunOutcome
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.listing import spool_source
from dmsg.analytics.main import MAX_CHECKS, MAX_SET_BACK, TriggerClock
from dmsg.analytics.schemas import REGISTER
from dmsg.analytics.session import SparkOnDemand
from dmsg.cli.pipeline.commands import ends_with_java
from tests.analytics.support import DAY, S1, Boot, LakeCase, spark, write_file

TIMEOUT = 120.0
"""Seconds after which a stream that has not read a file fails its test."""
MONTH = 30 * 86_400


class TriggerClockTests(SynchronousTestCase):
    """Clocks that are set, and clocks that NTP corrects."""

    def setUp(self) -> None:
        self.wall = self.now = 1000.0
        self.clock = TriggerClock(lambda: self.wall, lambda: self.now)

    def is_set_back_after(self, seconds: float, step: float = 0.0) -> bool:
        self.now += seconds
        self.wall += seconds + step
        return self.clock.was_set_back()

    def test_only_a_clock_that_is_set_back_counts(self) -> None:
        self.assertFalse(self.is_set_back_after(5, -MAX_SET_BACK))
        self.assertTrue(self.is_set_back_after(5, -1))
        self.assertTrue(self.is_set_back_after(5), "the queries have not been started again")
        self.clock.restart()
        self.assertFalse(self.is_set_back_after(5))

    def test_a_time_that_was_set_forward_and_back_counts(self) -> None:
        """A batch that began in between expects the later time."""
        self.assertFalse(self.is_set_back_after(5, 7200))
        self.assertTrue(self.is_set_back_after(5, -7200))


class BatchAfterStop:
    """Lock that a batch gets only after the stream's own thread, which creates the lock, has had it at its end."""

    def __init__(self, stop: Event, batch_waits: Event) -> None:
        self._lock = Lock()
        self._stop = stop
        self._batch_waits, self._batch_may = batch_waits, Event()
        self._thread = current_thread()

    def __enter__(self) -> None:
        if current_thread() is not self._thread:
            self._batch_waits.set()
            self._batch_may.wait()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if current_thread() is self._thread and self._stop.is_set():
            self._batch_may.set()


class StreamTests(LakeCase):
    """A stream over this test's spool, in a thread."""

    def setUp(self) -> None:
        super().setUp()
        boot = Boot(S1, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 10, sessions=1, transports=0, capacity=5)
        self.rows = boot.rows
        self.events = 0
        self.stop = Event()

    def begin(self, every: str) -> Thread:
        stop = self.stop
        failed: list[BaseException] = []

        def told(outcome: RunOutcome) -> None:
            self.events += outcome.events

        def run() -> None:
            try:
                main.stream(spark(), str(self.spool), None, str(self.out), every, told, stop)
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=run, daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(TIMEOUT)
            self.assertFalse(thread.is_alive())
            self.assertEqual(failed, [])

        self.addCleanup(end)
        return thread

    def wait_for(self, events: int) -> None:
        deadline = time.monotonic() + TIMEOUT
        while self.events < events:
            self.assertLess(time.monotonic(), deadline, f"{self.events} of {events} events were read")
            time.sleep(0.1)

    def write(self, number: int, age: float = 0.0) -> Path:
        """Write a file with one event."""
        path = self.spool / f".{number}"
        write_file(path, self.rows[number : number + 1], end=False)
        at = time.time() - age
        os.utime(path, (at, at))
        return path.rename(self.spool / f"events-{number}.jsonl.gz")

    def test_files_are_read_after_the_clock_was_set_back(self) -> None:
        """The next batch would begin at the next full hour."""
        offset = [0.0]
        real: Callable[..., Any] = TriggerClock
        self.patch(main, "TriggerClock", lambda: real(lambda: time.monotonic() + offset[0]))
        self.write(0)
        self.begin("1 hour")
        self.wait_for(1)
        self.write(1)
        offset[0] -= 7200
        self.wait_for(2)

    def test_files_are_read_whatever_their_age_is(self) -> None:
        """A file of the future comes first, then one of today, and one that was copied with its old time."""
        self.write(0, -MONTH)
        self.begin("1 second")
        self.wait_for(1)
        self.write(1)
        self.wait_for(2)
        self.write(2, MONTH)
        self.wait_for(3)

    def test_a_batch_that_waits_at_the_end_is_read(self) -> None:
        """To stop its query would wait for the batch, which would wait for the lock of who stops it."""
        batch_waits = Event()
        self.patch(main, "threading", SimpleNamespace(Lock=lambda: BatchAfterStop(self.stop, batch_waits)))
        self.write(0)
        thread = self.begin("1 second")
        self.assertTrue(batch_waits.wait(TIMEOUT))
        self.stop.set()
        thread.join(TIMEOUT)
        self.assertFalse(thread.is_alive())
        self.assertEqual(self.run_jobs().events, 0, "the stream has read the file")


class SameRowsTests(LakeCase):
    """Rows of a stream beside those of a run."""

    def rows(self, out: Path) -> tuple[list[Any], list[Any]]:
        """Return the rows of bronze, and those of the table ``files``."""
        lake = self.pipeline(out).lake
        bronze = lake.bronze().where(f"family <> '{REGISTER}'").drop("origin", "batch", "file_bytes", "file_sha256")
        files = lake.stored("silver", "files", lake.state()).to_pylist()
        return (
            sorted(map(str, bronze.collect())),
            sorted((row["file"], row["lines"], row["problem"], row["file_bytes"], row["file_sha256"]) for row in files),
        )

    def test_a_stream_and_a_run_store_the_same(self) -> None:
        """Arrow reads all files with events only, and Spark the others."""
        boot = Boot(S1, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 10, sessions=1, transports=0, capacity=5)
        for name in ("sp ace", "p%41", "new\nline", "\u00fc\u20ac", "b\\s", "br[1]{2}", "st*r"):
            write_file(self.spool / name / "events-1.jsonl.gz", boot.rows[:2])
        write_file(self.spool / "events-2.jsonl.gz", boot.rows[2:4], end=False)
        write_file(self.spool / "events-3.jsonl.gz", boot.rows[4:6], garbage=[b"hello", b"", b"[]"])
        write_file(self.spool / "events-4.jsonl.gz", [*boot.rows[6:8], {"v": 3}])
        write_file(self.spool / "events-5.jsonl.gz", boot.rows[8:])
        torn = self.spool / "events-5.jsonl.gz"
        torn.write_bytes(torn.read_bytes()[:-20])
        (self.spool / "events-6.jsonl.gz").write_bytes(b"no gzip")
        (self.spool / "events-7.jsonl.gz").write_bytes(b"")
        write_file(self.spool / "other-8.jsonl.gz", boot.rows)
        vanishing = self.spool / "events-9.jsonl.gz"
        write_file(vanishing, boot.rows)
        converted: list[tuple[bool, int]] = []

        def convert(*arguments: Any, **options: Any) -> Any:
            vanishing.unlink(missing_ok=True)
            found = convert_files(*arguments, **options)
            converted.append((options["here"], len(found.refused)))
            return found

        pipeline = Pipeline(spark(), str(self.out))
        with patch.object(jobs, "convert_files", convert):
            query = pipeline.follow(
                spool_source(str(self.spool)),
                "1 second",
                lambda claim: pipeline.refine(pipeline.lake.state(), claim, []),
                Lock(),
                Event(),
            )
            self.addCleanup(query.stop)
            query.processAllAvailable()
        # Tasks of Spark convert the files. Spark's reader gets the four files with other lines or damage, and the one
        # that is gone. The batch does not contain the empty one.
        self.assertEqual(converted, [(False, 5)])
        other = self.root / "other"
        Pipeline(SparkOnDemand(spark), str(other)).run([spool_source(str(self.spool))])
        streamed, expected = self.rows(self.out), self.rows(other)
        self.assertEqual(streamed[0], expected[0])
        # Only a run records files in which nothing can be read.
        unusable = [row for row in expected[1] if row[1] == 0]
        self.assertEqual([row[0][-17:] for row in unusable], ["events-6.jsonl.gz", "events-7.jsonl.gz"])
        self.assertEqual(streamed[1], [row for row in expected[1] if row not in unusable])
        # A run reads what is new only, and the stream's next batch has none of it.
        write_file(self.spool / "events-10.jsonl.gz", boot.rows[:1])
        run = Pipeline(SparkOnDemand(spark), str(self.out)).run([spool_source(str(self.spool))])
        self.assertEqual(run.events, 2)
        query.processAllAvailable()
        self.assertEqual(len(self.rows(self.out)[0]), len(streamed[0]) + 2)


class Query:
    """Query that lists files for as long as a test says.

    :param checks: number of checks after which the query is idle.
    """

    def __init__(self, checks: int) -> None:
        self._checks = checks
        self.stopped_after: int | None = None
        self.checked = 0

    @property
    def status(self) -> dict[str, bool]:
        self.checked += 1
        return {"isTriggerActive": self.checked <= self._checks}

    def stop(self) -> None:
        self.stopped_after = self.checked


class EndTests(SynchronousTestCase):
    """Queries at the end of their stream."""

    def ended(self, checks: int) -> int | None:
        query: Any = Query(checks)
        lock = Lock()

        def sleep(seconds: float) -> None:
            self.assertFalse(lock.locked(), "a batch can be written meanwhile")

        main.end_queries([query], lock, sleep)
        return query.stopped_after

    def test_a_query_is_stopped_once_it_is_idle(self) -> None:
        self.assertEqual(self.ended(0), 1)
        self.assertEqual(self.ended(3), 4)

    def test_a_query_that_is_never_idle_is_stopped_too(self) -> None:
        self.assertEqual(self.ended(MAX_CHECKS + 10), MAX_CHECKS)


class StoppedStreamTests(SynchronousTestCase):
    """Streams whose Java a service manager ends, too."""

    def test_the_end_of_java_is_an_error_only_before_the_stream_is_stopped(self) -> None:
        stop = Event()
        for error in (ConnectionRefusedError, Py4JNetworkError):
            stop.clear()
            with self.assertRaises(error), ends_with_java(stop):
                raise error
            stop.set()
            with ends_with_java(stop):
                raise error

    def test_other_errors_are_reported(self) -> None:
        stop = Event()
        stop.set()
        with self.assertRaises(LakeError), ends_with_java(stop):
            raise LakeError("the stream ended")
