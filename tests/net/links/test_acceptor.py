"""Places of a server: when all are taken, the block that has most of them gives one to whoever has fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.endpoints import TCP4ClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.errors import CloseReason, DropReason
from dmsg.keys import SecKey
from dmsg.messaging.core.policing import Limits as MessagingLimits
from dmsg.net.blocks import BlockCounts
from dmsg.net.links import places
from dmsg.net.links.places import FEW_PLACES, GREEDY_DIVISOR, SEARCH_AGAIN
from dmsg.servers.admission import Admission, KeyList
from dmsg.testing.lab import Lab
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.client import Client
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import ACCEPT, CLOSE, DRAIN, OK, PING, REQUEST, Frame, encode_frame, parse_drain
from dmsg.v2019.server import Server
from tests.messaging.support import Network
from tests.support import SERVER_KEY, Accepting, MemoryNetwork, asynchronous


def key(number: int) -> SecKey:
    return SecKey.from_seed(b"place %d" % number)


class PlacesTests(SynchronousTestCase):
    """A server with 20 places in memory."""

    PLACES = 20

    def setUp(self) -> None:
        self.network = MemoryNetwork(limits=Limits(max_connections=self.PLACES))
        self.factory = self.network.factory
        self.number = 0

    def come(self, host: str) -> RawClient:
        self.number += 1
        client = RawClient(key(self.number), SERVER_KEY.public)
        self.network.join(client, host)
        self.network.settle()
        return client

    def stays(self, client: RawClient) -> bool:
        return not client.closed and [frame.type for frame in client.take()][:1] in ([], [OK])

    def fill(self, *hosts: str) -> list[RawClient]:
        clients = [self.come(hosts[number % len(hosts)]) for number in range(self.PLACES)]
        self.assertTrue(all(map(self.stays, clients)))
        self.assertEqual(self.factory.available_connections, 0)
        return clients

    def test_an_honest_newcomer_has_the_place_of_the_newest_idle_one(self) -> None:
        crowd = self.fill("1.1.1.1", "2.2.2.2")
        self.assertEqual(self.factory.places, 10 - FEW_PLACES)
        newcomer = self.come("9.9.9.9")
        self.assertTrue(self.stays(newcomer))
        self.assertEqual([client.closed for client in crowd].count(True), 1)
        self.assertTrue(any(client.closed for client in crowd[-2:]))
        self.assertEqual(self.factory.relay.drops[DropReason.CROWDED_OUT], 1)
        self.assertEqual(len(self.factory.sessions), self.PLACES)
        # The crowd does not come back in the newcomer's place, however often it tries.
        for _ in range(10):
            self.assertFalse(self.stays(self.come("1.1.1.1")))
        self.assertTrue(self.stays(newcomer))

    def test_the_crowd_keeps_as_much_as_others_have(self) -> None:
        crowd = self.fill("1.1.1.1")
        honest = [self.come(f"9.9.{number}.9") for number in range(self.PLACES + 5)]
        self.assertEqual(
            [self.stays(one) for one in honest], [True] * (self.PLACES - FEW_PLACES) + [False] * (5 + FEW_PLACES)
        )
        self.assertEqual([client.closed for client in crowd].count(False), FEW_PLACES)
        self.assertEqual(self.factory.places, 0)

    def test_blocks_of_one_site_are_counted_together(self) -> None:
        """Twenty /64s of one /56."""
        crowd = self.fill(*[f"2600:1:2:{number:x}::1" for number in range(20)])
        self.assertTrue(self.stays(self.come("9.9.9.9")))
        self.assertEqual([client.closed for client in crowd].count(True), 1)

    def test_a_connection_with_open_transports_is_not_evicted(self) -> None:
        crowd = self.fill("1.1.1.1", "2.2.2.2")
        asker, answerer = crowd[-1], crowd[-2]
        payload = bytes(asker.key.public + answerer.key.public)
        asker.send(encode_frame(REQUEST, 2, payload))
        self.network.settle()
        (request,) = answerer.take()
        answerer.send(encode_frame(ACCEPT, request.id, payload))
        self.network.settle()
        self.assertTrue(self.stays(self.come("9.9.9.9")))
        self.assertFalse(asker.closed or answerer.closed)

    def test_where_none_is_idle_a_greedy_block_loses_one_all_the_same(self) -> None:
        """Otherwise clients could keep a server full by keeping one transport open each."""
        crowd = self.fill("1.1.1.1")
        self.factory.is_busy = lambda peer: True
        self.assertGreater(self.PLACES, self.PLACES / GREEDY_DIVISOR)
        self.assertTrue(self.stays(self.come("9.9.9.9")))
        self.assertTrue(crowd[-1].closed)

    def test_refused_newcomers_do_not_repeat_the_ranking(self) -> None:
        """Five busy connections of one address had the server rank all its blocks for every newcomer."""
        self.patch(places, "GREEDY_DIVISOR", 1)
        self.fill(*["1.1.1.1"] * (FEW_PLACES + 1), *[f"2.2.{number}.2" for number in range(15)])
        self.factory.is_busy = lambda peer: True
        ranked = []
        by_load = BlockCounts.by_load

        def counted(counts: BlockCounts, most: int) -> list[str]:
            ranked.append(most)
            return by_load(counts, most)

        self.patch(BlockCounts, "by_load", counted)
        for number in range(10):
            self.assertFalse(self.stays(self.come(f"9.9.{number}.9")))
        self.assertEqual(len(ranked), 1)
        self.network.clock.advance(SEARCH_AGAIN)
        self.come("9.9.10.9")
        self.assertEqual(len(ranked), 2)

    def test_clients_that_know_notices_are_redirected(self) -> None:
        crowd = self.fill("1.1.1.1")
        crowd[-1].send(encode_frame(PING, 0, b"12345678"))
        self.network.settle()
        crowd[-1].take()
        self.come("9.9.9.9")
        (told,) = crowd[-1].take()
        self.assertEqual((told.type, parse_drain(told.payload)), (DRAIN, (0, [])))
        self.come("9.9.8.9")
        self.assertEqual((crowd[-2].take(), crowd[-2].closed), ([], True))
        # A client that comes again is refused as at any full server, with a reason that programs of 2019 know from
        # CLOSE.
        again = self.come("1.1.1.1")
        self.assertEqual(again.take(), [Frame(CLOSE, 0, bytes((CloseReason.FULL,)))])

    def test_refused_clients_evict_no_connection(self) -> None:
        path = Path(self.mktemp())
        path.write_text(key(self.PLACES + 1).public.hex())
        self.factory.admission = Admission(deny=KeyList(str(path)))
        crowd = self.fill("1.1.1.1")
        self.assertFalse(self.stays(self.come("9.9.9.9")))
        self.assertFalse(any(client.closed for client in crowd))
        self.assertTrue(self.stays(self.come("9.9.9.9")))

    def test_behind_a_proxy_the_first_come_stay(self) -> None:
        self.factory.limits = Limits(max_connections=self.PLACES, max_per_address=0)
        crowd = self.fill("10.0.0.1")
        self.assertFalse(self.stays(self.come("10.0.0.2")))
        self.assertFalse(any(client.closed for client in crowd))
        self.assertEqual(self.factory.places, 0)


class MessagingPlacesTests(SynchronousTestCase):
    """The same rule at a server of the Messaging System."""

    def test_an_honest_newcomer_gets_a_place(self) -> None:
        network = Network(limits=MessagingLimits(max_connections=10))
        crowd = [network.client(key(number), Accepting(), host="1.1.1.1") for number in range(10)]
        channel = crowd[-1].open(key(8).public, Accepting(), 10.0)
        network.settle()
        self.assertTrue(network.client(key(11), host="9.9.9.9").connected)
        network.settle()
        self.assertEqual([session.connected for session in crowd], [True] * 7 + [False] + [True] * 2)
        self.assertIsNotNone(channel)


class ClientTests(SynchronousTestCase):
    """Our own client, and a server that is filled from one host."""

    def test_a_crowded_out_client_connects_to_another_server(self) -> None:
        lab = Lab(seed=1)
        first = lab.key("server-1").public
        server = lab.add_server("server-1", limits=Limits(max_connections=8))
        host = lab.network.host("crowd")
        crowd = [
            Client(host.reactor, key(number), lab.lookups(host), random=lab.random, min_servers=1)
            for number in range(8)
        ]
        for client in crowd:
            client.startService()
        lab.network.run_until(lambda: len(server.factory.sessions) == 8)
        lab.network.run(15.0)
        other = lab.add_server("server-2")
        lab.network.run(5.0)
        opened = server.factory.connections_opened
        lab.add_client("honest", only=[first], min_servers=1)
        lab.settle()
        lab.network.run(5.0)
        keys = [session.link.remote for session in server.factory.sessions if session.link is not None]
        self.assertIn(lab.key("honest").public, keys)
        self.assertEqual(len(other.factory.sessions), 1)
        # The newcomer and the evicted client connect, and possibly retry once or twice.
        self.assertLess(server.factory.connections_opened - opened, 4)


class RealTests(TestCase):
    """Idle clients of ten addresses fill a real server."""

    @asynchronous
    async def test_newcomers_get_in_to_a_server_filled_by_idle_clients(self) -> None:
        server = Server(reactor, SERVER_KEY, ["tcp:0:interface=0.0.0.0"], limits=Limits(max_connections=60))
        server.startService()
        self.addCleanup(server.stopService)
        await server.ready
        port = cast(Any, server.ports[0].getHost()).port
        number = 0

        async def come(host: str, target: str) -> RawClient:
            nonlocal number
            number += 1
            endpoint = TCP4ClientEndpoint(reactor, target, port, bindAddress=(host, 0))
            client: Any = await endpoint.connect(Factory.forProtocol(lambda: RawClient(key(number), SERVER_KEY.public)))
            self.addCleanup(client.transport.abortConnection)
            while not client.frames and not client.closed:
                await deferLater(reactor, 0.002)
            return cast(RawClient, client)

        crowd = [await come(f"127.0.{at % 10}.1", "127.0.0.1") for at in range(60)]
        newcomers = [await come(f"127.9.{at}.1", "127.0.0.1") for at in range(10)]
        answers = [[frame.type for frame in client.take()] for client in newcomers]
        self.assertEqual(answers, [[OK]] * 10)
        self.assertFalse(any(client.closed for client in newcomers))
        while sum(client.closed for client in crowd) < 10:
            await deferLater(reactor, 0.002)
        self.assertEqual(sum(client.closed for client in crowd), 10)
