"""The lab in memory: entities on a network that can be broken by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.error import (
    AlreadyCalled,
    AlreadyCancelled,
    ConnectionLost,
    ConnectionRefusedError,
    TimeoutError,
)
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.entries.entry import ClientMeta, Successor
from dmsg.errors import CloseReason, ConnectFailed, DiscoveryError, DropReason, EncryptionUnavailable, EntryNotFound
from dmsg.keys import SecKey
from dmsg.streams.streams import CROWD_BYTES
from dmsg.testing import walk as walk_module, walk_kinds
from dmsg.testing.lab import Lab
from dmsg.testing.network import Network
from dmsg.testing.plan import Aim, Plan, Shape, Step
from dmsg.testing.promise import Pattern, PromiseBroken, Talkers
from dmsg.testing.tcp import BUFFER, USER_TIMEOUT
from dmsg.testing.walk import follow
from dmsg.testing.walk_coverage import Cell
from dmsg.testing.walk_kinds import FAULTS, draw_plan
from dmsg.testing.walk_streams import MAX_UNACKNOWLEDGED
from dmsg.v2019 import resumption
from dmsg.v2019.core.policing import Limits
from tests.support import Accepting, Recorder

SEED = 101
"""Seed of the walk of an ordinary run; ``make long WHICH=lab`` takes others for minutes."""


class NetworkTests(SynchronousTestCase):
    """Hosts and TCP in memory."""

    def setUp(self) -> None:
        self.network = Network(1)
        self.one, self.two = self.network.host("one"), self.network.host("two")
        self.accepting = Accepting()
        listening: Any = self.successResultOf(TCP4ServerEndpoint(self.two, 80).listen(self.accepting))
        self.assertEqual(listening.getHost().port, 80)

    def connect(self) -> tuple[Recorder, Recorder]:
        connecting = TCP4ClientEndpoint(self.one, self.two.address, 80).connect(Accepting())
        self.network.run(1)
        return self.successResultOf(connecting), self.accepting.built[-1]  # type: ignore[return-value]

    def test_bytes_delay_and_bandwidth(self) -> None:
        here, there = self.connect()
        path = self.network.path(self.one, self.two)
        path.delay, path.rate = 0.5, 100_000
        here.transport.write(bytes(50_000))  # type: ignore[union-attr]
        self.network.run(0.9)
        self.assertEqual(there.data, b"")
        self.network.run(0.2)
        self.assertEqual(there.data, bytes(50_000))
        there.transport.loseConnection()  # type: ignore[union-attr]
        self.network.run(1)
        self.assertIsNotNone(here.lost and there.lost)

    def test_loss_and_reordering_make_late_and_keep_order(self) -> None:
        here, there = self.connect()
        path = self.network.path(self.one, self.two)
        path.delay, path.loss, path.reorder = 0.01, 0.5, 0.5
        data = b"".join(b"%d," % number for number in range(2000))
        for start in range(0, len(data), 100):
            here.transport.write(data[start : start + 100])  # type: ignore[union-attr]
        self.network.run(10)
        self.assertEqual(there.data, data)

    def test_a_slow_reader_stops_the_writer(self) -> None:
        here, there = self.connect()
        there.transport.pauseProducing()  # type: ignore[union-attr]
        here.transport.write(bytes(3 * BUFFER))  # type: ignore[union-attr]
        self.network.run(1)
        received: Any = there.transport.received  # type: ignore[union-attr]
        waiting = sum(len(one or b"") for one in received)
        self.assertLessEqual(waiting, BUFFER)
        there.transport.resumeProducing()  # type: ignore[union-attr]
        self.network.run(1)
        self.assertEqual(len(there.data), 3 * BUFFER)

    def test_a_partition_can_be_healed(self) -> None:
        here, there = self.connect()
        path = self.network.path(self.one, self.two)
        for seconds, lives in ((USER_TIMEOUT - 5, True), (USER_TIMEOUT + 5, False)):
            path.cut_since = self.network.clock.seconds()
            here.transport.write(b"x")  # type: ignore[union-attr]
            self.network.run(seconds)
            path.cut_since = None
            self.network.run(2)
            self.assertEqual((there.data, here.lost is None), (b"x", lives))

    def test_data_keeps_its_order_over_a_partition(self) -> None:
        """Some segments are also lost once, so that they are sent again at different times."""
        for cut in (0.26, 0.41, 0.47, 0.53, 0.59, 0.65):
            with self.subTest(seconds=cut):
                here, there = self.connect()
                path = self.network.path(self.one, self.two)
                path.delay, path.cut_since = 0.05, self.network.clock.seconds()
                sent = [bytes((number,)) for number in range(8)]
                for number, text in enumerate(sent):
                    path.loss = number % 2
                    here.transport.write(text)  # type: ignore[union-attr]
                    self.network.run(0.03)
                self.network.run(cut - 0.03 * len(sent))
                path.cut_since, path.loss = None, 0.0
                self.network.run(2.0)
                self.assertEqual(there.data, b"".join(sent))

    def test_kill_reset_pause(self) -> None:
        here, there = self.connect()
        self.two.pause()
        here.transport.write(b"later")  # type: ignore[union-attr]
        self.network.run(5)
        self.assertEqual(there.data, b"")
        self.two.resume()
        self.network.run(1)
        self.assertEqual(there.data, b"later")
        self.assertEqual(self.one.reset(), 1)
        self.network.run(1)
        self.assertTrue(here.lost.check(ConnectionLost) and there.lost.check(ConnectionLost))
        here, there = self.connect()
        self.two.kill()
        self.network.run(1)
        self.assertTrue(here.lost.check(ConnectionLost))
        self.assertIsNone(there.lost, "a process that was killed is told nothing")
        refused = TCP4ClientEndpoint(self.one, self.two.address, 80).connect(Accepting())
        self.network.run(1)
        self.failureResultOf(refused, ConnectionRefusedError)
        self.network.path(self.two, self.one).cut_since = 0.0
        late = TCP4ClientEndpoint(self.one, self.two.address, 80, timeout=5).connect(Accepting())
        self.network.run(6)
        self.failureResultOf(late, TimeoutError)

    def test_a_host_that_gets_a_new_address(self) -> None:
        """Its connections become half-open: neither end gets anything, and each notices this in its own time."""
        here, there = self.connect()
        before = self.one.address
        self.one.lose_silently(lambda host: {"one": 10.0, "two": 100.0}[host])
        self.network.run(9.0)
        self.assertEqual((here.lost, there.lost), (None, None))
        self.assertIsNone(self.network.by_address(before))
        self.network.run(2.0)
        self.assertIsInstance(here.lost.value, TimeoutError)
        self.assertIsNone(there.lost)
        _, again = self.connect()
        self.assertEqual(again.transport.getPeer().host, self.one.address)  # type: ignore[union-attr]
        self.network.run(100.0)
        self.assertIsInstance(there.lost.value, TimeoutError)
        self.assertIsNone(again.lost)

    def test_data_over_a_half_open_connection_is_lost(self) -> None:
        here, there = self.connect()
        self.one.lose_silently(lambda host: 1000.0)
        there.transport.write(b"x")  # type: ignore[union-attr]
        self.network.run(USER_TIMEOUT + 1.0)
        self.assertEqual((here.data, here.lost), (b"", None))
        self.assertIsInstance(there.lost.value, TimeoutError)

    def test_timers_run_before_arrivals_after_a_pause(self) -> None:
        """So do Twisted's reactors. Calls that a timer makes later follow what has arrived."""
        here, there = self.connect()
        happened: list[str] = []
        for delay in (4.0, 3.0):
            self.two.callLater(delay, lambda delay=delay: happened.append(f"{delay} {bytes(there.data)!r}"))
        self.two.callLater(5.0, self.two.callLater, 0, lambda: happened.append(f"next {bytes(there.data)!r}"))
        self.two.pause()
        here.transport.write(b"data")  # type: ignore[union-attr]
        refused = TCP4ClientEndpoint(self.two, self.one.address, 81, timeout=2).connect(Accepting())
        self.network.run(6.0)
        self.two.resume()
        self.network.run(1.0)
        self.assertEqual(happened, ["3.0 b''", "4.0 b''", "next b'data'"])
        self.failureResultOf(refused, TimeoutError)

    def test_a_process_that_was_killed_is_not_paused(self) -> None:
        self.two.kill()
        self.two.pause()
        self.two.revive()
        happened: list[str] = []
        self.two.do(lambda: happened.append("started"))
        self.assertEqual(happened, ["started"])

    def test_a_pause_that_a_timer_begins(self) -> None:
        """What is due, and what has arrived, waits for the end of this pause, too."""
        here, there = self.connect()
        happened: list[bytes] = []
        self.two.callLater(1.0, self.two.pause)
        self.two.callLater(2.0, lambda: happened.append(bytes(there.data)))
        self.two.pause()
        here.transport.write(b"data")  # type: ignore[union-attr]
        self.network.run(3.0)
        for expected in ([], [b""]):
            self.two.resume()
            self.assertEqual(happened, expected)
        self.assertEqual(there.data, b"data")

    def test_timers_of_a_host_that_is_paused(self) -> None:
        # In any reactor, a timer that was due during a pause can still be cancelled or postponed by an earlier timer.
        made: list[str] = []
        first = self.one.callLater(1, lambda: (cancelled.cancel(), put_off.reset(3)))
        cancelled = self.one.callLater(2, made.append, "cancelled")
        put_off = self.one.callLater(2, made.append, "put off")
        later = self.one.callLater(8, made.append, "later")
        later.delay(1)
        self.assertEqual(later.getTime(), self.network.clock.seconds() + 9)
        self.one.pause()
        self.network.run(5)
        self.assertTrue(first.active() and cancelled.active() and put_off.active())
        self.one.resume()
        self.assertEqual((made, first.active(), cancelled.active(), put_off.active()), ([], False, False, True))
        self.network.run(3.1)
        self.assertEqual(made, ["put off"])
        self.network.run(1)
        self.assertEqual(made, ["put off", "later"])
        self.assertRaises(AlreadyCalled, later.cancel)
        self.assertRaises(AlreadyCancelled, cancelled.reset, 1)


