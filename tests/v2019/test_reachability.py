"""Clients whose server is a program of 2019, and whether the requests of other clients reach them through it."""

from __future__ import annotations

from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import TimeoutError
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import CloseReason, DmsgError, DmsgTimeout, TransportClosed, TransportRefused
from dmsg.keys import PubKey
from dmsg.net.retry import JITTER, MAX_DELAY
from dmsg.net.streams.transports import stream_of
from dmsg.testing.lab import SERVER_PORT, Lab
from dmsg.testing.old_client import OldTransports
from dmsg.testing.old_relay import OldRelay
from dmsg.testing.raw_client import RawClient, RawFactory
from dmsg.testing.tcp import End
from dmsg.v2019.client import Client
from dmsg.v2019.core.peers import ConnectionPort, RelayPeer
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, REQUEST, Frame
from dmsg.v2019.reachability import (
    CHECK_INTERVAL,
    CHECK_JITTER,
    CHECK_TIMEOUT,
    FIRST_CHECK,
    MAX_SHARED_INTERVAL,
    MAX_UNANSWERED,
    REPEAT_DELAY,
    ReachabilityCheck,
)
from tests.support import KEYS, Accepting, vectors

SERVER, NEW_SERVER = "server-1", "server-2"
KEEPALIVE = 60.0
"""Seconds after which the kernel of a client ends a connection whose peer does not answer keepalive probes."""
NOTICED_AFTER = 900.0
"""Seconds after which the server of 2019 notices that a connection is dead."""
CHECKED_WITHIN = CHECK_INTERVAL * (1 + CHECK_JITTER) + FIRST_CHECK[1] + 2.0
"""Maximum seconds until a client has noticed that it is unreachable, has connected again, and has checked the new
connection."""


class CountingRelay(OldRelay):
    """Relay of 2019 that counts the connections of clients.

    :ivar added: number of connections so far.
    """

    added = 0

    def add(self, key: PubKey, port: ConnectionPort) -> RelayPeer:
        self.added += 1
        return super().add(key, port)


class OldServerCase(SynchronousTestCase):
    """The first server follows the rules of 2019; alice and bob are clients of today."""

    servers: tuple[str, ...] = (SERVER,)

    def setUp(self) -> None:
        self.lab = Lab(seed=4)
        self.lab.old_servers.add(SERVER)
        for name in self.servers:
            self.lab.add_server(name)
        self.lab.servers[SERVER].factory.relay.__class__ = CountingRelay
        self.alice, self.bob = [self.add_client(name) for name in ("alice", "bob")]
        self.lab.settle()
        self.bob.listen(Accepting(Protocol), 7)

    def tearDown(self) -> None:
        self.lab.stop()

    def add_client(self, name: str, **options: Any) -> Client:
        return self.lab.add_client(name, only=[self.lab.key(SERVER).public], min_servers=1, **options)

    @property
    def relay(self) -> Any:
        relay = self.lab.servers[SERVER].factory.relay
        assert isinstance(relay, CountingRelay)
        return relay

    def connections(self, seconds: float) -> int:
        """Return the number of connections that clients make to the server within some seconds."""
        before: int = self.relay.added
        self.lab.network.run(seconds)
        return self.relay.added - before

    def lose_silently(self, name: str) -> list[End]:
        """Let a client's connections die without a packet to either end. The client notices after ``KEEPALIVE``
        seconds and connects again. Return the server's ends, which notice nothing.
        """
        host, server = self.lab.network.host(name), self.lab.network.host(SERVER)
        ends = list(host.ends)
        host.forget_connections()
        self.lab.network.run(KEEPALIVE)
        for end in ends:
            end.reset_by_peer(TimeoutError())
        self.lab.network.run(5.0)
        return [end.other for end in ends if end.other in server.ends]

    def become_unreachable(self) -> None:
        """Let the server forget bob, who has connected again before."""
        (left,) = self.lose_silently("bob")
        left.reset_by_peer(TimeoutError())
        self.lab.network.run(0.5)
        self.assertIn(bytes(self.bob.public_key), self.relay.unreachable)

    def reach_bob(self) -> bool:
        """Return whether alice can open a stream to bob."""
        try:
            protocol = self.lab.result(self.alice.connect(self.bob.public_key, Accepting(), 7))
        except DmsgError:
            return False
        stream_of(protocol).loseConnection()
        return True


