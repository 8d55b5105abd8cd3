"""Calls at the end of a turn, on each kind of reactor."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from typing import Any

from twisted.internet.asyncioreactor import AsyncioSelectorReactor
from twisted.internet.epollreactor import EPollReactor
from twisted.internet.pollreactor import PollReactor
from twisted.internet.selectreactor import SelectReactor
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.turn_end import at_turn_end


class _Readable:
    """Reader of a pipe that is readable once."""

    def __init__(self, read: Callable[[], object]) -> None:
        self._end, self.writing = os.pipe()
        self._read = read

    def fileno(self) -> int:
        return self._end

    def logPrefix(self) -> str:
        return "pipe"

    def connectionLost(self, reason: object) -> None:
        raise AssertionError(reason)

    def doRead(self) -> None:
        os.read(self._end, 100)
        self._read()

    def close(self) -> None:
        os.close(self._end)
        os.close(self.writing)


class _Cases:
    """Tests for every reactor."""

    def make(self) -> Any:
        raise NotImplementedError

    def setUp(self) -> None:
        self.reactor = self.make()
        self.done: list[str] = []
        self.at_end = at_turn_end(self.reactor)
        case: Any = self
        case.addCleanup(self.clean)

    def clean(self) -> None:
        for reader in self.reactor.removeAll():
            close = getattr(reader, "close", None)
            if close:
                close()

    def note(self, text: str) -> Callable[[], object]:
        return lambda: self.done.append(text)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(100):
            if is_done():
                return
            self.reactor.iterate(0.01)
        raise AssertionError(f"not reached: {self.done}")

    def test_calls_run_in_order_and_one_that_fails_stops_no_other(self) -> None:
        case: Any = self
        self.at_end(self.note("first"))
        self.at_end({}.popitem)
        self.at_end(self.note("second"))
        self.run_until(lambda: len(self.done) == 2)
        case.assertEqual(self.done, ["first", "second"])
        case.assertEqual(len(case.flushLoggedErrors(KeyError)), 1)

    def test_a_call_made_by_a_timer_does_not_wait_for_the_next_timer(self) -> None:
        case: Any = self
        long = self.reactor.callLater(5, self.note("late"))
        self.reactor.callLater(0, self.at_end, self.note("end"))
        self.run_until(lambda: bool(self.done))
        long.cancel()
        case.assertEqual(self.done, ["end"])

    def test_all_that_is_readable_is_read_before_the_call(self) -> None:
        case: Any = self

        def read() -> None:
            self.done.append("read")
            if self.done.count("read") == 1:
                self.at_end(self.note("end"))

        readers = [_Readable(read) for _ in range(3)]
        for reader in readers:
            os.write(reader.writing, b"1")
            self.reactor.addReader(reader)
        self.run_until(lambda: "end" in self.done)
        case.assertEqual(self.done, ["read"] * 3 + ["end"])

    def test_calls_that_schedule_calls_do_not_keep_the_reactor_from_reading(self) -> None:
        def again() -> None:
            if "read" not in self.done:
                self.at_end(again)

        reader = _Readable(self.note("read"))
        os.write(reader.writing, b"1")
        self.reactor.addReader(reader)
        self.at_end(again)
        self.run_until(lambda: "read" in self.done)

    def test_a_timer_that_a_call_sets_is_in_time(self) -> None:
        """The poll waits for the timer that was set after the reactor had worked out how long to wait."""

        def set_timer() -> None:
            self.reactor.callLater(0.001, self.note("timer"))

        # The reactor would wait for this one.
        long = self.reactor.callLater(5, self.note("late"))
        self.reactor.callLater(0, self.at_end, set_timer)
        self.reactor.callLater(0, lambda: None)
        began = self.reactor.seconds()
        self.iterate_as_the_loop()
        self.run_until(lambda: bool(self.done))
        long.cancel()
        case: Any = self
        case.assertLess(self.reactor.seconds() - began, 4)

    def iterate_as_the_loop(self) -> None:
        self.reactor.iterate(0)


class _PollingCases(_Cases):
    """Tests for reactors whose iteration is hooked."""

    def iterate_as_the_loop(self) -> None:
        self.reactor.runUntilCurrent()
        self.reactor.doIteration(self.reactor.timeout())

    def test_a_call_needs_no_timer(self) -> None:
        case: Any = self
        self.at_end(self.note("end"))
        case.assertEqual(self.reactor.getDelayedCalls(), [])
        self.reactor.iterate()
        case.assertEqual(self.done, ["end"])

    def test_the_hook_is_set_once(self) -> None:
        case: Any = self
        case.assertIs(at_turn_end(self.reactor), self.at_end)

    def test_a_call_that_stops_the_reactor_stops_it_at_once(self) -> None:
        case: Any = self
        long = self.reactor.callLater(5, self.note("late"))
        self.reactor.callWhenRunning(lambda: self.reactor.callLater(0, self.at_end, self.reactor.stop))
        self.reactor.run(installSignalHandlers=False)
        long.cancel()
        case.assertEqual(self.done, [])


class EPollTests(_PollingCases, SynchronousTestCase):
    def make(self) -> EPollReactor:
        if not hasattr(select, "epoll"):
            self.skipTest("this system has no epoll")
        return EPollReactor()


class PollTests(_PollingCases, SynchronousTestCase):
    def make(self) -> PollReactor:
        return PollReactor()


class SelectTests(_PollingCases, SynchronousTestCase):
    def make(self) -> SelectReactor:
        return SelectReactor()


class AsyncioTests(_Cases, SynchronousTestCase):
    def make(self) -> AsyncioSelectorReactor:
        loop = asyncio.new_event_loop()
        self.addCleanup(loop.close)
        return AsyncioSelectorReactor(loop)


class OtherTests(SynchronousTestCase):
    def test_a_clock_gets_a_timer(self) -> None:
        clock, done = Clock(), []
        at_turn_end(clock)(lambda: done.append("end"))
        clock.advance(0)
        self.assertEqual(done, ["end"])

    def test_a_reactor_with_a_loop_of_its_own_gets_a_timer(self) -> None:
        class Foreign(SelectReactor):
            def mainLoop(self) -> None:
                raise AssertionError

        reactor, done = Foreign(), []
        at_turn_end(reactor)(lambda: done.append("end"))
        self.assertEqual(len(reactor.getDelayedCalls()), 1)
        reactor.iterate()
        self.assertEqual(done, ["end"])
        reactor.removeAll()