class LabTests(SynchronousTestCase):
    """Entities in the lab."""

    def test_a_stream_outlives_its_server(self) -> None:
        lab = Lab(3)
        lab.add_servers(2)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        accepting = Accepting()
        bob.listen(accepting, 7)
        one = lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        lab.result(one.transport.send(b"before"))
        name = next(n for n, server in lab.servers.items() if server._key.public == one.transport.server)
        lab.kill(name)
        lab.result(one.transport.send(b" and after"))
        self.assertEqual(accepting.built[0].data, b"before and after")
        self.assertEqual(alice.streams.resumed, 1)
        lab.stop()
        self.assertIsNotNone(accepting.built[0].lost)

    def test_a_stream_that_is_given_up_while_discovery_is_asked(self) -> None:
        """The search for the ended stream stops: no server is dialled, and no timer is left."""
        for stopping in (True, False):
            lab = Lab(8)
            lab.add_servers(2)
            alice, bob = lab.add_client("alice"), lab.add_client("bob")
            lab.settle()
            bob.listen(Accepting(), 7)
            one = lab.result(alice.connect(bob.public_key, Accepting(), port=7))
            lab.network.run(15)
            # Discovery receives the request and does not answer.
            lab.network.host("discovery").pause()
            alice._entries.mark_stale(bob.public_key)
            name = next(n for n, server in lab.servers.items() if server._key.public == one.transport.server)
            lab.kill(name)
            lab.network.run_until(cast(Any, lambda alice=alice: alice.streams.suspended), 60)
            searching = alice.streams._searching[one.transport]
            over: list[Any] = []
            dialled: list[Any] = []
            self.patch(alice, "server_session", dialled.append)
            if stopping:
                alice.stopService().addBoth(over.append)
            else:
                one.transport.abortConnection()
            self.assertEqual((alice.streams.suspended, alice.streams._searching), (0, {}))
            self.assertTrue(searching.called)
            lab.network.run(30)
            self.assertEqual((dialled, alice.streams.suspended), ([], 0))
            self.assertEqual(bool(over), stopping)

    def test_very_many_streams_go_on_without_a_flood(self) -> None:
        """The next server polices its clients, and they take their turns."""
        self.patch(resumption, "RESUME_RATE", 20.0)
        lab = Lab(30)
        for number in (1, 2):
            lab.add_server(f"server-{number}", limits=Limits(request_rate=15))
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        accepting = Accepting()
        bob.listen(accepting, 7)
        streams = []
        for _ in range(10):
            opening = [alice.connect(bob.public_key, Accepting(), port=7) for _ in range(15)]
            streams += [lab.result(one) for one in opening]
            lab.network.run(1)
        by_key = {server._key.public: name for name, server in lab.servers.items()}
        (used,) = {by_key[one.transport.server] for one in streams}
        lab.kill(used)
        (other,) = lab.servers.values()
        lab.network.run_until(lambda: alice.streams.resumed == len(streams), 60)
        self.assertEqual(other.factory.relay.drops[DropReason.FLOOD], 0)
        self.assertEqual({one.lost for one in streams}, {None})
        lab.stop()

    def test_a_peer_that_finds_resumptions_too_many_holds_only_its_own(self) -> None:
        """A server can also send this error in the peer's name, because it is not encrypted."""
        lab = Lab(3)
        lab.add_servers(2)
        victim, good, bad = (lab.add_client(name) for name in ("victim", "good", "bad"))
        lab.settle()
        for one in (good, bad):
            one.listen(Accepting(), 7)
        honest = lab.result(victim.connect(good.public_key, Accepting(), port=7))
        for _ in range(60):
            lab.result(victim.connect(bad.public_key, Accepting(), port=7))
        lab.network.run(1)
        for session in bad.sessions():
            session.core.refusal = lambda initiator, ephemeral: CloseReason.RATE_LIMITED
            for transport in list(session.core.transports.values()):
                session.core.close(transport, CloseReason.STALLED)
            session.flush()
        lab.network.run(3)
        now = lab.clock.seconds()
        self.assertTrue(victim.streams.suspended)
        self.assertLessEqual(max(victim._resumption._resume_after.values()) - now, resumption.RESUME_MAX_DELAY)
        name = next(n for n, server in lab.servers.items() if server._key.public == honest.transport.server)
        lab.network.host(name).reset()
        lab.result(honest.transport.send(b"on we go"), 5)

    def test_a_rate_limit_delays_a_connect(self) -> None:
        """The connect tries again, ever less often, and in the end says what to do."""
        lab = Lab(5)
        lab.add_servers(1)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        bob.listen(Accepting(), 7)
        left = 3
        times: list[float] = []

        def refusal(initiator: bytes, ephemeral: bytes | None) -> CloseReason | None:
            times.append(lab.clock.seconds())
            return CloseReason.RATE_LIMITED if len(times) <= left else None

        for session in bob.sessions():
            session.core.refusal = refusal
        lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        self.assertEqual(len(times), 4)
        left, before = 1000, len(times)
        connecting = alice.connect(bob.public_key, Accepting(), port=7, timeout=10)
        error = self.assertRaises(ConnectFailed, lab.result, connecting)
        self.assertIn("gets too many requests, from this key or from others; try again in a few seconds", str(error))
        self.assertEqual(str(error).count("through server"), 1)
        self.assertIn(len(times) - before, range(4, 8))
        self.assertLess(times[-1] - times[before], 10)
        lab.stop()

    def test_a_slow_server_is_replaced_and_a_preferred_one_kept(self) -> None:
        lab = Lab(4)
        lab.add_servers(3)
        alice = lab.add_client("alice", min_servers=2)
        lab.settle()
        slow = next(n for n, s in lab.servers.items() if s._key.public in alice.servers)
        for path in lab.network.both_ways(lab.network.host("alice"), lab.network.host(slow)):
            path.delay = 0.5
        key = lab.servers[slow]._key.public
        lab.network.run_until(lambda: key not in alice.servers and len(alice.servers) == 2, 300)
        bob = lab.add_client("bob", min_servers=2, prefer=[key])
        for path in lab.network.both_ways(lab.network.host("bob"), lab.network.host(slow)):
            path.delay = 0.5
        lab.network.run(200)
        self.assertIn(key, bob.servers)
        carol = lab.add_client("carol", min_servers=2, only=[key])
        lab.network.run(100)
        self.assertEqual(carol.servers, [key])
        lab.stop()

    def test_bytes_over_the_rate_are_read_later_and_none_is_lost(self) -> None:
        lab = Lab(9)
        server = lab.add_server("server-1", limits=Limits(byte_rate=100_000))
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        accepting = Accepting()
        bob.listen(accepting, 7)
        one = lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        started = lab.clock.seconds()
        lab.result(one.transport.send(bytes(1_000_000)))
        passed = lab.clock.seconds() - started
        self.assertEqual(len(accepting.built[0].data), 1_000_000)
        self.assertTrue(6 < passed < 15, passed)
        self.assertGreater(server.factory.throttled, 1)
        lab.stop()

    def test_a_key_that_follows_another(self) -> None:
        lab = Lab(10)
        lab.add_servers(1)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        carol = lab.add_client("carol")
        lab.settle()
        old, new = lab.key("old"), lab.key("bob")
        lookups = lab.lookups(lab.network.host("old"))

        def name(key: SecKey, successor: Successor) -> None:
            lab.result(lookups.update(key, lambda entry: replace(entry, client=ClientMeta(()), successor=successor)))

        name(old, Successor.make(old.public, new))
        bob.listen(Accepting(), 7)
        one = lab.result(alice.connect(old.public, Accepting(), port=7))
        self.assertEqual(one.transport.getPeer().public_key, bob.public_key)
        forged = Successor(new.public.hex(), old.sign(Successor.signing_json(old.public.hex(), new.public.hex())).hex())
        with self.assertRaises(DiscoveryError):
            name(old, forged)
        # Two keys that name each other as successors lead nowhere.
        for one_key, other in ((lab.key("x"), lab.key("y")), (lab.key("y"), lab.key("x"))):
            name(one_key, Successor.make(one_key.public, other))
        with self.assertRaises(ConnectFailed):
            lab.result(carol.connect(lab.key("x").public, Accepting(), port=7))
        lab.stop()

    def test_discovery_away_and_names_known(self) -> None:
        """Clients that were reached before are reached while discovery is down."""
        lab = Lab(5)
        lab.add_servers(1)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        bob.listen(Accepting(), 7)
        lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        lab.network.run(60)
        lab.kill("discovery")
        lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        with self.assertRaises(ConnectFailed):
            lab.result(alice.connect(bob.public_key, Accepting(), port=8))
        lab.network.run(1)
        lab.servers.popitem()
        lab.clients.clear()

    def test_a_server_that_hangs_is_found_out(self) -> None:
        """The server accepts connections and does nothing: PINGs are not answered, and streams move."""
        lab = Lab(6)
        lab.add_servers(2)
        alice, bob = lab.add_client("alice"), lab.add_client("bob")
        lab.settle()
        accepting = Accepting()
        bob.listen(accepting, 7)
        one = lab.result(alice.connect(bob.public_key, Accepting(), port=7))
        name = next(n for n, server in lab.servers.items() if server._key.public == one.transport.server)
        lab.network.host(name).pause()
        lab.result(one.transport.send(b"x"), 60)
        self.assertNotEqual(one.transport.server, lab.servers[name]._key.public)


