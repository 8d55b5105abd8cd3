"""The client of discovery against the service."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from treq.testing import StubTreq
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.testing import EventLoggingObserver
from twisted.logger import formatEvent, globalLogPublisher

from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta
from dmsg.discovery.entries.rules import Deletion
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import GRACE, HUNG_FOR, Lookups
from dmsg.discovery.lookup.server_list import ServerList
from dmsg.errors import DiscoveryError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.proxies import ProxyError
from tests.discovery.service.test_api import APICase, Fixed
from tests.net.test_own_pauses import let_pause

KEY = SecKey.from_seed(b"api")


class Away:
    """HTTP client of a discovery that refuses connections."""

    def request(self, *_: Any, **__: Any) -> Any:
        return fail(OSError("refused"))


class LookupTests(APICase):
    """The client of discovery against the service."""

    def test_a_proxy_or_a_head_that_fails_is_an_error_of_this_discovery(self) -> None:
        """The error is not unhandled, so that other discoveries can be asked."""

        class Fails:
            def request(self, *_: object, **__: object) -> Deferred[object]:
                return fail(ProxyError("the proxy http://proxy:80 refused: 403"))

        lookup = Lookup(self.clock, "http://discovery", http=Fails())
        error = self.failureResultOf(lookup.available_servers(), DiscoveryError).value
        self.assertEqual(str(error), "discovery http://discovery: the proxy http://proxy:80 refused: 403")

    def test_close_ends_requests_under_way(self) -> None:
        cancelled: list[Deferred[Any]] = []

        class Silent:
            def request(self, *args: Any, **options: Any) -> Deferred[Any]:
                return Deferred(cancelled.append)

        lookup = Lookup(self.clock, "http://discovery", http=Silent())
        waiting = lookup.entry(KEY.public)
        self.successResultOf(lookup.close())
        self.failureResultOf(waiting, DiscoveryError)
        self.assertEqual(len(cancelled), 1)

    def setUp(self) -> None:
        super().setUp()
        self.lookup = Lookup(self.clock, "http://discovery", http=self.http)

    def test_update_makes_and_iterates(self) -> None:
        for expected in (0, 1, 2):
            entry = self.successResultOf(self.lookup.update(KEY, lambda blank: self.with_client(blank)))
            self.assertEqual(entry.sequence, expected)
        self.assertEqual(self.successResultOf(self.lookup.entry(KEY.public)), entry)

    @staticmethod
    def with_client(blank: Entry) -> Entry:
        from dataclasses import replace

        return replace(blank, client=ClientMeta(()))

    def asked(self) -> list[str]:
        """Methods of the requests from now on."""
        found: list[str] = []
        inner = cast(Any, self.http).request

        def request(method: str, *args: Any, **options: Any) -> Any:
            found.append(method)
            return inner(method, *args, **options)

        self.patch(self.http, "request", request)
        return found

    def test_the_last_poster_updates_without_a_query(self) -> None:
        asked = self.asked()
        for sequence in range(3):
            entry = self.successResultOf(self.lookup.update(KEY, self.with_client))
            self.assertEqual(entry.sequence, sequence)
        self.assertEqual(asked, ["GET", "POST", "POST", "POST"])

    def test_an_entry_changed_elsewhere_is_read_again(self) -> None:
        """The entry was changed by another program with this key, or the discovery has lost all entries."""
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        other = Lookup(self.clock, "http://discovery", http=self.http)
        self.successResultOf(other.update(KEY, lambda blank: replace(self.with_client(blank), version="0.0.1+other1")))
        asked = self.asked()
        entry = self.successResultOf(self.lookup.update(KEY, self.with_client))
        self.assertEqual((entry.sequence, entry.version), (2, "0.0.1+other1"))
        self.store._db.execute("DELETE FROM entries")
        self.assertEqual(self.successResultOf(self.lookup.update(KEY, self.with_client)).sequence, 0)
        self.assertEqual(asked, ["POST", "GET", "POST"] * 2)

    def test_an_update_that_loses_a_race_is_tried_again(self) -> None:
        """Another writer of the same key posted between GET and POST."""
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        raced: list[Any] = []

        def make(blank: Entry) -> Entry:
            if not raced:
                raced.append(blank)
                self.successResultOf(self.lookup.update(KEY, self.with_client))
            return self.with_client(blank)

        self.assertEqual(self.successResultOf(self.lookup.update(KEY, make)).sequence, 2)

    def test_delete_and_post_again(self) -> None:
        self.successResultOf(self.lookup.update(KEY, self.with_client))
        self.successResultOf(self.lookup.delete(KEY))
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)
        self.failureResultOf(self.lookup.delete(KEY), EntryNotFound)
        self.assertEqual(self.successResultOf(self.lookup.update(KEY, self.with_client)).sequence, 0)

    def held(self) -> list[Callable[[], None]]:
        """Delay every POST on its way to discovery; return functions of which each lets one POST arrive."""
        waiting: list[Callable[[], None]] = []
        inner = cast(Any, self.http).request

        def request(method: str, *args: Any, **options: Any) -> Any:
            if method != "POST":
                return inner(method, *args, **options)
            answer: Deferred[Any] = Deferred()

            def arrive() -> None:
                answered = inner(method, *args, **options)
                if not answer.called:
                    answered.chainDeferred(answer)

            waiting.append(arrive)
            return answer

        self.patch(self.http, "request", request)
        return waiting

    def test_an_entry_whose_answer_was_lost_is_withdrawn(self) -> None:
        """A program stops while its first POST has no answer yet; discovery has stored the entry."""
        held = self.held()
        posting = self.lookup.update(KEY, self.with_client)
        posting.cancel()
        self.failureResultOf(posting)
        held.pop()()
        entry = self.successResultOf(self.lookup.entry(KEY.public))
        self.assertTrue(self.lookup.is_posted_here(entry))
        self.assertTrue(self.successResultOf(self.lookup.withdraw(KEY, "client")))
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)

    def test_a_withdrawal_follows_the_post_under_way(self) -> None:
        """Otherwise discovery could store the entry after its withdrawal."""
        held = self.held()
        lookups = Lookups([self.lookup])
        posting = lookups.update(KEY, self.with_client)
        withdrawing = lookups.withdraw(KEY, "client")
        self.assertNoResult(withdrawing)
        held.pop()()
        self.successResultOf(posting)
        self.successResultOf(withdrawing)
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)
        self.assertEqual((lookups._changing, self.clock.getDelayedCalls()), ({}, []))

    def test_a_withdrawal_does_not_wait_long_for_a_post(self) -> None:
        self.held()
        lookups = Lookups([self.lookup])
        posting = lookups.update(KEY, self.with_client)
        withdrawing = lookups.withdraw(KEY, "client")
        self.clock.advance(GRACE)
        self.failureResultOf(posting, DiscoveryError)
        self.failureResultOf(withdrawing, EntryNotFound)
        waiting = [lookups.update(KEY, self.with_client), lookups.withdraw(KEY, "client")]
        waiting[1].cancel()
        self.failureResultOf(waiting[1])
        self.successResultOf(lookups.close())
        self.failureResultOf(waiting[0])
        self.assertEqual(lookups._changing, {})

    def life(self, days: float, half: str = "client") -> int:
        """A program with this key and a clock that is ahead posts its entry and stops; by how much the entry is."""
        now = 1_800_000_000 * 10**9
        lookup = Lookup(self.clock, "http://discovery", http=self.http, date=lambda: now + round(days * 86400 * 10**9))
        content: Any = {"client": ClientMeta(())} if half == "client" else {"server": ServerMeta("h:1", 5)}
        posted: Entry = self.successResultOf(lookup.update(KEY, lambda blank: replace(blank, **content)))
        self.assertEqual(posted.sequence, 0)
        self.assertTrue(self.successResultOf(lookup.withdraw(KEY, half)))
        return posted.timestamp - now

    def test_a_clock_that_was_ahead_does_not_lock_out_an_owner(self) -> None:
        """After a regular stop, for a clock that was ahead by a day or a year, for a client and for a server."""
        log = EventLoggingObserver.createWithCleanup(cast(Any, self), globalLogPublisher)
        for half in ("client", "server"):
            ahead = self.life(1, half)
            self.assertEqual(self.life(0, half), ahead + 2)  # The entry was followed by its deletion.
            self.assertIn(
                "a machine whose clock was 1 d 0 h ahead of this machine's", str([formatEvent(one) for one in log])
            )
            ahead = self.life(366, half)
            self.assertEqual([self.life(0, half) - ahead, self.life(-1, half) - ahead], [2, 4])

    def test_only_its_own_signature_moves_the_date_of_a_key(self) -> None:
        """A discovery that lies cannot have an entry dated in the far future, where it would stay the newest."""
        far = 9 * 10**18
        forged = Deletion(KEY.public.hex(), 0, far).sign(SecKey.from_seed(b"other"))
        other = SecKey.from_seed(b"other")
        for body in (forged.to_json(), Deletion(other.public.hex(), 0, far).sign(other).to_json(), b"7", b"{}"):
            asked: list[bytes] = []

            class Lies:
                def request(self, method: str, url: str, *, data: Any, body: bytes = body, **options: Any) -> Any:
                    status = 422 if method == "POST" else 404
                    if data is not None:
                        asked.append(data)  # noqa: B023  # used in this turn of the loop only
                    says = Fixed(status, b'{"message":"no","code":422,"deletion":%s}' % body)
                    return cast(Any, StubTreq(says)).request(method, url, data=data)

            lookup = Lookup(self.clock, "http://discovery", http=Lies(), date=lambda: 1000)
            self.failureResultOf(lookup.update(KEY, self.with_client), DiscoveryError)
            self.assertEqual({json.loads(one)["timestamp"] for one in asked}, {1000}, body)

    def test_an_earlier_discovery_does_not_say_when(self) -> None:
        """If the earlier discovery gives no time, the message names what the owner can check."""
        self.life(1)
        self.store._db.execute("UPDATE entries SET deletion = NULL")
        lookup = Lookup(self.clock, "http://discovery", http=self.http, date=lambda: 1_800_000_000 * 10**9)
        said = str(self.failureResultOf(lookup.update(KEY, self.with_client), DiscoveryError).value)
        self.assertIn("is the clock of this machine right?", said)
        self.assertIn("forgets the deletion after a day", said)

    def test_entries_that_do_not_verify_are_not_used(self) -> None:
        """A discovery that lies: another's entry, a changed one, no entry at all."""
        entry = self.client_entry()
        changed = entry.to_json().replace(b'"timestamp":1', b'"timestamp":2')
        other = self.server_entry(b"other").to_json()
        for body in (changed, other, b"{}", b"[", b"null"):
            self.store.get = lambda static, body=body: succeed(body)
            self.failureResultOf(self.lookup.entry(KEY.public), DiscoveryError)

    def test_servers_that_do_not_verify_are_left_out(self) -> None:
        good, bad = self.server_entry(b"good"), self.server_entry(b"bad")
        for entry in (good, bad):
            self.successResultOf(self.lookup.post(entry))
        changed = bad.to_json().replace(b"h:1", b"h:2")
        self.store._db.execute("UPDATE entries SET json = ? WHERE static = ?", (changed, bad.static))
        servers = self.successResultOf(self.lookup.available_servers())
        self.assertEqual(servers, [good])
        why = f"discovery {self.lookup.url}: 1 of 2 server entries are refused: invalid signature"
        self.assertEqual(servers.refusal, why)
        both = self.successResultOf(Lookups([self.lookup, self.lookup]).available_servers())
        self.assertEqual((both, both.refusal), ([good], f"{why}; {why}"))

    def test_errors_name_their_cause(self) -> None:
        forged = self.client_entry().to_json()
        error = self.failureResultOf(self.lookup.post(Entry("0.0.1", 5, 1, KEY.public.hex(), ClientMeta(())).sign(KEY)))
        self.assertEqual(error.value.status, 422)
        self.assertIn("non-zero sequence", str(error.value))
        self.assertTrue(forged)

    def test_the_newest_entry_of_several_discoveries_wins(self) -> None:
        """One discovery has an older entry, another hangs: the client waits for the newest entry."""
        old, new = (Entry("0.0.1", number, 1 + number, KEY.public.hex(), ClientMeta(())).sign(KEY) for number in (0, 1))

        class Says(Lookup):
            def __init__(self, clock: Any, *entries: Entry, hangs: bool = False) -> None:
                super().__init__(clock, "http://says")
                self.entries, self.hangs, self.asked, self.cancelled = entries, hangs, 0, 0

            def answer(self, value: Any) -> Any:
                self.asked += 1
                if self.hangs:
                    return Deferred(self.gave_up)
                return succeed(value) if value else fail(EntryNotFound("it has none"))

            def gave_up(self, _: Any) -> None:
                self.cancelled += 1

            def entry(self, key: Any) -> Any:
                return self.answer(self.entries[0] if self.entries else None)

            def available_servers(self) -> Any:
                return self.answer(ServerList(self.entries))

        lying, honest, hanging = Says(self.clock, old), Says(self.clock, new), Says(self.clock, hangs=True)
        both = Lookups([lying, Says(self.clock), honest])
        self.assertEqual(self.successResultOf(both.entry(KEY.public)), new)
        lookups = Lookups([hanging, lying, honest])
        asking = lookups.entry(KEY.public)
        self.assertNoResult(asking)
        self.clock.advance(GRACE)
        self.assertEqual(self.successResultOf(asking), new)
        self.assertEqual((hanging.asked, hanging.cancelled), (1, 1))
        # For a while, the hanging discovery is still asked, but not waited for.
        self.assertEqual(self.successResultOf(lookups.entry(KEY.public)), new)
        self.assertEqual((hanging.asked, hanging.cancelled), (2, 2))
        self.clock.advance(HUNG_FOR)
        asking = lookups.entry(KEY.public)
        self.assertNoResult(asking)
        asking.cancel()
        self.failureResultOf(asking)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.failureResultOf(Lookups([Says(self.clock), Says(self.clock)]).entry(KEY.public), EntryNotFound)
        # The owner of an entry posts it to a discovery that has lost it, although another one fails.
        away: Any = Lookup(self.clock, "http://away", http=Away())
        for failing in ([away, Says(self.clock)], [Says(self.clock), away]):
            self.failureResultOf(Lookups(failing).stored_entry(KEY.public), EntryNotFound)
            self.assertIsNone(self.failureResultOf(Lookups(failing).entry(KEY.public)).check(EntryNotFound))
        self.assertEqual(self.successResultOf(Lookups([away, honest]).stored_entry(KEY.public)), new)
        self.assertIsNone(self.failureResultOf(Lookups([away]).stored_entry(KEY.public)).check(EntryNotFound))
        first = self.server_entry(b"s")
        second = replace(first, sequence=1, timestamp=2).sign(SecKey.from_seed(b"s"))
        several = Lookups([Says(self.clock, first), Says(self.clock, second), hanging])
        listing = several.available_servers()
        self.clock.advance(GRACE)
        self.assertEqual(self.successResultOf(listing), [second])

    def test_a_discovery_does_not_hang_because_this_process_pauses(self) -> None:
        """The answer of the second discovery has arrived, but this process has not read it yet."""
        answers: list[Deferred[Any]] = []

        class Answers(Lookup):
            def entry(self, key: Any) -> Any:
                answers.append(Deferred())
                return answers[-1]

        let_pause(self.clock)
        lookups = Lookups([Answers(self.clock, "http://one"), Answers(self.clock, "http://two")])
        asking = lookups.entry(KEY.public)
        answers[0].callback(self.server_entry(b"s"))
        # After a pause, the reactor runs delayed calls before it reads.
        self.clock.advance(GRACE + 5.0)
        self.assertNoResult(asking)
        answers[1].callback(self.server_entry(b"s"))
        self.successResultOf(asking)
        self.assertEqual((lookups._hung, self.clock.getDelayedCalls()), ({}, []))

    def test_a_change_is_not_held_up(self) -> None:
        """One discovery accepts the change and never answers; it is sent the next change as well, and the others do
        not wait.
        """

        class Hangs(Lookup):
            def __init__(self, clock: Any) -> None:
                super().__init__(clock, "http://hangs")
                self.asked: list[Deferred[Any]] = []
                self.cancelled = 0

            def update(self, key: Any, make: Any) -> Any:
                self.asked.append(Deferred(self.gave_up))
                return self.asked[-1]

            def withdraw(self, key: Any, half: str, features: Any = ()) -> Any:
                return self.update(key, None)

            def gave_up(self, _: Any) -> None:
                self.cancelled += 1

        hanging = Hangs(self.clock)
        lookups = Lookups([hanging, self.lookup])
        changing = lookups.update(KEY, self.with_client)
        self.assertNoResult(changing)
        self.assertEqual(self.successResultOf(self.lookup.entry(KEY.public)).sequence, 0)
        self.clock.advance(GRACE)
        self.successResultOf(changing)
        self.assertEqual((len(hanging.asked), hanging.cancelled), (1, 0))
        # For a while, the hanging discovery still gets changes, but is not waited for.
        self.successResultOf(lookups.update(KEY, self.with_client))
        self.assertEqual((len(hanging.asked), hanging.cancelled), (2, 1))
        hanging.asked[1].errback(DiscoveryError("late, and no"))
        self.successResultOf(lookups.withdraw(KEY, "client"))
        self.failureResultOf(self.lookup.entry(KEY.public), EntryNotFound)
        self.assertEqual((len(hanging.asked), hanging.cancelled), (3, 1))
        self.successResultOf(lookups.close())
        self.assertEqual((hanging.cancelled, lookups._changing), (2, {}))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_question_that_is_let_go(self) -> None:
        """The request was cancelled and is never answered: garbage collection reports no unhandled error."""

        class Silent:
            def request(self, *_: Any, **__: Any) -> Any:
                return Deferred()

        for many in (1, 2):
            lookups = Lookups([Lookup(self.clock, "http://silent", http=Silent()) for _ in range(many)])
            lookups.available_servers()
            del lookups
            gc.collect()
            self.assertEqual(self.flushLoggedErrors(), [])

    def test_writes_go_to_all_discoveries(self) -> None:
        """An absent discovery does not matter."""
        away = Lookup(self.clock, "http://away", http=Away())
        lookups = Lookups([away, self.lookup])
        self.successResultOf(lookups.update(KEY, self.with_client))
        self.assertEqual(self.successResultOf(lookups.entry(KEY.public)).static, KEY.public.hex())
        self.failureResultOf(lookups.entry(SecKey.generate().public), DiscoveryError)
        self.assertEqual(self.successResultOf(lookups.available_servers()), [])
        self.failureResultOf(Lookups([away]).available_servers(), DiscoveryError)
        self.successResultOf(lookups.delete(KEY))
