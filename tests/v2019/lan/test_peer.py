"""Peers on a network in memory: both sides, and networks that come and go."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.mdns.interfaces import Interface
from dmsg.net.mdns.packets import PORT as MDNS_PORT
from dmsg.net.mdns.sockets import GROUP4
from dmsg.testing.network import Host, Network
from dmsg.v2019.lan import peer as peer_module
from dmsg.v2019.lan.networks import CHECK_INTERVAL
from dmsg.v2019.lan.peer import FoundPeer, LanPeer
from tests.support import Recorder
from tests.v2019.lan.support import NUMBER

STREAM_PORT = 25
ASKER_PORT = 50000


class Socket:
    """UDP socket of one host in the air."""

    def __init__(self, air: Air, address: str, port: int, received: Callable[[bytes, str, int], None]) -> None:
        self.air, self.address, self.port, self.received = air, address, port, received
        air.sockets.append(self)

    def write(self, data: bytes, where: tuple[str, int]) -> None:
        for one in list(self.air.sockets):
            if one.port == where[1] and where[0] in (GROUP4, one.address):
                one.received(data, self.address, self.port)

    def stopListening(self) -> Deferred[None]:
        self.air.sockets.remove(self)
        return succeed(None)


class Air:
    """Network that delivers packets at once, to a group or to one address."""

    def __init__(self) -> None:
        self.sockets: list[Socket] = []

    def open_responder(self, reactor: object, interface: Interface, received: Any) -> Socket:
        return Socket(self, str(interface.address), MDNS_PORT, received)

    def open_asker(self, reactor: object, interface: Interface, received: Any) -> Socket:
        return Socket(self, str(interface.address), ASKER_PORT, received)


class PeerTests(SynchronousTestCase):
    """Alice offers a code, and Bob asks for it."""

    def setUp(self) -> None:
        self.network = Network(seed=1)
        self.air = Air()
        self.patch(peer_module, "open_responder", self.air.open_responder)
        self.patch(peer_module, "open_asker", self.air.open_asker)
        self.is_up = True
        self.warnings: list[str] = []
        self.alice, self.bob = (self.peer(self.network.host(name)) for name in ("alice", "bob"))
        self.listening = Factory.forProtocol(Recorder)
        self.listening.noisy = False

    def peer(self, host: Host) -> LanPeer:
        interface = Interface("lan", 1, IPv4Address(host.address), IPv4Network("10.0.0.0/8"))
        peer = LanPeer(
            host.reactor, interfaces=lambda: [interface] if self.is_up else [], on_warning=self.warnings.append
        )
        self.addCleanup(lambda: self.result_of(Deferred.fromCoroutine(peer.stop())))
        return peer

    def result_of(self, deferred: Any, seconds: float = 60.0) -> Any:
        results: list[Any] = []
        deferred.addBoth(results.append)
        self.network.run_until(lambda: results, seconds)
        return results[0]

    def found(self, number: int = NUMBER) -> list[FoundPeer]:
        found: list[FoundPeer] = []
        self.bob.search(number, found.append)
        self.network.run(1.5)
        return found

    def test_bob_finds_alice_and_opens_a_stream(self) -> None:
        offer = self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        self.assertEqual(len(offer.interfaces), 1)
        (one,) = self.found()
        self.assertEqual(one.key, self.alice.public_key)
        here = self.result_of(one.connect(self.listening, STREAM_PORT, timeout=5.0))
        self.assertEqual(here.transport.getPeer().public_key, self.alice.public_key)
        self.assertEqual(here.transport.getHost().public_key, self.bob.public_key)

    def test_another_number_finds_nobody(self) -> None:
        self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        self.assertEqual(self.found(NUMBER + 1), [])

    def test_what_was_refused_is_counted_after_its_end_too(self) -> None:
        offer = self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        self.found(NUMBER + 1)
        asked = self.alice.drops["other_code"]
        self.assertGreaterEqual(asked, 2)
        self.assertEqual(self.alice.drops, {"other_code": asked})
        self.result_of(offer.stop())
        self.assertEqual(self.alice.drops, {"other_code": asked})
        # A stranger without a ticket comes to the port of the next offer.
        self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        (port,) = self.network.host("alice").ports
        stranger = Recorder()
        endpoint = TCP4ClientEndpoint(self.network.host("bob").reactor, self.network.host("alice").address, port)
        self.result_of(connectProtocol(endpoint, stranger))
        stranger.transport.write(bytes(60))  # type: ignore[union-attr]
        self.network.run(5.0)
        self.assertEqual(self.alice.drops["handshake_failed"], 1)

    def test_a_search_finds_an_offer_that_is_made_later(self) -> None:
        found: list[FoundPeer] = []
        self.bob.search(NUMBER, found.append)
        self.network.run(20.0)
        self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        self.network.run(5.0)
        self.assertEqual(len(found), 1)

    def test_after_the_end_of_an_offer_its_ports_are_closed_and_its_streams_continue(self) -> None:
        offer = self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        (one,) = self.found()
        here = self.result_of(one.connect(self.listening, STREAM_PORT, timeout=5.0))
        self.result_of(offer.stop())
        self.assertEqual([socket for socket in self.air.sockets if socket.port == MDNS_PORT], [])
        self.assertEqual(self.network.host("alice").ports, {})
        here.transport.write(b"still there")
        self.network.run(5.0)
        self.assertFalse(here.lost)
        self.assertFalse(here.transport.has_ended)

    def test_a_network_that_comes_and_goes_leaves_no_ports(self) -> None:
        self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        for _ in range(10):
            self.is_up = not self.is_up
            self.network.run(CHECK_INTERVAL)
        self.assertEqual((len(self.alice._ports), len(self.network.host("alice").ports)), (1, 1))
        self.assertEqual(len(self.found()), 1)

    def test_nothing_is_left_when_both_have_stopped(self) -> None:
        self.alice.offer(NUMBER, self.listening, STREAM_PORT)
        (one,) = self.found()
        here = self.result_of(one.connect(self.listening, STREAM_PORT, timeout=5.0))
        for peer in (self.alice, self.bob):
            self.result_of(Deferred.fromCoroutine(peer.stop()))
        self.network.run(30.0)
        self.assertTrue(here.lost)
        self.assertEqual((self.air.sockets, self.network.host("alice").ports), ([], {}))
        self.assertEqual(self.network.clock.getDelayedCalls(), [])
