"""Programs at an agent whose process is paused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase

from dmsg.agent import programs
from dmsg.agent.program_service import ACCEPT_TIMEOUT, Service
from dmsg.agent.programs import END_TIME, LAST_TIME, REQUEST_TIME, ProgramConnection
from dmsg.net.streams.address import DmsgAddress
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import KEYS


class _Transport(StringTransportWithDisconnection):
    """Transport of a program's connection. Like a real one, it can unregister a producer that it does not have."""

    def getHandle(self) -> None:
        """Return no socket."""

    def unregisterProducer(self) -> None:
        """Do nothing."""

    def loseWriteConnection(self) -> None:
        """Do nothing."""


class PauseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = PausingClock()
        self.patch(programs, "peer_of", lambda channel: (1, 1))
        self.agent = cast(
            Any,
            SimpleNamespace(
                services={}, untaken={}, is_full=False, shared=SimpleNamespace(), max_programs=10, bridges={}
            ),
        )

    def connect(self) -> tuple[ProgramConnection, _Transport]:
        connection = ProgramConnection(self.agent, cast(Any, self.clock))
        transport = _Transport()
        transport.protocol = connection
        connection.makeConnection(transport)
        return connection, transport

    def check(self, transport: _Transport, seconds: float) -> None:
        """Check that a connection ends after ``seconds`` without pauses."""
        pass_time(self.clock, seconds / 2)
        self.clock.advance(10 * seconds)
        pass_time(self.clock, 0.4 * seconds)
        self.assertTrue(transport.connected)
        pass_time(self.clock, 0.2 * seconds)
        self.assertEqual((transport.connected, self.clock.getDelayedCalls()), (False, []))

    def test_the_request_of_a_program(self) -> None:
        _, transport = self.connect()
        self.check(transport, REQUEST_TIME)

    def test_a_program_that_closes_after_an_error(self) -> None:
        connection, transport = self.connect()
        connection.dataReceived(b'{"do": "nothing"}\n')
        self.check(transport, LAST_TIME)

    def test_a_program_that_closes_after_its_stream(self) -> None:
        connection, transport = self.connect()
        connection._deadline.stop()  # type: ignore[union-attr]
        connection.finish()
        self.check(transport, END_TIME)

    def test_a_stream_that_the_program_accepts(self) -> None:
        connection, _ = self.connect()
        connection._deadline.stop()  # type: ignore[union-attr]
        service = Service(self.agent, connection, 5)
        service.buildProtocol(DmsgAddress(KEYS["A"].public, 7))
        pass_time(self.clock, ACCEPT_TIMEOUT / 2)
        self.clock.advance(10 * ACCEPT_TIMEOUT)
        pass_time(self.clock, 0.4 * ACCEPT_TIMEOUT)
        self.assertEqual((len(service.waiting), service.refused), (1, 0))
        pass_time(self.clock, 0.2 * ACCEPT_TIMEOUT)
        self.assertEqual((len(service.waiting), service.refused), (0, 1))
