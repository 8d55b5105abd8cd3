"""Limits of clients behind proxies of the operator: each counts by its own address, and never at the proxy's."""

from __future__ import annotations

from ipaddress import ip_network

from twisted.internet.protocol import Protocol

from dmsg.base.memory import Memory
from dmsg.errors import CloseReason, DropReason
from dmsg.net.addresses import MAX_PROXIES, forwarded_client
from dmsg.net.links.acceptor import FAILED_BURST
from dmsg.net.links.places import FEW_PLACES
from dmsg.net.links.trusted_proxies import TrustedProxies
from dmsg.net.websocket.upgrade import plain_upgrade
from dmsg.servers.holdings import LinkHoldings
from dmsg.testing.raw_client import RawClient
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import CLOSE, OK
from tests.net.links.support import REQUEST, Carried, LinkCase
from tests.support import SERVER_KEY

PROXY = "10.0.0.1"


class ProxiedCase(LinkCase):
    """A server in memory that believes one proxy."""

    def setUp(self) -> None:
        super().setUp()
        self.factory.proxies = TrustedProxies((ip_network(PROXY), ip_network("10.9.0.0/16")))
        self.told: list[str] = []
        self.patch(self.factory.strangers, "log_refusal", lambda address, reason, detail="": self.told.append(address))

    def direct(self, host: str) -> RawClient:
        """A client that comes without a proxy."""
        client = RawClient(self.key(), SERVER_KEY.public)
        self.join(client, host)
        return client

    def behind(self, *named: str, wrong_key: bool = False, headers: bytes | None = None) -> RawClient:
        """A client that comes through the proxy, which adds a line for each of these texts."""
        client = RawClient(self.key(), self.key().public if wrong_key else SERVER_KEY.public)
        lines = b"".join(b"X-Forwarded-For: %s\r\n" % one.encode() for one in named)
        client.carried = Carried(client, lines if headers is None else headers)  # type: ignore[attr-defined]
        client.link = self.join(client.carried, PROXY)  # type: ignore[attr-defined]
        return client

    def may_stay(self, client: RawClient) -> bool:
        return not client.closed and [frame.type for frame in client.take()][:1] in ([], [OK])


class LimitTests(ProxiedCase):
    """Limits that count at an address."""

    def test_connections_through_the_proxy_and_direct_ones_share_the_limit_of_their_address(self) -> None:
        self.factory.limits = Limits(max_per_address=3)
        mine = [self.behind("203.0.113.9"), self.direct("203.0.113.9"), self.behind("203.0.113.9")]
        self.assertEqual([self.may_stay(one) for one in mine], [True] * 3)
        for more in (self.behind("203.0.113.9"), self.direct("203.0.113.9")):
            self.assertEqual([frame.type for frame in more.take()], [CLOSE])
        self.assertEqual(self.factory.relay.drops[DropReason.TOO_MANY_FROM_ADDRESS], 2)
        # Others behind the same proxy, and the proxy's own machine, are not limited.
        others = [self.behind(f"198.51.{number}.7") for number in range(5)] + [self.direct(PROXY) for _ in range(5)]
        self.assertEqual([self.may_stay(one) for one in others], [True] * 10)
        self.assertEqual(set(self.told), {"203.0.113.9"})

    def test_neighbours_behind_the_proxy_count_in_the_blocks_around_them(self) -> None:
        self.factory.limits = Limits(max_per_address=1, max_connections=100)
        came = [self.may_stay(self.behind(f"2001:db8::{number:x}:0:0:0:1")) for number in range(6)]
        self.assertEqual(came, [True] * 4 + [False] * 2)

    def test_failed_handshakes_end_with_a_ban_of_the_clients_address_alone(self) -> None:
        for _ in range(int(FAILED_BURST)):
            self.behind("203.0.113.9", wrong_key=True)
        for refused in (self.behind("203.0.113.9"), self.direct("203.0.113.9")):
            self.assertTrue(refused.closed)
        self.assertEqual(self.factory.relay.drops[DropReason.FAILED_BEFORE], 2)
        self.assertTrue(self.may_stay(self.behind("198.51.100.7")))
        self.assertEqual(set(self.told), {"203.0.113.9"})

    def test_failures_of_unnamed_clients_ban_nobody(self) -> None:
        for _ in range(int(FAILED_BURST) + 10):
            self.behind(wrong_key=True)
        self.assertTrue(self.may_stay(self.behind("203.0.113.9")))
        self.assertTrue(self.may_stay(self.behind()))
        # A program that bans by the log finds no address that it could ban.
        self.assertEqual(set(self.told), {f"behind the proxy {PROXY}"})
        self.assertEqual(len(self.factory._failures._buckets), 0)

    def test_every_count_is_zero_at_the_end(self) -> None:
        clients = [self.behind("203.0.113.9"), self.behind(), self.direct("203.0.113.9"), self.behind("", "unknown")]
        clients += [self.behind("198.51.100.7", wrong_key=True)]
        for one in clients:
            if one.transport is not None:
                getattr(one.transport, "transport", one.transport).abortConnection()  # type: ignore[union-attr]
        self.network.settle()
        factory = self.factory
        self.assertEqual(
            (len(factory._counts._of_address), len(factory._counts._shaking_of), len(factory._places)), (0, 0, 0)
        )
        self.assertEqual((factory._counts._counted_as, factory._unnamed, factory._refused_links), ({}, set(), {}))


