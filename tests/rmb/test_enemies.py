"""Attacks of strangers, twins and other relays on a relay, and of registries on their users."""

from __future__ import annotations

import json
import time
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.resource import Resource
from twisted.web.server import Site

from dmsg.net.turn_share import SERVER_FRAMES
from dmsg.net.websocket import frames
from dmsg.rmb.errors import Drop, IdentityError, RegistryUnavailable
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.relay import periodic, sessions, site
from dmsg.rmb.relay.queue.interface import BATCH_BYTES, QueueLimits
from dmsg.rmb.relay.server import open_queue
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.identity import parse_account
from tests.rmb.network import RawTwin, pause
from tests.rmb.test_registry import A, statement
from tests.rmb.test_relay import SocketPairCase, _deferred
from tests.support import asynchronous


class AccountTests(SynchronousTestCase):
    def test_overlong_accounts_are_not_decoded(self) -> None:
        """Base 58 takes the square of its length: a megabyte took minutes."""
        began = time.process_time()
        self.assertRaises(IdentityError, parse_account, "z" * 1_000_000)
        self.assertLess(time.process_time() - began, 1.0)
        self.assertEqual(parse_account(A.address), parse_account("0x" + parse_account(A.address).hex()))


class SessionTests(SocketPairCase):
    @asynchronous
    async def test_a_token_with_half_a_character(self) -> None:
        """The token is refused with an error text, without a traceback."""
        from base64 import urlsafe_b64encode

        await self.pair()
        head = urlsafe_b64encode(b'{"alg":"\\ud800"}').rstrip(b"=").decode()
        url = f"http://127.0.0.1:{self.one.port}/?{head}.e30.e30"
        upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec_WebSocket_Version": "13"}
        status, text = await self.status_of(url, Sec_WebSocket_Key="AQIDBAUGBwgJCgsMDQ4PEA==", **cast(Any, upgrade))
        self.assertEqual(status, 401, text)
        self.assertEqual(self.flushLoggedErrors(), [])

    @asynchronous
    async def test_a_token_from_the_future_is_taken_once(self) -> None:
        await self.pair()
        query = token.make(self.identities["A"], Session(self.ids["A"], "s"), int(self.now()) + 60)
        first, again = (
            RawTwin(self.identities["A"], Session(self.ids["A"], "s"), self.one.url, self.reactor) for _ in range(2)
        )
        self.raws += [first, again]
        await first.connect(self.now(), query=query)
        error = await self.assertFailure(_deferred(again.connect(self.now(), query=query)), ConnectionError)
        self.assertIn("was used before", str(error))

    @asynchronous
    async def test_sessions_of_one_twin(self) -> None:
        """A twin can only replace its own sessions; other twins can connect."""
        self.patch(site, "MAX_SESSIONS_OF_TWIN", 2)
        a, b = await self.pair()
        await self.raw("A", self.one, "second")
        third = RawTwin(self.identities["A"], Session(a.session.twin, "third"), self.one.url, self.reactor)
        self.raws.append(third)
        await self.assertFailure(_deferred(third.connect(self.now())), ConnectionError)
        self.assertEqual(self.drops(Drop.TOO_MANY_SESSIONS), 1)
        await self.raw("A", self.one, "second")
        await self.raw("B", self.one, "second")
        await self.until(lambda: dict(self.one.switch.presence.of_twin) == {a.session.twin: 2, b.session.twin: 2})

    @asynchronous
    async def test_tiny_frames_take_turns(self) -> None:
        """Thousands of them in one read are all taken, in order; between them the reactor is free."""
        a, _ = await self.pair()
        number = 5000
        turns = 0
        pings = b"".join(frames.encode(frames.PING, b"%d" % one, b"mask") for one in range(number))
        a.socket.transport.write(pings)
        while not a.pongs.pending:
            await pause()
        while len(a.pongs.pending) < number:
            turns += 1
            await pause()
        self.assertEqual([bytes(one) for one in a.pongs.pending], [b"%d" % one for one in range(number)])
        self.assertGreater(turns, number // SERVER_FRAMES // 2)

    @asynchronous
    async def test_a_message_that_ends_in_a_later_turn(self) -> None:
        """The last piece waited because the twin had used up its share of the turn; the message is complete
        nevertheless.
        """
        a, b = await self.pair()
        session = self.one.switch.sessions[a.session]

        class Tired:
            """Share of a turn that is used up."""

            tired = True

            def allows(self, owner: object) -> bool:
                return not self.tired

            def wait(self, socket: Any) -> None:
                self.tired = False
                reactor.callLater(0, socket.proceed)

            def now(self) -> float:
                return 0.0

            def seconds_left(self, owner: object) -> float:
                return 1.0

            def used(self, owner: object, seconds: float, now: float | None = None) -> None:
                pass

        envelope = a.envelope(b.session, payload=bytes(300_000))
        envelope.timestamp = int(self.now())
        frame = frames.encode(frames.BINARY, envelope.SerializeToString(), b"mask")
        a.socket.transport.write(frame[:-100])
        await self.until(lambda: session.unfinished > sessions.MAX_UNWATCHED_SIZE)
        session.socket.share = Tired()
        a.socket.transport.write(frame[-100:])
        self.assertEqual(len((await b.messages.get()).plain), 300_000)
        self.assertEqual((session.unfinished, self.one.switch.unfinished), (0, 0))

    @asynchronous
    async def test_a_message_in_pieces_that_does_not_end(self) -> None:
        """Received bytes count, in whatever frames they came."""
        a, _ = await self.pair()
        self.one.switch._max_unfinished = 3_000_000
        first = True
        for _ in range(5):
            head = (b"\x02" if first else b"\x00") + b"\xff" + (1_000_000).to_bytes(8, "big") + b"mask"
            a.socket.transport.write(head + bytes(1_000_000))
            first = False
        await a.closed
        self.assertEqual(self.drops(Drop.UNFINISHED), 1)

    @asynchronous
    async def test_a_message_that_does_not_end(self) -> None:
        """The session with the largest incomplete message ends after some time, or when such messages use too much
        memory.
        """
        a, b = await self.pair()
        self.one.switch._max_unfinished = 3_000_000
        head = b"\x82\xff" + (10_000_000).to_bytes(8, "big") + b"mask"
        b.socket.transport.write(head + bytes(1_000_000))
        a.socket.transport.write(head + bytes(2_500_000))
        await a.closed
        self.assertEqual(self.drops(Drop.UNFINISHED), 1)
        self.assertIsNotNone(b.socket)
        self.patch(periodic, "UNFINISHED_FOR", 0.3)
        await b.closed
        self.assertEqual(self.drops(Drop.UNFINISHED), 2)


class UsedTokenTests(SynchronousTestCase):
    def parsed(self, twin: int, number: int, expires: int = 100) -> token.Token:
        return token.Token(Session(twin), 0, expires, b"%d" % number, b"signature")

    def test_floods_of_tokens_do_not_make_used_tokens_valid(self) -> None:
        """When there are too many used tokens, the twin with most of them loses the oldest."""
        used = token.UsedTokens(10)
        self.assertTrue(used.first_use(self.parsed(1, 0), 0))
        for number in range(1000):
            self.assertTrue(used.first_use(self.parsed(2, number), 0))
        self.assertEqual(len(used), 10)
        self.assertFalse(used.first_use(self.parsed(1, 0), 0))
        self.assertTrue(used.first_use(self.parsed(2, 0), 0))
        self.assertFalse(used.first_use(self.parsed(2, 999), 0))

    def test_used_tokens_expire(self) -> None:
        used = token.UsedTokens(10)
        for twin in range(5):
            used.first_use(self.parsed(twin, 0, 100 + twin), 0)
        used.first_use(self.parsed(9, 0, 500), 102)
        self.assertEqual(len(used), 4)
        used.first_use(self.parsed(9, 1, 500), 501)
        self.assertEqual((len(used), list(used._of)), (1, [9]))


class ReadTests(TestCase):
    @asynchronous
    async def test_a_read_ends_with_bytes(self) -> None:
        queue = await open_queue("sqlite::memory:", reactor, QueueLimits())
        self.addCleanup(queue.close)
        for _ in range(20):
            await queue.append("1:", bytes(1 << 20), time.time() + 60)
        found = await queue.read("1:", None)
        self.assertEqual(sum(len(one.data) for one in found), BATCH_BYTES)


class HostileRegistry(Resource):
    """Answers whatever a test says."""

    isLeaf = True

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.answers: list[bytes] = []

    def render_GET(self, request: Any) -> bytes:
        self.asked += 1
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class RegistryTests(TestCase):
    """A registry that wants to be asked no more, or for ever."""

    async def serve(self, *answers: bytes) -> HTTPRegistry:
        self.page = HostileRegistry()
        self.page.answers = list(answers)
        server = Site(self.page)
        server.noisy = False
        port = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(server)
        registry = HTTPRegistry(reactor, f"http://127.0.0.1:{port.getHost().port}")

        async def stop() -> None:
            await registry.close()
            await port.stopListening()

        self.addCleanup(lambda: Deferred.fromCoroutine(stop()))
        return registry

    @asynchronous
    async def test_incomplete_characters_do_not_end_the_connection(self) -> None:
        bad = statement().as_dict() | {"relay": "\ud800"}
        good = statement().as_dict()
        answers = [json.dumps({"twins": [one], "next": number}).encode() for number, one in ((1, bad), (2, good))]
        registry = await self.serve(*answers)
        told: list[Any] = []
        registry.watch(told.append)
        while not told:
            await pause(0.01)
        self.assertGreater(self.page.asked, 1)
        error = await self.assertFailure(registry.get(1), RegistryUnavailable)
        self.assertIn("another twin" if "another" in str(error) else "signature is wrong", str(error))

    @asynchronous
    async def test_registry_redirects_in_a_circle_are_not_followed(self) -> None:
        registry = await self.serve(json.dumps({"twins": [], "next": 1}).encode())
        registry.watch(lambda twin: None)
        await pause(1.0)
        self.assertLess(self.page.asked, 8)

    @asynchronous
    async def test_a_long_answer_about_one(self) -> None:
        registry = await self.serve(b'{"x": "' + b"y" * 1_000_000 + b'"}')
        error = await self.assertFailure(registry.get(1), RegistryUnavailable)
        self.assertIn("more than", str(error))