class PolicyTests(SynchronousTestCase):
    """Encryption policies of two clients; a client with encryption off takes the part of a client of 2019."""

    def setUp(self) -> None:
        self.lab = Lab(20)
        self.lab.add_servers(1)
        self.clients = {
            name: self.lab.add_client(name, encryption=name, min_servers=1) for name in ("require", "prefer", "off")
        }
        self.lab.settle()
        self.accepting = {name: Accepting() for name in self.clients}
        for name, client in self.clients.items():
            client.listen(self.accepting[name])

    def connect(self, one: str, two: str, **options: Any) -> Any:
        return self.lab.result(self.clients[one].connect(self.clients[two].public_key, Accepting(), **options))

    def test_every_pair_of_policies(self) -> None:
        for one, two, secure in (
            ("require", "require", True),
            ("require", "prefer", True),
            ("prefer", "require", True),
            ("prefer", "prefer", True),
            ("prefer", "off", False),
            ("off", "prefer", False),
            ("off", "off", False),
        ):
            protocol = self.connect(one, two)
            self.assertEqual(protocol.transport.secure, secure, (one, two))
            self.lab.result(protocol.transport.send(b"hello"))
            self.assertEqual(self.accepting[two].built[-1].data, b"hello")
        with self.assertRaises(EncryptionUnavailable) as caught:
            self.connect("require", "off")
        self.assertIn("does not offer secure transports", str(caught.exception))
        with self.assertRaises(ConnectFailed) as refused:
            self.connect("off", "require")
        self.assertIn("accepts only secure transports", str(refused.exception))
        for one, two in (("off", "prefer"), ("prefer", "off")):
            with self.assertRaises(EncryptionUnavailable):
                self.connect(one, two, port=7)

    def test_a_replayed_old_entry_is_no_downgrade(self) -> None:
        prefer, require = self.clients["prefer"], self.clients["require"]
        self.connect("prefer", "require")
        entry = self.successResultOf(prefer.entry(require.public_key))
        old = replace(entry, version="0.0.1").sign(self.lab.key("require"))
        prefer._entries.keep(require.public_key, old, 1000)
        self.assertTrue(self.connect("prefer", "require").transport.secure)

    def test_a_forged_plain_request_of_a_secure_client_is_refused(self) -> None:
        """A server could ask so; a client that prefers asks discovery and refuses."""
        liar = self.lab.add_client("liar", encryption="off", min_servers=1)
        self.lab.settle()
        lookups = self.lab.lookups(self.lab.network.host("liar"))
        make = partial(replace, version="0.0.1+secure1")
        self.lab.result(lookups.update(self.lab.key("liar"), make))
        with self.assertRaises(ConnectFailed) as caught:
            self.lab.result(liar.connect(self.clients["prefer"].public_key, Accepting()))
        self.assertIn("accepts only secure transports", str(caught.exception))


