"""Limit of the memory that a relay uses for its sessions."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred

from dmsg.rmb.envelope import wire
from dmsg.rmb.errors import Drop, TwinNotFound
from dmsg.rmb.relay.federation.forward import FULL
from dmsg.rmb.relay.metrics import RelayMetrics
from dmsg.rmb.twins.address import Session
from tests.rmb.test_relay import PairCase
from tests.support import asynchronous

MIB = 1024 * 1024


class MemoryTests(PairCase):
    """Memory of real websockets."""

    @asynchronous
    async def test_sessions_that_confirm_nothing_lose_memory_first(self) -> None:
        """Their messages stay in their queues; sessions that confirm, and senders, are not affected."""
        a, b = await self.pair(memory=8 * MIB)
        self.twin("C", self.one.domain)
        greedy = [await self.raw("C", self.one, f"s{number}", answers_pings=False) for number in range(6)]
        for raw in greedy:
            a.send(a.envelope(raw.session, payload=bytes(3 * MIB)), self.now())
        await self.until(lambda: self.drops(Drop.MEMORY) > 0)
        await self.until(lambda: self.one.memory.total <= 8 * MIB)
        a.send(a.envelope(b.session, uid="after"), self.now())
        self.assertEqual((await b.messages.get()).uid, "after")
        self.assertTrue(a.socket.sendable and b.socket.sendable)
        gone = [raw for raw in greedy if raw.session not in self.one.switch.sessions]
        self.assertTrue(0 < len(gone) < 6)
        for raw in gone:
            await raw.closed
        again = await self.raw("C", self.one, gone[0].session.sid)
        self.assertEqual(len((await again.messages.get()).plain), 3 * MIB)
        a.socket.ping(b"settled?")
        self.assertEqual(b"settled?", await a.pongs.get())

    @asynchronous
    async def test_held_bytes_are_metrics(self) -> None:
        a, b = await self.pair(memory=64 * MIB)
        b.answers_pings = False
        a.send(a.envelope(b.session, payload=bytes(2 * MIB)), self.now())
        await b.messages.get()
        await self.until(lambda: self.one.memory.total > 0)
        text = RelayMetrics(self.one.switch, self.one.memory).render().decode()
        self.assertIn("rmb_memory_limit_bytes 6.7108864e+07", text)
        held = [line for line in text.splitlines() if line.startswith('rmb_held_bytes{kind="messages"}')]
        self.assertGreater(float(held[0].split()[1]), 2 * MIB)


class SessionBufferTests(PairCase):
    @asynchronous
    async def test_data_of_held_senders_counts_towards_the_limit(self) -> None:
        """A session that is held is ended when there is too much; what nobody confirmed it sends again."""
        a, b = await self.pair(memory=1 * MIB)
        session = self.one.switch.sessions[a.session]
        session.buffer.wait_for(self)
        for number in range(8):
            a.send(a.envelope(b.session, uid=str(number), payload=bytes(MIB // 4)), self.now())
        await a.closed
        self.assertEqual(self.drops(Drop.MEMORY), 1)
        self.assertEqual(len(self.one.switch.parked), 0)
        self.assertEqual(b.raw, [])
        again = await self.raw("A", self.one)
        again.send(again.envelope(b.session, uid="again"), self.now())
        self.assertEqual(wire.decode((await b.messages.get()).SerializeToString()).uid, "again")


class OtherHoldingsTests(PairCase):
    """Memory of messages whose way is not known yet."""

    def held(self, kind: str) -> int:
        return self.one.memory.held[kind]

    @asynchronous
    async def test_unfinished_messages_are_counted_and_given(self) -> None:
        a, b = await self.pair(memory=3 * MIB)
        assert a.socket is not None
        head = b"\x82\xff" + (15 * MIB).to_bytes(8, "big") + b"mask"
        a.socket.transport.write(head + bytes(2 * MIB))
        await self.until(lambda: self.held("unfinished") > 2 * MIB)
        self.assertEqual(list(self.one.switch.growing), [self.one.switch.sessions[a.session]])
        a.socket.transport.write(bytes(2 * MIB))
        await a.closed
        self.assertEqual(self.drops(Drop.UNFINISHED), 1)
        await self.until(lambda: self.one.memory.total == 0)
        self.assertEqual((self.one.switch.growing, self.one.switch.unfinished), ({}, 0))
        self.assertTrue(b.socket.sendable)

    @asynchronous
    async def test_messages_that_wait_for_the_registry(self) -> None:
        a, b = await self.pair(memory=3 * MIB)
        silent: Deferred[Any] = Deferred()
        self.patch(self.registry, "get", lambda number: silent)
        unknown = Session(4321)
        a.send(a.envelope(unknown, payload=bytes(2 * MIB)), self.now())
        await self.until(lambda: self.held("registry") > 2 * MIB)
        a.send(a.envelope(unknown, payload=bytes(2 * MIB)), self.now())
        await a.closed
        self.assertEqual(self.drops(Drop.MEMORY), 1)
        await self.until(lambda: self.one.memory.total == 0)
        self.assertEqual((self.one.switch.lookups.size, self.one.switch.lookups.looking), (0, {}))
        silent.errback(TwinNotFound("there is none"))
        self.assertTrue(b.socket.sendable)

    @asynchronous
    async def test_messages_for_other_relays_are_counted_and_given(self) -> None:
        """The sender is told that the messages were not accepted."""
        a, _ = await self.pair()
        switch = self.one.switch
        elsewhere = self.twin("C", "http://127.0.0.1:1")
        for number in range(4):
            a.send(a.envelope(Session(elsewhere), uid=str(number), payload=bytes(MIB)), self.now())
        await self.until(lambda: self.held("federation") > 4 * MIB)
        self.one.memory.limit = MIB
        answer = await a.messages.get()
        self.assertIn(FULL, answer.error.message)
        self.assertGreater(self.drops(Drop.FEDERATION_FULL), 0)
        await self.until(lambda: switch.federation._size <= MIB)
        self.assertEqual(sum(switch.federation.sizes().values()), switch.federation._size)
