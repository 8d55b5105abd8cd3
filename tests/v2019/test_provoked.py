"""Frames that others provoke from a client do not count against the client: the others are charged, or nobody."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.policing import FLOODING_REFUSALS
from dmsg.clients.handshake_limits import ALL_STRANGERS_BURST, ALL_STRANGERS_RATE
from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.servers.serving import REFUSED_BURST
from dmsg.streams.core.resumption import MAX_FRAMES
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.congestion import PEER_QUEUE_LIMIT, PEER_QUEUE_MAXIMUM
from dmsg.v2019.core.peers import RelayPeer
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.relay import EARLY_FRAMES, Relay
from dmsg.v2019.core.routes import IN_FLIGHT
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    MAX_CLOSE,
    MAX_HANDSHAKE_PAYLOAD,
    OK,
    REQUEST,
    WINDOW_FRAMES,
    Frame,
    encode_frame,
)
from tests.support import KEYS, SERVER_KEY, Draws, MemoryNetwork
from tests.v2019.core.test_relay import FakePort, feed

VICTIM = SecKey.from_seed(b"victim").public
ENEMIES = [SecKey.from_seed(b"enemy %d" % number).public for number in range(20)]


class ProvokedCase(SynchronousTestCase):
    """A victim, and others at one address."""

    limits = Limits()

    def setUp(self) -> None:
        self.now = 0.0
        self.relay = Relay(limits=self.limits, now=lambda: self.now, random=Draws(0x1000))  # type: ignore[arg-type]
        self.port = FakePort()
        self.port.blocks = ("127.0.0.0/24", "127.0.0.1")
        self.victim = self.relay.add(VICTIM, self.port)
        self.ports: dict[RelayPeer, FakePort] = {}
        self.enemies = [self.join(key, "127.0.0.2") for key in ENEMIES]

    def tearDown(self) -> None:
        self.relay.check()

    def join(self, key: Any, address: str) -> RelayPeer:
        port = FakePort()
        port.blocks = ("127.0.0.0/24", address)
        peer = self.relay.add(key, port)
        self.ports[peer] = port
        return peer

    def ask(self, peer: RelayPeer, own_id: int) -> Frame:
        return Frame(REQUEST, own_id, bytes(peer.key) + bytes(VICTIM))

    def accepted(self, peer: RelayPeer, own_id: int) -> int:
        """A transport to the victim; its id there."""
        feed(self.relay, peer, self.ask(peer, own_id))
        (request,) = self.port.take()
        feed(self.relay, self.victim, Frame(ACCEPT, request.id, request.payload))
        self.ports[peer].take()
        return request.id


class AnswerTests(ProvokedCase):
    def test_each_late_frame_is_counted(self) -> None:
        self.relay.limits = Limits(request_rate=1)
        own_id = self.accepted(self.enemies[0], 2)
        feed(self.relay, self.enemies[0], Frame(CLOSE, 2, b"\0"))
        feed(self.relay, self.victim, *[Frame(FWD, own_id, b"\0\0x")] * IN_FLIGHT)
        self.assertEqual(self.relay.drops, {DropReason.NO_SUCH_TRANSPORT: IN_FLIGHT})

    def test_answers_to_a_flood_of_requests_are_free(self) -> None:
        """Twenty connections with 500 REQUESTs a second each, which the victim refuses one by one."""
        newcomers = refused = answered = 0
        ended: set[RelayPeer] = set()
        for turn in range(100):
            self.now += 0.05
            for peer in self.enemies:
                if peer in ended:
                    continue
                frames = [self.ask(peer, 2 * (25 * turn + number) % 8000) for number in range(25)]
                try:
                    feed(self.relay, peer, *frames)
                except RemoteProtocolError as error:
                    self.assertIs(error.reason, DropReason.FLOOD)
                    ended.add(peer)
                for request in self.port.take():
                    if request.type == REQUEST:
                        answered += 1
                        feed(self.relay, self.victim, Frame(CLOSE, request.id, b"\x0f"))
            newcomer = self.join(SecKey.from_seed(b"new %d" % turn).public, f"127.0.0.{3 + turn}")
            feed(self.relay, newcomer, self.ask(newcomer, 2))
            newcomers += 1
            refused += bool(self.ports[newcomer].take())
            self.port.take()
        self.assertEqual((newcomers, refused), (100, 0))
        self.assertLess(answered, self.limits.destination_burst + 5 * self.limits.destination_rate)
        self.assertGreater(self.relay.drops[DropReason.DESTINATION_RATE], 10_000)
        self.assertTrue(all(peer.police.ignores_refusals(self.now) for peer in self.enemies[-5:]))
        self.assertFalse(self.victim.police.ignores_refusals(self.now))

    def test_answers_that_come_too_late_are_free(self) -> None:
        """Each REQUEST is cancelled at once; the victim accepts and closes nevertheless."""
        for turn in range(400):
            self.now += 0.05
            peer = self.enemies[turn % 20]
            for number in range(20):
                own_id = 2 * number
                feed(self.relay, peer, self.ask(peer, own_id), Frame(CLOSE, own_id, b"\0"))
            for request in self.port.take():
                if request.type == REQUEST:
                    late = Frame(ACCEPT, request.id, request.payload), Frame(CLOSE, request.id, b"\0")
                    feed(self.relay, self.victim, *late)
        self.assertEqual((self.relay.strays, self.relay.drops[DropReason.RATE_LIMITED]), (0, 0))
        self.assertEqual(self.relay.drops[DropReason.DESTINATION_RATE], 0)

    def test_closing_all_at_once_is_free(self) -> None:
        """For example, a server shuts down and every stream moves to another one."""
        self.relay.limits = Limits(request_rate=0)
        ids = [self.accepted(self.enemies[number % 20], 2 * number) for number in range(6000)]
        self.relay.limits = Limits()
        feed(self.relay, self.victim, *[Frame(CLOSE, own_id, b"\0") for own_id in ids])
        self.assertEqual((self.relay.route_count, self.relay.drops[DropReason.RATE_LIMITED]), (0, 0))

    def test_frames_in_flight_at_a_close_are_free(self) -> None:
        """A window of a transport that its other end closes; then what nobody provoked."""
        self.assertGreaterEqual(IN_FLIGHT, max(MAX_FRAMES, WINDOW_FRAMES))
        there = self.accepted(self.enemies[0], 2)
        feed(self.relay, self.enemies[0], Frame(CLOSE, 2, b"\0"))
        strays = 0
        for _ in range(IN_FLIGHT // 64):
            feed(self.relay, self.victim, *[Frame(FWD, there, b"\0\0x")] * 64)
            strays += self.relay.strays
        self.assertEqual(strays, 0)
        for _ in range(100):
            feed(self.relay, self.victim, *[Frame(FWD, there, b"\0\0x")] * 64)
            strays += self.relay.strays
        self.assertGreater(strays, 1000)

    def test_an_answer_for_each_frame_behind_a_close_is_free(self) -> None:
        """The victim closes at the first of many frames, and old clients answer each of the others with CLOSE."""
        there = self.accepted(self.enemies[0], 2)
        feed(self.relay, self.enemies[0], *[Frame(FWD, 2, b"\0\0x")] * 20_000)
        feed(self.relay, self.victim, *[Frame(CLOSE, there, b"\0")] * 20_001)
        self.assertEqual(self.relay.strays, 0)

    def test_data_before_accept_provokes_little(self) -> None:
        enemy = self.enemies[0]
        feed(self.relay, enemy, self.ask(enemy, 2), *[Frame(FWD, 2, b"\0\0x"), Frame(ACK, 2, b"\0\0")] * 500)
        self.assertEqual(
            [frame.type for frame in self.port.take()], [REQUEST, *[FWD, ACK] * (EARLY_FRAMES // 2), CLOSE]
        )
        self.assertEqual(self.relay.drops[DropReason.BAD_FRAME], 1)
        self.assertEqual(self.ports[enemy].take()[0], Frame(CLOSE, 2, bytes((CloseReason.BAD_FRAME,))))

    def test_an_accept_is_passed_on_once(self) -> None:
        """A slow reader cannot be ended by ACCEPTs of a client that it has asked."""
        enemy = self.enemies[0]
        self.relay.congest(self.victim)
        feed(self.relay, self.victim, Frame(REQUEST, 2, bytes(VICTIM) + bytes(enemy.key)))
        (request,) = self.ports[enemy].take()
        feed(self.relay, enemy, *[Frame(ACCEPT, request.id, bytes(1000))] * 10)
        self.assertEqual(len(self.port.take()), 1)
        feed(self.relay, self.victim, Frame(REQUEST, 4, bytes(VICTIM) + bytes(enemy.key)))
        (request,) = self.ports[enemy].take()
        feed(self.relay, enemy, Frame(ACCEPT, request.id, bytes(MAX_HANDSHAKE_PAYLOAD + 1)))
        self.assertEqual(self.port.take(), [Frame(CLOSE, 4, bytes((CloseReason.BAD_FRAME,)))])

    def test_a_close_is_passed_on_short(self) -> None:
        for size, passed in ((0, 0), (1, 1), (MAX_CLOSE, MAX_CLOSE), (60_000, 1)):
            self.accepted(self.enemies[0], 2)
            feed(self.relay, self.enemies[0], Frame(CLOSE, 2, b"\x0b" * size))
            self.assertEqual([frame.payload for frame in self.port.take()], [b"\x0b" * passed])

    def test_a_slow_reader_is_not_ended_for_requests_of_others(self) -> None:
        self.relay.congest(self.victim)
        self.port.waiting = PEER_QUEUE_MAXIMUM
        self.port.keep = False
        for number in range(8000):
            self.now += 0.01
            peer = self.enemies[number % 20]
            feed(self.relay, peer, Frame(REQUEST, 2 * number % 8000, bytes(peer.key) + bytes(VICTIM) + bytes(1000)))
        self.assertEqual(self.port.closed, [])
        self.assertEqual(self.relay.drops[DropReason.QUEUE_FULL], 8000)
        self.port.waiting = PEER_QUEUE_LIMIT
        self.port.keep = True
        feed(self.relay, self.enemies[0], self.ask(self.enemies[0], 2))
        self.assertEqual(len(self.port.take()), 1)


class RateTests(SynchronousTestCase):
    def test_a_server_passes_less_on_than_a_client_lets_in(self) -> None:
        limits = Limits()
        self.assertLessEqual(limits.destination_rate, 0.8 * ALL_STRANGERS_RATE)
        self.assertLessEqual(limits.destination_burst, ALL_STRANGERS_BURST)


class FloodTests(SynchronousTestCase):
    """Links that a flood ends."""

    def setUp(self) -> None:
        self.network = MemoryNetwork()
        self.clock = self.network.clock
        self.victim = self.join("victim", "198.51.100.1")

    def join(self, name: str, host: str) -> RawClient:
        client = RawClient(SecKey.from_seed(name.encode()), SERVER_KEY.public)
        link = self.network.join(client)
        link.owner, link.blocks, link.address = host, (host,), host
        self.network.settle()
        return client

    def asks(self, client: RawClient, count: int, first: int = 0) -> None:
        payload = bytes(client.key.public) + bytes(VICTIM)
        client.send(b"".join(encode_frame(REQUEST, 2 * (first + number) % 16_000, payload) for number in range(count)))

    def test_only_the_flooder_is_ended(self) -> None:
        """Neither the victim nor a client at the same address that was refused beside the flooders is ended."""
        enemies = [self.join(f"enemy {number}", "203.0.113.7") for number in range(20)]
        neighbour = self.join("neighbour", "203.0.113.7")
        for turn in range(60):
            self.clock.advance(0.05)
            for enemy in enemies:
                if not enemy.closed:
                    self.asks(enemy, 25, 25 * turn)
            if not turn % 10:
                self.asks(neighbour, 1, turn)
            self.network.settle()
            closes = b"".join(encode_frame(CLOSE, one.id, b"\x0f") for one in self.victim.take() if one.type == REQUEST)
            if closes:
                self.victim.send(closes)
            self.network.settle()
        self.assertTrue(all(enemy.closed for enemy in enemies))
        self.assertEqual((neighbour.closed, self.victim.closed), (False, False))
        drops = self.network.factory.relay.drops
        self.assertEqual((drops[DropReason.FLOOD], drops[DropReason.RATE_LIMITED]), (20, 0))
        self.assertGreater(drops[DropReason.DESTINATION_RATE], REFUSED_BURST)
        self.assertGreater(drops[DropReason.DESTINATION_RATE], 20 * FLOODING_REFUSALS)
        self.assertFalse(self.join("late neighbour", "203.0.113.7").closed)


class ClientTests(SynchronousTestCase):
    def test_a_client_answers_strays_of_one_read_once(self) -> None:
        core = ClientConnection(KEYS["A"].public)
        frames = [Frame(OK, 0, b""), *[Frame(FWD, 8, b"\0\0x")] * 500, *[Frame(ACK, 9, b"\0\0")] * 500]
        data = bytearray(b"".join(frame.encode() for frame in frames))
        core.receive_frames(data, len(data))
        answers = core.data_to_send()
        none_such = bytes((CloseReason.NO_SUCH_TRANSPORT,))
        self.assertEqual(answers, Frame(CLOSE, 8, none_such).encode() + Frame(CLOSE, 9, none_such).encode())
