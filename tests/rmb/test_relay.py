"""The relay on real TCP, with real websockets: its rules, and the reference's texts."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, cast, get_args

from autobahn.twisted.websocket import WebSocketServerProtocol
from twisted.internet.endpoints import TCP4ClientEndpoint, clientFromString, connectProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread

from dmsg.net.socketopts import held_bytes, queued_bytes
from dmsg.net.web.guard import WHOLE_WITHIN, GuardReason
from dmsg.net.websocket import frames
from dmsg.rmb.envelope import wire
from dmsg.rmb.errors import Drop, QueueUnavailable, RegistryUnavailable, TokenError
from dmsg.rmb.relay import deliveries, delivery, lookups, periodic, site, switch
from dmsg.rmb.relay.metrics import RelayMetrics
from dmsg.rmb.relay.queue.interface import QueueLimits
from dmsg.rmb.twins import token
from dmsg.rmb.twins.address import Session
from tests.rmb.network import MemoryCase, RawTwin, RmbCase, queue_of
from tests.support import asynchronous, some


class _Pair(RmbCase):
    """A relay with A and B connected."""

    options: dict[str, Any] = {}

    async def pair(self, **options: Any) -> tuple[RawTwin, RawTwin]:
        self.one = await self.named_relay(**{**self.options, **options})
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        return await self.raw("A", self.one), await self.raw("B", self.one)

    def drops(self, drop: Drop) -> int:
        return int(self.one.switch.rules.drops[drop])

    async def refused(self, raw: RawTwin, envelope: Any, text: str) -> None:
        """The sender gets a relay's error about it."""
        raw.send(envelope, self.now())
        got = await raw.messages.get()
        self.assertEqual("error", wire.kind_of(got))
        self.assertEqual((0, text, envelope.uid), (got.error.code, got.error.message, got.uid))
        self.assertFalse(got.HasField("source") or got.HasField("signature") or got.HasField("schema"))
        self.assertEqual(raw.session, wire.destination_of(got))
        self.assertEqual(300, got.expiration)


class PairCase(_Pair, MemoryCase):
    """Two sessions in memory."""


class SocketPairCase(_Pair):
    """Two sessions on real TCP, for tests of sockets and HTTP."""


class MessageTests(PairCase):
    @asynchronous
    async def test_messages_arrive_unchanged(self) -> None:
        """The bytes; of any size up to 16 MiB; nothing is in the queue."""
        a, b = await self.pair()
        for size in (0, 1, 125, 126, 65535, 65536, 3_000_000):
            sent = a.send(a.envelope(b.session, payload=b"x" * size), self.now())
            await b.messages.get()
            self.assertEqual(sent, b.raw[-1])
        self.assertEqual(0, len(self.one.switch.queue))

    @asynchronous
    async def test_sessions_are_apart(self) -> None:
        """None, the empty text, and a name are three sessions."""
        _, b = await self.pair()
        sessions = [b, await self.raw("B", self.one, ""), await self.raw("B", self.one, "s")]
        a = await self.raw("A", self.one, "x")
        for raw in sessions:
            a.send(a.envelope(raw.session), self.now())
            got = await raw.messages.get()
            self.assertEqual(raw.session, wire.destination_of(got))
        self.assertEqual([1, 1, 1], [len(raw.raw) for raw in sessions])

    @asynchronous
    async def test_A6_pings_are_answered(self) -> None:
        """A ping of any destination comes back to its sender, signature and times as sent."""
        a, b = await self.pair()
        for to in (Session(0), b.session):
            ping = a.envelope(to, None, b"", uid="p1")
            ping.ClearField("plain")
            ping.ping.SetInParent()
            a.send(ping, self.now())
            got = await a.messages.get()
            self.assertEqual("pong", wire.kind_of(got))
            self.assertEqual((to, a.session), (wire.source_of(got), wire.destination_of(got)))
            self.assertEqual((b"hello world", ping.signature, 60), (got.plain, got.signature, got.expiration))
        self.assertEqual([], b.raw)

    @asynchronous
    async def test_A7_errors_have_the_texts_of_the_reference(self) -> None:
        """Wrong source, missing destination, unknown twin, no relay; only requests are answered."""
        a, b = await self.pair()
        self.twin("C", None)
        for source in (b.session, Session(a.session.twin, "s"), Session(0)):
            envelope = a.envelope(b.session)
            wire.set_address(envelope.source, source)
            await self.refused(a, envelope, "message wrong source")
        await self.refused(a, a.envelope(Session(0)), "message with missing destination")
        await self.refused(a, a.envelope(Session(999)), "unknown twin destination")
        await self.refused(a, a.envelope(Session(self.ids["C"])), "relay info is not set for this twin")
        await self.refused(a, a.envelope(b.session, expiration=0), "message has expired")
        a.send(a.envelope(Session(999), None), self.now())
        await self.refused(a, a.envelope(Session(999), uid="after"), "unknown twin destination")
        self.assertEqual(3, self.drops(Drop.WRONG_SOURCE))
        self.assertEqual(3, self.drops(Drop.UNKNOWN_DESTINATION))

    @asynchronous
    async def test_an_unknown_twin_is_asked_for_once(self) -> None:
        """Weakness 6: look-ups of ids that are none do not go through to the registry each time."""
        a, _ = await self.pair()
        before = self.one.switch.registry.misses
        for _ in range(20):
            await self.refused(a, a.envelope(Session(999)), "unknown twin destination")
        self.assertEqual(before + 1, self.one.switch.registry.misses)

    @asynchronous
    async def test_A5_fail_fast_here(self) -> None:
        """A sleeping destination: said at once, and nothing is kept."""
        a, _ = await self.pair()
        self.twin("C", self.one.domain)
        await self.refused(a, a.envelope(Session(self.ids["C"]), tags="x,fail-fast"), "destination offline")
        self.assertEqual(0, len(self.one.switch.queue))

    @asynchronous
    async def test_A8_twins_are_rate_limited(self) -> None:
        """Per twin over its sessions, pings counted; the connection stays; a fresh minute is a fresh start."""
        self.offset = 60 - self.now() % 60  # A new window begins.
        a, b = await self.pair(limit=(3, 10_000))
        other = await self.raw("A", self.one, "other")
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        ping = other.envelope(Session(0), None)
        ping.ping.SetInParent()
        other.send(ping, self.now())
        await other.messages.get()
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        for raw in (a, other):
            await self.refused(raw, raw.envelope(b.session), "exceeded rate limits, dropping message")
        self.offset += 60
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        await self.refused(a, a.envelope(b.session, payload=b"x" * 10_000), "exceeded rate limits, dropping message")
        self.assertEqual(3, self.drops(Drop.RATE_LIMITED))


