"""Codes as a program uses them: offered, accepted, withdrawn, over a network in memory."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.error import CannotListenError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes import Code, CodeUsedUp, OfferedCode, accept_code, offer_code
from dmsg.apps.codes.stream import MAX_WRONG_GUESSES, PORT
from dmsg.discovery.lookup.nameplates import NoSuchNameplate
from dmsg.errors import DiscoveryError
from dmsg.net.streams.address import DmsgAddress
from dmsg.testing import Lab
from tests.apps.codes.test_stream import Recorder
from tests.support import Accepting


class RendezvousTests(SynchronousTestCase):
    """Alice offers a code, and Bob types it."""

    def setUp(self) -> None:
        self.lab = lab = Lab(seed=1)
        self.addCleanup(lab.stop)
        lab.add_servers(2)
        self.alice, self.bob = (lab.add_client(name) for name in ("alice", "bob"))
        lab.settle()
        self.guesses: list[int] = []
        self.warnings: list[str] = []

    def result_of(self, deferred: Any, seconds: float = 120.0) -> Any:
        """Return the result of a Deferred after the network has run for long enough; return a failure unchanged."""
        results: list[Any] = []
        deferred.addBoth(results.append)
        self.lab.network.run_until(lambda: results, seconds)
        return results[0]

    def offer(self, **options: Any) -> OfferedCode:
        host = self.lab.network.host("alice")
        offered = self.result_of(
            offer_code(host, self.alice, on_wrong_guess=self.guesses.append, on_warning=self.warnings.append, **options)
        )
        assert isinstance(offered, OfferedCode), offered
        return offered

    def accept(self, code: Code) -> Any:
        return self.result_of(accept_code(self.lab.network.host("bob"), self.bob, code))

    def test_a_code_connects_both_sides_with_a_stream(self) -> None:
        offered = self.offer(words=4)
        self.assertEqual(len(offered.code.words), 4)
        there = self.accept(Code.parse(str(offered.code)))
        here = self.result_of(offered.agreed)
        self.assertEqual((here.peer, there.peer), (self.bob.public_key, self.alice.public_key))
        self.assertEqual(here.verifier, there.verifier)
        one, two = Recorder(b"from alice"), Recorder(b"from bob")
        here.proceed(one)
        there.proceed(two)
        self.lab.network.run_until(lambda: one.got == b"from bob" and two.got == b"from alice", 30.0)

    def check_is_over(self, code: Code) -> None:
        """The number leads nowhere any more, and the port is free."""
        self.accept(code).trap(NoSuchNameplate)
        self.assertNotIn(PORT, self.alice.factories)

    def test_a_number_is_released_after_the_agreement(self) -> None:
        offered = self.offer()
        self.accept(offered.code)
        self.result_of(offered.agreed)
        self.check_is_over(offered.code)

    def test_withdrawing_an_offer_releases_the_number(self) -> None:
        offered = self.offer()
        offered.agreed.cancel()
        self.result_of(offered.agreed).trap(CancelledError)
        self.check_is_over(offered.code)

    def test_wrong_guesses_use_up_the_code(self) -> None:
        offered = self.offer()
        wrong = Code.make(offered.code.nameplate)
        for _ in range(MAX_WRONG_GUESSES):
            self.accept(wrong).trap(CodeUsedUp)
        self.result_of(offered.agreed).trap(CodeUsedUp)
        self.assertEqual(self.guesses, list(range(MAX_WRONG_GUESSES - 1, 0, -1)))
        self.check_is_over(offered.code)

    def test_a_number_stays_claimed_while_the_offer_lasts(self) -> None:
        offered = self.offer()
        assert offered._nameplate is not None
        self.lab.network.run(offered._nameplate.renew_every * 12)
        self.assertEqual(self.accept(offered.code).peer, self.alice.public_key)
        self.assertEqual(self.warnings, [])

    def test_the_second_failed_renewal_in_a_row_is_reported_once(self) -> None:
        """The second failure in a row is logged once. Each error is followed by the next renewal."""
        offered = self.offer()
        answers: list[Any] = [RuntimeError("ours"), *[DiscoveryError("discovery is away")] * 3, True, False]

        async def renew() -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        assert offered._nameplate is not None
        offered._nameplate.renew = renew  # type: ignore[method-assign]
        self.lab.network.run(offered._nameplate.renew_every * 10)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
        self.assertEqual(answers, [])
        self.assertEqual(len(self.warnings), 2)
        self.assertIn("discovery is away; the code may be lost", self.warnings[0])
        self.assertIn("make another code", self.warnings[1])

    def test_a_second_offer_fails_and_leaves_the_first(self) -> None:
        """A second offer fails, and leaves the first one as it is."""
        offered = self.offer()
        self.result_of(offer_code(self.lab.network.host("alice"), self.alice)).trap(CannotListenError)
        self.assertEqual(self.accept(offered.code).peer, self.alice.public_key)

    def test_an_offer_that_fails_keeps_no_number(self) -> None:
        """The port is in use, or the offer on the local network fails."""
        claims: list[Any] = []
        claim = self.alice.claim_nameplate

        async def count() -> Any:
            claims.append(await claim())
            return claims[-1]

        self.patch(self.alice, "claim_nameplate", count)
        host = self.lab.network.host("alice")
        listening = self.alice.listen(Accepting(), PORT)
        self.result_of(offer_code(host, self.alice)).trap(CannotListenError)
        self.assertEqual(claims, [])
        self.result_of(maybeDeferred(listening.stopListening))

        class NoNetwork:
            def offer(self, *_: object) -> None:
                raise OSError("no network")

        self.result_of(offer_code(host, self.alice, nearby=cast(Any, NoNetwork()))).trap(OSError)
        (claimed,) = claims
        self.check_is_over(Code.make(claimed.number))

    def test_an_offer_without_a_number_keeps_no_port(self) -> None:
        """The offer fails because no nameplate is free, or it is cancelled earlier. Meanwhile, no peer is served."""
        waiting: Deferred[Any] = Deferred()

        async def claim() -> Any:
            return await waiting

        self.patch(self.alice, "claim_nameplate", claim)
        host = self.lab.network.host("alice")
        offering = offer_code(host, self.alice)
        self.assertIsNone(self.alice.factories[PORT].buildProtocol(DmsgAddress(self.bob.public_key, 0)))
        waiting.errback(DiscoveryError("no nameplate is free"))
        self.result_of(offering).trap(DiscoveryError)
        self.assertNotIn(PORT, self.alice.factories)
        waiting = Deferred()
        offering = offer_code(host, self.alice)
        offering.cancel()
        self.result_of(offering).trap(CancelledError)
        self.assertNotIn(PORT, self.alice.factories)

    def test_a_code_of_too_few_words_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "3 to 12 words, not 2"):
            offer_code(self.lab.network.host("alice"), self.alice, words=2)
