"""Stores of nameplates, in the SQLite or Redis that also stores the entries."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from twisted.internet.defer import Deferred, DeferredLock, fail, succeed
from zope.interface import implementer

from dmsg.discovery.entries.nameplates import NONE_FREE, TOO_MANY, StoredNameplate, check_stored, decide_claim
from dmsg.discovery.store.base import INameplates
from dmsg.discovery.store.transaction import Changes, attempt
from dmsg.errors import EntryNotFound

if TYPE_CHECKING:
    from dmsg.net.redis import RedisConnection

MAX_REMOVED_PER_CLAIM = 100
"""Maximum number of expired nameplates that one claim deletes in Redis."""


@implementer(INameplates)
class SQLiteNameplates:
    """Store of nameplates in the SQLite database of the entries."""

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, db: sqlite3.Connection, changes: Changes) -> None:
        self._db = db
        self._changes = changes
        db.execute(
            "CREATE TABLE IF NOT EXISTS nameplates (number INTEGER PRIMARY KEY, static TEXT NOT NULL UNIQUE, "
            "place TEXT NOT NULL, ends REAL NOT NULL)"
        )

    def is_full(self, error: BaseException | None) -> bool:
        return isinstance(error, sqlite3.Error)

    def claim(
        self, static: str, numbers: Sequence[int], place: str, limit: float, now: float, ends: float
    ) -> Deferred[int]:
        return self._changes.make(partial(self._claim, static, numbers, place, limit, now, ends))

    def _claim(self, static: str, numbers: Sequence[int], place: str, limit: float, now: float, ends: float) -> int:
        db = self._db
        db.execute("DELETE FROM nameplates WHERE ends <= ?", (now,))
        held = db.execute("SELECT count(*) FROM nameplates WHERE place = ?", (place,)).fetchone()[0]
        free = (one for one in numbers if self._stored("number", one) is None)
        number = decide_claim(self._stored("static", static), place, held, limit, free)
        if number not in (TOO_MANY, NONE_FREE):
            db.execute("INSERT OR REPLACE INTO nameplates VALUES (?, ?, ?, ?)", (number, static, place, ends))
        return number

    def _stored(self, column: str, value: int | str) -> StoredNameplate | None:
        """Return the nameplate in the row where ``column`` (``number`` or ``static``) has this value."""
        row = self._db.execute(
            f"SELECT number, static, place, ends FROM nameplates WHERE {column} = ?",  # noqa: S608  # ours
            (value,),
        ).fetchone()
        return None if row is None else StoredNameplate(*row)

    def find(self, number: int, now: float) -> Deferred[str]:
        try:
            return succeed(check_stored(self._stored("number", number), now).static)
        except (EntryNotFound, sqlite3.Error):
            return fail()

    def release(self, number: int, static: str, now: float) -> Deferred[None]:
        return self._changes.make(partial(self._release, number, static, now))

    def _release(self, number: int, static: str, now: float) -> None:
        check_stored(self._stored("number", number), now, static)
        self._db.execute("DELETE FROM nameplates WHERE number = ?", (number,))


# The keys in Redis are: a hash from number to "<key> <place>"; a hash from key to number; a hash from place to the
# count of its nameplates; a sorted set of the numbers by their expiry.
_DROP = """
local keys, numbers, places, ends = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local function count(place, by)
  if redis.call('HINCRBY', places, place, by) <= 0 then redis.call('HDEL', places, place) end
end
local function drop(number)
  local kept = redis.call('HGET', keys, number)
  local blank = string.find(kept, ' ', 1, true)
  redis.call('HDEL', numbers, string.sub(kept, 1, blank - 1))
  redis.call('HDEL', keys, number)
  redis.call('ZREM', ends, number)
  count(string.sub(kept, blank + 1), -1)
end
"""
_READ = (
    _DROP
    + """