class HalfOpenTests(OldServerCase):
    """The client has connected again, and the server notices later that the older connection is dead."""

    def test_the_client_is_reachable_again(self) -> None:
        left = self.lose_silently("bob")
        self.assertEqual(len(left), 1)
        self.assertTrue(self.reach_bob())
        self.lab.network.run(NOTICED_AFTER)
        left[0].reset_by_peer(TimeoutError())
        self.lab.network.run(0.5)
        self.assertFalse(self.reach_bob())
        self.lab.network.run(CHECKED_WITHIN)
        self.assertEqual(self.bob.status, "online")
        self.assertTrue(self.reach_bob())
        self.assertEqual(self.alice.last_error, "")

    def test_several_dead_connections_end_one_after_another(self) -> None:
        left = self.lose_silently("bob") + self.lose_silently("bob")
        self.assertEqual(len(left), 2)
        for end in left:
            end.reset_by_peer(TimeoutError())
            self.lab.network.run(CHECKED_WITHIN)
            self.assertTrue(self.reach_bob())

    def test_the_state_is_not_online_until_a_check_succeeds(self) -> None:
        self.become_unreachable()
        states: dict[str, str] = {}

        def is_online_again() -> bool:
            states.setdefault(self.bob.status, self.bob.last_error)
            return len(states) > 1 and self.bob.status == "online"

        self.lab.network.run_until(is_online_again, CHECKED_WITHIN)
        self.assertEqual(list(states), ["online", "searching", "unreachable"])
        self.assertIn("no longer sends requests over this connection", states["unreachable"])
        self.assertEqual(self.bob.last_error, "")
        self.assertEqual(self.relay.unreachable, frozenset())

    def test_streams_of_the_client_are_resumed(self) -> None:
        carol = self.add_client("carol")
        carol.listen(Accepting(Protocol), 7)
        self.lab.settle()
        stream = stream_of(self.lab.result(self.bob.connect(carol.public_key, Accepting(), 7)))
        self.lab.network.run(10.0)
        self.become_unreachable()
        self.lab.network.run(CHECKED_WITHIN)
        self.lab.result(stream.send(b"x"))


class HarmlessTests(OldServerCase):
    """What the checks cost."""

    def test_one_transport_a_minute_that_is_closed_at_once(self) -> None:
        self.lab.network.run(10.0)
        before = self.relay.transports_opened
        frames = sum(peer.frames_in for peer in self.relay.peers)
        minutes = 20
        self.lab.network.run(60.0 * minutes)
        checks = self.relay.transports_opened - before
        self.assertLessEqual(abs(checks - 2 * minutes), 2 * minutes * CHECK_JITTER)
        # A check consists of two frames: the REQUEST and the CLOSE.
        self.assertEqual(sum(peer.frames_in for peer in self.relay.peers) - frames, 2 * checks)
        self.assertEqual(self.relay.route_count, 0)
        self.assertEqual([session.core.transports for session in self.bob.sessions()], [{}])

    def test_a_server_of_today_gets_no_checks(self) -> None:
        lab = Lab(seed=5)
        lab.add_server(SERVER)
        lab.add_client("bob", min_servers=1)
        lab.settle()
        lab.network.run(10 * CHECK_INTERVAL)
        self.assertEqual(lab.servers[SERVER].factory.relay.transports_opened, 0)
        lab.stop()

    def test_the_application_may_still_connect_to_its_own_key(self) -> None:
        for _ in range(3):
            self.lab.network.run(CHECK_INTERVAL / 3)
            protocol = self.lab.result(self.bob.connect(self.bob.public_key, Accepting(), 7))
            self.lab.result(stream_of(protocol).send(b"x"))
            stream_of(protocol).loseConnection()

    def test_the_frames_are_those_of_the_recording(self) -> None:
        """A's REQUEST to itself is the recorded one, and the recorded answer of the server ends the check."""
        (scenario,) = (one for one in vectors("server_rules")["scenarios"] if one["name"] == "request_self")
        sent, received = (
            [bytes.fromhex(event["plain"]) for event in scenario["events"] if event["hop"] == hop and "plain" in event]
            for hop in ("A->S", "S->A")
        )
        arrived: list[bool] = []

        def is_own_check() -> bool:
            arrived.append(True)
            return True

        core = ClientConnection(KEYS["A"].public, TableSettings(is_own_check=is_own_check))
        core._next_id = int.from_bytes(sent[0][1:3], "big")
        ok, request = received
        core.receive_frames(bytearray(ok), len(ok))
        core.request(KEYS["A"].public)
        out = b"".join(part for part in core._outgoing if isinstance(part, bytes))
        self.assertEqual(out, sent[0])
        core._outgoing.clear()
        self.assertEqual(core.receive_frames(bytearray(request), len(request)), (len(request), []))
        self.assertEqual(arrived, [True])
        own_id = int.from_bytes(request[1:3], "big")
        self.assertEqual(core._outgoing, [Frame(CLOSE, own_id, bytes([CloseReason.REFUSED])).encode()])


