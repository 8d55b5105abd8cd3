"""Where nameplates are kept: beside the entries, in memory, in a file, or in Redis."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.base.ranked import Ranked
from dmsg.base.tables import uncount
from dmsg.discovery.entries.nameplates import NONE_FREE, TOO_MANY
from dmsg.discovery.store.base import INameplates
from dmsg.discovery.store.transaction import transaction
from dmsg.errors import EntryNotFound

SWEPT = 100
"""Nameplates that are dropped at a time, at each claim, because their time is over."""


@dataclass(slots=True)
class _Nameplate:
    static: str
    place: str
    ends: float


@implementer(INameplates)
class MemoryNameplates:
    """In memory, gone with the process."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._kept: dict[int, _Nameplate] = {}
        self._of: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._ends: Ranked[int] = Ranked()

    def is_full(self, error: BaseException) -> bool:
        return False

    def claim(
        self, static: str, numbers: Sequence[int], place: str, most: float, now: float, ends: float
    ) -> Deferred[int]:
        self._sweep(now)
        number = self._of.get(static)
        elsewhere = number is not None and self._kept[number].place != place
        if (number is None or elsewhere) and self._counts[place] >= most:
            return succeed(TOO_MANY)
        if number is not None and elsewhere:
            uncount(self._counts, self._kept[number].place)
            self._counts[place] += 1
            self._kept[number].place = place
        if number is None:
            number = next((one for one in numbers if one not in self._kept), NONE_FREE)
            if number == NONE_FREE:
                return succeed(NONE_FREE)
            self._kept[number] = _Nameplate(static, place, ends)
            self._of[static] = number
            self._counts[place] += 1
        self._kept[number].ends = ends
        self._ends.put(number, ends)
        return succeed(number)

    def look(self, number: int, now: float) -> Deferred[str]:
        found = self._kept.get(number)
        return fail(EntryNotFound()) if found is None or found.ends <= now else succeed(found.static)

    def release(self, number: int, static: str, now: float) -> Deferred[None]:
        found = self._kept.get(number)
        if found is None or found.static != static or found.ends <= now:
            return fail(EntryNotFound())
        self._drop(number)
        return succeed(None)

    def _sweep(self, now: float) -> None:
        while (first := self._ends.first()) is not None and self._ends.rank(first) <= now:
            self._drop(first)

    def _drop(self, number: int) -> None:
        dropped = self._kept.pop(number)
        self._ends.remove(number)
        del self._of[dropped.static]
        uncount(self._counts, dropped.place)


@implementer(INameplates)
class SQLiteNameplates:
    """In the file of the entries."""

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(
            "CREATE TABLE IF NOT EXISTS nameplates (number INTEGER PRIMARY KEY, static TEXT NOT NULL UNIQUE, "
            "place TEXT NOT NULL, ends REAL NOT NULL)"
        )

    def is_full(self, error: BaseException) -> bool:
        return isinstance(error, sqlite3.Error)

    def claim(
        self, static: str, numbers: Sequence[int], place: str, most: float, now: float, ends: float
    ) -> Deferred[int]:
        try:
            with transaction(self._db):
                number = self._claim(static, numbers, place, most, now, ends)
        except sqlite3.Error:
            return fail()
        return succeed(number)

    def _claim(self, static: str, numbers: Sequence[int], place: str, most: float, now: float, ends: float) -> int:
        db = self._db
        db.execute("DELETE FROM nameplates WHERE ends <= ?", (now,))
        known = db.execute("SELECT number, place FROM nameplates WHERE static = ?", (static,)).fetchone()
        of_place = db.execute("SELECT count(*) FROM nameplates WHERE place = ?", (place,)).fetchone()[0]
        if (known is None or known[1] != place) and of_place >= most:
            return TOO_MANY
        if known is not None:
            db.execute("UPDATE nameplates SET ends = ?, place = ? WHERE number = ?", (ends, place, known[0]))
            return int(known[0])
        for number in numbers:
            # a number that is in use changes nothing
            row = (number, static, place, ends)
            if db.execute("INSERT OR IGNORE INTO nameplates VALUES (?, ?, ?, ?)", row).rowcount:
                return number
        return NONE_FREE

    def look(self, number: int, now: float) -> Deferred[str]:
        try:
            row = self._db.execute(
                "SELECT static FROM nameplates WHERE number = ? AND ends > ?", (number, now)
            ).fetchone()
        except sqlite3.Error:
            return fail()
        return fail(EntryNotFound()) if row is None else succeed(str(row[0]))

    def release(self, number: int, static: str, now: float) -> Deferred[None]:
        try:
            gone = self._db.execute(
                "DELETE FROM nameplates WHERE number = ? AND static = ? AND ends > ?", (number, static, now)
            ).rowcount
        except sqlite3.Error:
            return fail()
        return succeed(None) if gone else fail(EntryNotFound())


