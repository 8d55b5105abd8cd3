"""Batches: several messages in one POST to a relay that accepts batches."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred, gatherResults
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from dmsg.rmb.envelope import wire
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.errors import Drop, EnvelopeError
from dmsg.rmb.relay.federation import batch, post
from dmsg.rmb.relay.federation.post import Poster
from dmsg.rmb.relay.federation.slots import MAX_BATCHED_OF_SENDER, MAX_POSTS_OF_ONE, Slots
from dmsg.rmb.twins.address import Session
from tests.ports import port_of
from tests.rmb.relay.test_federation import FederationCase, MemoryFederationCase
from tests.support import asynchronous

messages = st.lists(st.tuples(st.binary(max_size=50), st.booleans()), min_size=1, max_size=batch.MAX_BATCH)


class WireTests(SynchronousTestCase):
    """Batches are decoded as they were encoded."""

    @given(messages)
    def test_written_batches_are_read_back(self, sent: list[tuple[bytes, bool]]) -> None:
        self.assertEqual(batch.decode(batch.encode(sent)), sent)

    @given(st.binary(max_size=60))
    def test_any_bytes_are_messages_or_an_error(self, body: bytes) -> None:
        try:
            found = batch.decode(body)
        except EnvelopeError:
            return
        self.assertEqual(batch.encode(found), body)

    def test_batches_have_the_documented_layout(self) -> None:
        body = bytes.fromhex("00 00000003 616263  01 00000001 64")
        self.assertEqual(batch.decode(body), [(b"abc", False), (b"d", True)])
        self.assertEqual(batch.encode_answer(7, 202), b"7 202\n")

    def test_malformed_batches_are_refused(self) -> None:
        one = batch.encode([(b"abc", False)])
        for body in (b"", one[:-1], one + b"\0", b"\x02" + one[1:], one * (batch.MAX_BATCH + 1)):
            self.assertRaises(EnvelopeError, batch.decode, body)

    @given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 599)), max_size=20), st.data())
    def test_answers_in_any_pieces(self, known: list[tuple[int, int]], data: st.DataObject) -> None:
        text = b"".join(batch.encode_answer(*one) for one in known)
        lines, found = batch.AnswerParser(), []
        while text:
            size = data.draw(st.integers(1, len(text)))
            found += list(lines.feed(text[:size]))
            text = text[size:]
        self.assertEqual(found, known)

    def test_lines_that_are_none(self) -> None:
        for text in (b"x 202\n", b"1\n", b"1 2 3\n", b"-1 202\n", b"1" * 100):
            self.assertRaises(ValueError, list, batch.AnswerParser().feed(text))


class SlotsTests(SynchronousTestCase):
    """Relays that take many have places of their own."""

    def test_more_are_under_way(self) -> None:
        many, few = frozenset({"many"}), frozenset({"few"})
        slots: Slots[str] = Slots(lambda relay: relay == "many")
        for relays in (many, few):
            for name, took in (("first", 0.1), ("second", None)):
                slots.add(f"{name} {relays}", relays, 0)
                taken = slots.take()
                assert taken is not None
                if took is not None:
                    slots.finish(taken, took)
                else:
                    slots.release(taken)
        for number in range(1000):
            slots.add(f"many {number}", many, 1)
            slots.add(f"few {number}", few, 1)
        taken_all = []
        while (item := slots.take()) is not None:
            taken_all.append(item.split()[0])
        self.assertEqual(taken_all.count("many"), MAX_BATCHED_OF_SENDER)
        self.assertEqual(taken_all.count("few"), MAX_POSTS_OF_ONE)


class Peer(Resource):
    """Any other relay."""

    isLeaf = True

    def __init__(self, offers: bool = True, lines: Any = None, status: int = 200) -> None:
        super().__init__()
        self.offers, self.lines, self.status = offers, lines, status
        self.single: list[bytes] = []
        self.batches: list[list[tuple[bytes, bool]]] = []

    def render_POST(self, request: Any) -> Any:
        if self.offers:
            request.setHeader(batch.OFFER, b"1")
        body = request.content.read()
        if request.path == b"/":
            self.single.append(body)
            request.setResponseCode(202)
            return b""
        self.batches.append(batch.decode(body))
        request.setResponseCode(self.status)
        if self.lines is None:
            return b"".join(batch.encode_answer(number, 202) for number in range(len(self.batches[-1])))
        request.write(self.lines)
        return NOT_DONE_YET


class PosterTests(FederationCase):
    """Requests of the poster."""

    async def meet(self, peer: Peer) -> tuple[Poster, str]:
        """A poster that has had one answer of ``peer``."""
        port = self.reactor.listenTCP(0, cast(Any, Site(peer)), interface=self.host)
        self.addCleanup(port.stopListening)
        poster = Poster(self.reactor, plain=True)
        self.addCleanup(poster.close)
        url = f"http://{self.host}:{port_of(port)}"
        self.assertEqual(await poster.post(url, b"first", only_connected=False), 202)
        return poster, url

    def all_of(self, poster: Poster, url: str, number: int) -> Deferred[list[int]]:
        return gatherResults(
            [
                Deferred.fromCoroutine(poster.post(url, b"%d" % one, only_connected=bool(one % 2)))
                for one in range(number)
            ]
        )

    @asynchronous
    async def test_messages_of_a_turn_are_posted_together(self) -> None:
        peer = Peer()
        poster, url = await self.meet(peer)
        self.assertTrue(poster.takes_many(url))
        self.assertEqual(await self.all_of(poster, url, 40), [202] * 40)
        self.assertEqual(peer.single, [b"first"])
        self.assertEqual([len(one) for one in peer.batches], [batch.MAX_BATCH, 40 - batch.MAX_BATCH])
        self.assertEqual(sum(peer.batches, []), [(b"%d" % one, bool(one % 2)) for one in range(40)])
        await self.until(lambda: not poster._lines, 10)

    @asynchronous
    async def test_a_single_message_is_posted_without_a_batch(self) -> None:
        peer = Peer()
        poster, url = await self.meet(peer)
        self.assertEqual(await poster.post(url, b"x", only_connected=False), 202)
        self.assertEqual((peer.single, peer.batches), ([b"first", b"x"], []))

    @asynchronous
    async def test_a_relay_of_the_reference_is_asked_one_by_one(self) -> None:
        """The relay does not offer batches."""
        peer = Peer(offers=False)
        poster, url = await self.meet(peer)
        self.assertFalse(poster.takes_many(url))
        self.assertEqual(await self.all_of(poster, url, 5), [202] * 5)
        self.assertEqual((len(peer.single), peer.batches), (6, []))

    @asynchronous
    async def test_a_relay_replaced_by_an_older_one_gets_single_messages(self) -> None:
        """No message is lost, and no more batches are tried."""
        peer = Peer()
        poster, url = await self.meet(peer)
        peer.offers, peer.status = False, 404
        self.assertEqual(await self.all_of(poster, url, 3), [202] * 3)
        self.assertEqual((len(peer.single), len(peer.batches)), (4, 1))
        self.assertEqual(await self.all_of(poster, url, 3), [202] * 3)
        self.assertEqual((len(peer.single), len(peer.batches)), (7, 1))

    @asynchronous
    async def test_the_status_of_a_full_relay_counts_for_each_message(self) -> None:
        peer = Peer(status=503)
        poster, url = await self.meet(peer)
        self.assertEqual(await self.all_of(poster, url, 3), [503] * 3)

    @asynchronous
    async def test_known_results_are_reported_immediately(self) -> None:
        """A message without a reported result counts as not answered."""
        self.patch(post, "POST_TIMEOUT", 1.0)
        poster, url = await self.meet(Peer(lines=b"2 202\n0 404\n"))
        answers = [Deferred.fromCoroutine(poster.post(url, b"x", only_connected=False)) for _ in range(3)]
        self.assertEqual(await answers[2], 202)
        self.assertEqual(await answers[0], 404)
        self.assertFalse(answers[1].called)
        self.assertEqual(await answers[1], 0)

    @asynchronous
    async def test_answers_that_make_no_sense(self) -> None:
        """A line that is malformed, repeated or for an unknown message changes nothing. Each message has one answer."""
        for lines, expected in (
            (b"7 202\n", [0, 0]),
            (b"0 202\n0 500\n", [202, 0]),
            (b"1 202\nnonsense\n", [0, 202]),
            (b"9" * 10_000, [0, 0]),
        ):
            self.patch(post, "POST_TIMEOUT", 1.0)
            poster, url = await self.meet(Peer(lines=lines))
            self.assertEqual(await self.all_of(poster, url, 2), expected, lines)

    @asynchronous
    async def test_cancelled_posts_are_not_answered(self) -> None:
        poster, url = await self.meet(Peer(lines=b""))
        answers = [Deferred.fromCoroutine(poster.post(url, b"x", only_connected=False)) for _ in range(3)]
        for one in answers:
            one.addErrback(lambda _: None)
            one.cancel()
        await self.until(lambda: not poster._lines, 10)


class RelayTests(MemoryFederationCase):
    """Two relays of this package."""

    async def pairs(self) -> tuple[Any, Any, Any]:
        await self.two()
        self.twin("A", self.first.domain), self.twin("B", self.second.domain)
        return await self.raw("A", self.first), await self.raw("B", self.second), Session(self.ids["B"], "away")

    async def warm(self, a: Any, b: Any) -> None:
        a.send(a.envelope(b.session, uid="warm"), self.now())
        await b.messages.get()
        await self.until(lambda: self.first.switch.federation.asking.success[self.second.domain] == 1)

    @asynchronous
    async def test_hundreds_are_brought_in_some_requests(self) -> None:
        a, b, _ = await self.pairs()
        await self.warm(a, b)
        poster = self.first.switch.federation.asking._poster
        asked: list[str] = []
        inner = poster._ask
        self.patch(poster, "_ask", lambda url, *rest: asked.append(url) or inner(url, *rest))
        for number in range(300):
            a.send(a.envelope(b.session, uid=str(number)), self.now())
        await self.until(lambda: len(b.raw) == 301)
        uids = [Envelope.FromString(one).uid for one in b.raw[1:]]
        self.assertEqual(sorted(uids, key=int), [str(number) for number in range(300)])
        await self.until(lambda: self.first.switch.federation.asking.success[self.second.domain] == 301)
        self.assertLess(len(asked), 60)

    @asynchronous
    async def test_a_waiting_message_does_not_delay_its_batch(self) -> None:
        """A receiver that confirms nothing, one that is refused, and one that is there, in one request."""
        a, b, away = await self.pairs()
        await self.warm(a, b)
        silent = await self.raw("B", self.second, "silent")
        silent.answers_pings = False
        a.send(a.envelope(silent.session, uid="silent"), self.now())
        a.send(a.envelope(away, uid="refused", tags="fail-fast"), self.now())
        a.send(a.envelope(b.session, uid="good"), self.now())
        self.assertEqual((await b.messages.get()).uid, "good")
        refused = await a.messages.get()
        self.assertEqual((refused.uid, refused.WhichOneof("message")), ("refused", "error"))


class IntakeTests(FederationCase):
    """Requests that anybody can POST."""

    @asynchronous
    async def test_forged_messages_in_a_batch_are_charged_alone(self) -> None:
        """Each message is verified alone, and the sender of the batch is charged."""
        await self.two()
        self.twin("A", "http://elsewhere:1"), self.twin("B", self.second.domain)
        b = await self.raw("B", self.second)
        good, forged = (b.envelope(b.session, uid=uid) for uid in ("good", "forged"))
        for envelope in (good, forged):
            wire.set_address(envelope.source, Session(self.ids["A"]))
            envelope.timestamp = int(self.now())
            envelope.signature = self.identities["A"].sign(wire.challenge(envelope))
        forged.uid = "changed"
        body = batch.encode([(forged.SerializeToString(), False), (b"\xff", False), (good.SerializeToString(), False)])
        status, text = await self.status_of(f"{self.second.domain}/batch", "POST", body)
        self.assertEqual(status, 200)
        self.assertEqual(sorted(text.splitlines()), ["0 401", "1 400", "2 202"])
        self.assertEqual((await b.messages.get()).uid, "good")
        drops = self.second.switch.rules.drops
        self.assertEqual((drops[Drop.INTAKE_SIGNATURE], drops[Drop.BAD_INTAKE]), (1, 1))
        status, text = await self.status_of(f"{self.second.domain}/batch", "POST", b"nonsense")
        self.assertEqual((status, drops[Drop.BAD_INTAKE]), (400, 2))
