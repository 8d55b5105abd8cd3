"""Direct links over a network in memory: two clients, and strangers at the port."""

from __future__ import annotations

from collections import Counter
from typing import Any

from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, HandshakeError, TransportRefused
from dmsg.keys import SecKey
from dmsg.net.flush import TurnFlush
from dmsg.testing.network import Network
from dmsg.v2019.core.wire import OK_FRAME
from dmsg.v2019.direct.links import LINKS_PER_ADDRESS, OK_TIMEOUT, TAG_TIMEOUT, DirectPort, dial
from dmsg.v2019.direct.tickets import Tickets, dialler_tag, listener_tag
from dmsg.v2019.pings import PING_INTERVAL, PING_TIMEOUT
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams
from tests.support import Recorder

ALICE, BOB = SecKey.from_seed(b"direct alice"), SecKey.from_seed(b"direct bob")
SECRET = bytes(range(32))
PORT = 25


class Stranger(Protocol):
    """Client that connects with plain TCP."""

    def __init__(self) -> None:
        self.got = b""
        self.is_lost = False

    def dataReceived(self, data: bytes) -> None:
        self.got += data

    def connectionLost(self, reason: Any = None) -> None:
        self.is_lost = True


class LinkCase(SynchronousTestCase):
    """Alice listens, and Bob has a ticket."""

    def setUp(self) -> None:
        self.network = Network(seed=1)
        self.alice, self.bob = (self.network.host(name) for name in ("alice", "bob"))
        self.drops: Counter[DropReason] = Counter()
        self.tickets = Tickets()
        self.factories: dict[int, Any] = {}
        streams = self.streams(self.alice, ALICE, self.factories)
        self.turn = TurnFlush(self.alice)
        self.port = DirectPort(self.alice, self.turn, streams, self.tickets, self.drops)
        self.listening = self.alice.listenTCP(0, self.port)  # type: ignore[arg-type]
        self.number = self.listening.getHost().port  # type: ignore[attr-defined]
        self.tickets.issue(SECRET, BOB.public, 0.0)

    def streams(self, host: Any, key: SecKey, factories: dict[int, Any]) -> TransportStreams:
        turn = TurnFlush(host)
        return TransportStreams(host, key, factories.get, turn.add_stream, resume_timeout=0.0)

    def dial(self, secret: bytes = SECRET) -> Any:
        """Dial from Bob, and return the Deferred's result, a failure as it is."""
        endpoint = TCP4ClientEndpoint(self.bob, self.alice.address, self.number)
        streams = self.streams(self.bob, BOB, {})
        return self.result_of(dial(self.bob, TurnFlush(self.bob), endpoint, streams, ALICE.public, secret))

    def result_of(self, deferred: Any, seconds: float = 60.0) -> Any:
        results: list[Any] = []
        deferred.addBoth(results.append)
        self.network.run_until(lambda: results, seconds)
        return results[0]

    def stranger(self, host: Any = None) -> Stranger:
        stranger = Stranger()
        endpoint = TCP4ClientEndpoint(host or self.bob, self.alice.address, self.number)
        factory = Factory.forProtocol(lambda: stranger)
        factory.noisy = False
        # A refused connection ends before the stranger gets it.
        stranger.is_lost = isinstance(self.result_of(endpoint.connect(factory)), Failure)
        return stranger


class DirectLinkTests(LinkCase):
    """The two ends know each other."""

    def listen(self) -> list[Any]:
        built: list[Any] = []

        class Listening(Factory):
            noisy = False

            def buildProtocol(self, addr: Any) -> Any:
                built.append(Recorder())
                return built[-1]

        self.factories[PORT] = Listening()
        return built

    def test_a_pause_of_the_dialler_does_not_count_while_ok_is_awaited(self) -> None:
        """Bob is connected after 1 s. Alice's tag arrives after 2 s, and her OK after 3 s."""
        paths = self.network.both_ways(self.bob, self.alice)
        for path in paths:
            path.delay = 0.5
        endpoint = TCP4ClientEndpoint(self.bob, self.alice.address, self.number)
        streams = self.streams(self.bob, BOB, {})
        dialling = dial(self.bob, TurnFlush(self.bob), endpoint, streams, ALICE.public, SECRET)
        results: list[Any] = []
        dialling.addBoth(results.append)
        self.network.run(2.7)
        self.bob.pause()
        paths[1].cut_since = self.network.clock.seconds()
        self.network.run(OK_TIMEOUT + 1.0)
        self.bob.resume()
        self.network.run(1.0)
        self.assertEqual(results, [])
        paths[1].cut_since = None
        self.network.run(2.0)
        self.assertTrue(results[0].connected)

    def open(self, session: ClientSession) -> Any:
        factory = Factory.forProtocol(Recorder)
        factory.noisy = False
        return self.result_of(session.open(ALICE.public, factory, 5.0, port=PORT, secure=True, resumable=False))

    def test_a_stream_carries_data_both_ways(self) -> None:
        built = self.listen()
        session = self.dial()
        self.assertTrue(session.connected)
        self.assertEqual(session.server, ALICE.public)
        here = self.open(session)
        (there,) = built
        self.assertEqual(there.transport.getPeer().public_key, BOB.public)
        self.assertEqual(here.transport.binding, there.transport.binding)
        here.transport.write(b"there")
        there.transport.write(b"and back")
        self.network.run(1.0)
        self.assertEqual((there.data, here.data), (b"there", b"and back"))

    def test_a_port_without_a_listener(self) -> None:
        self.open(self.dial()).trap(TransportRefused)

    def test_a_ticket_admits_its_owner_several_times(self) -> None:
        self.listen()
        sessions = [self.dial() for _ in range(2)]
        for session in sessions:
            self.open(session)
        self.assertEqual(len(self.port.sessions), 2)

    def test_the_end_of_the_link_ends_its_streams(self) -> None:
        built = self.listen()
        session = self.dial()
        here = self.open(session)
        session.close()
        self.network.run(5.0)
        self.assertTrue(here.lost and built[0].lost)
        self.assertEqual(list(self.port.sessions), [])

    def test_a_link_that_died_silently_is_found_by_both(self) -> None:
        session = self.dial()
        for path in self.network.both_ways(self.alice, self.bob):
            path.cut_since = self.network.clock.seconds()
        self.network.run(PING_INTERVAL + PING_TIMEOUT + 5.0)
        self.assertFalse(session.connected)
        self.assertEqual(list(self.port.sessions), [])