# "<number>" -> "<key> <place>" in one hash, "<key>" -> number in another, "<place>" -> how many in a third; the
# numbers by the time when they end in a sorted set
_CLAIM = """
local keys, numbers, places, ends = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
for _, number in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', ARGV[4], 'LIMIT', 0, ARGV[6])) do
  local kept = redis.call('HGET', keys, number)
  local blank = string.find(kept, ' ', 1, true)
  redis.call('HDEL', numbers, string.sub(kept, 1, blank - 1))
  redis.call('HDEL', keys, number)
  redis.call('ZREM', ends, number)
  local place = string.sub(kept, blank + 1)
  if redis.call('HINCRBY', places, place, -1) <= 0 then redis.call('HDEL', places, place) end
end
local number = redis.call('HGET', numbers, ARGV[1])
local before = number and string.sub(redis.call('HGET', keys, number), #ARGV[1] + 2)
if before ~= ARGV[2] and tonumber(redis.call('HGET', places, ARGV[2]) or 0) >= tonumber(ARGV[3]) then
  return ARGV[7]
end
if number and before ~= ARGV[2] then
  if redis.call('HINCRBY', places, before, -1) <= 0 then redis.call('HDEL', places, before) end
  redis.call('HINCRBY', places, ARGV[2], 1)
  redis.call('HSET', keys, number, ARGV[1] .. ' ' .. ARGV[2])
end
if not number then
  for at = 9, #ARGV do
    if redis.call('HSETNX', keys, ARGV[at], ARGV[1] .. ' ' .. ARGV[2]) == 1 then number = ARGV[at] break end
  end
  if not number then return ARGV[8] end
  redis.call('HSET', numbers, ARGV[1], number)
  redis.call('HINCRBY', places, ARGV[2], 1)
end
redis.call('ZADD', ends, ARGV[5], number)
return number
"""
_LOOK = """
local over = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not over or tonumber(over) <= tonumber(ARGV[2]) then return false end
return redis.call('HGET', KEYS[1], ARGV[1])
"""
_RELEASE = """
local keys, numbers, places, ends = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local over = redis.call('ZSCORE', ends, ARGV[1])
if not over or tonumber(over) <= tonumber(ARGV[3]) or redis.call('HGET', numbers, ARGV[2]) ~= ARGV[1] then return 0 end
local place = string.sub(redis.call('HGET', keys, ARGV[1]), #ARGV[2] + 2)
redis.call('HDEL', keys, ARGV[1])
redis.call('HDEL', numbers, ARGV[2])
redis.call('ZREM', ends, ARGV[1])
if redis.call('HINCRBY', places, place, -1) <= 0 then redis.call('HDEL', places, place) end
return 1
"""


@implementer(INameplates)
class RedisNameplates:
    """In the Redis of the entries: ``dmsg:nameplates`` and three keys that begin so."""

    def __init__(self, connection: Any, prefix: str) -> None:
        self._redis = connection
        name = f"{prefix}nameplates"
        self._keys = [name, f"{name}:numbers", f"{name}:places", f"{name}:ends"]

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What Redis says, or that it says nothing."""
        from txredisapi import RedisError  # an extra

        return (RedisError,)

    def is_full(self, error: BaseException) -> bool:
        return False

    def claim(
        self, static: str, numbers: Sequence[int], place: str, most: float, now: float, ends: float
    ) -> Deferred[int]:
        most = 1e18 if math.isinf(most) else most
        fixed = [static, place, repr(most), repr(now), repr(ends), str(SWEPT), str(TOO_MANY), str(NONE_FREE)]
        asked: Deferred[Any] = self._redis.eval(_CLAIM, self._keys, [*fixed, *map(str, numbers)])
        return asked.addCallback(int)

    def look(self, number: int, now: float) -> Deferred[str]:
        def found(kept: bytes | None) -> str:
            if kept is None:
                raise EntryNotFound
            return bytes(kept).decode().partition(" ")[0]

        asked: Deferred[Any] = self._redis.eval(_LOOK, [self._keys[0], self._keys[3]], [str(number), repr(now)])
        return asked.addCallback(found)

    def release(self, number: int, static: str, now: float) -> Deferred[None]:
        def released(gone: int) -> None:
            if not gone:
                raise EntryNotFound

        asked: Deferred[Any] = self._redis.eval(_RELEASE, self._keys, [str(number), static, repr(now)])
        return asked.addCallback(released)
