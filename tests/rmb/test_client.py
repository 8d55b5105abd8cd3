"""The client library: calling, being called, and what it does when relays come and go."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred

from dmsg.errors import DmsgTimeout
from dmsg.rmb.client import Reply
from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.envelope.texts import EXPIRED
from dmsg.rmb.errors import CallTimeout, Drop, RegistryRefused, RemoteError, RmbError, TwinNotFound, TwinOffline
from dmsg.rmb.session.handlers import HandlerError
from dmsg.rmb.session.seal import ReplayWindow
from dmsg.rmb.session.uplink import MessageTooLarge
from dmsg.rmb.twins.address import Session
from tests.rmb.network import MemoryCase
from tests.support import asynchronous, some


class CallTests(MemoryCase):
    async def two(self, **options: Any) -> None:
        self.one = await self.named_relay()
        for name in "AB":
            self.twin(name, None)
        self.a, self.b = self.client("A", self.one, **options), self.client("B", self.one)
        await self.a.when_online()
        await self.b.when_online()
        self.to = self.ids["B"]

    @asynchronous
    async def test_calls_are_answered_by_every_kind_of_handler(self) -> None:
        """Handlers that answer at once, later, as coroutines; by module; with nothing."""
        await self.two(session="caller")
        later: Deferred[bytes] = Deferred()

        async def coroutine(request: Any) -> bytes:
            await self.pause(0)
            return request.payload.upper()

        self.b.serve("now", lambda request: request.payload)
        self.b.serve("later", lambda request: later)
        self.b.serve("co", coroutine)
        self.b.serve("calc.*", lambda request: request.command.encode())
        self.b.serve("none", lambda request: None)
        reply = await self.a.call(self.to, "now", b"x")
        self.assertEqual(Reply(Session(self.to), b"x", "application/json"), reply)
        waiting = Deferred.fromCoroutine(self.a.call(self.to, "later"))
        self.assertEqual(b"ABC", (await self.a.call(self.to, "co", b"abc")).payload)
        later.callback(b"!")
        self.assertEqual(b"!", (await waiting).payload)
        self.assertEqual(b"calc.add.one", (await self.a.call(self.to, "calc.add.one")).payload)
        self.assertEqual(b"", (await self.a.call(self.to, "none")).payload)

    @asynchronous
    async def test_handlers_receive_caller_and_deadline(self) -> None:
        """A handler receives the signed caller and the time that the caller waits."""
        await self.two(session="caller")
        seen: list[Any] = []
        self.b.serve("cmd", lambda request: seen.append(request) or b"")
        await self.a.call(self.to, "cmd", b"p", timeout=20, tags="t", schema="text/plain")
        self.assertEqual(Session(self.ids["A"], "caller"), seen[0].source)
        self.assertEqual(
            ("cmd", b"p", "text/plain", "t,fail-fast"), (seen[0].command, seen[0].payload, seen[0].schema, seen[0].tags)
        )
        self.assertIn(seen[0].left, (20, 21), "no less than the caller waits")

    @asynchronous
    async def test_errors_of_handlers_and_registry_reach_the_caller(self) -> None:
        """The cases are an error of a handler, a missing handler, and a twin that the registry does not have."""
        await self.two()

        def own(request: Any) -> bytes:
            raise HandlerError("own words", 42)

        def failing(request: Any) -> bytes:
            raise KeyError("k")

        def quoting(request: Any) -> bytes:
            raise HandlerError(f"{json.loads(request.payload)} is no name")

        self.b.serve("own", own), self.b.serve("failing", failing), self.b.serve("quoting", quoting)
        for command, code, text in (
            ("own", 42, "own words"),
            ("failing", 255, "'k'"),
            ("x", 255, "function not found: x"),
        ):
            error: Any = await self.assertFailure(Deferred.fromCoroutine(self.a.call(self.to, command)), RemoteError)
            self.assertEqual((code, text, False), (error.code, str(error), error.by_relay))
        calling = Deferred.fromCoroutine(self.a.call(self.to, "quoting", b'"\\ud800"', timeout=5))
        error = await self.assertFailure(calling, RemoteError)
        self.assertEqual("? is no name", str(error), "half a character is replaced")
        self.assertEqual(1, len(self.flushLoggedErrors(KeyError)))
        await self.assertFailure(Deferred.fromCoroutine(self.a.call(999, "x")), TwinNotFound)

    @asynchronous
    async def test_offline_is_said_at_once(self) -> None:
        """grid3#453: no waiting for a sleeping twin; unless the relay is to keep the request."""
        await self.two()
        asleep = self.twin("C", self.one.domain)
        error: Any = await self.assertFailure(Deferred.fromCoroutine(self.a.call(asleep, "x", timeout=30)), TwinOffline)
        self.assertTrue(error.by_relay)
        waiting = Deferred.fromCoroutine(self.a.call(asleep, "x", b"kept", timeout=30, keep=True))
        await self.until(lambda: len(self.one.switch.queue) == 1)
        c = self.client("C", self.one)
        c.serve("x", lambda request: request.payload)
        self.assertEqual(b"kept", (await waiting).payload)

    @asynchronous
    async def test_a_call_past_its_deadline_times_out(self) -> None:
        """CallTimeout; and nothing is left of the call."""
        await self.two()
        self.b.serve("x", lambda request: Deferred())
        await self.assertFailure(Deferred.fromCoroutine(self.a.call(self.to, "x", timeout=0.1)), CallTimeout)
        self.assertEqual({}, self.a._calls)

    @asynchronous
    async def test_a_message_lives_as_long_as_its_caller_waits(self) -> None:
        """Timestamps are whole seconds: a life of one second, begun late in a second, would be over at once."""
        await self.two()
        lives: list[int] = []
        never: Deferred[None] = Deferred()

        def send(envelope: Any, *some: Any) -> Deferred[None]:
            lives.append(envelope.expiration)
            return never

        self.patch(self.a._bus, "send", send)
        for now, timeout, life in ((1000.0, 1, 1), (1000.95, 1, 2), (1000.95, 0.04, 1), (1000.5, 20, 21)):
            self.patch(self.a, "_now", lambda now=now: now)
            calling = Deferred.fromCoroutine(self.a.call(self.to, "x", timeout=timeout))
            await self.until(lambda: lives)
            calling.addErrback(lambda _: None).cancel()
            self.assertEqual(lives.pop(), life)

    @asynchronous
    async def test_a_relay_whose_clock_is_before(self) -> None:
        """The relay reports that the message has expired while the caller still waits; the caller gets a timeout."""
        await self.two()
        self.b.serve("x", lambda request: Deferred())
        calling = Deferred.fromCoroutine(self.a.call(self.to, "x", timeout=30))
        await self.until(lambda: self.a._calls)
        (uid,) = self.a._calls
        envelope = Envelope(uid=uid)
        envelope.error.message = EXPIRED
        self.a._on_answer(cast(Any, SimpleNamespace(kind="error", envelope=envelope, by_relay=True)))
        error: Any = await self.assertFailure(calling, CallTimeout)
        self.assertIn("a relay says; the relay's clock or this machine's clock is wrong", str(error))

    @asynchronous
    async def test_a_clock_that_differs_from_the_clock_of_the_relay(self) -> None:
        """The relay accepts no token of this client, and the error asks for the clocks."""
        relay = await self.named_relay()
        self.twin("A", relay.domain)
        for hours, why in ((-1, "jwt has expired"), (1, "jwt: was issued in the future")):
            client = self.client("A", relay, wall_clock=lambda hours=hours: self.now() + hours * 3600)
            error: Any = await self.assertFailure(Deferred.fromCoroutine(client.when_online(1.0)), DmsgTimeout)
            self.assertIn(f"401: invalid jwt: {why}; is the clock of this machine or of the relay wrong?", str(error))

    @asynchronous
    async def test_a_clock_that_is_set_while_a_client_serves(self) -> None:
        """The messages of others have times that this client cannot accept, so it reports its clock, once."""
        await self.two()
        for hours, why in ((1, "message has expired"), (-1, "timestamp is in the future")):
            ahead = [0.0]
            warnings: list[str] = []
            self.twin("C", None)
            client = self.client(
                "C", self.one, wall_clock=lambda ahead=ahead: self.now() + ahead[0], on_warning=warnings.append
            )
            await client.when_online()
            ahead[0] = hours * 3600.0
            for _ in range(2):
                calling = Deferred.fromCoroutine(self.a.call(self.ids["C"], "x", timeout=2))
                await self.assertFailure(calling, CallTimeout, RemoteError)
            (warning,) = warnings
            self.assertIn(f"{why}; is the clock of this machine or of the sender wrong?", warning)
            await client.stopService()

    @asynchronous
    async def test_a_call_to_several_destinations_returns_each_answer(self) -> None:
        """Each destination has an answer or an error."""
        await self.two()
        self.b.serve("x", lambda request: b"b")
        asleep = self.twin("C", self.one.domain)
        answers = await self.a.call_all([self.to, asleep, 999, self.to], "x")
        self.assertEqual({self.to, asleep, 999}, set(answers))
        self.assertEqual(b"b", cast(Any, answers[self.to]).payload)
        self.assertIsInstance(answers[asleep], TwinOffline)
        self.assertIsInstance(answers[999], TwinNotFound)

    @asynchronous
    async def test_payloads_are_encrypted_and_bound(self) -> None:
        """Bound as soon as one has seen that the other signs with borders; the relay sees nothing of it."""
        await self.two()
        self.b.serve("x", lambda request: request.payload)
        seen: list[bytes] = []
        receive = self.one.switch.received
        self.one.switch.received = lambda session, data: seen.append(data) or receive(session, data)
        self.assertEqual(b"secret words", (await self.a.call(self.to, "x", b"secret words")).payload)
        self.assertEqual(b"secret words", (await self.a.call(self.to, "x", b"secret words")).payload)
        self.assertEqual(
            ["cipher", "bound", "bound", "bound"], [wire.decode(data).WhichOneof("payload") for data in seen]
        )
        self.assertFalse([data for data in seen if b"secret words" in data])

    @asynchronous
    async def test_replays_and_foreign_answers(self) -> None:
        """A request is handled once, and only the twin that was asked can answer."""
        await self.two()
        handled: list[bytes] = []
        self.b.serve("x", lambda request: handled.append(request.payload) or b"")
        seen: list[bytes] = []
        receive = self.one.switch.received
        self.one.switch.received = lambda session, data: seen.append(data) or receive(session, data)
        await self.a.call(self.to, "x", b"1")
        await self.b._bus.take(seen[0])
        self.assertEqual(([b"1"], 1), (handled, self.b.drops[Drop.REPLAYED]))
        await self.a._bus.take(seen[1])
        self.assertEqual(1, self.a.drops[Drop.UNKNOWN_REPLY])

    @asynchronous
    async def test_messages_that_are_too_large_are_not_sent(self) -> None:
        """No relay would read such a message. Callers on both sides get an error, and connections stay open."""
        await self.two()
        self.b.serve("large", lambda request: bytes(17 * 1024 * 1024))
        self.b.serve("x", lambda request: b"x")
        calling = Deferred.fromCoroutine(self.a.call(self.to, "x", bytes(17 * 1024 * 1024)))
        await self.assertFailure(calling, MessageTooLarge)
        error: Any = await self.assertFailure(Deferred.fromCoroutine(self.a.call(self.to, "large")), RemoteError)
        self.assertIn("16777216 are allowed", str(error))
        self.assertEqual(b"x", (await self.a.call(self.to, "x")).payload)

    @asynchronous
    async def test_a_ping_measures_the_round_trip_to_the_relay(self) -> None:
        """An envelope to the relay and back."""
        await self.two(session="p")
        self.assertLess(await self.a.ping(), 5.0)

    @asynchronous
    async def test_a_relay_that_goes_and_comes(self) -> None:
        """Messages and answers that were sent during the interruption arrive."""
        path = self.mktemp()
        self.one = await self.named_relay(queue=f"sqlite:{path}")
        for name in "AB":
            self.twin(name, None)
        self.a, self.b = self.client("A", self.one), self.client("B", self.one)
        await self.a.when_online()
        await self.b.when_online()
        held: Deferred[bytes] = Deferred()
        self.b.serve("slow", lambda request: held)
        self.b.serve("x", lambda request: b"x")
        slow = Deferred.fromCoroutine(self.a.call(self.ids["B"], "slow"))
        await self.pause(0.1)
        await self.one.stopService()
        await self.until(lambda: not some(self.a.uplink).connected and not some(self.b.uplink).connected)
        held.callback(b"slow")
        meanwhile = Deferred.fromCoroutine(self.a.call(self.ids["B"], "x", keep=True))
        again = await self.relay(
            queue=f"sqlite:{path}",
            domains=self.one.switch.rules.domains,
            listen=[f"tcp:{self.one.port}:interface=127.0.0.1"],
        )
        self.assertEqual([b"slow", b"x"], [(await slow).payload, (await meanwhile).payload])
        await self.until(lambda: not len(some(self.a.uplink)) and not len(some(self.b.uplink)))
        self.assertEqual(2, len(some(again.switch).sessions))

    @asynchronous
    async def test_a_client_of_two_relays_survives_the_loss_of_either(self) -> None:
        """The client is connected to two relays. If one is lost, the other delivers."""
        self.one, other = await self.named_relay(), await self.named_relay()
        for name in "AB":
            self.twin(name, None)
        self.a, self.b = self.client("A", other), self.client("B", self.one, other)
        self.b.serve("x", lambda request: b"x")
        await self.a.when_online()
        await self.until(lambda: self.b.uplink is not None and all(link.connected for link in self.b.uplink.links))
        self.assertEqual({self.one.domain, other.domain}, set(some(self.b.twin).relays))
        await self.a.call(self.ids["B"], "x")
        await other.stopService()
        await self.relay(listen=[f"tcp:{other.port}:interface=127.0.0.1"], domains=other.switch.rules.domains)
        self.assertTrue(some(self.b.uplink).connected)
        reply = await self.a.call(self.ids["B"], "x", timeout=20)
        self.assertEqual(b"x", reply.payload)

    @asynchronous
    async def test_a_client_that_cannot_start_fails(self) -> None:
        """A twin that is none; no relay; a registry that does not take the update."""
        client = self.client("D", _Nowhere)
        error: Any = await self.assertFailure(Deferred.fromCoroutine(client.when_online(5)), TwinNotFound)
        self.assertEqual("no twin found on this network with given key", str(error))
        self.twin("A", None)
        client = self.client("A", _Nowhere)
        error = await self.assertFailure(Deferred.fromCoroutine(client.when_online(1.0)), DmsgTimeout)
        self.assertIn("refused", str(error))
        self.patch(self.registry, "put", lambda twin: _fail(RegistryRefused("no")))
        self.twin_of = self.ids["A"]
        client = self.client("A", _Elsewhere)
        await self.assertFailure(Deferred.fromCoroutine(client.when_online(5)), RegistryRefused)

    @asynchronous
    async def test_callers_that_wait_for_a_client_fail_when_it_is_stopped(self) -> None:
        """The client is stopped while it starts, while no relay is connected, and once more after it has stopped."""
        self.twin("A", None)
        held: Deferred[Any] = Deferred()
        self.patch(self.registry, "id_by_account", lambda account: held)
        starting = self.client("A", _Nowhere)
        ready: list[Any] = []
        starting.ready.addErrback(lambda failure: ready.append(str(failure.value)))
        waiting: list[Any] = [starting.when_online(1000), starting.call(self.ids["A"], "x", timeout=1000)]
        callers = list(map(Deferred.fromCoroutine, waiting))
        await self.pause(0.1)
        await starting.stopService()
        await self.pause(0)
        self.assertEqual(ready, ["the client is stopped"])
        for caller in (*callers, Deferred.fromCoroutine(starting.when_online(1000))):
            self.assertEqual(str(self.failureResultOf(caller, RmbError).value), "the client is stopped")

    @asynchronous
    async def test_callers_that_wait_for_a_relay_fail_when_the_client_is_stopped(self) -> None:
        self.twin("A", None)
        offline = self.client("A", _Nowhere)
        await offline.ready
        online = [Deferred.fromCoroutine(offline.when_online(1000)) for _ in range(2)]
        await self.pause(0.1)
        self.assertNoResult(online[0])
        await offline.stopService()
        late: list[Any] = [
            offline.when_online(1000),
            offline.call(self.ids["A"], "x", timeout=1000),
            offline.ping(1000),
        ]
        for caller in (*online, *map(Deferred.fromCoroutine, late)):
            self.assertEqual(str(self.failureResultOf(caller, RmbError).value), "the client is stopped")

    @asynchronous
    async def test_a_stopped_client_can_be_started_again(self) -> None:
        self.one = await self.named_relay()
        self.twin("A", None)
        client = self.client("A", self.one)
        await client.when_online()
        await client.stopService()
        client.startService()
        await client.when_online()
        self.assertLess(await client.ping(), 5.0)

    @asynchronous
    async def test_sessions_keep_the_relays_of_their_twin(self) -> None:
        """A program with a session name, through one of the twin's relays, takes the others not out."""
        self.one, other = await self.named_relay(), await self.named_relay()
        self.twin("A", f"{self.one.domain}_{other.domain}")
        client = self.client("A", self.one, session="s")
        await client.when_online()
        self.assertEqual({self.one.domain, other.domain}, set(some(client.twin).relays))
        client = self.client("A", self.one)
        await client.when_online()
        self.assertEqual({self.one.domain}, set(some(client.twin).relays))


