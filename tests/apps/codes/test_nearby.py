"""Race of candidates that may have made a code. The true sender wins, whoever else answers."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.nearby import GRACE, MAX_WAITING, STAGGER, AgreementRace, NearbySource, NobodyNearby
from dmsg.apps.codes.stream import CodeAgreement, CodeUsedUp
from dmsg.apps.codes.words import EXAMPLE, Code
from dmsg.errors import NobodyThere
from dmsg.keys import PubKey, SecKey

ALICE, LIAR = SecKey.from_seed(b"nearby alice").public, SecKey.from_seed(b"nearby liar").public
CODE = Code.parse(EXAMPLE)


def agreement(key: PubKey = ALICE) -> CodeAgreement:
    return CodeAgreement(key, "1234 5678 9012", lambda protocol: None)


class Candidate:
    """Candidate whose agreement the test ends.

    :ivar began: whether the agreement has begun.
    :ivar cancelled: whether it was cancelled.
    """

    def __init__(self, race: AgreementRace) -> None:
        self.began = self.cancelled = False
        self.agreed: Deferred[CodeAgreement] = Deferred(lambda _: setattr(self, "cancelled", True))
        race.add(self.begin)

    def begin(self) -> Deferred[CodeAgreement]:
        self.began = True
        return self.agreed


class RaceTests(SynchronousTestCase):
    """Several who may be the sender."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.race = AgreementRace(self.clock, 1)

    def test_the_first_agreement_ends_the_others(self) -> None:
        slow, good, late = (Candidate(self.race) for _ in range(3))
        self.assertEqual((slow.began, good.began), (True, False))
        self.clock.advance(STAGGER)
        self.assertEqual((good.began, late.began), (True, False))
        good.agreed.callback(found := agreement())
        self.assertIs(self.successResultOf(self.race.first), found)
        self.assertTrue(slow.cancelled)
        self.assertFalse(late.began)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.race.add(late.begin)
        self.assertFalse(late.began)

    def test_after_a_failure_the_next_begins_at_once(self) -> None:
        bad, good = Candidate(self.race), Candidate(self.race)
        bad.agreed.errback(CodeUsedUp("wrong"))
        self.assertTrue(good.began)
        self.race.source_ended()
        good.agreed.callback(found := agreement())
        self.assertIs(self.successResultOf(self.race.first), found)

    def test_a_silent_one_beside_a_failed_one_delays_the_next_no_longer(self) -> None:
        silent, bad, good = (Candidate(self.race) for _ in range(3))
        self.clock.advance(STAGGER)
        bad.agreed.errback(CodeUsedUp("wrong"))
        self.assertFalse(good.began)
        self.clock.advance(STAGGER)
        self.assertTrue(good.began)
        del silent

    def test_without_success_the_error_tells_who_answered(self) -> None:
        wrong, away = Candidate(self.race), Candidate(self.race)
        wrong.agreed.errback(CodeUsedUp("wrong"))
        away.agreed.errback(NobodyNearby("away"))
        self.assertNoResult(self.race.first)
        self.race.source_ended(Failure(NobodyNearby("nobody")))
        self.assertEqual(str(self.failureResultOf(self.race.first, CodeUsedUp).value), "wrong")

    def test_all_sources_have_to_end(self) -> None:
        race = AgreementRace(self.clock, 2)
        race.source_ended(Failure(NobodyNearby("nobody")))
        self.assertNoResult(race.first)
        race.source_ended(Failure(NobodyThere("no server")))
        self.assertEqual(str(self.failureResultOf(race.first, NobodyThere).value), "nobody; no server")

    def test_errors_that_say_the_same_are_told_once(self) -> None:
        for text in ("first", "away", "away", "no server"):
            Candidate(self.race).agreed.errback(NobodyNearby(text))
        self.race.source_ended()
        self.assertEqual(str(self.failureResultOf(self.race.first, NobodyThere).value), "away; no server")

    def test_a_running_agreement_is_awaited(self) -> None:
        one = Candidate(self.race)
        self.race.source_ended()
        self.assertNoResult(self.race.first)
        one.agreed.callback(agreement())
        self.successResultOf(self.race.first)

    def test_candidates_that_are_not_needed_are_passed_over(self) -> None:
        self.race.add(lambda: None)
        self.assertTrue(Candidate(self.race).began)

    def test_cancelling_ends_all(self) -> None:
        one = Candidate(self.race)
        self.race.first.cancel()
        self.failureResultOf(self.race.first, CancelledError)
        self.assertTrue(one.cancelled)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_waiting_candidates_are_bounded(self) -> None:
        candidates = [Candidate(self.race) for _ in range(MAX_WAITING + 5)]
        for one in candidates:
            if one.began:
                one.agreed.errback(NobodyNearby("away"))
        self.assertEqual(sum(one.began for one in candidates), MAX_WAITING + 1)


