"""Links: what a closing one has to say still leaves, within bounds."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.messaging.handshake import LinkHandshake
from dmsg.net.link import CLOSE_LIMIT, CLOSE_TIMEOUT
from dmsg.net.plain import PlainLink
from dmsg.net.turn import TurnFlush
from tests.messaging.support import KEYS


class ClosingTests(SynchronousTestCase):
    """A link that is closed with much unsent."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.link = PlainLink(self.clock, TurnFlush(self.clock), LinkHandshake(KEYS["S"]), lambda remote: None)  # type: ignore[arg-type,return-value]
        self.transport: Any = StringTransport()
        self.transport.aborted = False
        self.transport.abortConnection = self.abort
        self.link.makeConnection(self.transport)
        self.transport.registerProducer(self.link, True)
        self.waiting = 1_000_000
        self.patch(self.link, "queued", lambda: self.waiting)
        self.link.close()

    def abort(self) -> None:
        self.transport.aborted = True

    def test_nothing_leaves(self) -> None:
        self.clock.advance(CLOSE_TIMEOUT - 0.1)
        self.assertFalse(self.transport.aborted)
        self.clock.advance(0.2)
        self.assertTrue(self.transport.aborted)

    def test_some_of_it_leaves(self) -> None:
        for _ in range(3):
            self.waiting -= 100_000
            self.clock.advance(CLOSE_TIMEOUT)
            self.assertFalse(self.transport.aborted)
        self.clock.advance(CLOSE_TIMEOUT)
        self.assertTrue(self.transport.aborted)

    def test_it_does_not_go_on_for_ever(self) -> None:
        passed = 0.0
        while not self.transport.aborted:
            self.waiting -= 1
            self.clock.advance(CLOSE_TIMEOUT)
            passed += CLOSE_TIMEOUT
        self.assertGreaterEqual(passed, CLOSE_LIMIT)
        self.assertLess(passed, CLOSE_LIMIT + 2 * CLOSE_TIMEOUT)
