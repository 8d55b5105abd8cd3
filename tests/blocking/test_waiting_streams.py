"""Streams that wait until a thread accepts them, without a network."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from dmsg.blocking import client
from dmsg.blocking.client import Listener
from dmsg.blocking.streams import StreamProtocol
from dmsg.keys import SecKey
from dmsg.net.streams.address import DmsgAddress
from tests.support import KEYS


class _Transport(StringTransport):
    """Stream of a peer, which records whether it was aborted."""

    aborted = False

    def abortConnection(self) -> None:
        self.aborted = True


class WaitingTests(SynchronousTestCase):
    """Which waiting stream is aborted when there are too many."""

    def setUp(self) -> None:
        self.patch(client, "WAITING_LIMIT", 5)
        self.listener = Listener(KEYS["A"].public, 7)
        self.listener.begin(Clock(), None)  # type: ignore[arg-type]
        self.factory = self.listener.factory()

    def open(self, peer: DmsgAddress) -> _Transport:
        protocol = self.factory.buildProtocol(peer)
        assert isinstance(protocol, StreamProtocol)
        transport = _Transport(peerAddress=peer)
        protocol.makeConnection(transport)
        return transport

    def test_a_peer_with_many_waiting_streams_keeps_no_other_out(self) -> None:
        greedy, modest = (DmsgAddress(SecKey.generate().public, 0) for _ in range(2))
        held = [self.open(greedy) for _ in range(7)]
        self.assertEqual([one.aborted for one in held], [False] * 5 + [True] * 2)
        self.assertEqual([self.open(modest).aborted for _ in range(3)], [False, False, True])
        self.assertEqual([one.aborted for one in held], [False] * 3 + [True] * 4)
        accepted = [self.listener.accept(0).peer for _ in range(5)]
        self.assertEqual(accepted, [greedy] * 3 + [modest] * 2)
        self.assertRaises(TimeoutError, self.listener.accept, 0)
