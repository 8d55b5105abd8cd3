"""Connections that a client prepares while it goes online, and servers for which somebody waits."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.candidates import EXPECT_TIMEOUT, LISTED_TIME, MAX_EXPECTED
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.servers import ServerSet, ServerUses
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.testing.lab import DISCOVERY_PORT, Lab
from dmsg.testing.network import Host
from tests.clients.test_servers import KEYS, Servers, Session

ROUND_TRIP = 0.1
SERVERS = [key.public for key in KEYS]


class ExpectTests(SynchronousTestCase):
    """A set of servers whose connections the test completes."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.lookups = Servers(KEYS[:10])
        self.openings: list[tuple[PubKey, Deferred[Any]]] = []
        self.set = self.make()

    def make(self, **choice: Any) -> ServerSet[Any]:
        def opener(entry: Entry) -> Any:
            class Opening:
                def open(_) -> Deferred[Any]:
                    self.openings.append((entry.key, Deferred(lambda _: None)))
                    return self.openings[-1][1]

            return Opening()

        lookups: Any = self.lookups
        return ServerSet(
            self.clock, lookups, Random(0), ServerChoice(min_servers=1, **choice), ServerUses(opener=opener)
        )

    def start(self, *expected: PubKey) -> None:
        servers: Deferred[list[PubKey]] = Deferred()
        self.set.start()
        self.set.expect(servers)
        servers.callback(list(expected))
        self.clock.advance(0)
        self.addCleanup(self.set.stop)

    def connect(self, server: PubKey) -> Session:
        """Complete all attempts to connect to a server; return the last session."""
        session = Session(server)
        for key, opening in self.openings:
            if key == server and not opening.called:
                session = Session(server)
                opening.callback(session)
        self.clock.advance(0)
        return session

    def opened(self, server: PubKey) -> int:
        return [key for key, _ in self.openings].count(server)

    def test_servers_of_the_expected_remote_are_first_and_stay(self) -> None:
        self.start(SERVERS[7], SERVERS[19], SERVERS[8], SERVERS[9])
        tried = [key for key, _ in self.openings]
        self.assertEqual(tried[:MAX_EXPECTED], [SERVERS[7], SERVERS[8]])
        self.assertNotIn(SERVERS[19], tried)  # Discovery does not list it.
        other = tried[-1]
        self.connect(other)
        self.assertEqual(set(self.set.links) & {SERVERS[7], SERVERS[8]}, {SERVERS[7], SERVERS[8]})
        found = self.set.session(SERVERS[7])
        session = self.connect(SERVERS[7])
        self.assertIs(self.successResultOf(found), session)
        self.assertIs(self.successResultOf(self.set.session(SERVERS[7])), session)
        self.assertEqual(self.opened(SERVERS[7]), 1)

    def test_only_named_servers_are_used(self) -> None:
        self.set = self.make(only=[SERVERS[0]])
        self.start(SERVERS[7])
        self.assertEqual([key for key, _ in self.openings], [SERVERS[0]])

    def test_a_slow_answer_delays_the_search_only_briefly(self) -> None:
        self.set.start()
        self.addCleanup(self.set.stop)
        self.set.expect(Deferred(lambda waiting: waiting.callback([])))
        self.clock.advance(0)
        self.assertEqual(self.openings, [])
        self.clock.advance(EXPECT_TIMEOUT)
        self.assertGreater(len(self.openings), 0)

    def test_a_session_waits_for_a_connection_under_way(self) -> None:
        self.start(SERVERS[7])
        found = [self.set.session(SERVERS[7]) for _ in range(2)]
        # Another server is faster, and one is enough; but somebody waits for this one.
        self.connect(next(key for key, _ in self.openings if key != SERVERS[7]))
        session = self.connect(SERVERS[7])
        self.assertEqual([self.successResultOf(one) for one in found], [session] * 2)
        self.assertEqual(self.opened(SERVERS[7]), 1)

    def test_a_connection_that_fails_is_replaced_by_a_visit(self) -> None:
        self.start(SERVERS[7])
        found = self.set.session(SERVERS[7])
        self.openings[0][1].errback(DmsgError("refused"))
        self.assertEqual(self.opened(SERVERS[7]), 2)
        visit = Session(SERVERS[7])
        self.openings[-1][1].callback(visit)
        self.assertIs(self.successResultOf(found), visit)

    def test_a_connection_that_is_back_ends_the_wait_for_a_visit(self) -> None:
        """The visit may take long, or fail; callers do not wait for it when the lasting connection is made again."""
        self.start(SERVERS[7])
        found = self.set.session(SERVERS[7])
        self.openings[0][1].errback(DmsgError("refused"))
        visit = self.openings[-1][1]
        self.clock.pump([0.1] * 30)
        (again,) = (one for key, one in self.openings if key == SERVERS[7] and not one.called and one is not visit)
        session = Session(SERVERS[7])
        again.callback(session)
        self.clock.advance(0)
        self.assertIs(self.successResultOf(found), session)
        self.assertTrue(visit.called)  # It was cancelled.
        self.assertIs(self.successResultOf(self.set.session(SERVERS[7])), session)

    def test_a_visit_that_follows_a_closing_one_is_kept(self) -> None:
        """The loss of the first session arrives when the second one is in use already."""
        self.start()
        visited = next(key for key in SERVERS[:10] if not self.opened(key))
        sessions = []
        for _ in range(2):
            found = self.set.session(visited)
            sessions.append(self.connect(visited))
            self.assertIs(self.successResultOf(found), sessions[-1])
            if len(sessions) == 1:
                self.set._visits.close_idle()
                sessions[0].connected = False
        sessions[0].lost.callback(None)
        self.assertIs(self.set.find_session(visited), sessions[1])
        self.assertIn(sessions[1], self.set.sessions())
        # The second session is as new at this check as the first one was at its first check.
        self.set._visits.close_idle()
        self.assertTrue(sessions[1].connected)
        self.set._visits.close_idle()
        self.assertFalse(sessions[1].connected)

    def test_nobody_waits_any_more_for_a_connection_that_fails(self) -> None:
        self.start(SERVERS[7])
        found = self.set.session(SERVERS[7]).addTimeout(1, self.clock)
        self.clock.advance(1)
        self.failureResultOf(found)
        self.openings[0][1].errback(DmsgError("refused"))
        self.assertEqual(self.opened(SERVERS[7]), 1)

    def test_a_stop_ends_the_wait(self) -> None:
        self.start(SERVERS[7])
        found = self.set.session(SERVERS[7])
        stopped = Deferred.fromCoroutine(self.set.stop())
        self.failureResultOf(found, DmsgError)
        for _, opening in self.openings:
            if not opening.called:
                opening.errback(DmsgError("stopped"))
        self.successResultOf(stopped)

    def test_a_visit_uses_the_entry_in_the_list(self) -> None:
        self.start()
        visited = next(key for key in SERVERS[:10] if not self.opened(key))
        self.set.session(visited)
        self.assertEqual((self.lookups.asked, self.opened(visited)), ([], 1))
        self.connect(visited).close()
        self.connect(self.openings[0][0])  # Otherwise the list would be fetched again.
        self.clock.advance(LISTED_TIME)
        self.set.session(visited)
        self.assertEqual((self.lookups.asked, self.opened(visited)), ([visited], 2))
        self.connect(visited)


