"""Connections of a program to its agent, in a process that is paused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase

from dmsg.agent.connections import ANSWER_TIMEOUT, AgentConnections, StreamConnection
from dmsg.agent.local_stream import LocalCarrier
from dmsg.base.timeouts import CLOSE_TIMEOUT
from dmsg.errors import DmsgTimeout
from tests.net.test_own_pauses import PausingClock, pass_time


class _ClosingStream:
    """Stream that the application has closed, and whose data is not sent yet."""

    disconnecting = True
    has_ended = False


class _ClosingCarrier:
    """Carrier of such a stream."""

    stream = _ClosingStream()

    def ended(self, reason: object) -> None:
        """Do nothing."""


class PauseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = PausingClock()
        self.connections = AgentConnections(cast(Any, self.clock), Path("agent.sock"), "program")

    def test_the_answer_of_the_agent(self) -> None:
        answered: Deferred[None] = self.connections.with_timeout(Deferred())
        pass_time(self.clock, 1.0)
        self.clock.advance(10 * ANSWER_TIMEOUT)
        pass_time(self.clock, ANSWER_TIMEOUT - 2.0)
        self.assertNoResult(answered)
        pass_time(self.clock, 2.0)
        self.failureResultOf(answered, DmsgTimeout)

    def test_a_stream_that_sends_its_last_data(self) -> None:
        for is_sent in (False, True):
            stream = StreamConnection(self.connections, lambda opened: None)
            stream.started.addErrback(lambda _: None)
            transport = StringTransportWithDisconnection()
            transport.protocol = stream
            stream.makeConnection(transport)
            stream._carrier = cast(LocalCarrier, _ClosingCarrier())
            stream.stop()
            pass_time(self.clock, CLOSE_TIMEOUT / 2)
            self.clock.advance(10 * CLOSE_TIMEOUT)
            self.assertTrue(transport.connected)
            if is_sent:
                transport.loseConnection()
            else:
                pass_time(self.clock, CLOSE_TIMEOUT)
            self.assertEqual((transport.connected, self.clock.getDelayedCalls()), (False, []))
