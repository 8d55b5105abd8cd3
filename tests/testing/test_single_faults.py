"""Single faults at the end of a walk, and the Deferreds on which programs of a walk wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

from dmsg.clients.publish import EntryPublisher
from dmsg.errors import CloseReason
from dmsg.streams import streams
from dmsg.streams.carrier import TransportCarrier
from dmsg.streams.core.resumption import ResumableEnd
from dmsg.streams.streams import STALL_TIME
from dmsg.testing.lab import Lab
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.single_faults import SingleFaults
from dmsg.testing.walk_streams import WalkStreams
from dmsg.testing.walk_waits import Waits
from dmsg.v2019.reachability import ReachabilityCheck
from tests.testing.walks import WalkCase

SERVERS = ("server-1", "server-2")
PING_SECONDS = 60.0
"""Seconds after which each client has sent a PING. A server announces its shutdown only to clients that know PING."""
TIMEOUT = 60.0


class Network:
    """Two clients with a stream between them, in a lab with some servers."""

    def __init__(self, seed: int, servers: int, *, is_old: bool = False) -> None:
        lab = self.lab = Lab(seed)
        if is_old:
            lab.old_servers.add("server-1")
        lab.add_servers(servers)
        names = {bytes(lab.key(name).public): name for name in SERVERS}
        clients = {name: lab.add_client(name, min_servers=1 + is_old) for name in ("alice", "bob")}
        lab.settle()
        self.streams = WalkStreams(lab, clients, seed)
        self.streams.listen(clients["bob"])
        self.streams.start("alice", [("bob", clients["bob"])])
        self.waits = Waits(lab, clients)
        self.single = SingleFaults(lab, SERVERS[:servers], names, clients, self.streams, self.waits)
        self.random = Random(seed)

    def read_while_moving(self) -> None:
        """Let the responder read while the stream moves, and run the lab until all data has arrived."""
        self.lab.network.run(PING_SECONDS)
        assert self.single.read_while_moving(self.random)
        self.lab.network.run_until(self.streams.is_all_there, TIMEOUT)


class SingleFaultTests(WalkCase):
    """Faults that happen when nothing else does."""

    @staticmethod
    def moves() -> Iterator[partial[None]]:
        for seed in range(12):
            yield partial(Network(seed, 2).read_while_moving)

    def test_reading_while_the_stream_moves_opens_the_window_again(self) -> None:
        network = Network(1, 2)
        network.read_while_moving()
        self.assertGreater(network.streams.acknowledged, 400_000)
        self.assertEqual(list(network.lab.servers), [name for name in SERVERS if name in network.lab.servers])
        self.assertEqual(len(network.lab.servers), 1)

    def test_a_stream_whose_window_stays_closed_is_found(self) -> None:
        attach = ResumableEnd.attach

        def attach_and_keep(end: Any, *arguments: Any, **options: Any) -> None:
            before = end.told_window
            attach(end, *arguments, **options)
            end.told_window = before

        self.patch(ResumableEnd, "attach", attach_and_keep)
        self.found("the awaited condition did not become true", self.moves())

    def lose_last_frame(self, servers: int) -> Network:
        """Lose the last frame in a network with some servers, and run the lab until it has arrived."""
        network = Network(1, servers)
        self.assertTrue(network.single.lose_last_frame(network.random))
        network.lab.network.run_until(network.streams.is_all_there, TIMEOUT)
        return network

    def test_a_lost_last_frame_arrives_over_another_transport(self) -> None:
        for servers in (1, 2):
            network = self.lose_last_frame(servers)
            self.assertEqual(network.streams.acknowledged, 100)
            self.assertGreater(network.lab.clock.seconds(), STALL_TIME)

    def test_no_frame_is_lost_at_a_server_that_was_just_started_again(self) -> None:
        """Seed 106 of a walk with lies: the stream was still with the former process of its server."""
        network = Network(1, 1)
        network.lab.network.run(PING_SECONDS)
        network.lab.leave("server-1")
        network.lab.add_server("server-1")
        self.assertFalse(network.single.lose_last_frame(network.random))
        network.lab.network.run_until(network.streams.is_all_there, TIMEOUT)

    def test_a_client_that_never_notices_a_stall_is_found(self) -> None:
        self.patch(streams, "STALL_TIME", 1e6)
        self.found("the awaited condition did not become true", [partial(self.lose_last_frame, 2)])

    def lose_last_frame_at_only_server(self, servers: int) -> Network:
        """Lose the last frame of an initiator that reaches only the server of its stream."""
        network = Network(1, servers)
        self.assertEqual(network.single.lose_last_frame_at_only_server(network.random), "alice")
        return network

    def test_a_last_frame_arrives_over_the_only_server_that_its_initiator_reaches(self) -> None:
        for servers in (1, 2):
            network = self.lose_last_frame_at_only_server(servers)
            self.assertEqual(network.streams.acknowledged, 100)
            self.assertGreater(network.lab.clock.seconds(), STALL_TIME)
            paths = network.single._client_paths()
            self.assertEqual([path.cut_since for path in paths], [None] * len(paths))

    def test_a_stall_without_consequence_is_found(self) -> None:
        leave, suspend = TransportCarrier.leave, streams.Streams.suspend

        def leave_others(carrier: Any, reason: int) -> None:
            if reason != CloseReason.STALLED:
                leave(carrier, reason)

        def suspend_others(table: Any, stream: Any, reason: int) -> None:
            if reason != CloseReason.STALLED:
                suspend(table, stream, reason)

        self.patch(TransportCarrier, "leave", leave_others)
        self.patch(streams.Streams, "suspend", suspend_others)
        for servers in (1, 2):
            self.found(
                "does not arrive, although both clients are connected to server-",
                [partial(self.lose_last_frame_at_only_server, servers)],
            )

    def test_the_faults_of_a_server_are_repaired_before_it_drops_a_frame(self) -> None:
        network = Network(1, 1)
        path, _ = network.lab.network.both_ways(*map(network.lab.network.host, ("bob", "server-1")))
        path.cut_since, path.loss, path.rate = network.lab.clock.seconds(), 0.3, 1000.0
        network.lab.network.host("server-1").pause()
        self.assertEqual(network.single.lose_last_frame_at_only_server(network.random, ("alice", "carol")), "alice")
        self.assertEqual((path.cut_since, path.loss, path.rate), (None, 0.0, 0.0))

    def test_a_server_of_2019_is_not_the_only_one_that_is_reached(self) -> None:
        network = Network(1, 1)
        network.lab.old_servers.add("server-1")
        self.assertEqual(network.single.lose_last_frame_at_only_server(network.random), "")

    def test_a_client_with_dead_connections_becomes_reachable_again(self) -> None:
        for is_old in (False, True):
            network = Network(1, 2, is_old=is_old)
            network.single.go_half_open(network.random)
            network.lab.network.run_until(network.streams.is_all_there, TIMEOUT)

    def test_a_client_that_does_not_notice_that_it_is_unreachable_is_found(self) -> None:
        self.patch(ReachabilityCheck, "check_soon", lambda check: None)
        network = Network(1, 2, is_old=True)
        self.found(
            "is not reachable through server-1, which has noticed a dead connection",
            [partial(network.single.go_half_open, network.random)],
        )

    def test_no_stream_moves_in_a_network_with_one_server(self) -> None:
        network = Network(1, 1)
        self.assertEqual(network.single.read_while_moving(network.random), "")
        self.assertEqual(list(network.lab.servers), ["server-1"])

    def test_an_entry_is_published_after_each_loss_of_the_servers(self) -> None:
        network = Network(1, 1)
        network.single.lose_servers_while_posting(network.random)
        network.waits.check(0)
        self.assertGreater(network.waits.fired, 8)

    def test_a_client_that_tells_nobody_of_an_unchanged_entry_is_found(self) -> None:
        tell = EntryPublisher._fire_if_published

        def tell_after_posts(publisher: Any) -> None:
            if publisher._posted_at == publisher._reactor.seconds():
                tell(publisher)

        self.patch(EntryPublisher, "_fire_if_published", tell_after_posts)
        networks = (Network(seed, 1) for seed in range(12))
        self.found(
            "programs still wait 200 s after all faults were repaired: when_published of",
            (partial(one.single.lose_servers_while_posting, one.random) for one in networks),
        )


class WaitsTests(WalkCase):
    """Deferreds that have to fire."""

    def test_a_deferred_that_does_not_fire_breaks_the_promise(self) -> None:
        network = Network(2, 1)
        network.waits.begin("bob")
        self.assertEqual(network.waits.fired, 2)
        network.lab.kill("server-1")
        network.lab.network.run(1)
        network.waits.begin("bob")
        self.assertRaisesRegex(
            PromiseBroken,
            "programs still wait 9 s .*: when_online of bob, when_published of bob",
            network.waits.check,
            9,
        )
        network.lab.add_server("server-1")
        network.waits.check()
        self.assertEqual(network.waits.fired, 4)

    def test_the_deferreds_of_a_killed_client_are_forgotten(self) -> None:
        network = Network(3, 1)
        network.lab.kill("server-1")
        network.lab.network.run(1)
        network.waits.begin_any(Random(1))
        for name in ("alice", "bob"):
            network.waits.client_was_killed(name)
        network.waits.check(0)
        self.assertEqual(network.waits.fired, 0)
