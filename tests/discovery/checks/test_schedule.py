"""Schedule of checks: which servers are checked, how often, and what a check has to prove."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.checks import schedule as looks_module
from dmsg.discovery.checks.limits import (
    OWN_CHECKS,
    PORTS,
    PORTS_PER_BLOCK,
    PROOFS_PER_BLOCK,
)
from dmsg.discovery.checks.proof import Opening
from dmsg.discovery.checks.schedule import (
    CHECK_INTERVAL,
    CHECK_TIMEOUT,
    CHECKS_PER_BLOCK,
    CHECKS_PER_TTL,
    CHECKS_PER_WIDER_BLOCK,
    FIRST_CHECK_DELAY,
    MAX_FAILED_CHECKS,
    MAX_INTERVAL_REFRESHED,
    MAX_OTHER_CHECKS,
    MAX_SILENT_CHECKS,
    POSTPONED_FOR,
    PROVED_FOR,
    UNLISTED_AFTER,
    ServerChecks,
)
from dmsg.discovery.entries.entry import Entry, ServerMeta
from dmsg.discovery.entries.rules import Terms
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.net.fair_queue import FairQueue
from tests.net.test_own_pauses import let_pause

TTL = 120.0


def server(number: int, address: str = "8.8.8.8:1", sequence: int = 0, version: str = "0.0.1") -> Entry:
    key = SecKey.from_seed(b"looks %d" % number)
    return Entry(version, sequence, 1 + sequence, key.public.hex(), server=ServerMeta(address, 1)).sign(key)


class ServerChecksTests(SynchronousTestCase):
    """Checks with a test clock and a network that answers as the test decides."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.store = SQLiteStore(":memory:")
        self.there = True
        self.proves = True
        self.reached: list[tuple[str, int]] = []
        self.proofs = 0
        self.start()
        self.addCleanup(self.stop)

    def start(self) -> None:
        self.looks = ServerChecks(
            self.clock, self.store, self.clock.seconds, TTL, reach=self.reach, lasts=1000.0, random=Random(1)
        )
        self.looks.start()

    def stop(self) -> None:
        self.successResultOf(Deferred.fromCoroutine(self.looks.stop()))

    def restart(self) -> None:
        """Check by a new object, as a new process of discovery does over the same store."""
        self.stop()
        self.start()

    def count_postponements(self) -> list[float]:
        """Return a list to which the time of each postponed check is added."""
        times: list[float] = []
        postpone = self.looks._postponement_delay

        def counted() -> float:
            times.append(self.clock.seconds())
            return postpone()

        self.patch(self.looks, "_postponement_delay", counted)
        return times

    def reach(self, host: str, port: int, opening: Opening | None, *carrier: object) -> Deferred[Any]:
        self.reached.append((host, port))
        if not self.there:
            return fail(ConnectionRefusedError())
        if opening is not None:
            self.proofs += 1
            if not self.proves:
                return fail(HandshakeError("another key"))
        return succeed(None)

    def post(self, entry: Entry, refreshes: bool = False, place: str = "1.1.1.1") -> None:
        terms = Terms(refreshes=refreshes, checked=False, place=place, lasts=1000.0)
        self.successResultOf(self.store.post(entry, self.clock.seconds(), terms))
        self.looks.soon()

    def listed(self) -> int:
        return len(self.successResultOf(self.store.quiet(100, self.clock.seconds() - TTL)))

    def available(self) -> int:
        return len(self.successResultOf(self.store.available(1000, self.clock.seconds() - TTL)))

    def advance(self, seconds: float) -> None:
        self.clock.pump([CHECK_INTERVAL] * int(seconds / CHECK_INTERVAL))

    def test_a_reachable_server_stays_listed(self) -> None:
        self.post(server(1))
        self.assertEqual(self.listed(), 0)
        self.clock.advance(0.1)
        self.assertEqual(self.listed(), 1)
        self.advance(3500.0)
        self.assertEqual(self.listed(), 1)
        self.assertLess(len(self.reached), 3600 / (TTL / 3) + 2)
        self.assertEqual(self.proofs, 1)
        # After its last successful check, the entry is kept for this time.
        self.assertEqual(self.successResultOf(self.store.sweep(self.clock.seconds() + 900.0, 10)), 0)
        self.there = False
        self.advance(TTL + 10)
        self.assertEqual(self.listed(), 0)
        self.there = True
        self.advance(TTL * 4)
        self.assertEqual(self.listed(), 1)

    def test_a_server_that_does_not_prove_its_key_is_not_listed(self) -> None:
        """Anybody can write the address of another server into an entry."""
        self.proves = False
        self.post(server(1))
        self.post(server(2, "8.8.4.4:1", version="0.0.1+relay1"), refreshes=True)
        self.advance(600.0)
        self.assertEqual((self.listed(), self.available()), (0, 0))
        self.assertTrue(self.proofs)

    def test_a_proof_is_asked_for_once_an_hour(self) -> None:
        for number, refreshes in ((1, True), (2, False)):
            version = "0.0.1+relay1" if refreshes else "0.0.1"
            self.post(server(number, f"8.8.8.{number}:1", version=version), refreshes)
        self.clock.advance(0.1)
        self.assertEqual(self.proofs, 2)
        self.advance(PROVED_FOR - 10)
        self.assertEqual(self.proofs, 2)
        self.advance(TTL)
        self.assertEqual(self.proofs, 4)
        # Another server has the address now.
        self.proves = False
        self.advance(PROVED_FOR + 5 * MAX_INTERVAL_REFRESHED)
        self.assertEqual(self.listed(), 0)
        self.assertEqual(self.successResultOf(self.store.available(10, 0.0)), [])

    def test_a_refreshing_server_is_checked_on_arrival_and_move(self) -> None:
        """The server stays listed through two failed checks."""
        self.post(server(1, version="0.0.1+relay1"), refreshes=True)
        self.clock.advance(0.1)
        self.assertEqual((self.available(), len(self.reached)), (1, 1))
        for sequence in range(1, 20):
            self.post(server(1, sequence=sequence, version="0.0.1+relay1"), refreshes=True)
            self.advance(30.0)
        self.assertEqual((self.available(), len(self.reached)), (1, 1))
        self.there = False
        self.post(server(1, "8.8.4.4:1", sequence=20, version="0.0.1+relay1"), refreshes=True)
        self.clock.advance(0.1)
        self.assertEqual((self.available(), len(self.reached)), (0, 2))
        self.there = True
        self.advance(60.0)
        self.assertEqual((self.available(), len(self.reached)), (1, 3))
        self.there = False
        self.advance(PROVED_FOR + 3000.0)
        looked = len(self.reached)
        self.assertLess(looked, 3 + 5 + 3000.0 / MAX_INTERVAL_REFRESHED)
        self.assertGreaterEqual(looked, 3 + UNLISTED_AFTER)
        self.assertEqual(self.successResultOf(self.store.available(10, 0.0)), [])

    def test_a_quiet_one_with_an_old_mark(self) -> None:
        """An old mark of another program has no effect. Only the way in which the entry was posted counts."""
        self.post(server(1, version="0.0.1+relay1"))
        self.advance(600.0)
        self.assertEqual(self.listed(), 1)

    def test_an_unreachable_server_is_checked_rarely(self) -> None:
        self.there = False
        self.post(server(1))
        self.advance(24 * 3600.0)
        self.assertLess(len(self.reached), 10)

    def test_an_address_that_many_entries_name_is_asked_so_often(self) -> None:
        """Otherwise entries could make discovery flood an address. Servers at other addresses are still checked."""
        for number in range(100):
            self.post(server(number))
        self.advance(30.0)
        self.assertEqual((len(self.reached), self.listed()), (PROOFS_PER_BLOCK, PROOFS_PER_BLOCK))
        self.post(server(100), place="2.2.2.2")
        self.advance(5.0)
        self.assertEqual(self.listed(), PROOFS_PER_BLOCK + 1)

    def test_posts_from_the_servers_own_block_have_their_own_checks(self) -> None:
        """A server that posts from its own block is checked, however many other posters name the block."""
        for number in range(400):
            self.post(server(number, f"8.8.8.8:{number + 1}"), place=f"1.1.1.{number % 50}")
        self.clock.pump([0.1] * 20)
        self.assertLessEqual(len(self.reached), PORTS)
        self.post(server(500, "8.8.8.8:7777"), place="8.8.8.8")
        self.clock.pump([0.1] * 20)
        self.assertEqual(self.reached[-1], ("8.8.8.8", 7777))
        for number in range(600, 700):
            self.post(server(number, "8.8.8.8:7777"), place="8.8.8.8")
        self.advance(5.0)
        self.assertLessEqual(self.reached.count(("8.8.8.8", 7777)), OWN_CHECKS + PROOFS_PER_BLOCK)

    def test_ports_named_by_others_take_no_checks_from_a_listed_server(self) -> None:
        """The checks of a listed server do not count towards the allowance of its address, also after a restart."""

        def reach(host: str, port: int, opening: Opening | None, *carrier: object) -> Deferred[Any]:
            if port == 1:
                times.append(self.clock.seconds())
                return self.reach(host, port, opening)
            others.add(port)
            return fail(HandshakeError("no server"))

        times: list[float] = []
        others: set[int] = set()
        self.looks._reach = reach
        self.post(server(1, "8.8.8.8:1"))
        self.advance(CHECK_INTERVAL)
        for number in range(2, 250):
            self.post(server(number, f"8.8.8.8:{number}"), place=f"1.1.{number % 50}.1")
        for restarts in (False, True):
            if restarts:
                self.restart()
                self.looks._reach = reach
                self.looks.soon()
            del times[:]
            others.clear()
            begun = self.clock.seconds()
            # Each turn of the clock begins CHECKS_PER_TURN checks at most, and longer ones would delay all of them.
            for _ in range(int(2 * TTL)):
                self.clock.advance(1.0)
                self.assertEqual(self.listed(), 1)
            # The allowance was used up in each window, or nothing would be shown.
            self.assertGreaterEqual(len(others), PORTS)
            intervals = [after - before for before, after in pairwise([begun, *times, self.clock.seconds()])]
            self.assertLessEqual(max(intervals), TTL / CHECKS_PER_TTL + 2 * CHECK_INTERVAL)

    def test_a_postponed_check_is_not_counted_as_a_failure(self) -> None:
        """A listed server whose check finds no place stays listed, and is checked as soon as there is one."""

        def post_regularly(seconds: float) -> None:
            for _ in range(int(seconds / 30.0)):
                sequences[0] += 1
                self.post(server(1, sequence=sequences[0], version="0.0.1+relay1"), refreshes=True)
                self.advance(30.0)
                self.assertEqual(self.available(), 1)

        sequences = [0]
        self.post(server(1, version="0.0.1+relay1"), refreshes=True)
        self.advance(CHECK_INTERVAL)
        self.assertEqual((self.available(), self.proofs), (1, 1))
        self.looks._listed = crowded = FairQueue(1, 1, 1, 0, 0)
        self.successResultOf(crowded.acquire("2.2.2.2"))
        postponed = self.count_postponements()
        self.clock.advance(PROVED_FOR)
        post_regularly(4 * MAX_INTERVAL_REFRESHED)
        self.assertEqual(self.proofs, 1)
        self.assertGreater(len(postponed), 2 * MAX_FAILED_CHECKS)
        crowded.release("2.2.2.2")
        post_regularly(2 * POSTPONED_FOR)
        self.assertEqual(self.proofs, 2)

    def test_few_checks_of_a_block_run_concurrently(self) -> None:
        """Servers that take connections and say nothing keep nobody else waiting."""
        silent = self.silence("8.8.8.")
        for number in range(200):
            self.post(server(number, f"8.8.8.{number}:1"))
        self.post(server(300, "8.8.4.4:1"), place="2.2.2.2")
        self.clock.pump([FIRST_CHECK_DELAY] * 20)
        self.assertEqual((len(silent), self.listed()), (CHECKS_PER_BLOCK, 1))
        self.advance(60.0)
        self.assertLessEqual(len(silent), CHECKS_PER_BLOCK)

    def test_a_check_of_a_former_address_is_ignored(self) -> None:
        """The result says nothing about the new address."""
        looks: list[Deferred[Any]] = []

        def reach(host: str, port: int, opening: Any, *carrier: object) -> Deferred[Any]:
            if host == "8.8.8.8":
                looks.append(Deferred())
                return looks[-1]
            return fail(HandshakeError("another key"))

        self.looks._reach = reach
        self.post(server(1, "8.8.8.8:1", version="0.0.1+relay1"), refreshes=True)
        self.advance(5.0)
        self.post(server(1, "10.0.0.1:80", sequence=1, version="0.0.1+relay1"), refreshes=True)
        looks[0].callback(None)
        self.advance(5.0)
        self.assertEqual(self.available(), 0)
        self.advance(60.0)
        self.assertEqual(self.successResultOf(self.store.available(10, 0.0)), [])

    def test_an_unreachable_address_is_connected_once_per_window(self) -> None:
        self.there = False
        for number in range(100):
            self.post(server(number))
        self.advance(30.0)
        self.assertEqual(len(self.reached), 1)

    def test_few_checks_run_at_a_time(self) -> None:
        self.patch(looks_module, "MAX_UNDER_WAY", 300)
        for number in range(500):
            self.post(server(number, f"8.8.{number // 200}.{number % 200}:1"), place=f"1.{number % 50}.1.1")
        silent = self.silence("8.8.")
        self.clock.pump([FIRST_CHECK_DELAY] * 20)
        self.assertEqual(len(silent), MAX_OTHER_CHECKS)
        self.assertEqual(len(self.looks._under_way), 300)
        silent[0].callback(None)
        self.assertEqual(len(silent), MAX_OTHER_CHECKS)
        self.assertEqual(self.listed(), 1)

    def test_thousands_of_silent_servers_do_not_delay_a_new_one(self) -> None:
        """Some thousand entries from /64 networks of one /55, as in a real attack: the servers accept connections and
        send nothing.  A new server is listed at once, and a listed server of 2019 stays listed.
        """
        old = server(5000, "9.9.9.9:1")
        self.post(old, place="9.9.9.8")
        self.clock.advance(0.1)
        self.assertEqual(self.listed(), 1)
        silent = self.silence("2600:1:")
        for number in range(1040):
            block = 0x200 + number % 260
            self.post(server(number, f"[2600:1:0:{block:x}::{number:x}]:1"), place=f"2600:1:0:{block:x}::/64")
        self.clock.pump([FIRST_CHECK_DELAY] * 200)
        longest = 0.0
        for number in range(5):
            self.post(server(6000 + number, f"8.8.{number}.8:1"), place=f"8.9.{number}.8")
            came = self.clock.seconds()
            while self.listed() < 2 + number:
                self.clock.advance(FIRST_CHECK_DELAY)
                self.assertLess(self.clock.seconds() - came, 10.0)
            longest = max(longest, self.clock.seconds() - came)
            self.clock.pump([FIRST_CHECK_DELAY] * 200)
        self.assertLess(longest, 1.0)
        self.assertIn(old.to_json(), self.successResultOf(self.store.quiet(100, self.clock.seconds() - TTL)))
        self.assertLessEqual(len(silent), CHECKS_PER_WIDER_BLOCK + MAX_SILENT_CHECKS)

    def test_neighbours_of_silent_servers_are_looked_at_too(self) -> None:
        """Later: their /48 has only some of the places, and they wait behind the others of it in turn."""
        self.silence("2600:1:0:2")
        for number in range(250):
            self.post(server(number, f"[2600:1:0:{0x200 + number:x}::1]:1"), place=f"2600:1:0:{0x200 + number:x}::/64")
        self.clock.pump([FIRST_CHECK_DELAY] * 400)
        self.post(server(1000, "[2600:1:0:9000::1]:1"), place="2600:1:0:9000::/64")
        for _ in range(60):
            self.clock.advance(1.0)
        self.assertEqual(self.listed(), 1)

    def test_postponed_checks_leave_room_for_others(self) -> None:
        """Entries without room for a check return later. The more entries wait, the longer they wait."""
        delays = [self.looks._postponement_delay() for _ in range(60_000)]
        self.assertGreater(sum(delays[-100:]) / 100, 150.0)
        self.assertLess(sum(delays[:100]) / 100, 1.5 * POSTPONED_FOR)
        self.clock.advance(400.0)
        self.assertLess(self.looks._postponement_delay(), 1.5 * POSTPONED_FOR + 1)

    def silence(self, prefix: str) -> list[Deferred[Any]]:
        """Servers there take connections and say nothing.  :returns: connections to them that are open."""
        silent: list[Deferred[Any]] = []

        def reach(host: str, port: int, opening: Any, *carrier: object) -> Deferred[Any]:
            if not host.startswith(prefix):
                return self.reach(host, port, opening)
            connection: Deferred[Any] = Deferred()
            silent.append(connection)

            def over(result: Any) -> Any:
                silent.remove(connection)
                return result

            connection.addBoth(over)
            return connection

        self.looks._reach = reach
        return silent

    def test_a_silent_server_does_not_delay_other_checks(self) -> None:
        def reach(host: str, port: int, opening: Any, *carrier: object) -> Deferred[Any]:
            return Deferred() if host == "8.8.8.8" else self.reach(host, port, opening)

        self.looks._reach = reach
        self.post(server(1))
        self.advance(10.0)
        self.post(server(2, "8.8.4.4:1"))
        self.clock.advance(0.1)
        self.assertEqual(self.listed(), 1)

    def test_a_pause_of_discovery_counts_against_no_server(self) -> None:
        """Discovery stands still during a check. The timers run before the server's answer is read."""
        let_pause(self.clock)
        answers = self.silence("8.8.8.8")
        self.post(server(1))
        self.clock.advance(FIRST_CHECK_DELAY)
        self.assertEqual((len(answers), self.listed()), (1, 0))
        self.clock.advance(2 * CHECK_TIMEOUT)
        answers[0].callback(None)
        self.assertEqual(self.listed(), 1)

    def test_ports_of_one_address_are_few(self) -> None:
        """Discovery cannot be used to scan the ports of an address."""
        for number in range(50):
            self.post(server(number, f"8.8.8.8:{number + 1}"))
        self.advance(CHECK_INTERVAL)
        self.assertEqual(len(self.reached), PORTS_PER_BLOCK)

    def test_spellings_of_one_address_are_one(self) -> None:
        self.there = False
        for number, text in enumerate(("8.8.8.8:1", "[::ffff:8.8.8.8]:1", "[::ffff:808:808]:1")):
            self.post(server(number, text))
        self.post(server(9, "8.8.8.8%x.example:1"))
        self.advance(CHECK_INTERVAL)
        self.assertEqual(self.reached, [("8.8.8.8", 1)])

    def test_private_addresses_are_checked_for_local_posters(self) -> None:
        self.post(server(1, "10.0.0.1:1"), place="10.0.0.7")
        self.post(server(2, "10.0.0.2:1"), place="1.1.1.1")
        self.post(server(3, "127.0.0.1:1"), place="10.0.0.7")
        self.advance(60.0)
        self.assertEqual(self.reached[0], ("10.0.0.1", 1))
        self.assertEqual(self.listed(), 1)
        self.looks._anywhere = True
        self.advance(TTL * 3)
        self.assertEqual(self.listed(), 3)

    def test_an_entry_that_was_never_reachable_is_abandoned(self) -> None:
        """Dead entries would take the time of those that live."""
        self.there = False
        self.post(server(1))
        self.advance(48 * 3600.0)
        self.assertEqual(len(self.reached), MAX_FAILED_CHECKS)

    def test_a_store_that_fails_is_asked_again(self) -> None:
        due = self.store.due
        self.store.due = lambda *arguments: fail(OSError("away"))  # type: ignore[method-assign]
        self.post(server(1))
        self.advance(TTL)
        self.store.due = due  # type: ignore[method-assign]
        self.advance(CHECK_INTERVAL * 2)
        self.assertEqual(len(self.reached), 1)