class _Greeting(Protocol):
    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"x")


class _Lab(Lab):
    def lookups(self, host: Host) -> Lookups:
        address = self.network.host("discovery").address
        return Lookups([Lookup(host, f"http://{address}:{DISCOVERY_PORT}")])


class RoundTripTests(SynchronousTestCase):
    """Round trips from a client's start to the first byte of a peer's program, in a network of ten servers."""

    def measure(self, *, expected: bool) -> float:
        lab = _Lab(1)
        self.addCleanup(lab.stop)
        lab.add_servers(10)
        bob = lab.add_client("bob", min_servers=1)
        bob.listen(Factory.forProtocol(_Greeting), 1)
        lab.settle()
        places = [lab.network.host(name) for name in ("discovery", *lab.servers)]
        for client in (lab.network.host("alice"), lab.network.host("bob")):
            for place in places:
                lab.network.path(client, place).delay = lab.network.path(place, client).delay = ROUND_TRIP / 2
        began = lab.clock.seconds()
        first: list[float] = []

        class _Ear(Protocol):
            def dataReceived(self, data: bytes) -> None:
                first.append(lab.clock.seconds())

        alice = lab.add_client("alice", min_servers=1)
        if expected:
            alice.expect(bob.public_key)
        alice.when_online().addCallback(lambda _: alice.connect(bob.public_key, Factory.forProtocol(_Ear), 1))
        lab.network.run_until(lambda: first, 60)
        return (first[0] - began) / ROUND_TRIP

    def test_first_byte(self) -> None:
        """TCP, list and entry; TCP and handshake; REQUEST, confirmation and data, each of them over two hops."""
        expected = self.measure(expected=True)
        self.assertLess(expected, 9.6)
        self.assertGreater(self.measure(expected=False), expected + 0.9)
