"""Messages that are offered elsewhere, and twins that are doubted, by plain calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.rmb.relay.federation import offers as offers_module
from dmsg.rmb.relay.federation.attempts import RETRY_FIRST, SHARE_DIVISOR, AttemptOutcome
from dmsg.rmb.relay.federation.offers import MAX_OFFERED, Offers
from dmsg.rmb.relay.federation.unverified import UNSIGNED_STATUS, UNVERIFIED_FOR, UnverifiedTwins
from dmsg.rmb.relay.queue.interface import QueuedMessage
from dmsg.rmb.relay.rules import Action, Decision, Rules
from dmsg.rmb.twins.address import Session
from dmsg.rmb.twins.twin import Twin

SESSION = str(Session(7))
RELAYS = frozenset({"there"})


class Elsewhere:
    """Replacement of requests to other relays and of the queue, which records offered and removed messages."""

    stopped = False

    def __init__(self) -> None:
        self.offered: list[bytes] = []
        self.removed: list[Any] = []
        self.answers: list[Deferred[AttemptOutcome]] = []

    def offer(self, data: bytes, relays: frozenset[str], twin: int) -> Deferred[AttemptOutcome]:
        self.offered.append(data)
        self.answers.append(Deferred())
        return self.answers[-1]

    def remove(self, session: str, numbers: list[Any]) -> None:
        self.removed += numbers


class OfferTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.there, self.here = Clock(), Elsewhere(), False
        there = cast(Any, self.there)
        self.offers = Offers(self.clock, there, there, self.clock.seconds, 100, lambda session: self.here)

    def add(self, number: int, data: bytes, session: str = SESSION) -> None:
        self.offers.add(session, cast(Any, QueuedMessage(cast(Any, number), data)), RELAYS, 60.0)

    def test_offers_are_made_one_after_the_other(self) -> None:
        for number in range(3):
            self.add(number, b"%d" % number)
        self.assertEqual((self.there.offered, self.offers.count, self.offers.size), ([b"0"], 3, 3))
        self.there.answers[0].callback(AttemptOutcome.TAKEN)
        self.assertEqual((self.there.offered, self.there.removed, self.offers.count), ([b"0", b"1"], [0], 2))
        others = [one for one in AttemptOutcome if one is not AttemptOutcome.TAKEN]
        self.there.answers[1].callback(others[0])
        self.offers.round()
        self.assertEqual((len(self.there.offered), self.there.removed), (2, [0]))
        for outcome, delay in zip((*others, others[0]), (RETRY_FIRST, 2 * RETRY_FIRST, 4 * RETRY_FIRST), strict=False):
            self.clock.advance(delay - 0.5)
            self.offers.round()
            asked = len(self.there.offered)
            self.clock.advance(0.5)
            self.offers.round()
            self.assertEqual(len(self.there.offered), asked + 1)
            self.there.answers[-1].callback(outcome)
        self.assertEqual(set(self.there.offered[1:]), {b"1"})

    def test_messages_for_connected_receivers_are_not_offered(self) -> None:
        self.add(1, b"1")
        self.add(2, b"2")
        self.here = True
        self.there.answers[0].callback(AttemptOutcome.TAKEN)
        self.assertEqual((self.there.offered, self.offers.count, self.offers.size), ([b"1"], 0, 0))

    def test_the_number_of_offers_is_bounded(self) -> None:
        self.add(1, bytes(60))
        self.add(2, bytes(41))  # The message has too many bytes, so it stays in the queue.
        self.assertEqual((self.offers.count, self.offers.size), (1, 60))
        self.add(2, bytes(40))
        self.assertEqual((self.offers.count, self.offers.size), (2, 100))
        for most in (2 * SHARE_DIVISOR, 3 * SHARE_DIVISOR):
            self.setUp()
            self.patch(offers_module, "MAX_OFFERED", most)
            for number in range(5):
                self.add(number, b"x")
            self.assertEqual(self.offers.count, most // SHARE_DIVISOR)
        self.assertEqual(MAX_OFFERED % SHARE_DIVISOR, 0)

    def test_expired_messages_are_not_offered(self) -> None:
        self.add(1, b"1")
        self.add(2, b"2")
        self.clock.advance(60.0)
        self.there.answers[0].callback(AttemptOutcome.TAKEN)
        self.assertEqual((self.there.offered, self.offers.count), ([b"1"], 0))

    def test_all_sessions_together_have_a_limit(self) -> None:
        self.patch(offers_module, "MAX_OFFERED", SHARE_DIVISOR)
        for number in range(SHARE_DIVISOR + 2):
            self.add(number, b"x", str(Session(number + 1)))
        self.assertEqual((self.offers.count, len(self.there.offered)), (SHARE_DIVISOR, SHARE_DIVISOR))


class UnverifiedTwinsTests(SynchronousTestCase):
    def refuses(self, doubts: UnverifiedTwins, twin: int) -> bool:
        envelope = Envelope()
        envelope.source.twin = twin
        return self.successResultOf(Deferred.fromCoroutine(doubts.refuses(envelope.SerializeToString())))

    def test_unverified_twins_expire(self) -> None:
        """Messages of a doubted twin need its signature; these have none."""

        class Registry:
            def get(self, twin: int) -> Deferred[Twin]:
                return succeed(Twin(twin, bytes(32), "here"))

        clock = Clock()
        doubts = UnverifiedTwins(clock.seconds, cast(Any, Registry()))
        self.assertFalse(self.refuses(doubts, 7))
        envelope = Envelope()
        envelope.source.twin = 7
        for code, doubted in ((200, False), (UNSIGNED_STATUS, True)):
            doubts.answered(envelope.SerializeToString(), code)
            self.assertIs(self.refuses(doubts, 7), doubted)
            self.assertFalse(self.refuses(doubts, 8))
        clock.advance(UNVERIFIED_FOR - 1)
        self.assertTrue(self.refuses(doubts, 7))
        clock.advance(1)
        self.assertFalse(self.refuses(doubts, 7))
        self.assertFalse(doubts._until)


class RuleTests(SynchronousTestCase):
    """Decision of a relay on a message for a twin that has no session there."""

    def test_relays_may_deliver_only_for_their_own_twins(self) -> None:
        header, both = cast(Any, SimpleNamespace(fail_fast=False)), cast(Any, SimpleNamespace())
        both.relays = frozenset({"here", "there", ""})
        self.assertIs(Rules(frozenset({"here"})).route_inbound(header, None).action, Action.REFUSE)
        self.assertEqual(Rules(frozenset({"here"})).route_inbound(header, both), Decision(Action.QUEUE, RELAYS))
        self.assertEqual(Rules(frozenset()).route_inbound(header, both), Decision(Action.QUEUE, frozenset()))
        self.assertIs(Rules(frozenset({"elsewhere"})).route_inbound(header, both).action, Action.REFUSE)
        header.fail_fast = True
        self.assertIs(Rules(frozenset({"here"})).route_inbound(header, both).action, Action.REFUSE)
