"""Shares of reactor turns: no client takes a whole turn, and nothing that waits is lost or delivered out of order."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet.address import IPv4Address
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import SecKey
from dmsg.net.links.acceptor import FAILED_BURST, FAILED_RATE, FLOOD_BURST
from dmsg.net.turn_share import MAX_SHARE, MIN_SHARE, SERVER_FRAMES, TURN_BUDGET, TurnShare
from dmsg.net.turns import HoldReason
from dmsg.servers.serving import STRAY_BURST
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import ACCEPT, CLOSE, FWD, OK, REQUEST, Frame, encode_frame
from tests.support import KEYS, SERVER_KEY, MemoryNetwork, TurnClock


class Waiter:
    def __init__(self, share: TurnShare, owner: str, log: list[str], cost: float) -> None:
        self.share, self.owner, self.log, self.cost = share, owner, log, cost

    def proceed(self) -> None:
        if not self.share.allows(self.owner):
            self.share.wait(self)
            return
        self.log.append(self.owner)
        self.share.used(self.owner, self.cost)


class ShareTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = TurnClock()
        self.share = TurnShare(self.clock)

    def test_every_owner_gets_a_part_of_the_turn(self) -> None:
        self.assertTrue(self.share.allows("a"))
        self.share.used("a", MAX_SHARE)
        self.assertFalse(self.share.allows("a"))
        self.assertTrue(self.share.allows("b"))

    def test_the_next_turn_is_scheduled_without_a_request(self) -> None:
        self.share.used("a", MAX_SHARE)
        self.clock.advance(TURN_BUDGET)
        self.share.used("b", 0.0)
        self.assertTrue(self.share.allows("a"))

    def test_the_longest_waiter_has_the_first_turn(self) -> None:
        """Two readers of one owner, which has time for one of them, and one reader of another owner."""
        log: list[str] = []
        for owner in ("a", "a", "b"):
            self.share.wait(Waiter(self.share, owner, log, MAX_SHARE))
        self.clock.advance(0)
        self.assertEqual(log, ["a", "b"])
        self.clock.advance(0)
        self.assertEqual(log, ["a", "b", "a"])
        self.assertEqual(self.share.waited, 4)

    def test_a_busy_owner_does_not_keep_the_first_turn(self) -> None:
        """Three readers of one owner, which has time for one of them at a time: each is served in every third turn."""
        log: list[str] = []
        share = self.share

        class Insatiable(Waiter):
            def __init__(self, name: str) -> None:
                super().__init__(share, "nat", log, MAX_SHARE)
                self.name = name

            def proceed(self) -> None:
                assert share.allows("nat")
                share.wait(self)
                log.append(self.name)
                share.used("nat", MAX_SHARE)

        for name in "abc":
            share.wait(Insatiable(name))
        for _ in range(9):
            self.clock.advance(0)
        self.assertEqual("".join(log), "abc" * 3)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)

    def test_owners_in_a_wide_block_take_turns(self) -> None:
        """The share of a common block is too small for all owners in it: each is served as often as the others."""
        log: list[str] = []
        share = self.share

        class Insatiable(Waiter):
            def proceed(self) -> None:
                share.wait(self)
                log.append(self.owner)
                share.used(self.owner, MAX_SHARE)

        owners = [f"192.0.2.{number}" for number in range(20)]
        for owner in owners:
            share.wait(Insatiable(share, owner, log, MAX_SHARE))
        for _ in range(10):
            self.clock.advance(0)
        served = [log.count(owner) for owner in owners]
        self.assertLessEqual(max(served) - min(served), 1)
        self.assertGreater(min(served), 1)

    def test_waiters_of_an_owner_without_time_are_not_called(self) -> None:
        """A thousand connections of one owner wait, and the turn has time for one of them."""
        calls: list[str] = []

        class Counted(Waiter):
            def proceed(self) -> None:
                calls.append(self.owner)
                super().proceed()

        log: list[str] = []
        for _ in range(1000):
            self.share.wait(Counted(self.share, "proxy", log, MAX_SHARE))
        for turn in range(1, 4):
            self.clock.advance(0)
            self.assertEqual(len(calls), turn)
        self.assertEqual(self.share.waited, 1000 + 999 + 998 + 997)
        self.assertEqual(len(self.clock.getDelayedCalls()), 1)

    def test_many_owners_get_smaller_parts(self) -> None:
        for number in range(1000):
            self.share.used(f"{number}", 1e-6)
        self.clock.advance(TURN_BUDGET)
        self.share.used("x", MIN_SHARE / 2)
        self.assertTrue(self.share.allows("x"))
        self.share.used("x", MIN_SHARE / 2)
        self.assertFalse(self.share.allows("x"))

    def test_an_error_in_a_turn_does_not_affect_other_waiters(self) -> None:
        log: list[str] = []

        class Bad:
            owner = "a"

            def proceed(self) -> None:
                raise ValueError("ours")

        self.share.wait(Bad())
        self.share.wait(Waiter(self.share, "b", log, 0.0))
        self.clock.advance(0)
        self.assertEqual(log, ["b"])
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)


class LinkTests(SynchronousTestCase):
    """A server with a client that sends very many frames in one record."""

    def setUp(self) -> None:
        self.network = MemoryNetwork(TurnClock())
        self.clock = self.network.clock

    def raw(self, name: str) -> RawClient:
        client = RawClient(KEYS[name], SERVER_KEY.public)
        self.network.join(client)
        self.network.settle()
        self.assertEqual([frame.type for frame in client.take()], [OK])
        return client

    def pair(self) -> tuple[RawClient, RawClient, int]:
        one, two = self.raw("A"), self.raw("B")
        payload = bytes(one.key.public + two.key.public)
        one.send(encode_frame(REQUEST, 2, payload))
        self.network.settle()
        (request,) = two.take()
        two.send(encode_frame(ACCEPT, request.id, payload))
        self.network.settle()
        one.take()
        return one, two, request.id

    def test_other_clients_are_served_during_a_flood(self) -> None:
        """Frames behind ten thousand frames for unknown transports wait for many turns; another client's frame does
        not wait.
        """
        factory = self.network.factory
        one, two, theirs = self.pair()
        other = self.raw("C")
        strays = b"".join(encode_frame(FWD, 2 * number, b"") for number in range(10_000))
        other.send(strays + encode_frame(CLOSE, 8, b"\1"))
        one.send(encode_frame(FWD, 2, b"\0\1a"))
        for pump in self.network.pumps:
            pump.pump()
        self.assertEqual(sum(factory.relay.drops.values()), SERVER_FRAMES)
        self.clock.advance(0)
        for pump in self.network.pumps:
            pump.pump()
        self.assertLessEqual(sum(factory.relay.drops.values()), 2 * SERVER_FRAMES)
        self.assertEqual(two.take(), [Frame(FWD, theirs, b"\0\1a")])
        self.network.settle()
        self.assertEqual(sum(factory.relay.drops.values()), 10_000 + 1)
        self.assertGreater(factory.share.waited, 10_000 // SERVER_FRAMES - 1)

    @given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(1, 4000), max_size=4), st.booleans())
    def test_frames_before_the_end_of_a_turn_are_delivered(self, kinds: list[int], cuts: list[int], bad: bool) -> None:
        """Frames that were complete before the end of the connection are delivered in order, whatever ends the
        connection.
        """
        self.setUp()
        one, two, theirs = self.pair()
        expected: list[Frame] = []
        frames = []
        for number, kind in enumerate(kinds):
            if kind == 3:
                body = bytes(2) + b"%d" % number
                expected.append(Frame(FWD, theirs, body))
                frames.append(encode_frame(FWD, 2, body))
            else:
                frames += [encode_frame(FWD, 100 + 2 * (k % 2), b"") for k in range(50 * kind)]
        stream = b"".join(frames) + (encode_frame(0x77, 2, b"") if bad else b"")
        for size in [*cuts, len(stream)]:
            piece, stream = stream[:size], stream[size:]
            if piece:
                one.send(piece)
        if not bad:
            cast(Any, one.transport).loseConnection()
        self.network.settle()
        got = [frame for frame in two.take() if frame.type != CLOSE]
        self.assertEqual(got, expected)
        self.assertTrue(one.closed)

    def test_a_flood_of_strays_ends(self) -> None:
        """First the connection ends. A client that returns repeatedly is refused for a while."""
        factory = self.network.factory
        client = self.raw("A")
        record = b"".join(encode_frame(FWD, 2 + 2 * (number % 2), b"") for number in range(13_000))
        sent = 0
        while not client.closed:
            self.assertLess(sent, 2 * STRAY_BURST)
            client.send(record)
            sent += 13_000
            while factory.sessions and next(iter(factory.sessions)).link.held_by >= {HoldReason.TOO_FAST}:
                self.clock.advance(0.1)
            self.network.settle()
        self.assertEqual(factory.relay.drops[DropReason.FLOOD], 1)
        self.assertGreater(sent, STRAY_BURST)

    def end(self, host: str, key: SecKey, reason: DropReason) -> Any:
        """A connection of ``key`` from ``host``, which ends for ``reason``."""
        factory = self.network.factory
        link: Any = factory.buildProtocol(IPv4Address("TCP", host, 1))
        if link is None:
            return None
        transport = StringTransport()
        self.patch(transport, "unregisterProducer", lambda: None)
        link.makeConnection(transport)
        if reason is DropReason.HANDSHAKE_FAILED:
            factory._handshake_failed(link, Failure(RemoteProtocolError(reason, "no key")))
            return link
        session = factory._make_session(key.public)
        session.link, link.remote = link, key.public
        factory.session_up(session)
        refused, link.ended_for = link.ended_for, reason
        factory.session_down(session)
        return refused

    def test_a_flood_is_refused_only_to_its_sender(self) -> None:
        """Other clients at the same address are served, whatever number of keys sends floods."""
        for _ in range(int(FLOOD_BURST)):
            self.assertIsNone(self.end("203.0.113.7", KEYS["A"], DropReason.FLOOD))
        for number in range(20):
            self.assertIsNone(self.end("203.0.113.7", SecKey.from_seed(bytes([number])), DropReason.FLOOD))
        self.assertIs(self.end("203.0.113.7", KEYS["A"], DropReason.FLOOD), DropReason.FLOODED_BEFORE)
        self.assertIs(self.end("203.0.113.8", KEYS["A"], DropReason.FLOOD), DropReason.FLOODED_BEFORE)
        self.assertIsNone(self.end("203.0.113.7", KEYS["B"], DropReason.REPLACED))
        self.assertEqual(self.network.factory.relay.drops[DropReason.FLOODED_BEFORE], 2)

    def test_an_address_is_refused_for_handshakes_that_fail(self) -> None:
        for _ in range(int(FAILED_BURST)):
            self.assertIsNotNone(self.end("203.0.113.7", KEYS["A"], DropReason.HANDSHAKE_FAILED))
        factory = self.network.factory
        self.assertIsNone(self.end("203.0.113.7", KEYS["A"], DropReason.HANDSHAKE_FAILED))
        self.assertEqual(factory.relay.drops[DropReason.FAILED_BEFORE], 1)
        self.assertIsNotNone(self.end("203.0.113.8", KEYS["A"], DropReason.HANDSHAKE_FAILED))
        self.clock.advance(1 / FAILED_RATE + 0.01)
        self.assertIsNotNone(self.end("203.0.113.7", KEYS["A"], DropReason.HANDSHAKE_FAILED))
        # Behind a proxy, all clients have one address.
        factory.limits = Limits(max_per_address=0)
        for _ in range(2 * int(FAILED_BURST)):
            self.assertIsNotNone(self.end("203.0.113.9", KEYS["A"], DropReason.HANDSHAKE_FAILED))

    def test_connections_behind_a_proxy_share_no_limit(self) -> None:
        factory = self.network.factory
        factory.limits = Limits(max_per_address=0)
        one, two = (factory.buildProtocol(IPv4Address("TCP", "10.0.0.1", n)) for n in (1, 2))
        self.assertNotEqual(one.owner, two.owner)
