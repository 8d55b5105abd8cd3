"""Several relays: messages for other relays, sessions that may be connected elsewhere, and messages that other relays
bring.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import Drop
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.relay import delivery, limit_log, presence, switch
from dmsg.rmb.relay.federation import attempts, forward as federation, post as poster
from dmsg.rmb.relay.federation.attempts import AttemptOutcome
from dmsg.rmb.relay.federation.forward import Federation
from dmsg.rmb.relay.federation.post import Poster
from dmsg.rmb.relay.mail import Header, Mail
from dmsg.rmb.relay.metrics import RelayMetrics
from dmsg.rmb.relay.queue.interface import QueuedMessage
from dmsg.rmb.relay.queue.sqlite import SQLiteQueue
from dmsg.rmb.relay.ranker import Ranker
from dmsg.rmb.socket.confirm import Message
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.twin import Twin, check_relay
from tests.ports import port_of
from tests.rmb.network import MemoryCase, RmbCase, queue_of
from tests.support import asynchronous


class Scripted(Resource):
    """A relay that answers what a test says; None means nothing."""

    isLeaf = True

    def __init__(self, *statuses: int | None) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.posts: list[bytes] = []

    def render_POST(self, request: Any) -> Any:
        self.posts.append(request.content.read())
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status is None:
            return NOT_DONE_YET
        request.setResponseCode(status)
        return b""


class FederationCase(RmbCase):
    """Two relays on real TCP."""

    async def scripted(self, *statuses: int | None) -> tuple[str, Scripted]:
        resource = Scripted(*statuses)
        port = self.reactor.listenTCP(0, cast(Any, Site(resource)), interface=self.host)
        self.addCleanup(port.stopListening)
        return f"http://{self.host}:{port_of(port)}", resource

    async def two(self) -> None:
        self.first, self.second = await self.named_relay(), await self.named_relay()

    def unreachable(self) -> str:
        return "http://127.0.0.1:1"


class MemoryFederationCase(FederationCase, MemoryCase):
    """The same in memory."""


class ForwardTests(MemoryFederationCase):
    @asynchronous
    async def test_A9_messages_cross_relays(self) -> None:
        """A message and its answer, the bytes as they were; nothing stays in any queue (A11)."""
        # On a busy machine, fifty posts take longer than this. The messages would be stored meanwhile, and the ping
        # answered earlier.
        self.patch(federation, "SPILL_AFTER", 30.0)
        self.patch(poster, "POST_TIMEOUT", 30.0)
        await self.two()
        self.twin("A", self.first.domain), self.twin("B", self.second.domain)
        a, b = await self.raw("A", self.first, "s"), await self.raw("B", self.second)
        for number in range(50):
            sent = a.send(a.envelope(b.session, uid=str(number)), self.now())
        await self.until(lambda: len(b.raw) == 50)
        self.assertIn(sent, b.raw)
        back = b.send(b.envelope(a.session, None), self.now())
        await a.messages.get()
        self.assertEqual([back], a.raw)
        a.socket.ping(b"settled?")
        await a.pongs.get()
        self.assertEqual(0, len(self.first.switch.federation))
        self.assertEqual(0, len(self.first.switch.queue))
        self.assertEqual({self.second.domain: 50}, dict(self.first.switch.federation.asking.success))

    @asynchronous
    async def test_A5_fail_fast_across(self) -> None:
        """The other relay answers 404. The sender gets the text of that case, without a destination."""
        await self.two()
        self.twin("A", self.first.domain)
        b = self.twin("B", self.second.domain)
        a = await self.raw("A", self.first)
        a.send(a.envelope(Session(b), tags="fail-fast"), self.now())
        got = await a.messages.get()
        self.assertEqual("remote relay rejected permanently: destination offline", got.error.message)
        self.assertFalse(got.HasField("destination"))
        self.assertEqual(1, self.second.switch.rules.drops[Drop.OFFLINE])

    @asynchronous
    async def test_A10_the_second_relay(self) -> None:
        """Weakness 9: a twin that lists both and is connected to one is reached through either, fail-fast or not."""
        await self.two()
        both = f"{self.first.domain}_{self.second.domain}"
        self.twin("A", self.first.domain), self.twin("B", both)
        a, b = await self.raw("A", self.first), await self.raw("B", self.second)
        for tags in ("", "fail-fast"):
            a.send(a.envelope(b.session, tags=tags), self.now())
            await b.messages.get()
        a.socket.ping(b"?")
        await a.pongs.get()
        await self.until(lambda: not len(self.first.switch.queue))

    @asynchronous
    async def test_A10_messages_are_stored_and_handed_over(self) -> None:
        """The first relay stores a message while the twin is offline at both relays. It hands the message over when the
        twin connects to the second.
        """
        self.patch(federation, "RETRY_FIRST", 0.1)
        await self.two()
        both = f"{self.first.domain}_{self.second.domain}"
        self.twin("A", self.first.domain)
        b = self.twin("B", both)
        a = await self.raw("A", self.first)
        for number in range(5):
            a.send(a.envelope(Session(b), uid=str(number)), self.now())
        await self.until(lambda: len(self.first.switch.queue) == 5)
        raw = await self.raw("B", self.second)
        self.assertEqual(list("01234"), [(await raw.messages.get()).uid for _ in range(5)])
        await self.until(lambda: not len(self.first.switch.queue))
        self.assertEqual(0, self.first.switch.federation.offers.count)

    @asynchronous
    async def test_A10_or_to_the_first(self) -> None:
        """The twin connects to the first relay, which delivers the message itself. The second relay is not asked any
        more.
        """
        await self.two()
        both = f"{self.first.domain}_{self.second.domain}"
        self.twin("A", self.first.domain)
        b = self.twin("B", both)
        a = await self.raw("A", self.first)
        a.send(a.envelope(Session(b)), self.now())
        await self.until(lambda: len(self.first.switch.queue) == 1)
        raw = await self.raw("B", self.first)
        await raw.messages.get()
        await self.until(lambda: not self.first.switch.federation.offers._offers)

    @asynchronous
    async def test_other_relays_are_tried_after_a_4xx(self) -> None:
        """Weakness 10: a relay that refuses a message does not prevent another relay from accepting it."""
        await self.two()
        refusing, posts = await self.scripted(404)
        self.twin("A", self.first.domain)
        self.twin("B", f"{refusing}_{self.second.domain}")
        a, b = await self.raw("A", self.first), await self.raw("B", self.second)
        for number in range(20):
            a.send(a.envelope(b.session, uid=str(number)), self.now())
        await self.until(lambda: len(b.raw) == 20)
        self.assertTrue(posts.posts)
        self.assertEqual([], a.raw)

    @asynchronous
    async def test_A9_retries_and_ranking(self) -> None:
        """The relay answers 500, then nothing, and then accepts. A relay that failed is tried last."""
        self.patch(poster, "POST_TIMEOUT", 0.2)
        await self.two()
        failing, posts = await self.scripted(500, None, 202)
        self.twin("A", self.first.domain)
        b = self.twin("B", failing)
        a = await self.raw("A", self.first)
        a.send(a.envelope(Session(b)), self.now())
        await self.until(lambda: len(posts.posts) == 3)
        a.socket.ping(b"?")
        await a.pongs.get()
        self.assertEqual(2, self.first.switch.federation.asking.error[failing])
        ranker = self.first.switch.federation.asking._ranker
        self.assertEqual(failing, ranker.order([failing, "https://other"], self.reactor.seconds())[-1])

    @asynchronous
    async def test_unsigned_messages_count_against_the_sending_relay(self) -> None:
        """The other relay counts the message against this relay. From then on, this relay verifies the messages of such
        a twin.
        """
        await self.two()
        self.twin("A", self.first.domain), self.twin("C", self.first.domain)
        b = Session(self.twin("B", self.second.domain))
        a, c = await self.raw("A", self.first), await self.raw("C", self.first)
        receiver = await self.raw("B", self.second)
        drops = self.second.switch.rules.drops
        for number in range(5):
            a.send(a.envelope(b, uid=f"forged {number}"), self.now(), sign=False)
            self.assertIn("destination offline", (await a.messages.get()).error.message)
        self.assertEqual(drops[Drop.INTAKE_SIGNATURE], 1)
        for raw in (a, c):
            raw.send(raw.envelope(b, uid="signed"), self.now())
            self.assertEqual((await receiver.messages.get()).uid, "signed")

    @asynchronous
    async def test_A9_expired_under_way(self) -> None:
        """No relay accepts the message before it expires. It stays in the queue until then, and the sender gets an
        error.
        """
        self.patch(federation, "RETRY_FIRST", 0.2)
        await self.two()
        self.twin("A", self.first.domain)
        b = self.twin("B", self.unreachable())
        a = await self.raw("A", self.first)
        a.send(a.envelope(Session(b), expiration=30), self.now())
        await self.until(lambda: len(self.first.switch.queue) == 1)
        a.socket.ping(b"?")
        await a.pongs.get()
        self.offset = 40
        got = await a.messages.get()
        self.assertEqual("message has expired", got.error.message)
        await self.until(lambda: not len(self.first.switch.queue))

    @asynchronous
    async def test_a_relay_that_was_killed_goes_on(self) -> None:
        """The next process with the same queue sends the messages that no other relay has accepted."""
        path = self.mktemp()
        second = await self.named_relay()
        first = await self.named_relay(queue=f"sqlite:{path}")
        self.twin("A", first.domain)
        b = self.twin("B", self.unreachable())
        a = await self.raw("A", first)
        a.send(a.envelope(Session(b)), self.now())
        await self.until(lambda: len(queue_of(first)) == 1)
        await first.stopService()
        self.twin("B", second.domain)
        raw = await self.raw("B", second)
        again = await self.relay(queue=f"sqlite:{path}", domains=first.switch.rules.domains)
        await raw.messages.get()
        self.assertEqual(1, len(raw.raw))
        await self.until(lambda: not len(queue_of(again)))

    @asynchronous
    async def test_public_relays_do_not_speak_http(self) -> None:
        """A twin cannot make a relay POST to what is beside it."""

        target, posts = await self.scripted(202)
        poster = Poster(self.reactor, plain=False)
        self.assertEqual(0, await poster.post(target, b"x", only_connected=False))
        self.assertEqual([], posts.posts)
        await poster.close()


class HostileTests(FederationCase):
    """Hostile relays, and twins that name such relays."""

    @asynchronous
    async def test_a_hanging_relay_does_not_delay_messages_to_others(self) -> None:
        """Hundreds of messages to a relay that does not answer; one to another is there at once."""
        await self.two()
        hanging, _ = await self.scripted(None)
        self.twin("A", self.first.domain)
        self.twin("B", hanging), self.twin("C", self.second.domain)
        a, c = await self.raw("A", self.first), await self.raw("C", self.second)
        for _ in range(400):
            a.send(a.envelope(Session(self.ids["B"])), self.now())
        await self.pause(0.2)
        a.send(a.envelope(c.session, uid="quick"), self.now())
        self.assertEqual("quick", (await c.messages.get()).uid)

    @asynchronous
    async def test_an_endless_answer_is_read_for_some_kilobytes(self) -> None:
        """Only some kilobytes of the answer are read, and its status decides."""

        reactor = self.reactor

        class Endless(Resource):
            isLeaf = True
            written = 0

            def render_POST(self, request: Any) -> Any:
                request.setResponseCode(202)

                def more() -> None:
                    if not request._disconnected and self.written < 10**8:
                        Endless.written += 65536
                        request.write(b"x" * 65536)
                        reactor.callLater(0, more)

                more()
                return NOT_DONE_YET

        port = self.reactor.listenTCP(0, cast(Any, Site(Endless())), interface=self.host)
        self.addCleanup(port.stopListening)
        poster = Poster(self.reactor, plain=True)
        url = f"http://{self.host}:{port_of(port)}"
        self.assertEqual(202, await poster.post(url, b"x", only_connected=False))
        await self.pause(0.2)
        self.assertLess(Endless.written, 10_000_000)
        await poster.close()

    @asynchronous
    async def test_a_name_that_cannot_be_asked(self) -> None:
        """Counts as one that does not answer; nothing hangs on it."""

        poster = Poster(self.reactor, plain=True)
        for name in ("http://a b:1", "http://\xe9:1", "http://a\nb:1", "http://127.0.0.1:1"):
            self.assertEqual(0, await poster.post(name, b"x", only_connected=True))
            if name != "http://127.0.0.1:1":
                self.assertRaises(ValueError, check_relay, name)
        await poster.close()

    def test_counters_are_bounded(self) -> None:
        """Counters of relays that twins list are bounded."""
        self.patch(attempts, "MAX_COUNTED", 2)
        one = make_federation(Clock(), Answers())
        for name in "abcab":
            one.asking._count(one.asking.error, name)
        self.assertEqual({"a": 2, "b": 2, "other": 1}, dict(one.asking.error))


class IntakeTests(FederationCase):
    """Weakness 2: requests that anybody can POST."""

    async def make(self, **options: Any) -> None:
        self.one = await self.named_relay(**options)
        self.twin("A", "http://elsewhere:1"), self.twin("B", self.one.domain)
        self.b = await self.raw("B", self.one)
        self.a = Session(self.ids["A"])

    def message(self, signer: str = "A", **fields: Any) -> Envelope:
        envelope = self.b.envelope(self.b.session, **fields)
        wire.set_address(envelope.source, self.a)
        envelope.timestamp = envelope.timestamp or int(self.now())
        envelope.signature = self.identities[signer].sign(wire.challenge(envelope))
        return envelope

    async def post(self, envelope: Envelope | bytes) -> tuple[int, str]:
        data = envelope if isinstance(envelope, bytes) else envelope.SerializeToString()
        return await self.status_of(f"{self.one.domain}/", "POST", data)

    @asynchronous
    async def test_a_signed_message_is_accepted_and_delivered(self) -> None:
        """202 with an empty body, and it is delivered."""
        await self.make()
        self.assertEqual((202, ""), await self.post(self.message()))
        self.assertEqual(self.a, wire.source_of(await self.b.messages.get()))

    @asynchronous
    async def test_for_a_client_of_the_reference(self) -> None:
        """The client is pinged at most once a second; the other relay is answered as soon as the message was written
        to the client.
        """
        await self.make()
        await self.b.drop()
        self.b = await self.raw("B", self.one, resends=False)
        await self.until(lambda: self.b.pings)
        await self.pause(0.1)
        without_ping = 0
        for number in range(3):
            pings = len(self.b.pings)
            self.assertEqual((202, ""), await self.post(self.message(uid=str(number))))
            without_ping += len(self.b.pings) == pings
        # A relay that waits for the client's pong pings the client before each answer. On a busy machine a ping that is
        # due anyway can fall into one of the requests.
        self.assertGreater(without_ping, 0)
        self.assertEqual([(await self.b.messages.get()).uid for _ in range(3)], ["0", "1", "2"])

    @asynchronous
    async def test_for_a_session_that_does_not_read(self) -> None:
        """A local sender would be paused, and another relay is asked to retry. Answers to the relay's own twins are
        accepted.
        """
        self.patch(delivery, "WINDOW_MESSAGES", 1)
        self.patch(switch, "BACKLOG_MESSAGES", 2)
        await self.make()
        self.b.answers_pings = False
        for number in range(3):  # The first message is in the window, and the others wait.
            envelope = self.message(uid=str(number))
            receiver = self.one.switch.sessions[self.b.session]
            receiver.delivery.offer(Message(envelope.SerializeToString(), 1e10, None))
        self.assertEqual(503, (await self.post(self.message(uid="one more")))[0])
        self.assertEqual(self.one.switch.rules.drops[Drop.BUSY], 1)
        answer = self.message(uid="answer", command=None)
        self.assertEqual(202, (await self.post(answer))[0])
        self.b.socket.pong((1).to_bytes(8, "big"))
        self.b.answers_pings = True
        for _ in range(4):
            await self.b.messages.get()
        self.assertEqual(202, (await self.post(self.message(uid="one more")))[0])

    @asynchronous
    async def test_each_message_counts_once(self) -> None:
        """Anybody who has a message can post it again. The repetition is not delivered, and uses nothing of its
        sender's share.
        """
        await self.make()
        message = self.message()
        for _ in range(5):
            self.assertEqual((202, ""), await self.post(message))
        self.assertEqual((202, ""), await self.post(self.message(uid="another")))
        self.assertEqual([(await self.b.messages.get()).uid for _ in range(2)], [message.uid, "another"])
        self.assertEqual(len(self.b.raw), 2)

    @asynchronous
    async def test_unacceptable_messages_are_refused(self) -> None:
        """Cases: no envelope, without an end, expired, unsigned, signed by another key, of an unknown twin."""
        await self.make()
        unsigned = self.message()
        unsigned.ClearField("signature")
        nowhere = self.message()
        nowhere.ClearField("destination")
        nobody = self.message()
        nobody.source.twin = 999
        changed = self.message()
        changed.plain = b"y"
        cases = [
            (b"\xff\xff", 400, "bad request: not an envelope"),
            (nowhere, 400, "bad request: without source or destination"),
            (self.message(timestamp=int(self.now()) - 100), 400, "bad request: message has expired"),
            (unsigned, 401, "bad signature: message is not signed"),
            (self.message("B"), 401, "bad signature: ed25519 signature verification failed"),
            (changed, 401, "bad signature: ed25519 signature verification failed"),
            (nobody, 503, "twin not found 999"),
            (self.message(timestamp=int(self.now()) + 1000), 503, "bad request: message timestamp is in the future"),
        ]
        for envelope, status, text in cases:
            got = await self.post(cast(Any, envelope))
            self.assertEqual(status, got[0])
            self.assertTrue(got[1].startswith(text), got)
        error = wire.error_envelope("u", "text", self.b.session, int(self.now()))
        self.assertEqual(400, (await self.post(error))[0])
        await self.pause(0.05)
        self.assertEqual([], self.b.raw)

    @asynchronous
    async def test_unknown_foreign_and_offline_destinations_are_refused(self) -> None:
        """Unknown ones, those of other relays, those that sleep; only the last is final: rmb-rs tries no 4xx again."""
        await self.make()
        self.twin("C", "http://elsewhere:2"), self.twin("D", self.one.domain)
        for to, tags, status in (
            (999, "", 503),
            (self.ids["C"], "", 503),
            (self.ids["D"], "fail-fast", 404),
            (self.ids["D"], "", 202),
        ):
            envelope = self.message(tags=tags)
            envelope.destination.twin = to
            envelope.signature = self.identities["A"].sign(wire.challenge(envelope))
            self.assertEqual(status, (await self.post(envelope))[0], to)
        self.assertEqual(1, len(self.one.switch.queue))

    @asynchronous
    async def test_A9_when_the_queue_fails(self) -> None:
        """503, so that the other relay tries again."""
        from dmsg.rmb.relay.queue.interface import QueueLimits

        await self.make(queue_limits=QueueLimits(total=1))
        await self.b.drop()
        await self.until(lambda: not self.one.switch.sessions)
        status, text = await self.post(self.message())
        self.assertEqual((503, "switch error: the relay's stored messages have reached their limit"), (status, text))

    @asynchronous
    async def test_rates_of_addresses_and_twins_hold(self) -> None:
        """Only signed messages count against a twin."""
        await self.make()
        page = self.one.ports[0].factory.site.resource
        page._verifier._of_twins.count = 2
        statuses = [(await self.post(self.message()))[0] for _ in range(2)]
        spoilt = self.message("B")
        statuses += [(await self.post(spoilt))[0], (await self.post(self.message()))[0]]
        self.assertEqual([202, 202, 401, 503], statuses)
        page._verifier._rate._rate, page._verifier._rate._burst = 0.001, 1.0
        page._verifier._rate._buckets.clear()
        self.assertEqual([401, 503], [(await self.post(spoilt))[0] for _ in range(2)])

    @asynchronous
    async def test_a_receiver_that_does_not_confirm(self) -> None:
        """The answer waits for it; after two seconds the queue is enough."""
        await self.make()
        self.b.answers_pings = False
        self.assertEqual((202, ""), await self.post(self.message()))
        self.assertEqual(1, len(self.one.switch.queue))


class StartTests(MemoryFederationCase):
    """A relay was just started. Its sessions return in a moment, so no sender gets the error that they are offline."""

    @asynchronous
    async def test_sessions_that_come_back_after_a_start_are_waited_for(self) -> None:
        self.patch(presence, "START_GRACE", 30.0)
        self.patch(presence, "COME_BACK", 15.0)
        await self.two()
        self.twin("A", self.first.domain)
        b = self.twin("B", self.second.domain)
        a = await self.raw("A", self.first)
        for tags in ("fail-fast", ""):
            a.send(a.envelope(Session(b), tags=tags, uid=f"u{tags}"), self.now())
        local = self.twin("C", self.first.domain)
        a.send(a.envelope(Session(local), tags="fail-fast", uid="local"), self.now())
        await self.pause(0.2)
        back, there = await self.raw("B", self.second), await self.raw("C", self.first)
        await self.until(lambda: len(back.raw) == 2 and len(there.raw) == 1)
        self.assertEqual([], a.raw)

    @asynchronous
    async def test_sessions_that_stay_away_after_a_start_count_as_offline(self) -> None:
        self.patch(presence, "START_GRACE", 30.0)
        self.patch(presence, "COME_BACK", 0.2)
        await self.two()
        self.twin("A", self.first.domain)
        b = self.twin("B", self.second.domain)
        a = await self.raw("A", self.first)
        a.send(a.envelope(Session(b), tags="fail-fast"), self.now())
        self.assertIn("destination offline", (await a.messages.get()).error.message)


class LimitTests(MemoryFederationCase):
    @asynchronous
    async def test_limited_twins_are_logged_once_and_counted(self) -> None:
        """A line with the twins, summed up, and a metric with a bound."""
        self.patch(limit_log, "LOG_INTERVAL", 0.0)
        self.one = await self.named_relay(limit=(3, 10**6))
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        a, b = await self.raw("A", self.one), await self.raw("B", self.one)
        said: list[str] = []
        self.patch(limit_log, "_log", _Lines(said))
        for _ in range(10):
            a.send(a.envelope(b.session), self.now())
        await self.until(lambda: said)
        number = self.one.switch.limited.of_twin[self.ids["A"]]
        self.assertEqual(7, number)
        self.assertRegex(
            said[0], rf"^rate limit: \d+ messages of 1 twins refused in \d+ s \(twin {self.ids['A']}: \d+\)$"
        )
        text = RelayMetrics(self.one.switch, self.one.memory).render().decode()
        self.assertIn(f'rmb_limited_total{{twin="{self.ids["A"]}"}} 7.0', text)
        for twin in range(10_000, 10_500):
            self.one.switch.limited.count(twin)
        self.assertLessEqual(len(self.one.switch.limited.of_twin), limit_log.MAX_TWINS + 1)

    @asynchronous
    async def test_a_stopping_relay_logs_the_last_refusals(self) -> None:
        """A relay that is stopped says what it has refused since the last one."""
        self.one = await self.named_relay(limit=(3, 10**6))
        self.twin("A", self.one.domain), self.twin("B", self.one.domain)
        a, b = await self.raw("A", self.one), await self.raw("B", self.one)
        said: list[str] = []
        self.patch(limit_log, "_log", _Lines(said))
        for _ in range(5):
            a.send(a.envelope(b.session), self.now())
        await self.until(lambda: self.one.switch.limited.of_twin)
        await self.pause(0.3)
        self.assertEqual(said, [])
        await self.one.stopService()
        self.assertEqual(len(said), 1)


class _Lines:
    """Replacement of a logger."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def warn(self, text: str, **fields: object) -> None:
        self.lines.append(text.format(**fields))

    info = error = failure = warn


