"""Programs that use the SOCKS proxy of a process that is paused."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.socks import REQUEST_TIMEOUT, SocksProtocol
from tests.net.test_own_pauses import PausingClock, pass_time


class PauseTests(SynchronousTestCase):
    def test_pauses_do_not_count_while_a_request_is_awaited(self) -> None:
        clock = PausingClock()
        dialled: list[Any] = []

        def dial(host: str, port: int, connection: object) -> Deferred[Any]:
            dialled.append((host, port))
            return Deferred()

        for answers in (True, False):
            protocol = SocksProtocol(clock, dial, lambda failure: 1, lambda: None)
            transport = StringTransportWithDisconnection()
            transport.protocol = protocol
            protocol.makeConnection(transport)
            pass_time(clock, REQUEST_TIMEOUT / 2)
            clock.advance(10 * REQUEST_TIMEOUT)
            pass_time(clock, 0.4 * REQUEST_TIMEOUT)
            self.assertTrue(transport.connected)
            if answers:
                protocol.dataReceived(b"\x05\x01\x00")
                protocol.dataReceived(b"\x05\x01\x00\x03\x04bobx\x00\x50")
                self.assertEqual(dialled, [("bobx", 80)])
            else:
                pass_time(clock, 0.2 * REQUEST_TIMEOUT)
                self.assertFalse(transport.connected)
            self.assertEqual(clock.getDelayedCalls(), [])