class FloodTests(SocketPairCase):
    """A sender that waits for nothing, and a receiver that is there: nothing is dropped for it."""

    queue = "sqlite::memory:"

    def setUp(self) -> None:
        super().setUp()
        self.patch(delivery, "WINDOW_MESSAGES", 16)
        self.patch(switch, "BACKLOG_MESSAGES", 40)

    async def flood(self, number: int, *, both: bool = False) -> None:
        a, b = await self.pair(queue=self.queue, queue_limits=QueueLimits(messages=200))
        for count in range(number):
            a.send(a.envelope(b.session, uid=str(count)), self.now())
            if both:
                b.send(b.envelope(a.session, uid=str(count)), self.now())
        expected = [str(count) for count in range(number)]
        for receiver in (a, b) if both else (b,):
            await self.until(lambda receiver=receiver: len(receiver.raw) >= number, 40)
            self.assertEqual(expected, [wire.decode(data).uid for data in receiver.raw])
        a.socket.ping(b"all of it")
        self.assertEqual(b"all of it", await a.pongs.get())
        self.assertEqual({}, dict(self.one.switch.rules.drops))
        self.assertEqual(0, self.one.switch.dropped_oldest)

    @asynchronous
    async def test_a_flood_in_a_single_direction_arrives(self) -> None:
        await self.flood(3000)

    @asynchronous
    async def test_floods_in_both_directions_do_not_deadlock(self) -> None:
        """The floods end, and neither side waits for ever for the other."""
        await self.flood(1500, both=True)

    @asynchronous
    async def test_a_reader_that_pauses(self) -> None:
        """All messages go to the queue, and their sender is held; no message is lost."""
        a, b = await self.pair(queue=self.queue, queue_limits=QueueLimits(messages=200))
        b.answers_pings = False
        for count in range(1000):
            a.send(a.envelope(b.session, uid=str(count)), self.now())
        sessions = self.one.switch.sessions
        await self.until(lambda: sessions[b.session].delivery.stalled and sessions[a.session].buffer.is_active)
        await self.pause(0.5)
        b.answers_pings = True
        b.socket.pong(b.pings[-1])
        await self.until(lambda: len(b.raw) >= 1000)
        self.assertEqual([str(count) for count in range(1000)], [wire.decode(data).uid for data in b.raw])
        self.assertEqual({}, dict(self.one.switch.rules.drops))

    @asynchronous
    async def test_a_receiver_that_confirms_nothing_counts_as_absent(self) -> None:
        """After a minute the sender is released, and the queue's limit holds."""
        self.patch(periodic, "STALLED_AFTER", 1.0)
        a, b = await self.pair(queue=self.queue, queue_limits=QueueLimits(messages=200))
        c_twin = self.twin("C", self.one.domain)
        c = await self.raw("C", self.one)
        b.answers_pings = False
        for count in range(1000):
            a.send(a.envelope(b.session, uid=str(count)), self.now())
        a.send(a.envelope(Session(c_twin), uid="past it"), self.now())
        self.assertEqual("past it", (await c.messages.get()).uid)
        self.assertEqual(self.drops(Drop.STALLED), 1)
        await self.until(lambda: self.drops(Drop.QUEUE_FULL) > 0)

    @asynchronous
    async def test_a_twin_that_reads_no_answers_does_not_hold_the_answerer(self) -> None:
        """A twin asks for more than it reads. The answering twin continues to answer others."""
        a, b = await self.pair(queue=self.queue, queue_limits=QueueLimits(messages=200))
        c_twin = self.twin("C", self.one.domain)
        c = await self.raw("C", self.one)
        b.answers_pings = False
        for count in range(1000):
            a.send(a.envelope(b.session, None, uid=str(count)), self.now())
        a.send(a.envelope(Session(c_twin), None, uid="past it"), self.now())
        self.assertEqual("past it", (await c.messages.get()).uid)
        self.assertEqual(self.drops(Drop.STALLED), 0)
        self.assertIn(b.session, self.one.switch.sessions)

    @asynchronous
    async def test_a_connection_lost_in_a_flood(self) -> None:
        """Waiting messages go to the queue and arrive on the next connection, in order, some of them a second time."""
        a, b = await self.pair(queue=self.queue, queue_limits=QueueLimits(messages=2000))
        for count in range(800):
            a.send(a.envelope(b.session, uid=str(count)), self.now())
        await self.until(lambda: len(b.raw) > 100)
        first = [wire.decode(data).uid for data in b.raw]
        await b.drop()
        again = await self.raw("B", self.one)
        await self.until(lambda: again.raw and wire.decode(again.raw[-1]).uid == "799", 30)
        second = [int(wire.decode(data).uid) for data in again.raw]
        self.assertEqual(sorted(second), second)
        self.assertEqual(set(range(800)), {int(uid) for uid in first} | set(second))