class Answers:
    """Replacement of the network, which returns the answers of each relay in turn."""

    def __init__(self, **codes: list[int]) -> None:
        self.codes = codes
        self.asked: list[str] = []

    def takes_many(self, relay: str) -> bool:
        return False

    async def post(self, relay: str, data: bytes, *, only_connected: bool) -> int:
        self.asked.append(relay)
        codes = self.codes[relay]
        return codes.pop(0) if len(codes) > 1 else codes[0]

    def close(self) -> Deferred[None]:
        done: Deferred[None] = Deferred()
        done.callback(None)
        return done


def make_federation(
    clock: Clock,
    answers: Answers,
    queue: SQLiteQueue | None = None,
    here: Container[str] = (),
    finished: Callable[[Mail, str | None], None] = lambda mail, error: None,
) -> Federation:
    """Return a federation whose registry has no twin."""
    queue = SQLiteQueue(":memory:", clock) if queue is None else queue
    others = Ranker(), TableRegistry(), queue, clock.seconds, frozenset[str]()
    return Federation(clock, answers, *others, lambda name: name in here, finished)


class PassTests(SynchronousTestCase):
    """The passes over relays, by a clock."""

    def federation(self, answers: Answers) -> Federation:
        self.clock = Clock()
        self.queue = SQLiteQueue(":memory:", self.clock)
        self.here: set[str] = set()
        self.finished: list[str] = []
        return make_federation(self.clock, answers, self.queue, self.here, self.note)

    def note(self, mail: Mail, error: str | None) -> None:
        self.finished.append(mail.header.uid)

    def forward(self, federation: Federation, *relays: str) -> list[str | None]:
        envelope = Envelope(uid="u", timestamp=0, expiration=60)
        done: list[str | None] = []
        mail = Mail(b"x", 60.0, None, Header(envelope))
        federation.forward(mail, frozenset(relays), lambda _, error: done.append(error))
        return done

    def test_three_passes_precede_the_queue(self) -> None:
        """0.1 and 0.2 s apart, and up to half more; then it waits in the queue."""
        answers = Answers(r1=[500], r2=[0])
        federation = self.federation(answers)
        done = self.forward(federation, "r1", "r2")
        self.assertEqual(2, len(answers.asked))
        self.clock.advance(0.09)
        self.assertEqual(2, len(answers.asked))
        self.clock.advance(0.07)
        self.assertEqual(4, len(answers.asked))
        self.clock.advance(0.31)
        self.assertEqual(6, len(answers.asked))
        self.clock.advance(0)
        self.assertEqual(([], 1), (done, len(self.queue)))

    def test_a_refusal_by_all_relays_is_reported_to_the_sender(self) -> None:
        """Each relay is asked once. Then the sender gets the error."""
        answers = Answers(r1=[404], r2=[400])
        done = self.forward(self.federation(answers), "r1", "r2")
        self.assertEqual({"r1", "r2"}, set(answers.asked))
        self.assertEqual(["remote relay rejected permanently: destination offline"], done)

    def test_too_many_requests_is_no_refusal(self) -> None:
        """429 may be another thing a moment later."""
        answers = Answers(r1=[429, 202])
        done = self.forward(self.federation(answers), "r1")
        self.assertEqual([], done)
        self.clock.advance(0.2)
        self.assertEqual([None], done)

    def test_an_offer_asks_each_relay_once(self) -> None:
        """The best first."""
        answers = Answers(r1=[404], r2=[202])
        outcome = self.successResultOf(self.federation(answers).asking.offer(b"x", ["r1", "r2"], 1))
        self.assertIs(AttemptOutcome.TAKEN, outcome)
        self.assertEqual("r2", answers.asked[-1])

    def test_a_sender_has_a_limited_part_of_the_federation(self) -> None:
        """Further messages wait in the queue, those of other senders do not; they are sent when there is room again."""
        self.patch(federation, "MAX_ITEMS", 2 * attempts.SHARE_DIVISOR)
        answers = Answers(slow=[0] * 100, good=[202] * 100)
        one = self.federation(answers)

        class Registry(TableRegistry):
            def get(self, twin: int) -> Deferred[Twin]:
                return succeed(Twin(twin, bytes(32), "good"))

        one._registry = Registry()
        finished = self.finished

        def forward(uid: str, sender: int, relay: str) -> None:
            envelope = Envelope(uid=uid, timestamp=0, expiration=3000)
            envelope.source.twin, envelope.destination.twin = sender, 9
            data = envelope.SerializeToString()
            one.forward(Mail(data, 3000.0, None, Header(envelope)), frozenset({relay}), self.note)

        for number in range(6):
            forward(f"greedy {number}", 1, "slow")
        forward("other", 2, "good")
        self.clock.advance(0)
        self.assertEqual((finished, len(one), one._items_of[1]), (["other"], 2, 2))
        self.assertEqual(len(self.queue), 4)
        for _ in range(60):
            self.clock.advance(1.0)
            one.round()
        self.assertEqual(sorted(finished), sorted(["other", *(f"greedy {number}" for number in range(6))]))
        self.assertEqual((len(one), len(self.queue), one._items_of, one._size_of, one._size), (0, 0, {}, {}, 0))

    def test_offers_wait_for_room(self) -> None:
        """Relays that answer have room of their own; a message that waits too long is not offered."""
        self.patch(attempts, "MAX_OFFERS", 2)
        asked: list[Deferred[int]] = []

        class Slow(Answers):
            def post(self, relay: str, data: bytes, *, only_connected: bool) -> Any:
                if relay == "good":
                    return succeed(202)
                asked.append(Deferred())
                return asked[-1]

        one = self.federation(Slow())
        self.assertIs(self.successResultOf(one.asking.offer(b"x", ["good"], 1)), AttemptOutcome.TAKEN)
        slow = [one.asking.offer(b"x", [f"slow {number}"], number) for number in range(4)]
        self.assertEqual(len(asked), 2)
        self.assertIs(self.successResultOf(one.asking.offer(b"x", ["good"], 9)), AttemptOutcome.TAKEN)
        asked[0].callback(404)
        self.clock.advance(attempts.OFFER_RETRY)
        self.assertEqual(len(asked), 3)
        self.clock.pump([attempts.OFFER_RETRY] * 30)
        self.assertIs(self.successResultOf(slow[3]), AttemptOutcome.FAILED)
        self.assertEqual((one.asking.not_offered, one.asking._waiting), (1, 0))

    def test_offered_bytes_are_limited(self) -> None:
        answers = Answers(slow=[0] * 100)
        one = self.federation(answers)
        one.offers._max_size = 1000
        for number in range(20):
            one.offers.add("5:s", QueuedMessage(number, bytes(300)), frozenset({"slow"}), 1000.0)
        self.assertEqual((one.offers.count, one.offers.size), (3, 900))
        self.here.add("5:s")
        self.clock.advance(60)
        one.round()
        self.assertEqual((one.offers.count, one.offers.size, one.offers._offers), (0, 0, {}))