class _Nowhere:
    url = "ws://127.0.0.1:1"


class _Elsewhere:
    url = "ws://127.0.0.1:2"


def _fail(error: Exception) -> Any:
    from twisted.internet.defer import fail

    return fail(error)


class SeenTests(MemoryCase):
    def test_the_replay_window_is_bounded_per_twin(self) -> None:
        """A twin that has used up its share gets an error, and others are served. Expired entries make room."""
        seen = ReplayWindow(limit=10, of_twin=3)
        self.assertEqual([True] * 3 + [None], [seen.add(1, str(n), "request", 100, 0) for n in range(4)])
        self.assertTrue(seen.add(2, "0", "request", 100, 0))
        self.assertIs(False, seen.add(1, "0", "request", 100, 0))
        self.assertTrue(seen.add(1, "9", "request", 300, 100))
        self.assertTrue(seen.add(1, "0", "request", 300, 101))
        self.assertEqual(3, len(seen))
        full = ReplayWindow(limit=3, of_twin=9)
        self.assertEqual([True, True, True], [full.add(1, str(n), "request", 100 + n, 0) for n in range(3)])
        # The twin with most ids loses the one that expires first. The same twin gets no further id.
        self.assertTrue(full.add(2, "u", "request", 100, 0))
        self.assertTrue(full.add(1, "0", "request", 100, 0) is None)
        self.assertIs(False, full.add(1, "2", "request", 100, 0))
        self.assertEqual(3, len(full))
