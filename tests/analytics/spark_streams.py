"""Streams of the pipeline while clocks are set, with files of any age."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Lock, Thread, current_thread
from types import SimpleNamespace
from typing import Any

from py4j.protocol import Py4JNetworkError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import main
from dmsg.analytics.jobs import RunOutcome
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.main import MAX_CHECKS, MAX_SET_BACK, TriggerClock
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
