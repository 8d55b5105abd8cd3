"""Connections that a listener splices, at its limit."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.splice import LEFT_AFTER, PROTECTED_DIVISOR, SpliceFactory
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress


class SpliceLimitTests(SynchronousTestCase):
    """Peers at a listener that has as many connections as it may have."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.factory = SpliceFactory(
            lambda factory: Deferred(), max_pairs=2 * PROTECTED_DIVISOR, seconds=self.clock.seconds
        )

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

    def test_a_stranger_ends_no_connection_of_a_peer_whose_server_has_died(self) -> None:
        """The stream of the peer will continue over another server."""
        known = self.connect("known")
        greedy = [self.connect("greedy") for _ in range(2 * PROTECTED_DIVISOR - 1)]
        known.transport.away_since = self.clock.seconds()
        self.assertIsNotNone(self.connect("other"))
        self.assertEqual((known.transport.disconnected, greedy[-1].transport.disconnected), (False, True))
        self.assertIsNone(self.connect("greedy"))
        self.assertFalse(known.transport.disconnected)

    def test_strangers_with_many_keys_end_no_connection_of_a_peer_whose_server_has_died(self) -> None:
        known = self.connect("known")
        for number in range(2 * PROTECTED_DIVISOR - 1):
            self.connect(f"key {number}")
        known.transport.away_since = self.clock.seconds()
        self.clock.advance(LEFT_AFTER - 1)
        self.assertIsNone(self.connect("new"))
        self.assertFalse(known.transport.disconnected)
        self.clock.advance(1)
        self.assertIsNotNone(self.connect("new"))
        self.assertTrue(known.transport.disconnected)

    def test_a_peer_loses_its_useless_connections_first(self) -> None:
        greedy = [self.connect("greedy") for _ in range(2 * PROTECTED_DIVISOR)]
        greedy[3].transport.away_since = 2.0
        greedy[4].transport.away_since = 1.0
        greedy[5].transport.has_ended = True
        for _ in range(3):
            self.assertIsNotNone(self.connect("other"))
        gone = [number for number, one in enumerate(greedy) if one.transport.disconnected]
        self.assertEqual(gone, [3, 4, 5])
        greedy[6].transport.away_since = self.clock.seconds()
        self.assertIsNotNone(self.connect("greedy"), "a peer that has restarted replaces what it has left")
        self.assertTrue(greedy[6].transport.disconnected)
