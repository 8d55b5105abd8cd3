"""Clients whose own process is paused while others answer, over a network in memory."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgTimeout, DropReason
from dmsg.testing.lab import Lab
from tests.support import Accepting, Recorder

TIMEOUT = 6.0
PAUSE = 10.0
"""Seconds for which a host is paused; less than TCP's own limit for data that nobody acknowledges."""


class PausedConnectTests(SynchronousTestCase):
    """Alice is paused while she connects to Bob."""

    def setUp(self) -> None:
        self.lab = Lab(1)
        self.addCleanup(self.lab.stop)
        self.lab.add_servers(2)
        self.alice = self.lab.add_client("alice")
        self.bob = self.lab.add_client("bob")
        self.lab.settle()
        self.bob.listen(Accepting(), 7)
        self.host = self.lab.network.host("alice")
        self.results: list[Any] = []

    def cut(self, seconds: float | None) -> None:
        for host in self.lab.network.hosts.values():
            if host is not self.host:
                self.lab.network.path(host, self.host).cut_since = seconds

    def pause(self) -> None:
        """Pause Alice during her request. The answer arrives only after she runs again."""
        self.cut(self.lab.clock.seconds())
        self.lab.network.run(1.0)
        self.host.pause()
        self.lab.network.run(PAUSE)
        self.host.resume()
        self.lab.network.run(1.0)

    def test_a_pause_does_not_count_towards_connecting(self) -> None:
        self.alice.connect(self.lab.key("bob").public, Accepting(), 7, timeout=TIMEOUT).addBoth(self.results.append)
        self.pause()
        self.assertEqual(self.results, [])
        self.cut(None)
        self.lab.network.run(2.0)
        (protocol,) = self.results
        self.assertIsInstance(protocol, Recorder)

    def test_a_pause_does_not_count_towards_the_session_with_a_server(self) -> None:
        """Carol is connected to another server than Dave, so she first connects to his."""
        first, second = (self.lab.key(name).public for name in self.lab.servers)
        carol = self.lab.add_client("carol", only=[first])
        dave = self.lab.add_client("dave", only=[second])
        self.lab.settle()
        dave.listen(Accepting(), 7)
        self.assertNotIn(second, [session.server for session in carol._set.sessions()])
        self.host = self.lab.network.host("carol")
        self.lab.network.run_until(lambda: dave.status == "online")
        path = self.lab.network.path(self.lab.network.host(list(self.lab.servers)[1]), self.host)
        path.cut_since = self.lab.clock.seconds()  # Discovery answers, and the server does not.
        carol.connect(self.lab.key("dave").public, Accepting(), 7, timeout=TIMEOUT).addBoth(self.results.append)
        self.lab.network.run(0.5)
        self.pause()
        self.assertEqual(self.results, [])
        self.cut(None)
        self.lab.network.run(3.0)
        (protocol,) = self.results
        self.assertIsInstance(protocol, Recorder)

    def test_a_silent_network_is_noticed_after_the_pause(self) -> None:
        self.alice.connect(self.lab.key("bob").public, Accepting(), 7, timeout=TIMEOUT).addBoth(self.results.append)
        self.pause()
        self.lab.network.run(TIMEOUT)
        (failure,) = self.results
        self.assertIn("within 6 s", str(failure.value))

    def test_a_pause_does_not_count_towards_the_wait_for_a_server(self) -> None:
        carol = self.lab.network.host("carol")
        for name, host in self.lab.network.hosts.items():
            if name != "carol":
                self.lab.network.path(carol, host).cut_since = self.lab.clock.seconds()
        waiting = self.lab.add_client("carol").when_online(TIMEOUT)
        waiting.addBoth(self.results.append)
        self.lab.network.run(1.0)
        carol.pause()
        self.lab.network.run(PAUSE)
        carol.resume()
        self.lab.network.run(TIMEOUT - 2.0)
        self.assertEqual(self.results, [])
        self.lab.network.run(2.0)
        (failure,) = self.results
        self.assertTrue(failure.check(DmsgTimeout))


class SuspendedTests(SynchronousTestCase):
    """All machines are suspended at once, while requests, data and answers are on their way.

    Nobody is to blame, so nobody is blamed: no stream moves or ends, and no connection is closed.
    """

    def check(self, seconds: float) -> None:
        lab = Lab(2)
        self.addCleanup(lab.stop)
        lab.add_servers(2)
        clients = [lab.add_client(name) for name in ("alice", "bob", "carol")]
        lab.settle()
        lab.network.delay_all(0.1)
        accepting = Accepting()
        for client in clients:
            client.listen(accepting, 7)
        pairs = [(one, two) for one in clients for two in clients if one is not two]
        connections = [[id(session) for session in client.sessions()] for client in clients]
        streams: list[Any] = []
        for number in range(40):
            one, two = pairs[number % len(pairs)]
            opening = one.connect(two.public_key, Accepting(), port=7)
            for stream in streams:
                stream.transport.write(bytes(20_000))
            lab.network.run(0.013 * number)
            lab.network.suspend(seconds)
            streams.append(lab.result(opening, 3.0))
        lab.network.run(10.0)
        self.assertEqual([stream.lost for stream in (*streams, *accepting.built)], [None] * 80)
        self.assertEqual([client.streams.resumed for client in clients], [0, 0, 0])
        self.assertEqual([[id(session) for session in client.sessions()] for client in clients], connections)
        for server in lab.servers.values():
            # Discovery checks servers from time to time, and ends its connection during the handshake.
            self.assertLessEqual(set(server.factory.relay.drops), {DropReason.HANDSHAKE_ABANDONED})

    def test_for_seconds(self) -> None:
        self.check(5.0)

    def test_for_a_minute(self) -> None:
        self.check(60.0)

    def test_for_ten_minutes(self) -> None:
        self.check(600.0)