class PromiseTests(SynchronousTestCase):
    """The checker sees what is wrong."""

    def test_stream_contents_follow_the_pattern(self) -> None:
        whole = Pattern(1).take(100_000)
        pieces = Pattern(1)
        self.assertEqual(b"".join(pieces.take(size) for size in (1, 4095, 4096, 91_808)), whole)

    def test_the_promise_detects_each_violation(self) -> None:
        talkers = Talkers()
        one = talkers.pair(1)
        two = one.other
        assert two is not None
        data = Pattern(2).take(100)
        two.dataReceived(data[:50])
        self.assertRaises(PromiseBroken, two.dataReceived, data[:50])  # These data arrive again.
        one.sent = one.acknowledged = 50
        two.received = 49
        self.assertRaises(PromiseBroken, talkers.check)  # The data are lost.
        two.received = 51
        self.assertRaises(PromiseBroken, talkers.check)  # Nobody has sent these data.


class DiscoveriesTests(SynchronousTestCase):
    """Networks with two discoveries."""

    def test_either_of_two_discoveries_is_enough(self) -> None:
        for host in ("discovery", "discovery-2"):
            lab = Lab(8)
            lab.add_discovery("discovery-2")
            lab.add_servers(1)
            alice, bob = lab.add_client("alice", min_servers=1), lab.add_client("bob", min_servers=1)
            lab.settle()
            lab.network.run(2)
            lab.network.host(host).kill()
            carol = lab.lookups(lab.network.host("carol"))
            self.assertEqual(lab.result(carol.entry(bob.public_key)).static, bob.public_key.hex())
            bob.listen(Accepting(), 7)
            lab.result(alice.connect(bob.public_key, Accepting(), 7))
            again = lab.start_discovery() if host == "discovery" else lab.add_discovery(host)
            assert again._running is not None
            self.failureResultOf(again._running.store.get(bob.public_key.hex()), EntryNotFound)

    def test_an_entry_that_is_lost_while_the_other_discovery_is_down_is_posted_again(self) -> None:
        lab = Lab(8)
        lab.add_discovery("discovery-2")
        lab.add_servers(1)
        alice, bob = lab.add_client("alice", min_servers=1), lab.add_client("bob", min_servers=1)
        lab.settle()
        for host in ("discovery", "discovery-2"):
            lab.network.host(host).kill()
        lab.start_discovery()  # Its store is empty.
        lab.network.run(150)
        bob.listen(Accepting(), 7)
        lab.result(alice.connect(bob.public_key, Accepting(), 7))


