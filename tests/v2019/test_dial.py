"""Sessions that a client opens while its own process is paused, over a network in memory."""

from __future__ import annotations

from typing import Any

from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, HandshakeError
from dmsg.keys import SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.records import record_links
from dmsg.servers.reachability import CHECK_TIMEOUT, check_reachability
from dmsg.testing.network import Network
from dmsg.v2019.dial import SessionEndpoint
from dmsg.v2019.protocol import ServerFactory
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams
from tests.support import Accepting

CLIENT, SERVER = SecKey.from_seed(b"dial client"), SecKey.from_seed(b"dial server")
DELAY = 0.5
"""Seconds for which each segment travels."""
TIMEOUT = 4.0
"""Seconds for which the client waits. The server waits longer, because it blames a client that pauses."""
PAUSE = 5.0


class PausedClientTests(SynchronousTestCase):
    """The client is connected after 1 s. The server's handshake arrives after 2 s, and its OK after 3 s."""

    def setUp(self) -> None:
        self.network = Network(seed=1)
        self.client, self.server = (self.network.host(name) for name in ("client", "server"))
        self.paths = self.network.both_ways(self.client, self.server)
        for path in self.paths:
            path.delay = DELAY
        self.server.listenTCP(1, ServerFactory(self.server, SERVER))  # type: ignore[arg-type]
        turn = TurnFlush(self.client)
        streams = TransportStreams(self.client, CLIENT, lambda port: None, turn.add_stream)
        endpoint = SessionEndpoint(
            self.client, turn, CLIENT, SERVER.public, f"{self.server.address}:1", streams, TIMEOUT
        )
        self.results: list[Any] = []
        endpoint.open().addBoth(self.results.append)

    def pause(self, first: float) -> None:
        """Pause the client ``first`` seconds after the start. What the server sends after that arrives only later than
        the client runs again."""
        self.network.run(first)
        self.client.pause()
        self.paths[1].cut_since = self.network.clock.seconds()
        self.network.run(PAUSE)
        self.client.resume()
        self.network.run(1.0)

    def heal(self) -> None:
        self.paths[1].cut_since = None
        self.network.run(5.0)

    def check_opened(self) -> None:
        self.assertEqual(self.results, [])
        self.heal()
        (session,) = self.results
        self.assertIsInstance(session, ClientSession)
        self.assertTrue(session.connected)

    def test_a_pause_does_not_count_while_the_handshake_is_awaited(self) -> None:
        self.pause(1.7)
        self.check_opened()

    def test_a_pause_does_not_count_while_ok_is_awaited(self) -> None:
        self.pause(2.7)
        self.check_opened()

    def check_refused(self, reason: DropReason) -> None:
        self.network.run(TIMEOUT)
        (failure,) = self.results
        self.assertIsInstance(failure, Failure)
        self.assertEqual(failure.check(HandshakeError) and failure.value.reason, reason)

    def test_a_server_that_is_silent_after_the_pause_is_given_up(self) -> None:
        self.pause(1.7)
        self.check_refused(DropReason.HANDSHAKE_TIMEOUT)

    def test_a_server_that_sends_no_ok_after_the_pause_is_given_up(self) -> None:
        self.pause(2.7)
        self.check_refused(DropReason.NO_OK_FRAME)


class PausedServerTests(SynchronousTestCase):
    """A server that is paused while it checks whether it can be reached."""

    def test_a_pause_does_not_count_towards_the_reachability_check(self) -> None:
        network = Network(seed=1)
        server, router = (network.host(name) for name in ("server", "router"))
        for path in network.both_ways(server, router):
            path.delay = 2.5  # So the timeout of the link's own handshake begins after 5 s.
        router.listenTCP(1, Accepting())  # type: ignore[arg-type]
        make_link = record_links(server, TurnFlush(server), SERVER, SERVER.public)
        results: list[Any] = []
        check_reachability(server, f"{router.address}:1", make_link).addBoth(results.append)
        network.run(6.0)
        server.pause()
        network.run(CHECK_TIMEOUT)
        server.resume()
        network.run(3.0)
        self.assertEqual(results, [])
        network.run(1.5)
        (failure,) = results
        self.assertEqual(str(failure.value), "no answer within 10 s")