class DurableTests(PairCase):
    """With ``--durable``, a message that its client would not send again is stored before it is delivered."""

    async def other(self, name: str, *, resends: bool) -> RawTwin:
        return await self.raw(name, self.one, resends=resends)

    @asynchronous
    async def test_messages_of_clients_that_do_not_resend_are_stored(self) -> None:
        self.one = await self.named_relay(durable=True)
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        b = await self.raw("B", self.one, answers_pings=False)
        for resends, kept in ((True, 0), (False, 1)):
            a = await self.other("A", resends=resends)
            a.send(a.envelope(b.session), self.now())
            await b.messages.get()
            self.assertEqual(kept, len(self.one.switch.queue))
            if not resends:
                # The ping after messages shows the client that this relay asks for confirmations.
                a.socket.ping(b"8 bytes!")
                await a.pongs.get()
                a.send(a.envelope(b.session), self.now())
                await b.messages.get()
                self.assertEqual(kept, len(self.one.switch.queue))
        b.answers_pings = True
        for number in (1, 2, 3):
            b.socket.pong(number.to_bytes(8, "big"))
        await self.until(lambda: not len(self.one.switch.queue))

    @asynchronous
    async def test_only_a_durable_relay_waits_for_the_disk(self) -> None:
        for durable, synchronous in ((False, 1), (True, 2)):  # The values mean NORMAL and FULL.
            relay = await self.relay(durable=durable, queue=f"sqlite:{self.mktemp()}")
            queue: Any = some(relay.switch).queue
            self.assertEqual((synchronous,), queue._db.execute("PRAGMA synchronous").fetchone())

    @asynchronous
    async def test_a_client_of_the_reference_gets_no_duplicates(self) -> None:
        """Neither a lost connection nor a stop of the relay causes duplicates. Messages that were not sent yet arrive
        later.
        """
        path = self.mktemp()
        self.one = await self.named_relay(durable=True, queue=f"sqlite:{path}")
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        a, b = await self.other("A", resends=False), await self.other("B", resends=False)
        await self.until(lambda: b.pings)
        got: list[str] = []
        for end in (b.drop, self.one.stopService):
            for _ in range(10):
                a.send(a.envelope(b.session, uid=f"u{len(got)}"), self.now())
                got.append((await b.messages.get()).uid)
            await end()
            if a.socket is not None:
                a.send(a.envelope(b.session, uid="while it was away"), self.now())
                await self.until(lambda: len(self.one.switch.queue) == 1)
                b = await self.other("B", resends=False)
                self.assertEqual((await b.messages.get()).uid, "while it was away")
        self.one = await self.relay(queue=f"sqlite:{path}", domains=self.one.switch.rules.domains)
        b = await self.other("B", resends=False)
        await self.until(lambda: b.pings)
        self.assertEqual((b.raw, len(self.one.switch.queue)), ([], 0))

    @asynchronous
    async def test_clients_that_log_pings_get_few(self) -> None:
        """At most one ping in 50 ms is sent under load, one a second for a few messages, and none when all are
        confirmed.
        """
        self.one = await self.named_relay()
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        b, a = await self.other("B", resends=False), await self.raw("A", self.one)
        began = self.reactor.seconds()
        for count in range(3000):
            a.send(a.envelope(b.session, uid=str(count)), self.now())
        await self.until(lambda: len(b.raw) == 3000)
        a.socket.ping(b"settled?")
        await a.pongs.get()
        self.assertLess(self.reactor.seconds() - began, deliveries.MAX_PING_DELAY)
        await self.until(lambda: not len(self.one.switch.sessions[b.session].delivery))
        passed = self.reactor.seconds() - began
        self.assertLessEqual(len(b.pings), passed / deliveries.PING_DELAY + 2)
        before = len(b.pings)
        await self.pause(0.3)
        self.assertEqual(before, len(b.pings))