class ShapeTests(SynchronousTestCase):
    """Networks of walks."""

    def test_every_shape_is_drawn(self) -> None:
        shapes = [draw_plan(seed).shape for seed in range(300)]
        self.assertEqual({one.servers for one in shapes}, {1, 2, 3, 4, 6})
        self.assertEqual({one.clients for one in shapes} & {2, 12}, {2, 12})
        self.assertEqual({one.second for one in shapes}, {"", "honest", "down", "lying"})

    def test_the_smallest_shape_with_a_lying_discovery(self) -> None:
        """The network loses its only server, and its second discovery invents servers to the end. Discovery once got
        1112 requests a minute of two clients.
        """
        kills = (Step(((0, 300_000),), "kill", 1, 3.0), Step(((0, 100),), "restart", 1, 3.0))
        done = follow(Plan(0, (*kills, *kills), shape=Shape(1, 2, "lying")))
        self.assertEqual(done.faults, ["kill", "restart"] * 2)
        self.assertEqual(sorted(done.lab.network.hosts)[:2], ["alice", "bob"])
        self.assertGreater(done.acknowledged, 600_000)
        self.assertIn(Cell("kill", "its server", "idle"), done.coverage.reached)

    def test_a_walk_notices_clients_that_ask_often(self) -> None:
        self.patch(walk_module, "MAX_IDLE_REQUESTS", 0.5)
        plan = Plan(0, (), shape=Shape(1, 2))
        self.assertRaisesRegex(PromiseBroken, "requests a minute, and at most 2 are expected", follow, plan)