class OldNode(RawClient):
    """Client of 2019."""

    def __init__(self, lab: Lab, name: str) -> None:
        super().__init__(lab.key(name), lab.key(SERVER).public)
        self._transports = OldTransports(self.key.public)
        self.requests = 0

    def frames_changed(self) -> None:
        for frame in self.take():
            self.requests += frame.type == REQUEST
            self._transports.receive(frame)
        for frame in self._transports.take():
            if not self.closed:
                self.send(frame.encode())


class SharedKeyTests(OldServerCase):
    """Another program is connected with bob's key."""

    def test_a_program_of_2019_that_connected_later_keeps_the_requests(self) -> None:
        node = OldNode(self.lab, "bob")
        host = self.lab.network.host("elsewhere")
        host.connectTCP(self.lab.network.host(SERVER).address, SERVER_PORT, RawFactory(node, lambda: None))
        self.lab.network.run(CHECKED_WITHIN)
        self.assertEqual(self.bob.status, "unreachable")
        self.assertIn("another program with the same key", self.bob.last_error)
        before = node.requests
        self.assertEqual(self.connections(1200.0), 0)
        self.assertLessEqual(node.requests - before, 1200.0 / MAX_SHARED_INTERVAL / (1 - CHECK_JITTER) + 3)
        self.assertFalse(node.closed)
        host.reset()
        self.lab.network.run(MAX_SHARED_INTERVAL * (1 + CHECK_JITTER) + FIRST_CHECK[1] + 2.0)
        self.assertEqual(self.bob.status, "online")
        self.assertTrue(self.reach_bob())

    def test_two_programs_of_today_do_not_fight(self) -> None:
        warnings: list[str] = []
        other = self.add_client("elsewhere", key=self.lab.key("bob"))
        other._on_warning = warnings.append
        both = [self.bob, other]
        self.lab.network.run(CHECKED_WITHIN)
        self.assertEqual([one.status for one in both], ["unreachable", "online"])
        self.assertIn("another program is connected with this key", warnings[0])
        self.assertEqual(self.connections(1200.0), 0)
        # When either connection ends, one of the two programs becomes reachable, and both stay connected.
        for name in ("bob", "elsewhere", "bob"):
            self.lab.network.host(name).reset()
            self.assertLessEqual(self.connections(400.0), 4, name)
            self.assertEqual(sorted(one.status for one in both), ["online", "unreachable"])
            self.assertEqual(self.relay.unreachable, frozenset())

    def test_a_visit_of_the_same_client_is_not_another_program(self) -> None:
        """While bob is connected twice, REQUESTs reach him over the newer connection. When that connection ends, bob
        connects again at once.
        """
        servers = self.bob._set
        link = servers.links.pop(self.lab.key(SERVER).public)
        self.lab.result(servers.session(link.server))
        servers.links[link.server] = link
        self.lab.network.run(CHECKED_WITHIN)
        self.assertEqual(self.bob.status, "online")
        self.assertEqual(self.bob._warnings, set())
        self.lab.network.run_until(lambda: not servers._visits.sessions, 3 * CHECK_INTERVAL)
        self.lab.network.run(FIRST_CHECK[1] + 4.0)
        self.assertEqual(self.bob.status, "online")
        self.assertTrue(self.reach_bob())


class RefusingRelay(CountingRelay):
    """Server that refuses every REQUEST of a client to itself."""

    is_silent = False

    def _receive_control(self, peer: Any, frame_type: int, own_id: int, payload: bytes) -> None:
        if frame_type == REQUEST and payload[33:66] == peer.key:
            if self.is_silent:
                return
            payload = payload[:33] + bytes(33)
        super()._receive_control(peer, frame_type, own_id, payload)


class AcceptingRelay(CountingRelay):
    """Server that accepts every REQUEST of a client to itself, and sends further frames in the same record.

    :ivar following: types and payloads of these frames.
    """

    following: tuple[tuple[int, bytes], ...] = ()

    def _receive_control(self, peer: Any, frame_type: int, own_id: int, payload: bytes) -> None:
        if frame_type == REQUEST and payload[33:66] == peer.key:
            frames = ((ACCEPT, payload), *self.following)
            peer.port.send(b"".join(Frame(kind, own_id, data).encode() for kind, data in frames))
            return
        super()._receive_control(peer, frame_type, own_id, payload)


