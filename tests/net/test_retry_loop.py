"""Work that is done again and again; and the loops that ask discovery, with an error for each of their questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.publish import FEWER_DELAY, POST_BURST, POST_INTERVAL, PUBLISH_DELAY, EntryPublisher
from dmsg.clients.server_choice import ServerChoice
from dmsg.clients.servers import ServerSet, ServerUses
from dmsg.discovery.entries.entry import VERSION, ClientMeta, Entry, ServerMeta
from dmsg.discovery.lookup.server_list import ServerList
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.retry_loop import RetryLoop

KEY = SecKey.from_seed(b"who asks")
SERVER = SecKey.from_seed(b"a server")


class RetryLoopTests(SynchronousTestCase):
    """The piece that all of them use."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.began: list[float] = []
        self.under_way: Deferred[Any] | None = None
        self.result: Any = None
        self.again = RetryLoop(self.clock, self.work, lambda failures: 10.0 * failures, "it")
        self.again.start()

    async def work(self) -> Any:
        self.began.append(self.clock.seconds())
        if self.under_way is not None:
            await self.under_way
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def test_the_loop_runs_at_the_planned_times(self) -> None:
        self.result = 5.0
        self.again.soon(1)
        self.clock.pump([1] * 12)
        self.assertEqual(self.began, [1, 6, 11])
        self.result = None
        self.clock.advance(5)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_any_exception_is_followed_by_the_next_run(self) -> None:
        for error in (RecursionError("deep"), KeyError("x"), ValueError(), OSError(24, "too many open files")):
            self.setUp()
            self.result = error
            self.again.soon(0)
            self.clock.pump([0] + [1] * 35)
            self.assertEqual(self.began, [0, 10, 30])
            self.assertEqual(len(self.flushLoggedErrors(type(error))), 3)
            self.again.stop()
            self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_runs_never_overlap(self) -> None:
        self.under_way = Deferred()
        self.again.soon(0)
        self.clock.advance(0)
        self.again.soon(3)
        self.again.now()
        self.again.soon(7)
        self.clock.advance(60)
        self.assertEqual(self.began, [0])
        waiting, self.under_way = self.under_way, None
        waiting.callback(None)
        self.clock.advance(0)
        self.assertEqual(self.began, [0, 60])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    @given(st.lists(st.sampled_from(["soon", "later", "now", "time", "end", "error"]), max_size=30))
    def test_every_request_is_served_in_any_order(self, steps: list[str]) -> None:
        """No caller waits for ever."""
        self.setUp()
        self.under_way = Deferred()
        asked_at = -1.0
        for step in steps:
            if step in ("soon", "later", "now"):
                asked_at = self.clock.seconds()
                self.again.now() if step == "now" else self.again.soon(1.0 if step == "soon" else 5.0)
            elif step == "time":
                self.clock.advance(2)
            elif self.under_way is not None and self.again.busy:
                waiting, self.under_way = self.under_way, Deferred()
                waiting.callback(None) if step == "end" else waiting.errback(KeyError("x"))
        waiting, self.under_way = self.under_way, None
        if self.again.busy:
            waiting.callback(None)
        self.clock.pump([1] * 40)
        self.flushLoggedErrors(KeyError)
        if asked_at >= 0:
            self.assertGreaterEqual(self.began[-1], asked_at)
        self.assertFalse(self.again.busy)


class Questions:
    """A discovery whose answer to one question, the number of which is said, is an error of the worst kind."""

    def __init__(self, bad: int, error: BaseException) -> None:
        self._bad = bad
        self._error = error
        self.asked = 0
        self.posted: list[Entry] = []

    def _answer(self, answer: Callable[[], Any]) -> Deferred[Any]:
        self.asked += 1
        if self.asked == self._bad:
            return fail(self._error)
        return succeed(answer())

    def entry(self, key: Any) -> Deferred[Any]:
        if key == SERVER.public:
            entry = Entry(VERSION, 0, 1, SERVER.public.hex(), server=ServerMeta("127.0.0.1:9", 5)).sign(SERVER)
            return self._answer(lambda: entry)
        if self.posted:
            return self._answer(lambda: self.posted[-1])
        self.asked += 1
        return fail(self._error if self.asked == self._bad else EntryNotFound("none", KEY.public.hex()))

    stored_entry = entry

    def available_servers(self) -> Deferred[Any]:
        return self._answer(ServerList)

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[Any]:
        blank = Entry(VERSION, 0, 1, KEY.public.hex(), client=ClientMeta(()))

        def post() -> None:
            self.posted.append(make(blank).sign(KEY))

        return self._answer(post)

    def is_posted_here(self, entry: Entry) -> bool:
        return entry in self.posted


ERRORS = (RecursionError("maximum recursion depth exceeded"), KeyError("x"), DiscoveryError("away"), MemoryError())