class FakeSearch:
    """Search whose answers the test gives."""

    def __init__(self, found: Any) -> None:
        self.found = found
        self.announcers = 0
        self.interfaces: list[object] = ["wlan0"]
        self.drops: dict[str, int] = {}
        self.stopped = 0

    def stop(self) -> Deferred[None]:
        self.stopped += 1
        return succeed(None)


class FakeNearby:
    """Network whose answers the test gives."""

    search_: FakeSearch

    def offer(self, nameplate: int, factory: Any, port: int) -> Any:
        raise AssertionError("nobody offers here")

    def search(self, nameplate: int, found: Any) -> FakeSearch:
        assert nameplate == CODE.nameplate
        self.search_ = FakeSearch(found)
        return self.search_


class FakePeer:
    """Somebody on the network."""

    def __init__(self, key: PubKey, error: Exception | None = None) -> None:
        self.key = key
        self.error = error
        self.dials = 0

    def connect(self, factory: Any, port: int, *, timeout: float) -> Deferred[Any]:
        self.dials += 1
        return fail(self.error) if self.error is not None else succeed(None)


class SourceTests(SynchronousTestCase):
    """Search on the network, as a source of the race."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.race = AgreementRace(self.clock, 1)
        self.nearby = FakeNearby()
        self.source = NearbySource(self.clock, self.nearby, CODE, self.race, timeout=10.0)

    def find(self, peer: FakePeer) -> FakePeer:
        search = self.nearby.search_
        search.announcers += 1
        search.found(peer)
        return peer

    def test_nobody_answers(self) -> None:
        self.clock.advance(9.9)
        self.assertNoResult(self.race.first)
        self.clock.advance(0.2)
        text = str(self.failureResultOf(self.race.first, NobodyNearby).value)
        self.assertRegex(text, r"nobody on this network offers this code \(asked for 10 s\): .*--lan")
        self.assertEqual((self.nearby.search_.stopped, self.clock.getDelayedCalls()), (1, []))

    def test_ignored_answers_are_named(self) -> None:
        self.nearby.search_.drops = {"too_many": 2, "off_link": 1}
        self.clock.advance(10.0)
        text = str(self.failureResultOf(self.race.first, NobodyNearby).value)
        self.assertTrue(text.endswith(" (ignored answers: off_link: 1, too_many: 2)"), text)

    def test_a_machine_without_a_network(self) -> None:
        self.nearby.search_.interfaces = []
        self.clock.advance(10.0)
        self.assertIn("in no network", str(self.failureResultOf(self.race.first, NobodyNearby).value))

    def test_somebody_who_cannot_be_reached(self) -> None:
        self.find(FakePeer(LIAR, ConnectionRefusedError()))
        self.clock.advance(10.0)
        text = str(self.failureResultOf(self.race.first, NobodyNearby).value)
        self.assertRegex(text, "cannot be reached: .*refused.*firewall")

    def test_a_key_that_had_its_guess_gets_no_other(self) -> None:
        first, second = self.find(FakePeer(LIAR)), self.find(FakePeer(LIAR))
        self.clock.advance(STAGGER)
        self.assertEqual((first.dials, second.dials), (1, 0))

    def test_a_key_that_was_not_reached_is_tried_at_its_next_address(self) -> None:
        self.find(FakePeer(ALICE, ConnectionRefusedError()))
        self.assertEqual(self.find(FakePeer(ALICE)).dials, 1)

    def test_stopping_ends_the_search(self) -> None:
        self.successResultOf(self.source.stop())
        self.successResultOf(self.source.stop())
        self.assertEqual((self.nearby.search_.stopped, self.clock.getDelayedCalls()), (1, []))

    def test_after_a_wrong_code_the_search_goes_on_for_a_while(self) -> None:
        """The true sender may answer behind a liar; but a person who has mistyped should not wait for long."""
        self.source._agree = lambda peer: self.wrong()  # type: ignore[method-assign]
        self.source._until.reset(GRACE)
        self.find(FakePeer(LIAR))
        self.assertNoResult(self.race.first)
        self.clock.advance(GRACE)
        self.failureResultOf(self.race.first, CodeUsedUp)

    async def wrong(self) -> CodeAgreement:
        raise CodeUsedUp("wrong")