class AcceptedCheckTests(OldServerCase):
    """The REQUEST of a check is accepted, and the client closes its transport at once."""

    def test_frames_behind_the_accept_are_dropped(self) -> None:
        data = (FWD, bytes(2) + b"data")
        for following in ((data,), ((CLOSE, b"\0"),), (data, data, (ACK, bytes(2)), (CLOSE, b"\0"))):
            self.relay.__class__ = AcceptingRelay
            self.relay.following = following
            self.assertEqual(self.connections(CHECKED_WITHIN), 0)
            self.assertIn("another program with the same key", self.bob.last_error)
            (link,) = self.bob._set.links.values()
            self.assertEqual(link.session.core.transports, {})  # type: ignore[union-attr]
            self.relay.__class__ = CountingRelay
            self.lab.network.run(MAX_SHARED_INTERVAL * (1 + CHECK_JITTER) + 2.0)
            self.assertEqual(self.bob.status, "online")


class NeverReachedTests(OldServerCase):
    """The server never sends a REQUEST to bob."""

    servers = (SERVER, NEW_SERVER)

    def test_the_delay_between_connections_grows(self) -> None:
        self.relay.__class__ = RefusingRelay
        first = self.connections(600.0)
        # Later, each of the two clients connects about once a minute.
        self.assertLessEqual(self.connections(600.0), min(first - 1, 2 * 600.0 / (MAX_DELAY * (1 - JITTER))))
        self.assertNotEqual(self.bob.status, "online")
        self.assertIn("no longer sends requests over this connection", self.bob.last_error)

    def test_a_server_that_does_not_answer(self) -> None:
        self.relay.__class__ = RefusingRelay
        self.relay.is_silent = True
        most = CHECK_INTERVAL * (1 + CHECK_JITTER) + MAX_UNANSWERED * (CHECK_TIMEOUT + REPEAT_DELAY)
        self.lab.network.run_until(lambda: self.bob.status == "unreachable", most)
        self.assertIn("does not answer", self.bob.last_error)
        self.relay.__class__ = CountingRelay
        self.lab.network.run(FIRST_CHECK[1] + CHECK_TIMEOUT + REPEAT_DELAY)
        self.assertEqual(self.bob.status, "online")

    def test_another_server_is_used(self) -> None:
        carol = self.lab.add_client("carol", prefer=[self.lab.key(SERVER).public], min_servers=1, encryption="off")
        self.lab.settle()
        self.lab.network.run(10.0)
        old, new = [self.lab.key(name).public for name in self.servers]
        self.assertIn(old, carol.servers)
        carol._set.links[old].session.unreachable = "x"  # type: ignore[union-attr]
        carol._set.reachability_changed(carol._set.links[old].session)  # type: ignore[arg-type]
        self.lab.network.run_until(lambda: new in carol.servers, 10.0)
        self.lab.network.run_until(lambda: carol._set.delegated() == (new.hex(),), 10.0)
        self.assertEqual(carol.status, "online")


class WakeTests(OldServerCase):
    """The machine was suspended, and its router has forgotten the connection."""

    def test_a_client_connects_again_at_once(self) -> None:
        host = self.lab.network.host("bob")
        self.lab.network.run(5.0)
        host.suspend()
        self.lab.network.run(300.0)
        host.forget_connections()
        host.wake()
        self.lab.network.run(CHECK_TIMEOUT + REPEAT_DELAY + FIRST_CHECK[1])
        self.assertEqual(self.bob.status, "online")
        self.assertTrue(self.reach_bob())


