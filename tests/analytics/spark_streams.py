"""Streams of the pipeline while clocks are set, with files of any age."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from py4j.protocol import Py4JNetworkError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import main
from dmsg.analytics.jobs import RunOutcome
from dmsg.analytics.lake_error import LakeError
from dmsg.analytics.main import MAX_SET_BACK, TriggerClock
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


class StreamTests(LakeCase):
    """A stream over this test's spool, in a thread."""

    def setUp(self) -> None:
        super().setUp()
        boot = Boot(S1, "boot-1")
        boot.event("start", DAY, "08:00:00", capacity=5)
        boot.beats(DAY, "08:00:30", 10, sessions=1, transports=0, capacity=5)
        self.rows = boot.rows
        self.events = 0

    def begin(self, every: str) -> None:
        stop = Event()
        failed: list[BaseException] = []

        def told(outcome: RunOutcome) -> None:
            self.events += outcome.events

        def run() -> None:
            try:
                main.stream(spark(), str(self.spool), None, str(self.out), every, told, stop)
            except BaseException as error:
                failed.append(error)

        thread = Thread(target=run)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join(TIMEOUT)
            self.assertFalse(thread.is_alive())
            self.assertEqual(failed, [])

        self.addCleanup(end)

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
