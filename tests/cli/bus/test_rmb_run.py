"""Shell commands of ``dmsg rmb serve`` at their limits."""

from __future__ import annotations

import errno
import os
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.cli.bus import rmb_run
from dmsg.cli.bus.rmb_run import MAX_PROGRAMS, MAX_PROGRAMS_OF_TWIN, MAX_WAITING_OF_TWIN, ProgramTurns, handler_for
from dmsg.rmb.session.handlers import HandlerError, Request
from dmsg.rmb.twins.address import Session
from tests.support import asynchronous

LOUD, QUIET = 1, 2
"""Numbers of twins."""


class TurnTests(SynchronousTestCase):
    """Turns of several twins."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.turns = ProgramTurns(self.clock.seconds)

    def acquire(self, twin: int, number: int = 1, left: float = 60.0) -> list[Deferred[None]]:
        return [self.turns.acquire(twin, left) for _ in range(number)]

    def test_a_twin_with_many_calls_keeps_no_other_waiting(self) -> None:
        loud = self.acquire(LOUD, MAX_PROGRAMS_OF_TWIN + MAX_WAITING_OF_TWIN)
        self.assertEqual(sum(turn.called for turn in loud), MAX_PROGRAMS_OF_TWIN)
        self.failureResultOf(self.acquire(LOUD)[0], HandlerError)
        self.successResultOf(self.acquire(QUIET)[0])
        self.turns.release(LOUD)
        self.assertEqual(sum(turn.called for turn in loud), MAX_PROGRAMS_OF_TWIN + 1)
        self.turns.release(QUIET)
        self.assertEqual(sum(turn.called for turn in loud), MAX_PROGRAMS_OF_TWIN + 1)

    def test_twins_take_turns(self) -> None:
        for twin in range(10, 10 + MAX_PROGRAMS // MAX_PROGRAMS_OF_TWIN):
            for turn in self.acquire(twin, MAX_PROGRAMS_OF_TWIN):
                self.successResultOf(turn)
        loud, quiet = self.acquire(LOUD, 5), self.acquire(QUIET, 2)
        order: list[int] = []

        def note(_: None, number: int) -> None:
            order.append(number)

        for number, turn in enumerate((*loud, *quiet)):
            turn.addCallback(note, number)
        for _ in range(7):
            self.turns.release(10)
        self.assertEqual(order, [0, 5, 1, 6, 2, 3, 4])

    def test_a_call_that_expires_while_it_waits_starts_no_program(self) -> None:
        self.acquire(LOUD, MAX_PROGRAMS_OF_TWIN)
        (late,), (last,) = self.acquire(LOUD, left=5.0), self.acquire(LOUD)
        self.clock.advance(5.0)
        self.turns.release(LOUD)
        self.failureResultOf(late, HandlerError)
        self.successResultOf(last)


class ProgramTests(TestCase):
    """Real shell commands."""

    def setUp(self) -> None:
        self.patch(rmb_run, "MAX_PROGRAMS_OF_TWIN", 2)
        self.turns = ProgramTurns(reactor.seconds)
        self.started, self.most_started = 0, 100

    async def call(self, shell: str, number: int, starts: int) -> list[bytes | None]:
        """Call the handler several times, and return the outputs; None for calls that failed.

        :param starts: number of commands that start at once.
        """
        handle = handler_for(self, shell, self.turns)  # type: ignore[arg-type]
        request = Request(Session(LOUD), "run", b"", None, "", "uid", 60.0)
        before = self.started
        answers = [handle(request).addErrback(self.fails) for _ in range(number)]
        self.assertEqual(self.started - before, starts)
        return await gatherResults(answers)

    def fails(self, failure: Failure) -> None:
        failure.trap(HandlerError)

    def callLater(self, *arguments: Any) -> IDelayedCall:
        return reactor.callLater(*arguments)

    def spawnProcess(self, *arguments: Any, **options: Any) -> None:
        if self.started >= self.most_started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.started += 1
        reactor.spawnProcess(*arguments, **options)

    @asynchronous
    async def test_at_most_as_many_run_as_permitted(self) -> None:
        self.assertEqual(await self.call("echo done", 5, 2), [b"done\n"] * 5)
        self.assertEqual(self.started, 5)

    @asynchronous
    async def test_programs_that_fail_leave_their_places(self) -> None:
        self.assertEqual(await self.call("exit 1", 5, 2), [None] * 5)
        self.assertEqual(await self.call("echo done", 3, 2), [b"done\n"] * 3)

    @asynchronous
    async def test_programs_that_cannot_be_started_leave_their_places(self) -> None:
        """Many calls wait when the machine has no process left."""
        self.most_started = 2
        answers = await self.call("echo done", 2 + MAX_WAITING_OF_TWIN, 2)
        self.assertEqual(answers, [b"done\n"] * 2 + [None] * MAX_WAITING_OF_TWIN)
        self.most_started = 5
        self.assertEqual(await self.call("echo done", 3, 2), [b"done\n"] * 3)