class CheckTests(SynchronousTestCase):
    """The rules of a check, by plain calls."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.sent: list[Deferred[object]] = []
        self.results: list[str] = []
        self.dead: list[str] = []
        self.shared = self.reads = 0
        self.needed, self.requesting = True, False
        self.check = ReachabilityCheck(
            self.clock,
            "srv",
            request=self.request,
            is_needed=lambda: self.needed,
            is_requesting=lambda: self.requesting,
            received=lambda: self.reads,
            on_result=self.results.append,
            on_dead=self.dead.append,
            on_shared=self.count_shared,
            random=Random(1),
        )
        self.check.check_soon()
        self.clock.advance(FIRST_CHECK[1])
        self.assertEqual(len(self.sent), 1)

    def request(self, timeout: float) -> Deferred[object]:
        self.sent.append(Deferred())
        return self.sent[-1]

    def count_shared(self) -> None:
        self.shared += 1

    def refuse(self, reason: int) -> None:
        self.sent[-1].errback(Failure(TransportRefused(reason)))

    def time_out(self) -> None:
        self.sent[-1].errback(Failure(DmsgTimeout("late")))

    def test_arrived(self) -> None:
        self.assertTrue(self.check.arrived())
        self.refuse(CloseReason.REFUSED)  # The end of the transport, which the client itself has refused.
        self.clock.advance(0)
        self.assertEqual((self.results, self.dead, self.shared), ([""], [], 0))
        self.assertTrue(self.check.was_reached)
        self.clock.advance(CHECK_INTERVAL * (1 - CHECK_JITTER) - 0.1)
        self.assertEqual(len(self.sent), 1)
        self.clock.advance(CHECK_INTERVAL * 2 * CHECK_JITTER + 0.2)
        self.assertEqual(len(self.sent), 2)

    def test_not_delivered(self) -> None:
        self.refuse(CloseReason.UNSPECIFIED)
        self.assertEqual(len(self.dead), 1)
        self.assertFalse(self.check.was_reached)

    def test_limits_of_a_server_say_nothing(self) -> None:
        for reason in (CloseReason.RATE_LIMITED, CloseReason.TOO_MANY_TRANSPORTS, CloseReason.QUEUE_FULL):
            self.refuse(reason)
            self.clock.advance(REPEAT_DELAY)
        self.assertEqual((self.results, self.dead, self.shared, len(self.sent)), ([], [], 0, 4))

    def test_data_that_arrives_shows_that_the_connection_works(self) -> None:
        for _ in range(2 * MAX_UNANSWERED):
            self.reads += 1
            self.time_out()
            self.clock.advance(REPEAT_DELAY)
        self.assertEqual((self.results, self.dead), ([], []))
        for _ in range(MAX_UNANSWERED):
            self.assertEqual(self.dead, [])
            self.time_out()
            self.clock.advance(REPEAT_DELAY)
        self.assertEqual(len(self.dead), 1)

    def test_a_late_arrival(self) -> None:
        self.time_out()
        self.assertTrue(self.check.arrived())
        self.clock.advance(CHECK_INTERVAL * (1 - CHECK_JITTER) - 0.1)
        self.assertEqual((self.results, self.dead, len(self.sent)), ([""], [], 1))

    def test_the_check_of_another_program(self) -> None:
        self.assertTrue(self.check.arrived())
        self.assertTrue(self.check.arrived())
        self.clock.advance(0)
        self.assertEqual((self.results, self.shared), ([""], 1))
        self.requesting = True
        self.assertFalse(self.check.arrived())
        self.clock.advance(10 * CHECK_INTERVAL)
        self.assertEqual(len(self.sent), 1)

    def test_another_program_answers(self) -> None:
        waits = []
        for answer in (lambda: self.refuse(CloseReason.REFUSED), lambda: self.sent[-1].callback(None)) * 3:
            answer()
            sent, began = len(self.sent), self.clock.seconds()
            while len(self.sent) == sent:
                self.clock.advance(1.0)
            waits.append(self.clock.seconds() - began)
        self.assertEqual((self.shared, self.dead), (6, []))
        self.assertTrue(all("another program" in one for one in self.results))
        for wait, interval in zip(waits, (60.0, 120.0, 240.0, *[MAX_SHARED_INTERVAL] * 3), strict=True):
            self.assertLessEqual(abs(wait - interval), interval * CHECK_JITTER + 1.0)

    def test_a_server_that_answers_ping_needs_no_checks(self) -> None:
        self.assertTrue(self.check.arrived())
        self.needed = False
        self.assertFalse(self.check.arrived())
        self.assertFalse(self.check.check_now())
        self.clock.advance(2 * CHECK_INTERVAL)
        self.assertEqual((len(self.sent), self.clock.getDelayedCalls()), (1, []))

    def test_nothing_happens_after_the_connection_is_lost(self) -> None:
        self.check.stop()
        self.sent[-1].errback(Failure(TransportClosed(CloseReason.PEER_DISCONNECTED)))
        self.assertFalse(self.check.arrived())
        self.check.check_soon()
        self.assertEqual((self.results, self.dead, self.shared, self.clock.getDelayedCalls()), ([], [], 0, []))