for _, number in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', ARGV[3], 'LIMIT', 0, ARGV[4])) do drop(number) end
local number = redis.call('HGET', numbers, ARGV[1])
local kept = number and redis.call('HGET', keys, number) or false
local held = redis.call('HGET', places, ARGV[2]) or '0'
return {number, kept, held, redis.call('HMGET', keys, unpack(ARGV, 5))}
"""
)
# This is an optimistic transaction. Python code has made the decision from the values that _READ returned. If these
# values have changed since then, the script writes nothing.
_CLAIM = (
    _DROP
    + """
local static, place, number, ends_at, read_number, read_kept, read_held = unpack(ARGV)
if (redis.call('HGET', numbers, static) or '') ~= read_number or (redis.call('HGET', keys, number) or '') ~= read_kept
  or (redis.call('HGET', places, place) or '0') ~= read_held then return false end
if read_kept ~= '' then drop(number) end
redis.call('HSET', keys, number, static .. ' ' .. place)
redis.call('HSET', numbers, static, number)
redis.call('ZADD', ends, ends_at, number)
count(place, 1)
return number
"""
)
_LOOK = "return {redis.call('HGET', KEYS[1], ARGV[1]), redis.call('ZSCORE', KEYS[4], ARGV[1])}"
_RELEASE = (
    _DROP
    + """
if redis.call('HGET', keys, ARGV[1]) ~= ARGV[2] then return false end
drop(ARGV[1])
return 1
"""
)


@implementer(INameplates)
class RedisNameplates:
    """Store of nameplates in the Redis of the entries, in ``dmsg:nameplates`` and three other keys with this prefix."""

    def __init__(self, connection: RedisConnection, prefix: str) -> None:
        self._redis = connection
        self._lock = DeferredLock()
        name = f"{prefix}nameplates"
        self._keys = [name, f"{name}:numbers", f"{name}:places", f"{name}:ends"]

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Type of the errors of Redis, including timeouts."""
        from txredisapi import RedisError  # The import is here, because the package is an optional dependency.

        return (RedisError,)

    def is_full(self, error: BaseException | None) -> bool:
        return False

    def claim(
        self, static: str, numbers: Sequence[int], place: str, limit: float, now: float, ends: float
    ) -> Deferred[int]:
        async def change() -> int | None:
            asked = [static, place, repr(now), str(MAX_REMOVED_PER_CLAIM), *map(str, numbers)]
            known, kept, held, used = await self._redis.eval(_READ, self._keys, asked)
            free = (one for one, key in zip(numbers, used, strict=True) if key is None)
            number = decide_claim(self._stored(known, kept, ends), place, int(held), limit, free)
            if number in (TOO_MANY, NONE_FREE):
                return number
            read = [known or b"", kept or b"", held]
            written = await self._redis.eval(_CLAIM, self._keys, [static, place, str(number), repr(ends), *read])
            return None if written is None else number

        # Claims of one process are serialised. Otherwise a claim could change values that a concurrent claim has read,
        # and the concurrent claim would have to be repeated.
        return self._lock.run(lambda: Deferred.fromCoroutine(attempt(change)))

    @staticmethod
    def _stored(number: bytes | None, kept: bytes | None, ends: float) -> StoredNameplate | None:
        if number is None or kept is None:
            return None
        static, _, place = kept.decode().partition(" ")
        return StoredNameplate(int(number), static, place, ends)

    async def _find(self, number: int, now: float, static: str | None = None) -> tuple[StoredNameplate, bytes]:
        kept, ends = await self._redis.eval(_LOOK, self._keys, [str(number)])
        return check_stored(self._stored(b"%d" % number, kept, float(ends or 0)), now, static), kept

    def find(self, number: int, now: float) -> Deferred[str]:
        return Deferred.fromCoroutine(self._find(number, now)).addCallback(lambda found: found[0].static)

    def release(self, number: int, static: str, now: float) -> Deferred[None]:
        async def change() -> int | None:
            _, kept = await self._find(number, now, static)
            released: int | None = await self._redis.eval(_RELEASE, self._keys, [str(number), kept])
            return released

        return Deferred.fromCoroutine(attempt(change)).addCallback(lambda _: None)