class LoopTests(SynchronousTestCase):
    """The loops of a client recover soon after an error."""

    def test_publishing_is_retried(self) -> None:
        for bad in range(1, 5):
            for error in ERRORS:
                clock = Clock()
                questions: Any = Questions(bad, error)
                publisher = EntryPublisher(
                    clock, questions, KEY, lambda: (SERVER.public.hex(),), lambda why: None, Random(0), features={}
                )
                publisher.start()
                publisher.soon(0)
                for _ in range(120):
                    clock.advance(1)
                    if publisher.published and not publisher.is_busy:
                        publisher.soon(0)  # The call stands for the client's regular check of its entry.
                self.flushLoggedErrors()
                self.assertGreater(questions.asked, bad, (bad, error))
                self.assertTrue(questions.posted and publisher.published, (bad, error))
                publisher._publishing.stop()

    def test_a_lost_server_and_its_replacement_are_posted_together(self) -> None:
        """The client posts once, not twice for each client of the lost server, and no other post takes longer than
        before.
        """
        clock = Clock()
        questions: Any = Questions(0, ERRORS[0])
        servers = ["aa", "bb"]
        publisher = EntryPublisher(
            clock, questions, KEY, lambda: tuple(servers), lambda why: None, Random(0), features={}
        )
        self.addCleanup(publisher._publishing.stop)
        publisher.start()
        publisher.changed()
        clock.advance(PUBLISH_DELAY)
        self.assertEqual(publisher.published, ("aa", "bb"))
        del servers[0]
        publisher.changed()
        clock.advance(FEWER_DELAY / 4)
        servers.append("cc")
        publisher.changed()
        clock.advance(PUBLISH_DELAY)
        self.assertEqual([entry.client.delegated_servers for entry in questions.posted], [("aa", "bb"), ("bb", "cc")])
        del servers[0]
        publisher.changed()
        clock.advance(FEWER_DELAY / 4)
        self.assertEqual(publisher.published, ("bb", "cc"))
        clock.advance(2 * FEWER_DELAY)
        self.assertEqual(publisher.published, ("cc",))

    def flapping(self, states: Sequence[tuple[str, ...]], interval: float, seconds: float) -> tuple[Any, Clock, Any]:
        """Change the servers of a client every ``interval`` seconds, for some seconds.

        :param states: lists of servers, which follow each other in turn.
        :returns: the publisher, its clock, and what it asked of discovery.
        """
        clock = Clock()
        questions: Any = Questions(0, ERRORS[0])
        servers: tuple[str, ...] = ()
        publisher = EntryPublisher(clock, questions, KEY, lambda: servers, lambda why: None, Random(0), features={})
        self.addCleanup(publisher._publishing.stop)
        publisher.start()
        for number in range(int(seconds / interval)):
            servers = states[number % len(states)]
            publisher.changed()
            clock.advance(interval)
        return publisher, clock, questions

    def test_a_flapping_link_does_not_flood_discovery(self) -> None:
        """A server that accepts connections and closes them at once can change the links of a client at any rate."""
        for states in ([("aa",), ()], [("aa", "bb"), ("bb",)], [("aa",), ("bb",)], [("bb",), ("bb",)]):
            for interval in (0.01, 0.04, 0.06, 0.3, 1.6):
                publisher, clock, questions = self.flapping(states, interval, 60.0)
                self.assertLessEqual(questions.asked, POST_BURST + 60.0 / POST_INTERVAL, (states, interval))
                publisher._delegated = lambda: ("cc",)
                publisher.changed()
                clock.pump([0.1] * 80)
                self.assertEqual(publisher.published, ("cc",), (states, interval))
                self.assertEqual(questions.posted[-1].client.delegated_servers, ("cc",), (states, interval))

    def test_the_first_changes_are_posted_at_once(self) -> None:
        interval = 1.1 * PUBLISH_DELAY
        states = [("aa",), ("bb",), ("aa", "bb"), ("aa", "bb", "cc"), ("dd",)]
        publisher, clock, questions = self.flapping(states, interval, 1.01 * POST_BURST * interval)
        self.assertEqual([entry.client.delegated_servers for entry in questions.posted], states)
        # After a calm time, a change is posted at once again.
        clock.advance(POST_INTERVAL)
        publisher._delegated = lambda: ("ee",)
        publisher.changed()
        clock.advance(PUBLISH_DELAY)
        self.assertEqual(publisher.published, ("ee",))

    def test_a_server_that_is_lost_and_back_while_its_post_is_under_way(self) -> None:
        """A caller that waits for the entry is notified, although no new entry has to be posted."""
        clock = Clock()
        questions: Any = Questions(0, ERRORS[0])
        under_way: Deferred[None] = Deferred()
        servers = ["aa"]

        def update(key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[Any]:
            under_way.addCallback(lambda _: Questions.update(questions, key, make))
            return under_way

        questions.update = update
        publisher = EntryPublisher(
            clock, questions, KEY, lambda: tuple(servers), lambda why: None, Random(0), features={}
        )
        self.addCleanup(publisher._publishing.stop)
        publisher.start()
        waiting = publisher.when_published()
        publisher.soon(0)
        clock.advance(0)
        servers.clear()
        publisher.changed()
        under_way.callback(None)
        self.assertNoResult(waiting)
        servers.append("aa")
        publisher.changed()
        clock.advance(PUBLISH_DELAY)
        self.successResultOf(waiting)
        self.assertEqual([entry.client.delegated_servers for entry in questions.posted], [("aa",)])

    def test_a_post_that_ends_after_the_stop(self) -> None:
        """The publisher has withdrawn its entry, so it does not count the entry as published."""
        for error in (None, DiscoveryError("cancelled")):
            clock = Clock()
            questions: Any = Questions(0, ERRORS[0])
            under_way: Deferred[None] = Deferred()
            failed: list[DiscoveryError] = []
            questions.update = lambda key, make, under_way=under_way: under_way
            questions.withdraw = lambda key, half, features: succeed(None)
            publisher = EntryPublisher(clock, questions, KEY, lambda: ("aa",), failed.append, Random(0), features={})
            publisher.start()
            publisher.soon(0)
            clock.advance(0)
            waiting = publisher.when_published()
            stopped = Deferred.fromCoroutine(publisher.withdraw())
            under_way.callback(None) if error is None else under_way.errback(error)
            self.successResultOf(stopped)
            self.failureResultOf(waiting, DmsgError)
            self.assertEqual((publisher.published, failed, clock.getDelayedCalls()), (None, [], []))

    def test_a_check_that_ends_after_the_stop(self) -> None:
        """An entry that discovery has lost, or the client has just withdrawn, is not posted again after the stop."""
        clock = Clock()
        questions: Any = Questions(0, ERRORS[0])
        questions.withdraw = lambda key, half, features: succeed(None)
        publisher = EntryPublisher(clock, questions, KEY, lambda: ("aa",), lambda why: None, Random(0), features={})
        publisher.start()
        publisher.soon(0)
        clock.advance(0)
        under_way: Deferred[Entry] = Deferred()
        questions.stored_entry = lambda key: under_way
        publisher.soon(0)
        clock.advance(0)
        self.successResultOf(Deferred.fromCoroutine(publisher.withdraw()))
        under_way.errback(EntryNotFound("none", KEY.public.hex()))
        self.assertEqual((len(questions.posted), publisher.published), (1, None))

    def test_a_server_that_has_moved(self) -> None:
        """The server is looked for only at the address in its entry, after its former address has failed."""
        clock = Clock()
        address = "127.0.0.1:9"
        tried: list[tuple[float, str]] = []

        class Lookups:
            def entry(self, key: Any) -> Deferred[Any]:
                entry = Entry(VERSION, 0, 1, SERVER.public.hex(), server=ServerMeta(address, 5)).sign(SERVER)
                return succeed(entry)

            def available_servers(self) -> Deferred[Any]:
                return succeed(ServerList())

        def opener(entry: Entry) -> Any:
            class Refused:
                def open(self) -> Deferred[Any]:
                    assert entry.server is not None
                    tried.append((clock.seconds(), entry.server.address))
                    return fail(DiscoveryError("refused"))

            return Refused()

        lookups: Any = Lookups()
        choice = ServerChoice(min_servers=1, prefer=[SERVER.public])
        servers = ServerSet(clock, lookups, Random(0), choice, ServerUses(opener=opener))
        servers.start()
        clock.pump([0.1] * 100)
        moved, address = clock.seconds(), "127.0.0.1:10"
        clock.pump([0.1] * 300)
        before = [at for at, where in tried if where == "127.0.0.1:9"]
        after = [at for at, where in tried if where == "127.0.0.1:10"]
        self.assertGreater(len(before), 2)
        self.assertLess(len([at for at in before if at > moved]), 2)
        self.assertGreater(len(after), 2)
        servers._search_loop.stop()

    def test_looking_for_servers_is_retried(self) -> None:
        for bad in (1, 2):
            for error in ERRORS:
                clock = Clock()
                questions: Any = Questions(bad, error)
                choice = ServerChoice(min_servers=1, prefer=[SERVER.public])
                servers = ServerSet(clock, questions, Random(0), choice, ServerUses(opener=lambda entry: _Never()))
                servers.start()
                for _ in range(300):
                    clock.advance(1)
                self.flushLoggedErrors()
                self.assertGreaterEqual(questions.asked, bad, (bad, error))
                self.assertIn(SERVER.public, servers.links)
                servers._search_loop.stop()


class _Never:
    """A server that does not answer."""

    def open(self) -> Deferred[Any]:
        return Deferred()
