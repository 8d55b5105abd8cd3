"""Connections that a listener splices, at its limit."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.splice import PROTECTED_DIVISOR, SpliceFactory
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress


class SpliceLimitTests(SynchronousTestCase):
    """Peers at a listener that has as many connections as it may have."""

    def setUp(self) -> None:
        self.factory = SpliceFactory(lambda factory: Deferred(), max_pairs=2 * PROTECTED_DIVISOR)

    def connect(self, name: str) -> Any:
        half: Any = self.factory.buildProtocol(DmsgAddress(SecKey.from_seed(name.encode()).public, 0))
        if half is not None:
            half.transport = StringTransport()
        return half

    def test_new_keys_keep_no_peer_out_that_was_served_before(self) -> None:
        """64 keys of a stranger fill the table, each with no more connections than a peer never loses."""
        self.factory._halves.pop(self.connect("known"))
        strangers = [self.connect(f"key {number}") for number in range(PROTECTED_DIVISOR) for _ in range(2)]
        self.assertNotIn(None, strangers)
        self.assertIsNone(self.connect("new"))
        for _ in range(2):
            self.assertIsNotNone(self.connect("known"))
        self.assertEqual([one.transport.disconnected for one in strangers[-3:]], [False, True, True])
        self.assertEqual(self.factory.pair_count, 2 * PROTECTED_DIVISOR)