class WalkTests(SynchronousTestCase):
    """Random walks over all faults; the seed is in what a failure says."""

    def test_a_random_walk_loses_no_data(self) -> None:
        """Programs of 2019 take part in it."""
        plan = draw_plan(SEED)
        done = follow(replace(plan, shape=replace(plan.shape, old=True)))
        assert done.old_programs is not None and done.old_party is not None
        self.assertGreater(min(done.old_programs.finished, *done.old_party.finished), 0)

    def draw_earlier(self, seed: int, aims: Sequence[str]) -> Plan:
        """Draw the plan that a seed determined before there were the faults ``half-open`` and ``lost last frame``, and
        before shapes fitted their aims.
        """
        later = ("half-open", "lost last frame")
        self.patch(walk_kinds, "FAULTS", tuple(fault for fault in FAULTS if fault not in later))
        return replace(draw_plan(seed, 60, [Aim.parse(aim) for aim in aims]), shape=draw_plan(seed, 60).shape)

    def test_a_link_is_not_stopped_while_it_reports_its_failure(self) -> None:
        """Found by this walk, whose second discovery invents servers."""
        aims = ("slow reader@in flight", "wall clock@moving", "bandwidth@closing", "reorder@opening")
        follow(self.draw_earlier(41004, aims))

    def test_suspended_streams_of_a_walk_do_not_end_because_they_buffer_too_much(self) -> None:
        """Seed 1021541285: the only server was away for long, and a client had much to say in two incoming streams."""
        says = tuple((end, 300_000) for end in range(4))
        talk = (Step(says, seconds=0.01),) * (MAX_UNACKNOWLEDGED // 300_000 + 1)
        done = follow(Plan(1021541285, (Step(fault="kill"), *talk, Step(seconds=60.0)), shape=Shape(1, 2)))
        self.assertGreater(done.acknowledged, CROWD_BYTES - 300_000)


class SleepTests(SynchronousTestCase):
    """Laptops that sleep, and routers that forget."""

    def setUp(self) -> None:
        self.lab = Lab(7)
        self.lab.add_servers(2)
        self.alice, self.bob = self.lab.add_client("alice"), self.lab.add_client("bob")
        self.lab.settle()
        self.accepting = Accepting(Recorder)
        self.bob.listen(self.accepting)
        self.stream: Any = self.lab.result(self.alice.connect(self.bob.public_key, Accepting()))
        self.host = self.lab.network.host("alice")

    def sleep(self, seconds: float, *, is_forgotten: bool) -> float:
        """Suspend the laptop, and wake it; return the time of the wake."""
        self.host.suspend()
        self.lab.network.run(seconds, 1.0)
        if is_forgotten:
            self.assertGreater(self.host.forget_connections(), 0)
        self.host.wake()
        return self.lab.clock.seconds()

    def check_back(self, woke: float) -> None:
        """Check that the stream works and that the laptop can be reached within two seconds."""
        network = self.lab.network
        sent = self.stream.transport.send(b"awake")
        network.run_until(lambda: sent.called)
        self.successResultOf(sent)
        self.alice.listen(Accepting(Recorder), 7)
        reached = self.bob.connect(self.alice.public_key, Accepting(), 7)
        network.run_until(lambda: reached.called)
        self.successResultOf(reached)
        self.assertLess(self.lab.clock.seconds() - woke, 2.0)
        self.assertEqual(self.accepting.built[0].data, b"awake")

    def test_a_laptop_is_back_within_two_seconds_of_waking(self) -> None:
        """The router has forgotten the laptop's connections. The laptop falls asleep between two pings, or during a
        ping.
        """
        for before, seconds in ((3.3, 3600.0), (6.64, 60.0), (10.02, 60.0)):
            with self.subTest(before=before):
                self.setUp()
                self.lab.network.run(before)
                self.check_back(self.sleep(seconds, is_forgotten=True))

    def test_connections_that_outlived_the_sleep_are_kept(self) -> None:
        self.lab.network.run(3.3)
        before = self.alice.sessions()
        self.check_back(self.sleep(600.0, is_forgotten=False))
        self.lab.network.run(30)
        self.assertEqual(self.alice.sessions(), before)

    def test_an_idle_stream_outlives_a_router_that_forgets_after_a_minute(self) -> None:
        before = self.alice.sessions()
        self.host.idle_limit = 60.0
        self.lab.network.run(600)
        self.check_back(self.lab.clock.seconds())
        self.assertEqual(self.alice.sessions(), before)

    def test_a_router_that_forgets_faster_than_pings_breaks_connections(self) -> None:
        """Shows that the test above can fail."""
        before = self.alice.sessions()
        self.host.idle_limit = 5.0
        self.lab.network.run(60)
        self.assertNotEqual(self.alice.sessions(), before)
