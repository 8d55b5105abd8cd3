"""Idle links of a server release their cipher objects."""

from __future__ import annotations

import gc
from weakref import ref

from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.memory import Memory
from dmsg.keys import SecKey
from dmsg.net.links.records import RecordLink
from dmsg.servers.holdings import RELEASE_AFTER, LinkHoldings
from tests.support import MemoryNetwork

ONE, TWO = (SecKey.from_seed(name) for name in (b"one", b"two"))


class ReleaseCiphersTests(SynchronousTestCase):
    """A server in memory with two clients."""

    def setUp(self) -> None:
        self.network = MemoryNetwork()
        self.clock = self.network.clock
        memory = Memory(1 << 30)
        self.holdings = LinkHoldings(self.clock, self.network.factory, memory)
        self.holdings.start()
        self.addCleanup(self.holdings.stop)
        self.clients = [self.network.client(key, Factory.forProtocol(Protocol)) for key in (ONE, TWO)]

    def links(self) -> list[RecordLink]:
        return [session.link for session in self.network.factory.sessions]

    def released(self) -> list[bool]:
        return [link._sealer._cipher is None for link in self.links()]  # type: ignore[union-attr]

    def ping(self) -> None:
        """Send a frame to the server and back."""
        answered = self.clients[0].ping()
        self.network.settle()
        self.successResultOf(answered)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)

    def test_an_idle_link_releases_its_ciphers_and_works_again(self) -> None:
        self.wait(RELEASE_AFTER - 0.5)
        self.assertEqual(self.released(), [False, False])
        self.wait(2 * RELEASE_AFTER)
        self.assertEqual(self.released(), [True, True])
        self.ping()
        self.assertEqual(sorted(self.released()), [False, True])

    def test_a_link_in_use_keeps_its_ciphers(self) -> None:
        for _ in range(20):
            self.wait(RELEASE_AFTER / 4)
            self.assertIn(False, self.released())
            self.ping()

    def test_links_that_end_are_not_kept(self) -> None:
        self.wait(0.5)
        gone = [ref(link) for link in self.links()]
        for client in self.clients:
            client.close()
        self.network.settle()
        self.clients.clear()
        self.network.pumps.clear()
        gc.collect()
        self.assertEqual([link() for link in gone], [None, None])
