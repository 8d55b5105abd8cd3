"""Waiting with a time limit, and errors of Deferreds that did not fire in time."""

from __future__ import annotations

import ast
from pathlib import Path

from twisted.internet.defer import CancelledError, Deferred, TimeoutError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

import dmsg
from dmsg.net.deadlines import no_answer, wait_until


class DeadlineTests(SynchronousTestCase):
    def test_text(self) -> None:
        clock = Clock()
        late: Deferred[int] = Deferred().addTimeout(2.5, clock, no_answer)
        clock.advance(3)
        self.assertEqual(str(self.failureResultOf(late, TimeoutError).value), "no answer within 2.5 s")

    def test_results_and_other_errors_stay(self) -> None:
        clock = Clock()
        fired: Deferred[int] = Deferred()
        fired.addTimeout(1, clock, no_answer)
        fired.callback(3)
        self.assertEqual(self.successResultOf(fired), 3)
        cancelled: Deferred[int] = Deferred()
        cancelled.addTimeout(1, clock, no_answer)
        cancelled.cancel()
        self.failureResultOf(cancelled, CancelledError)
        failing: Deferred[int] = Deferred(lambda one: one.errback(OSError("closed")))
        failing.addTimeout(1, clock, no_answer)
        clock.advance(2)
        self.failureResultOf(failing, OSError)

    def test_every_timeout_has_a_text(self) -> None:
        """The text of Twisted's own error is ``(2.5, 'Deferred')``, and errors are printed and logged."""
        root = Path(dmsg.__file__).parent
        bare = []
        for path in root.rglob("*.py"):
            source = path.read_text()
            if "addTimeout" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                called = node.func if isinstance(node, ast.Call) else None
                if isinstance(called, ast.Attribute) and called.attr == "addTimeout":
                    assert isinstance(node, ast.Call)
                    if len(node.args) + len(node.keywords) < 3:
                        bare.append(f"{path.relative_to(root)}:{node.lineno}")
        self.assertEqual(bare, [])


class WaitTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.is_met = False

    def wait(self) -> Deferred[bool]:
        return Deferred.fromCoroutine(wait_until(self.clock, lambda: self.is_met, 1.0, 0.25))

    def test_a_met_condition_is_not_waited_for(self) -> None:
        self.is_met = True
        self.assertIs(self.successResultOf(self.wait()), True)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_condition_is_checked_at_each_interval(self) -> None:
        waiting = self.wait()
        self.clock.advance(0.25)
        self.is_met = True
        self.clock.advance(0.2)
        self.assertNoResult(waiting)
        self.clock.advance(0.05)
        self.assertIs(self.successResultOf(waiting), True)

    def test_the_wait_ends_in_time(self) -> None:
        waiting = self.wait()
        self.clock.pump([0.25] * 3)
        self.assertNoResult(waiting)
        self.clock.advance(0.25)
        self.assertIs(self.successResultOf(waiting), False)
        self.assertEqual(self.clock.getDelayedCalls(), [])