class SessionTests(PairCase):
    @asynchronous
    async def test_A1_a_newer_connection_replaces_the_older(self) -> None:
        """Weakness 7: the old one is dropped, the new one stays and has what the old one did not confirm."""
        a, b = await self.pair()
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        fresh = await self.raw("B", self.one)
        self.assertIn("replaced this one", await b.closed)
        self.assertEqual(b.raw, [(await fresh.messages.get()).SerializeToString()])
        a.send(a.envelope(b.session), self.now())
        await fresh.messages.get()
        await self.pause(0.05)
        self.assertEqual(1, self.drops(Drop.REPLACED))
        self.assertIsNotNone(fresh.socket)

    @asynchronous
    async def test_A2_no_ghosts(self) -> None:
        """An invalid envelope or text ends the connection, and the session is gone at once."""
        for spoil in (lambda raw: raw.socket.send(b"\xff\xff"), lambda raw: raw.socket.sendMessage(b"text", False)):
            a, b = await self.pair()
            spoil(b)
            await b.closed
            await self.refused(a, a.envelope(b.session, tags="fail-fast"), "destination offline")
            await a.close()

    @asynchronous
    async def test_confirming_unsent_messages_ends_the_connection(self) -> None:
        """A confirmation of a message that was not sent ends the connection."""
        _, b = await self.pair()
        b.socket.pong((5).to_bytes(8, "big"))
        self.assertIn("the session confirms a message that was not sent", await b.closed)
        self.assertEqual(1, self.drops(Drop.BAD_FRAME))

    @asynchronous
    async def test_A3_queued_in_order_at_once(self) -> None:
        """Messages for an absent session arrive in order within 100 ms of its connection."""
        a, _ = await self.pair()
        c = Session(self.twin("C", self.one.domain))
        for number in range(500):
            a.send(a.envelope(c, uid=str(number)), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 500)
        began = self.reactor.seconds()
        raw = await self.raw("C", self.one)
        first = await raw.messages.get()
        # The benchmark measures the goal of 100 ms on a quiet machine.
        self.assertLess(self.reactor.seconds() - began, 1.0)
        got = [first] + [await raw.messages.get() for _ in range(499)]
        self.assertEqual([str(number) for number in range(500)], [one.uid for one in got])
        await self.until(lambda: not len(self.one.switch.queue))

    @asynchronous
    async def test_messages_behind_the_handshake(self) -> None:
        """Pieces of them come together with the relay's 101; none is lost or torn."""
        a, _ = await self.pair()
        c = Session(self.twin("C", self.one.domain))
        for number in range(40):
            a.send(a.envelope(c, uid=str(number), payload=bytes([number]) * 7000), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 40)
        raw = await self.raw("C", self.one)
        got = [await raw.messages.get() for _ in range(40)]
        self.assertEqual([(str(n), bytes([n]) * 7000) for n in range(40)], [(one.uid, one.plain) for one in got])

    @asynchronous
    async def test_A4_the_oldest_stored_messages_are_dropped(self) -> None:
        """The oldest go, and are counted."""
        a, _ = await self.pair(queue_limits=QueueLimits(messages=10))
        c = Session(self.twin("C", self.one.domain))
        for number in range(15):
            a.send(a.envelope(c, uid=str(number)), self.now())
        await self.until(lambda: self.one.switch.dropped_oldest == 5)
        raw = await self.raw("C", self.one)
        self.assertEqual([str(number) for number in range(5, 15)], [(await raw.messages.get()).uid for _ in range(10)])
        metrics = RelayMetrics(self.one.switch, self.one.memory).render()
        self.assertIn(b'rmb_drops_total{reason="queue_full"} 5.0', metrics)

    @asynchronous
    async def test_unconfirmed_messages_of_a_dead_connection_are_resent(self) -> None:
        """Weakness 8: messages that were written and not confirmed are delivered again. Confirmed messages are not."""
        a, b = await self.pair()
        a.send(a.envelope(b.session, uid="confirmed"), self.now())
        await b.messages.get()
        await self.until(lambda: not len(self.one.switch.sessions[b.session].delivery))
        b.answers_pings = False
        for number in range(3):
            a.send(a.envelope(b.session, uid=str(number)), self.now())
            await b.messages.get()
        await b.drop()
        a.send(a.envelope(b.session, uid="3"), self.now())
        fresh = await self.raw("B", self.one)
        self.assertEqual(list("0123"), [(await fresh.messages.get()).uid for _ in range(4)])

    @asynchronous
    async def test_pings_are_answered_when_all_is_settled(self) -> None:
        """The sender's ping waits for its receiver; after two seconds the queue is enough."""
        a, b = await self.pair()
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        a.socket.ping(b"settled?")
        await self.pause(0.1)
        self.assertEqual([], a.pongs.pending)
        b.socket.pong(b.pings[-1])
        self.assertEqual(b"settled?", await a.pongs.get())
        a.send(a.envelope(b.session), self.now())
        a.socket.ping(b"kept?")
        self.assertEqual(b"kept?", await a.pongs.get())
        self.assertEqual(1, len(self.one.switch.queue))
        # A late confirmation removes the message from the queue.
        await self.until(lambda: len(b.pings) == 2)
        b.socket.pong(b.pings[-1])
        await self.until(lambda: not len(self.one.switch.queue))

    @asynchronous
    async def test_expired_in_the_queue(self) -> None:
        """Weakness 12: an expired message is not delivered, and its sender gets an error."""
        a, _ = await self.pair()
        c = Session(self.twin("C", self.one.domain))
        a.send(a.envelope(c, uid="short", expiration=5), self.now())
        a.send(a.envelope(c, uid="long", expiration=500), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 2)
        self.offset = 10
        raw = await self.raw("C", self.one)
        self.assertEqual("long", (await raw.messages.get()).uid)
        told = await a.messages.get()
        self.assertEqual(("short", "message has expired"), (told.uid, told.error.message))

    @asynchronous
    async def test_expired_messages_are_removed_without_a_connection(self) -> None:
        """The round finds what expired too."""
        a, _ = await self.pair()
        a.send(a.envelope(Session(self.twin("C", self.one.domain)), expiration=5), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 1)
        self.offset = 10
        self.assertEqual("message has expired", (await a.messages.get()).error.message)
        self.assertEqual(0, len(self.one.switch.queue))

    @asynchronous
    async def test_a_slow_reader(self) -> None:
        """Messages beyond the reader's window go to the queue in order, and the sender is not paused."""
        a, b = await self.pair()
        b.answers_pings = False
        for number in range(2000):
            a.send(a.envelope(b.session, uid=str(number)), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 2000)
        self.assertEqual(1024, len(b.raw))
        a.socket.ping(b"settled?")
        self.assertEqual(b"settled?", await a.pongs.get())
        b.answers_pings = True
        b.socket.pong(b.pings[-1])
        await self.until(lambda: len(b.raw) == 2000)
        self.assertEqual([str(number) for number in range(2000)], [(await b.messages.get()).uid for _ in range(2000)])
        await self.until(lambda: not len(self.one.switch.queue))

    @asynchronous
    async def test_a_relay_that_is_stopped(self) -> None:
        """The relay closes its connections in order. The next relay on the same queue delivers the unconfirmed
        messages.
        """
        path = self.mktemp()
        a, b = await self.pair(queue=f"sqlite:{path}")
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        await self.one.stopService()
        self.assertIn("shutting down", await a.closed)
        second = await self.relay(queue=f"sqlite:{path}", domains=self.one.switch.rules.domains)
        fresh = await self.raw("B", second)
        await fresh.messages.get()
        self.assertEqual(b.raw, fresh.raw)

    @asynchronous
    async def test_a_stopping_relay_waits_for_confirmations(self) -> None:
        """The relay waits at most two seconds, and pings a client of the reference at once. No message arrives a
        second time.
        """
        path = self.mktemp()
        a, b = await self.pair(queue=f"sqlite:{path}")
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        began = self.reactor.seconds()
        ending = self.one.stopService()
        await self.pause(0.1)
        self.assertFalse(ending.called)
        b.socket.pong(b.pings[-1])
        await ending
        self.assertLess(self.reactor.seconds() - began, 0.5)
        second = await self.relay(queue=f"sqlite:{path}", domains=self.one.switch.rules.domains)
        self.assertEqual(0, len(queue_of(second)))

    @asynchronous
    async def test_a_queue_is_of_one_process(self) -> None:
        """A second relay on the same file says so and does not start."""
        path = self.mktemp()
        await self.relay(queue=f"sqlite:{path}")
        failure = await self.assertFailure(self.relay_fails(f"sqlite:{path}"), QueueUnavailable)
        self.assertIn("locked", str(failure))

    def relay_fails(self, queue: str) -> Any:
        from dmsg.rmb.relay.server import RmbRelay
        from dmsg.rmb.relay.settings import RelaySettings

        relay = RmbRelay(self.reactor, RelaySettings(["tcp:0"], "", queue=queue), registry=self.registry)
        relay.startService()
        return relay.ready


