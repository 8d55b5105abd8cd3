"""Entries of others: how often discovery is asked for one."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.entries import Entries
from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError
from dmsg.keys import PubKey, SecKey

KEY = SecKey.from_seed(b"remote")


class Asked(Lookup):
    """Discovery whose answers the test gives."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, "http://127.0.0.1:1")
        self.questions: list[Deferred[Entry]] = []
        self.cancelled = 0

    def entry(self, key: PubKey) -> Deferred[Entry]:
        def cancel(_: Deferred[Entry]) -> None:
            self.cancelled += 1

        self.questions.append(Deferred(cancel))
        return self.questions[-1]


class SharedQueryTests(SynchronousTestCase):
    """Callers that ask for the same entry at the same time."""

    def setUp(self) -> None:
        self.lookup = Asked(Clock())
        self.entries = Entries(self.lookup.reactor, Lookups([self.lookup]))
        self.signed = Entry("0.0.1", 0, 1, KEY.public.hex(), ClientMeta(())).sign(KEY)

    def ask(self) -> Deferred[Entry]:
        return Deferred.fromCoroutine(self.entries.get(KEY.public))

    def test_a_single_query_answers_all_callers(self) -> None:
        callers = [self.ask() for _ in range(400)]
        self.assertEqual(len(self.lookup.questions), 1)
        self.lookup.questions[0].callback(self.signed)
        self.assertEqual({id(self.successResultOf(caller)) for caller in callers}, {id(self.signed)})

    def test_an_error_comes_to_all_and_the_next_asks_again(self) -> None:
        callers = [self.ask(), self.ask()]
        self.lookup.questions[0].errback(DiscoveryError("away"))
        for caller in callers:
            self.failureResultOf(caller, DiscoveryError)
        self.ask()
        self.assertEqual(len(self.lookup.questions), 2)

    def test_cancelling_a_caller_leaves_the_shared_query_running(self) -> None:
        """The first one too, which asked."""
        first, second = self.ask(), self.ask()
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.assertEqual(self.lookup.cancelled, 0)
        self.lookup.questions[0].callback(self.signed)
        self.assertIs(self.successResultOf(second), self.signed)

    def test_the_last_caller_that_leaves_ends_the_question(self) -> None:
        callers = [self.ask(), self.ask()]
        for caller in callers:
            caller.cancel()
            self.failureResultOf(caller, CancelledError)
        self.assertEqual(self.lookup.cancelled, 1)
        self.ask()
        self.assertEqual(len(self.lookup.questions), 2)

    def test_a_caller_that_is_answered_may_cancel_another(self) -> None:
        callers = [self.ask(), self.ask()]
        callers[0].addCallback(lambda _: callers[1].cancel())
        self.lookup.questions[0].callback(self.signed)
        self.failureResultOf(callers[1], CancelledError)

    def test_after_a_doubt_discovery_is_asked_anew(self) -> None:
        """A question from before the doubt may bring the entry that is in doubt."""
        for end in (lambda: self.entries.mark_stale(KEY.public), self.entries.forget):
            self.lookup.questions.clear()
            before = self.ask()
            end()
            after = self.ask()
            self.assertEqual(len(self.lookup.questions), 2)
            for question in self.lookup.questions:
                question.callback(self.signed)
            self.assertIs(self.successResultOf(before), self.signed)
            self.assertIs(self.successResultOf(after), self.signed)
            self.entries.forget()
