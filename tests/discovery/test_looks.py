"""Looking at servers that say nothing: what is connected to, and how often."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from dmsg.discovery.entry import Entry, ServerMeta
from dmsg.discovery.looks import AT_ONCE, LOOK_EVERY, PORTS, TRIES, Looks, may_look
from dmsg.discovery.store import FIRST_LOOK, MemoryStore
from dmsg.keys import SecKey
from tests.support import asynchronous

TTL = 120.0


def server(number: int, address: str = "8.8.8.8:1") -> Entry:
    key = SecKey.from_seed(b"looks %d" % number)
    return Entry("0.0.1", 0, 1, key.public.hex(), server=ServerMeta(address, 1)).sign(key)


class MayLookTests(SynchronousTestCase):
    """Nobody makes discovery ask what is beside it."""

    def test_by_kind_of_network(self) -> None:
        for address, poster, may in (
            ("8.8.8.8:1", "1.1.1.1", True),
            ("8.8.8.8:1", "", True),
            ("relay.example:1", "1.1.1.1", True),
            ("127.0.0.1:1", "1.1.1.1", False),
            ("127.0.0.1:1", "10.0.0.1", False),
            ("127.0.0.1:1", "127.0.0.1", True),
            ("10.0.0.1:1", "1.1.1.1", False),
            ("10.0.0.1:1", "10.0.0.2", True),
            ("[::ffff:127.0.0.1]:1", "1.1.1.1", False),
            ("[::1]:1", "1.1.1.1", False),
            ("169.254.169.254:80", "169.254.0.1", False),
            ("0.0.0.0:1", "0.0.0.0", False),
            ("224.0.0.1:1", "224.0.0.1", False),
            ("nonsense", "1.1.1.1", False),
            ("8.8.8.8%x.example:1", "1.1.1.1", False),
            ("[2002:7f00:1::1]:1", "1.1.1.1", False),
            ("[fec0::1]:1", "1.1.1.1", False),
            ("a..b:1", "1.1.1.1", False),
            ("x" * 64 + ".example:1", "1.1.1.1", False),
            ("127.0.0.1:1", "", False),
        ):
            self.assertEqual(may_look(address, poster), may, (address, poster))


class LooksTests(SynchronousTestCase):
    """With a clock, and a network that says who is there."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore()
        self.there = True
        self.reached: list[tuple[str, int]] = []
        self.looks = Looks(self.clock, self.store, self.clock.seconds, TTL, reach=self.reach)
        self.looks.start()
        self.addCleanup(lambda: self.successResultOf(Deferred.fromCoroutine(self.looks.stop())))

    def reach(self, host: str, port: int) -> Deferred[Any]:
        self.reached.append((host, port))
        return succeed(None) if self.there else fail(ConnectionRefusedError())

    def post(self, entry: Entry) -> None:
        self.successResultOf(self.store.post(entry, self.clock.seconds(), False))

    def listed(self) -> int:
        return len(self.successResultOf(self.store.quiet(100, self.clock.seconds() - TTL)))

    def advance(self, seconds: float) -> None:
        self.clock.pump([LOOK_EVERY] * int(seconds / LOOK_EVERY))

    def test_it_stays_as_long_as_it_is_there(self) -> None:
        self.post(server(1))
        self.advance(3600.0)
        self.assertEqual(self.listed(), 1)
        self.assertLess(len(self.reached), 3600 / (TTL / 3) + 2)
        self.there = False
        self.advance(TTL + 10)
        self.assertEqual(self.listed(), 0)
        self.there = True
        self.advance(TTL * 4)
        self.assertEqual(self.listed(), 1)

    def test_one_that_is_never_there_is_asked_rarely(self) -> None:
        self.there = False
        self.post(server(1))
        self.advance(24 * 3600.0)
        self.assertLess(len(self.reached), 10)

    def test_an_address_that_ten_thousand_entries_name_is_connected_to_once(self) -> None:
        """Or entries would be a way to have discovery flood somebody."""
        for number in range(100):
            self.post(server(number))
        self.advance(FIRST_LOOK + 100 / AT_ONCE * LOOK_EVERY)
        self.assertLessEqual(len(self.reached), 3)

    def test_few_at_a_time(self) -> None:
        for number in range(50):
            self.post(server(number, f"8.8.8.{number}:1"))
        under_way: list[Deferred[Any]] = []

        def reach(host: str, port: int) -> Deferred[Any]:
            under_way.append(Deferred())
            return under_way[-1]

        self.looks._reach = reach
        self.advance(FIRST_LOOK)
        self.assertEqual(len(under_way), AT_ONCE)
        under_way[0].callback(None)
        self.assertEqual(len(under_way), AT_ONCE + 1)

    def test_ports_of_one_address_are_few(self) -> None:
        """Nobody has discovery look for open ones."""
        for number in range(50):
            self.post(server(number, f"8.8.8.8:{number + 1}"))
        self.advance(FIRST_LOOK + LOOK_EVERY)
        self.assertEqual(len(self.reached), PORTS)

    def test_spellings_of_one_address_are_one(self) -> None:
        for number, text in enumerate(("8.8.8.8:1", "[::ffff:8.8.8.8]:1", "[::ffff:808:808]:1")):
            self.post(server(number, text))
        self.post(server(9, "8.8.8.8%x.example:1"))
        self.advance(FIRST_LOOK + LOOK_EVERY)
        self.assertEqual(self.reached, [("8.8.8.8", 1)])

    def test_one_that_is_never_there_is_given_up(self) -> None:
        """Dead entries would take the time of those that live."""
        self.there = False
        self.post(server(1))
        self.advance(48 * 3600.0)
        self.assertEqual(len(self.reached), TRIES)

    def test_a_store_that_fails_is_asked_again(self) -> None:
        due = self.store.due
        self.store.due = lambda *arguments: fail(OSError("away"))  # type: ignore[method-assign]
        self.post(server(1))
        self.advance(TTL)
        self.store.due = due  # type: ignore[method-assign]
        self.advance(LOOK_EVERY * 2)
        self.assertEqual(len(self.reached), 1)


class ConnectingTests(TestCase):
    """To a real port."""

    @asynchronous
    async def test_nothing_is_sent(self) -> None:
        got: list[bytes] = []
        lost: Deferred[None] = Deferred()

        class Server(Protocol):
            def dataReceived(self, data: bytes) -> None:
                got.append(data)

            def connectionLost(self, reason: Any = None) -> None:
                lost.callback(None)

        port: Any = reactor.listenTCP(0, Factory.forProtocol(Server), interface="127.0.0.1")  # type: ignore[attr-defined]
        self.addCleanup(port.stopListening)
        looks = Looks(reactor, MemoryStore(), lambda: 0.0, TTL)
        self.assertTrue(await looks._is_there(f"127.0.0.1:{port.getHost().port}"))
        await lost
        self.assertEqual(got, [])

    @asynchronous
    async def test_a_name_is_only_connected_to_where_it_is_public(self) -> None:
        """``localhost`` is this machine, whoever wrote it."""
        looks = Looks(reactor, MemoryStore(), lambda: 0.0, TTL)
        self.assertFalse(await looks._is_there("localhost:1"))
        self.assertEqual(looks.looked, 0)