class StrangerTests(LinkCase):
    """A client without a ticket gets no answer."""

    def write(self, stranger: Stranger, data: bytes) -> None:
        stranger.transport.write(data)  # type: ignore[union-attr]
        self.network.run(1.0)

    def test_a_wrong_tag_is_answered_with_nothing(self) -> None:
        for data in (listener_tag(SECRET), b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(1000)):
            stranger = self.stranger()
            self.write(stranger, data)
            self.assertEqual((stranger.got, stranger.is_lost), (b"", True))
        self.assertEqual(self.drops, {DropReason.HANDSHAKE_FAILED: 3})

    def test_silence_ends_the_connection(self) -> None:
        stranger = self.stranger()
        self.network.run(TAG_TIMEOUT + 1.0)
        self.assertEqual((stranger.got, stranger.is_lost), (b"", True))
        self.assertEqual(self.drops, {DropReason.HANDSHAKE_TIMEOUT: 1})

    def test_an_end_that_sends_no_ok(self) -> None:
        stranger = self.stranger()
        self.write(stranger, dialler_tag(SECRET))
        self.assertEqual((stranger.got, stranger.is_lost), (listener_tag(SECRET), False))
        self.network.run(OK_TIMEOUT + 1.0)
        self.assertTrue(stranger.is_lost)
        self.assertEqual(self.drops, {DropReason.NO_OK_FRAME: 1})

    def test_pauses_of_this_process_do_not_count(self) -> None:
        stranger = self.stranger()
        self.write(stranger, dialler_tag(SECRET))
        self.alice.pause()
        self.network.run(OK_TIMEOUT + 1.0)
        self.alice.resume()
        self.network.run(OK_TIMEOUT - 2.0)
        self.assertFalse(stranger.is_lost)
        self.network.run(2.0)
        self.assertEqual((stranger.is_lost, self.drops), (True, {DropReason.NO_OK_FRAME: 1}))

    def test_ok_is_answered_with_ok(self) -> None:
        stranger = self.stranger()
        self.write(stranger, dialler_tag(SECRET) + OK_FRAME)
        self.assertTrue(stranger.got.startswith(listener_tag(SECRET) + OK_FRAME))

    def test_links_of_one_address_are_bounded(self) -> None:
        strangers = [self.stranger() for _ in range(LINKS_PER_ADDRESS + 2)]
        self.assertEqual(self.drops, {DropReason.TOO_MANY_FROM_ADDRESS: 2})
        for one in strangers:
            one.transport.write(dialler_tag(SECRET) + OK_FRAME)  # type: ignore[union-attr]
        self.network.run(OK_TIMEOUT)
        self.assertEqual([one.is_lost for one in strangers], [False] * LINKS_PER_ADDRESS + [True] * 2)
        self.assertEqual(len(self.port.sessions), LINKS_PER_ADDRESS)

    def test_addresses_that_are_not_admitted(self) -> None:
        self.port._is_admitted = lambda host: host != self.bob.address
        stranger = self.stranger()
        self.network.run(1.0)
        self.assertEqual((stranger.got, stranger.is_lost), (b"", True))
        self.assertEqual(self.drops, {DropReason.NOT_ADMITTED: 1})
        self.assertFalse(self.stranger(self.network.host("carol")).is_lost)

    def test_a_dialler_with_another_secret(self) -> None:
        self.dial(bytes(32)).trap(HandshakeError)

    def test_a_port_that_says_nothing_does_not_keep_the_dialler(self) -> None:
        self.listening.stopListening()
        silent = Factory.forProtocol(Protocol)
        silent.noisy = False
        self.number = self.alice.listenTCP(0, silent).getHost().port  # type: ignore[attr-defined,arg-type]
        began = self.network.clock.seconds()
        self.dial().trap(HandshakeError)
        self.assertLess(self.network.clock.seconds() - began, TAG_TIMEOUT + 1.0)