class HalfRequestTests(PairCase):
    """Strangers who connect to a relay and send no whole request."""

    async def stranger(self, said: bytes) -> Stranger:
        await self.pair()
        endpoint = TCP4ClientEndpoint(self.network.host("stranger"), self.host, self.one.port)
        stranger = await connectProtocol(endpoint, Stranger())
        stranger.write(said)
        return stranger

    @asynchronous
    async def test_half_a_request_ends_with_its_connection(self) -> None:
        stranger = await self.stranger(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le")
        await self.pause(WHOLE_WITHIN - 0.1)
        self.assertFalse(stranger.gone)
        await self.pause(0.2)
        self.assertTrue(stranger.gone)
        self.assertEqual(1, self.drops(Drop.SLOW_REQUEST))

    def test_every_reason_of_the_guard_is_counted(self) -> None:
        for reason in get_args(GuardReason):
            self.assertEqual(reason, Drop(reason).value)


class Stranger(Protocol):
    """Connection that sends what a test sends through it."""

    gone = False

    def write(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def connectionLost(self, reason: Any = None) -> None:
        self.gone = True


class HostileTests(SocketPairCase):
    """Attacks of a twin on a relay, or on other twins."""

    @asynchronous
    async def test_absurd_fields_are_refused(self) -> None:
        """Session names of any length and times of any size are not stored, and the periodic checks continue."""
        a, _ = await self.pair()
        twin = self.twin("C", f"{self.one.domain}_http://127.0.0.1:1")
        await self.refused(a, a.envelope(Session(twin, "x" * 300)), "message with an invalid destination session")
        for timestamp in (2**64 - 10, int(self.now()) + 400):
            await self.refused(a, a.envelope(Session(twin), timestamp=timestamp), "message timestamp is in the future")
        self.assertEqual(0, len(self.one.switch.queue))
        a.send(a.envelope(Session(twin)), self.now())
        await self.until(lambda: len(self.one.switch.queue) == 1)
        self.assertTrue(self.one._running.round.running)

    @asynchronous
    async def test_a_step_that_fails(self) -> None:
        """A failing step ends neither the other steps nor the next round."""
        a, b = await self.pair()
        self.patch(self.one.switch.queue, "expired", lambda now: 1 / 0)
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        a.socket.ping(b"?")
        self.assertEqual(b"?", await a.pongs.get())
        self.assertTrue(self.flushLoggedErrors(ZeroDivisionError))

    @asynchronous
    async def test_repeated_confirmations_do_not_count_as_reading(self) -> None:
        """Repeated confirmations do not count as reading. The queue takes over, and the session ends."""
        self.patch(periodic, "STALLED_AFTER", 1.0)
        a, b = await self.pair()
        b.answers_pings = False
        a.send(a.envelope(b.session), self.now())
        a.socket.ping(b"?")
        while b.socket is not None:
            b.socket.pong((0).to_bytes(8, "big"))
            await self.pause(0.05)
        self.assertEqual(b"?", await a.pongs.get())
        self.assertEqual(1, self.drops(Drop.STALLED))

    @asynchronous
    async def test_the_sender_of_a_lost_answer_is_disconnected(self) -> None:
        """An answer that the queue does not take: its sender's connection ends, so that it sends it again."""
        a, _ = await self.pair(queue_limits=QueueLimits(total=1))
        a.send(a.envelope(Session(self.twin("C", self.one.domain)), None), self.now())
        self.assertIn("cannot store messages now", await a.closed)

    @asynchronous
    async def test_an_answer_while_the_registry_is_away(self) -> None:
        """The answer is for a twin that is not in the cache. The connection ends, so that the sender repeats the
        answer.
        """
        a, _ = await self.pair()
        c = self.twin("C", self.one.domain)
        self.patch(lookups, "LOOKUP_TIMEOUT", 0.3)
        self.patch(lookups, "LOOKUP_RETRY", 0.1)
        self.patch(self.registry, "get", lambda number: _fail(RegistryUnavailable("it is away")))
        self.one.switch.registry.flush()
        await self.refused(
            a, a.envelope(Session(c)), f"failed to route message to peer '{c}': failed to get twin: it is away"
        )
        a.send(a.envelope(Session(c), None), self.now())
        self.assertIn("cannot store messages now", await a.closed)

    @asynchronous
    async def test_clients_that_do_not_read_are_not_read_from(self) -> None:
        """Pings without end to a relay whose answers nobody takes: nothing piles up."""
        a, _ = await self.pair()
        socket = a.socket
        socket.transport.pauseProducing()
        frame = frames.encode(frames.PING, b"x" * 125, b"mask")
        for _ in range(40):
            socket.transport.write(frame * 2000)
            await self.pause(0.01)
        session = self.one.switch.sessions[a.session]
        await self.until(lambda: "unsent" in session.socket.held_by)
        held = len(session.socket.transport.dataBuffer) + session.socket.transport._tempDataLen
        self.assertLess(held, 2_000_000)
        socket.transport.resumeProducing()
        await self.until(lambda: not session.socket.held_by)

    def test_sessions_that_are_no_text(self) -> None:
        """Half a character in the claim."""
        claims = {"sub": 1, "sid": "\ud800", "iat": 1, "exp": 2}
        parts = [urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in ({"alg": "RS512"}, claims)]
        self.assertRaises(TokenError, token.parse, b".".join([*parts, b"AA"]))


class Lines(Protocol):
    """Collects what comes."""

    def __init__(self) -> None:
        self.data = b""

    def dataReceived(self, data: bytes) -> None:
        self.data += data


class SocketTests(SocketPairCase):
    """Rare cases of sockets that the autobahn library handles."""

    @asynchronous
    async def test_a_message_in_pieces(self) -> None:
        """A whole message follows the pieces."""
        a, b = await self.pair()
        for _ in range(2):
            envelope = a.envelope(b.session, payload=b"in pieces" * 1000)
            envelope.timestamp = int(self.now())
            envelope.signature = a.identity.sign(wire.challenge(envelope))
            data = envelope.SerializeToString()
            third = len(data) // 3
            a.socket.sendFrame(opcode=2, payload=data[:third], fin=False)
            a.socket.sendFrame(opcode=0, payload=data[third : 2 * third], fin=False)
            a.socket.sendFrame(opcode=0, payload=data[2 * third :], fin=True)
            await b.messages.get()
            self.assertEqual(data, b.raw[-1])
            a.send(a.envelope(b.session), self.now())
            await b.messages.get()

    @asynchronous
    async def test_text_is_refused(self) -> None:
        a, _ = await self.pair()
        a.socket.sendFrame(opcode=1, payload=b"hello", fin=True)
        self.assertIn("only binary messages", await a.closed)

    @asynchronous
    async def test_bytes_behind_a_malformed_frame_are_ignored(self) -> None:
        """The bytes are not parsed as frames, because a read could contain thirty thousand frames of two bytes."""
        a, _ = await self.pair()
        looked: list[int] = []
        before = WebSocketServerProtocol._dataReceived

        def look(socket: Any, data: bytes) -> None:
            looked.append(len(data))
            before(socket, data)

        self.patch(WebSocketServerProtocol, "_dataReceived", look)
        a.socket.transport.write(bytes(60_000))
        await a.closed
        await self.until(lambda: len(self.one.switch.sessions) == 1)
        self.assertLess(len(looked), 5)

    @asynchronous
    async def test_unsent_data_of_an_ended_session_is_freed(self) -> None:
        """The data is in the queue; its memory is freed without the garbage collector."""
        a, _ = await self.pair()
        server = self.one.switch.sessions[a.session].socket
        assert server is not None
        transport = server.transport
        server.send(bytes(16_000_000))  # The data exceed the kernel's buffers.
        server.flush()
        server.send(b"later in this turn")
        self.assertGreater(queued_bytes(transport) or 0, 0)
        a.socket.abort()
        await self.until(lambda: server._is_over_mark)
        self.assertEqual((server._out, queued_bytes(transport), held_bytes(transport)), (None, 0, 0))

    @asynchronous
    async def test_a_good_bye_is_answered(self) -> None:
        a, _ = await self.pair()
        await a.close()
        await self.until(lambda: len(self.one.switch.sessions) == 1)

    @asynchronous
    async def test_malformed_websocket_handshakes_are_refused(self) -> None:
        """A wrong version, a key that is none, two keys; with an origin, as browsers say it."""
        a, _ = await self.pair()
        port = self.one.port
        for headers, status in (
            ("Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"101"),
            (
                "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                "Origin: http://127.0.0.1\r\nSec-WebSocket-Protocol: x\r\n",
                b"101",
            ),
            ("Sec-WebSocket-Version: 99\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"400"),
            ("Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: short\r\n", b"400"),
            ("Sec-WebSocket-Version: 13\r\n", b"400"),
            ("Sec-WebSocket-Version: 13\r\n" + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" * 2, b"400"),
        ):
            query = token.make(a.identity, Session(a.session.twin, "other"), int(self.now()))
            raw = await clientFromString(self.reactor, f"tcp:{self.host}:{port}").connect(Factory.forProtocol(Lines))
            request = f"GET /?{query} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{headers}\r\n"
            raw.transport.write(request.encode())
            await self.until(lambda raw=raw: b"\r\n\r\n" in raw.data)
            self.assertTrue(raw.data.startswith(b"HTTP/1.1 " + status), (headers, raw.data[:200]))
            if status == b"101":
                self.assertIn(b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", raw.data)  # The value is from RFC 6455, section 1.3.
            raw.transport.abortConnection()


class HTTPTests(SocketPairCase):
    @asynchronous
    async def test_refused_tokens_have_status_and_text(self) -> None:
        """A15 on the wire: status and text of each refusal; the path does not matter."""
        a, _ = await self.pair()
        url = self.one.domain
        upgrade = {
            "Upgrade": "websocket",
            "Connection": "keep-alive, Upgrade",
            "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
            "Sec_WebSocket_Version": "13",
        }
        now = int(self.now())
        good = token.make(a.identity, a.session, now)
        cases = [
            ("", 400, "missing jwt"),
            ("?", 400, "missing jwt"),
            ("?x", 401, "invalid jwt: jwt: No claims component found in token string"),
            ("?" + token.make(a.identity, a.session, now - 1000), 401, "invalid jwt: jwt has expired"),
            ("?" + token.make(self.identities["B"], a.session, now), 401, "invalid jwt: jwt: Invalid signature"),
            ("?" + token.make(a.identity, Session(999), now), 401, "twin not found 999"),
            (f"?{good}&x=1", 401, "invalid jwt: jwt: Invalid base64"),
            (f"?{good}.x", 401, "invalid jwt: jwt: Too many components found in token string"),
            (
                "?" + token.make(a.identity, a.session, now, 10**6),
                401,
                "invalid jwt: jwt: is valid for more than 86400 seconds",
            ),
        ]
        for query, status, text in cases:
            self.assertEqual(
                (status, text), await self.status_of(f"{url}/any/path{query}", **cast(Any, upgrade)), query[:20]
            )
        self.patch(self.registry, "get", lambda number: _fail(RegistryUnavailable("it is away")))
        self.one.switch.registry.flush()
        self.assertEqual(
            (500, "failed to get twin: it is away"), await self.status_of(f"{url}/?{good}", **cast(Any, upgrade))
        )

    @asynchronous
    async def test_a_token_is_taken_once(self) -> None:
        """Weakness 5: a token that is read from a proxy's log cannot be used again, unless the operator allows it."""
        relay = await self.named_relay()
        self.twin("A", relay.domain)
        query = token.make(self.identities["A"], Session(self.ids["A"]), int(self.now()) - site.TOKEN_REUSE_TIME - 1)
        first = RawTwin(self.identities["A"], Session(self.ids["A"]), relay.url, self.reactor)
        self.raws.append(first)
        await first.connect(self.now(), query=query)
        again = RawTwin(self.identities["A"], Session(self.ids["A"]), relay.url, self.reactor)
        error = await self.assertFailure(_deferred(again.connect(self.now(), query=query)), ConnectionError)
        self.assertIn("401: invalid jwt: jwt: was used before", str(error))
        self.assertIsNotNone(first.socket)
        other = await self.named_relay(token_reuse=True)
        for _ in range(2):
            raw = RawTwin(self.identities["A"], Session(self.ids["A"]), other.url, self.reactor)
            self.raws.append(raw)
            await raw.connect(self.now(), query=query)

    @asynchronous
    async def test_two_connections_within_a_second_are_no_replay(self) -> None:
        """Clients of the reference put nothing into a token but the second, and ed25519 signs the same alike."""
        relay = await self.named_relay()
        self.twin("A", relay.domain)
        for name in (None, "s"):
            session = Session(self.ids["A"], name)
            for _ in range(2):
                query = token.make(self.identities["A"], session, int(self.now()), unique=False, resends=False)
                raw = RawTwin(self.identities["A"], session, relay.url, self.reactor)
                self.raws.append(raw)
                await raw.connect(self.now(), query=query)
        # Another signature over the same claims makes another token.
        old = int(self.now()) - site.TOKEN_REUSE_TIME - 1
        session = Session(self.ids["A"])
        one, two = (
            token.make(self.identities["A"], session, old, unique=False, resends=resends) for resends in (True, False)
        )
        for query in (one, two):
            raw = RawTwin(self.identities["A"], session, relay.url, self.reactor)
            self.raws.append(raw)
            await raw.connect(self.now(), query=query)
        again = RawTwin(self.identities["A"], session, relay.url, self.reactor)
        await self.assertFailure(_deferred(again.connect(self.now(), query=two)), ConnectionError)

    @asynchronous
    async def test_the_relay_pings(self) -> None:
        """Weakness 13: a session that is silent is asked, and ended when it does not answer, or confirms nothing."""
        self.patch(periodic, "IDLE_PING", 0.3)
        self.patch(periodic, "SILENT_AFTER", 1.2)
        a, b = await self.pair()
        b.answers_pings = False
        self.assertIn("silent for too long", await b.closed)
        self.assertIn(b"", b.pings)
        self.assertIsNotNone(a.socket)
        self.assertEqual(1, self.drops(Drop.SILENT))
        self.patch(periodic, "STALLED_AFTER", 0.5)
        c = await self.raw("B", self.one, "c", answers_pings=False)
        a.send(a.envelope(c.session), self.now())
        while c.socket is not None:
            c.socket.ping(b"not silent")
            await self.pause(0.05)
        self.assertEqual(1, self.drops(Drop.STALLED))
        self.assertEqual(1, len(self.one.switch.queue))

    @asynchronous
    async def test_a_hundred_sessions_exchange_messages(self) -> None:
        """Upstream's test_switch: 100 sessions, 10 messages each, all delivered and confirmed."""
        a, _ = await self.pair()
        sessions = [await self.raw("B", self.one, str(number)) for number in range(100)]
        for number in range(10):
            for raw in sessions:
                a.send(a.envelope(raw.session, uid=str(number)), self.now(), sign=False)
        await self.until(lambda: all(len(raw.raw) == 10 for raw in sessions))
        await self.until(lambda: not any(len(one.delivery) for one in self.one.switch.sessions.values()))
        for raw in sessions:
            self.assertEqual([str(number) for number in range(10)], [wire.decode(data).uid for data in raw.raw])

    @asynchronous
    async def test_E6_another_account(self) -> None:
        """The registry knows another key for the twin: 401, in words."""
        relay = await self.named_relay()
        self.twin("A", relay.domain)
        raw = RawTwin(self.identities["B"], Session(self.ids["A"]), relay.url, self.reactor)
        self.raws.append(raw)
        error = await self.assertFailure(_deferred(raw.connect(self.now())), ConnectionError)
        self.assertIn("401: invalid jwt: jwt: Invalid signature", str(error))

    @asynchronous
    async def test_metrics_health_and_unknown_paths(self) -> None:
        """404; /metrics with the reference's names; /health."""
        a, b = await self.pair()
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        url = self.one.domain
        for method, path in (("GET", "/"), ("GET", "/x"), ("POST", "/x"), ("PUT", "/")):
            self.assertEqual((404, "page not found"), await self.status_of(url + path, method))
        status, metrics = await self.status_of(f"{url}/metrics")
        self.assertEqual(200, status)
        for line in (
            'relay_worker_connections{worker="0"} 2.0',
            "relay_message_rx_total 1.0",
            "relay_message_tx_total 1.0",
            "relay_message_rx_bytes_total",
            "relay_message_tx_bytes_total",
            'relay_session_evictions_total{reason="closed"} 0.0',
            "federation_message_success",
            "federation_message_error",
            "rmb_cache_misses_total",
            "rmb_cache_flushes_total",
            "rmb_cache_entries",
            "rmb_queue_forgotten_total 0.0",
            "process_open_fds",
        ):
            self.assertIn(line, metrics)
        status, health = await self.status_of(f"{url}/health")
        self.assertEqual((200, 2), (status, json.loads(health)["sessions"]))
        # The charts of rmb-rs probe /metrics from another host, and only check whether it answers.
        status, metrics = await self.status_of(f"{url}/metrics", X_Forwarded_For="192.0.2.1")
        self.assertEqual((200, "#"), (status, metrics[0]))
        self.assertNotIn("relay_", metrics)
        status, health = await self.status_of(f"{url}/health", X_Forwarded_For="192.0.2.1")
        self.assertEqual((200, {"status": "ok"}), (status, json.loads(health)))

    @asynchronous
    async def test_too_many_sessions(self) -> None:
        """503, and those that are there stay."""
        a, b = await self.pair(max_sessions=2)
        raw = RawTwin(self.identities["A"], Session(a.session.twin, "third"), self.one.url, self.reactor)
        self.raws.append(raw)
        await self.assertFailure(_deferred(raw.connect(self.now())), ConnectionError)
        self.assertEqual(1, self.drops(Drop.TOO_MANY_SESSIONS))
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()

    @asynchronous
    async def test_a_twin_with_most_sessions_gives_a_place(self) -> None:
        """Otherwise a twin could fill a relay and lock others out.  Messages on their way to a session protect the
        session.
        """
        a, _ = await self.pair(max_sessions=7)
        crowd = [await self.raw("A", self.one, f"crowd {number}") for number in range(5)]
        self.one.switch.sessions[crowd[-1].session].lookups = 1  # A look-up for one of its messages is under way.
        newcomer = await self.raw("B", self.one, "newcomer")
        self.assertEqual(self.drops(Drop.CROWDED_OUT), 1)
        sessions = self.one.switch.sessions
        self.assertIn(newcomer.session, sessions)
        self.assertEqual([one.session in sessions for one in crowd], [True] * 3 + [False, True])
        # The evicted session does not come back, and B does not get all remaining places.
        for twin, name in (("A", "crowd 3"), ("B", "another"), ("B", "one more")):
            raw = RawTwin(self.identities[twin], Session(self.ids[twin], name), self.one.url, self.reactor)
            self.raws.append(raw)
            if name == "another":
                await raw.connect(self.now())
            else:
                await self.assertFailure(_deferred(raw.connect(self.now())), ConnectionError)
        self.assertIn(a.session, sessions)

    @asynchronous
    async def test_tokens_are_never_logged(self) -> None:
        """Weakness 5: the token is in no line of the log."""
        from twisted.logger import globalLogPublisher

        lines: list[str] = []
        observer = lambda event: lines.append(repr(event))
        globalLogPublisher.addObserver(cast(Any, observer))
        try:
            a, _ = await self.pair()
            await a.close()
        finally:
            globalLogPublisher.removeObserver(cast(Any, observer))
        self.assertFalse([line for line in lines if "eyJ" in line])

    @asynchronous
    async def test_oversized_frames_and_posts_are_not_read(self) -> None:
        """A frame, and a POST, that say they are larger than a message may be are not read."""
        a, _ = await self.pair()
        a.socket.transport.write(b"\x82\xff" + (2**40).to_bytes(8, "big") + b"mask")
        await a.closed
        endpoint = clientFromString(self.reactor, f"tcp:{self.host}:{self.one.port}")
        raw = await endpoint.connect(Factory.forProtocol(Lines))
        raw.transport.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        await self.until(lambda: b"413" in raw.data)
        self.assertEqual(1, self.drops(Drop.INTAKE_TOO_LARGE))
        raw.transport.loseConnection()

        def post() -> int:
            """Send a whole request before reading the answer, as most clients do."""
            connection = HTTPConnection(self.host, self.one.port)
            with closing(connection):
                connection.request("POST", "/", bytes(wire.MAX_MESSAGE + 1))
                return connection.getresponse().status

        self.assertEqual(413, await deferToThread(post))

    @asynchronous
    async def test_random_bytes_leave_the_relay_running(self) -> None:
        """The random bytes are sent to the port, after the upgrade, and as frames."""
        import random

        rng = random.Random(5)
        a, b = await self.pair()
        for number in range(60):
            junk = rng.randbytes(rng.randrange(1, 400))
            if number % 3 == 0:
                endpoint = clientFromString(self.reactor, f"tcp:{self.host}:{self.one.port}")
                raw = await endpoint.connect(Factory.forProtocol(Lines))
                raw.transport.write(junk if number % 2 else b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n" + junk)
                raw.transport.loseConnection()
                continue
            c = await self.raw("A", self.one, str(number))
            if number % 3 == 1:
                c.socket.transport.write(junk)
            else:
                c.socket.transport.write(frames.encode(0x82, junk, b"mask"))
            await self.pause(0)
            await c.drop()
        a.send(a.envelope(b.session), self.now())
        await b.messages.get()
        await self.until(lambda: len(self.one.switch.sessions) == 2)
        self.flushLoggedErrors()


def _fail(error: Exception) -> Any:
    from twisted.internet.defer import fail

    return fail(error)


def _deferred(coroutine: Any) -> Any:
    from twisted.internet.defer import Deferred

    return Deferred.fromCoroutine(coroutine)