class FullTests(ProxiedCase):
    """A server without free places."""

    def test_a_newcomer_behind_the_proxy_gets_the_place_that_a_direct_one_would_get(self) -> None:
        crowd = [self.behind("203.0.113.9") for _ in range(20)]
        self.assertTrue(all(map(self.may_stay, crowd)))
        self.assertFalse(self.may_stay(self.behind("203.0.113.9")))
        self.assertTrue(self.may_stay(self.behind("198.51.100.7")))
        self.assertTrue(self.may_stay(self.direct("198.51.101.7")))
        self.assertEqual([one.closed for one in crowd].count(True), 2)
        self.assertEqual(self.factory.places, 18 - FEW_PLACES)

    def test_unnamed_clients_are_no_crowd_and_crowd_nobody_out(self) -> None:
        first = [self.behind() for _ in range(15)] + [self.direct("198.51.100.7") for _ in range(5)]
        refused = self.behind()
        self.assertEqual(next(frame.payload for frame in refused.take())[:1], bytes([CloseReason.FULL]))
        self.assertTrue(all(map(self.may_stay, first)))

    def test_a_refused_client_that_is_not_told_gets_an_answer_of_http(self) -> None:
        self.factory.limits = Limits(max_per_address=1)
        self.behind("203.0.113.9")
        self.patch(self.factory, "_may_be_notified", lambda refusal, block: False)
        refused = self.behind("203.0.113.9")
        self.assertIn(b"HTTP/1.1 503 ", refused.carried.received)  # type: ignore[attr-defined]
        self.assertEqual(self.factory.relay.drops[DropReason.TOO_MANY_FROM_ADDRESS], 1)

    def test_handshakes_without_a_name_do_not_evict_those_of_direct_clients(self) -> None:
        self.factory._counts._max_handshakes = 8
        for _ in range(8):
            self.join(Protocol(), PROXY)
        waiting = self.join(Protocol(), "198.51.100.7")
        for _ in range(6):
            self.join(Protocol(), PROXY)
        self.assertEqual(self.factory.handshakes, 8)
        self.assertIsNone(waiting.ended_for)


class MemoryOrderTests(ProxiedCase):
    """Owners of what the server holds in memory."""

    def test_what_is_held_belongs_to_the_client_and_not_to_the_proxy(self) -> None:
        account = Memory(1)
        LinkHoldings(self.network.clock, self.factory, account)
        for host in ("203.0.113.9", "203.0.113.77", ""):
            client = Carried(Protocol(), b"X-Forwarded-For: %s\r\n" % host.encode())
            self.join(client, PROXY)
        (holdings,) = [list(source()) for source in account._sources]
        owners = [one.owner[0] for one in holdings]
        self.assertEqual(owners[:2], ["203.0.113.9", "203.0.113.77"])
        self.assertNotIn(PROXY, owners)
        self.assertEqual([one.around for one in holdings], [(("203.0.113.0/24", 8),)] * 2 + [()])


class NameTests(ProxiedCase):
    """Text that names a client behind a proxy."""

    def address(self, *named: str) -> str:
        client = self.behind(*named)
        found: str = client.link.address  # type: ignore[attr-defined]
        self.assertTrue(self.may_stay(client))
        return found

    def test_the_last_address_that_is_not_a_proxy_counts(self) -> None:
        for named, expected in (
            (("203.0.113.9",), "203.0.113.9"),
            (("1.1.1.1, 203.0.113.9",), "203.0.113.9"),
            (("1.1.1.1", "203.0.113.9"), "203.0.113.9"),
            (("203.0.113.9, 10.9.1.2,10.0.0.1",), "203.0.113.9"),
            (("203.0.113.9:4711",), "203.0.113.9"),
            (("[2001:db8::1]:4711",), "2001:db8::1"),
            (("2001:0db8::0001",), "2001:db8::1"),
            (("::ffff:203.0.113.9",), "203.0.113.9"),
            (("203.0.113.9%\x1b[2J",), "203.0.113.9"),
        ):
            with self.subTest(named=named):
                self.assertEqual(self.address(*named), expected)

    def test_without_an_address_the_client_is_unknown(self) -> None:
        for named in ((), ("",), ("unknown",), ("_hidden",), ("203.0.113.9,",), ("1.1.1.1, 10.0.0.1, x",), (PROXY,)):
            with self.subTest(named=named):
                self.assertEqual(self.address(*named), PROXY)

    def test_only_a_proxy_is_believed(self) -> None:
        client = Carried(RawClient(self.key(), SERVER_KEY.public), b"X-Forwarded-For: 203.0.113.9\r\n")
        link = self.join(client, "198.51.100.7")
        self.assertEqual((link.address, self.factory.counted_as(link)), ("198.51.100.7", "198.51.100.7"))

    def test_the_length_of_a_header_costs_a_bounded_number_of_comparisons(self) -> None:
        asked: list[str] = []

        def is_proxy(host: str) -> bool:
            asked.append(host)
            return True

        self.assertEqual(forwarded_client(b"10.0.0.1," * 1000, is_proxy), "")
        self.assertEqual(len(asked), MAX_PROXIES)

    def test_other_headers_are_still_not_repeated(self) -> None:
        self.assertIsNotNone(plain_upgrade(REQUEST + b"X-Forwarded-For: a\r\nx-forwarded-for: b\r\n\r\n"))
        self.assertIsNone(plain_upgrade(REQUEST + b"X-Other: a\r\nx-other: b\r\n\r\n"))
