"""Classes of the errors that programs catch."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

import dmsg
from dmsg.errors import fit_close_reason
from dmsg.v2019 import Client
from tests.support import KEYS


class ErrorTests(SynchronousTestCase):
    def test_an_end_is_twisted_s_and_ours(self) -> None:
        lost, late = dmsg.StreamLost(11), dmsg.StreamTimeout("read deadline passed")
        for error in (lost, late):
            self.assertIsInstance(error, ConnectionLost)
            self.assertIsInstance(error, dmsg.DmsgError)
            self.assertIs(error.close_reason, dmsg.CloseReason.TIMEOUT)
        self.assertIsInstance(late, dmsg.DmsgTimeout)
        self.assertEqual(repr(late), "StreamTimeout('read deadline passed')")
        self.assertEqual(dmsg.StreamLost(250).close_reason, 250)
        self.assertEqual(dmsg.TransportClosed(250).reason, 250)

    def test_reasons_larger_than_a_byte(self) -> None:
        """Inside the library such a reason is an ordinary number. Where a wire has only a byte for it, it does not
        become a clean end.
        """
        self.assertEqual(dmsg.StreamLost(0x1234).close_reason, 0x1234)
        self.assertEqual(dmsg.TransportClosed(0x1234).reason, 0x1234)
        self.assertEqual([fit_close_reason(reason) for reason in (0, 255, 256, -1)], [0, 255, 12, 12])
        self.assertEqual([fit_close_reason(reason, 2) for reason in (256, 65535, 65536)], [256, 65535, 12])

    def test_a_connect_that_takes_too_long(self) -> None:
        """The error is the timeout that callers expect, and its text names what was tried."""
        clock = Clock()
        client = Client(clock, KEYS["A"], ["http://127.0.0.1:9"])  # type: ignore[arg-type]
        self.patch(client._entries, "successor", lambda remote: _never())
        connecting = client.connect(KEYS["B"].public, object(), timeout=2)  # type: ignore[arg-type]
        clock.advance(2)
        error = self.failureResultOf(connecting, dmsg.ConnectFailed).value
        self.assertIsInstance(error, dmsg.DmsgTimeout)
        self.assertIsInstance(error, TimeoutError)
        self.assertEqual(error.attempts, ())

    def test_errors_name_both_ports(self) -> None:
        client = Client(Clock(), KEYS["A"], ["http://127.0.0.1:9"])  # type: ignore[arg-type]
        address = dmsg.DmsgAddress(KEYS["B"].public, 7)
        self.assertRaises(ValueError, client.connect, address, object(), port=9)


def _never() -> Deferred[None]:
    return Deferred()
