"""Entries in Redis; any number of discovery processes may share one.

Each step that compares and sets is a script that runs there.  Numbers of entries
are compared as text: Lua's are doubles, ours have 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from twisted.internet.defer import Deferred
from zope.interface import implementer

from dmsg.discovery.entry import Entry, EntryInvalid
from dmsg.discovery.nameplates.store import RedisNameplates
from dmsg.discovery.rules import (
    WRONG_DELETE_SEQUENCE,
    WRONG_FIRST_SEQUENCE,
    WRONG_SEQUENCE,
    WRONG_TIME,
    DeletedLater,
    Deletion,
    Head,
    next_sequence,
    time_order,
)
from dmsg.discovery.store.base import (
    LATEST_LOOK,
    MIGRATED_TTL,
    NEVER,
    OVERHEAD,
    ROOM_AT_ONCE,
    TOMBSTONE_TTL,
    Dropped,
    Due,
    IEntryStore,
    Terms,
    ends,
    kind,
    listable,
    nobody_told,
    size_of,
    target,
)
from dmsg.errors import EntryNotFound

ADOPTED_AT_ONCE = 500
"""Entries of an earlier version that one script takes over: Redis does nothing else meanwhile."""
_UNKNOWN_LIMIT = 1e18

_KEYS = ("servers", "quiet", "looks", "entries", "kinds", "places", "ends", "size")
"""Behind the entry's own, in the order in which scripts know them."""

_ROOM = """
local servers, quiet, looks, entries, kinds = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local places, ends, size = KEYS[7], KEYS[8], KEYS[9]
local function resize(place, by)
  redis.call('INCRBY', size, by)
  if tonumber(redis.call('ZINCRBY', places, by, place)) <= 0 then redis.call('ZREM', places, place) end
end
local function unlist(name)
  redis.call('ZREM', servers, name)
  redis.call('ZREM', quiet, name)
  redis.call('ZREM', looks, name)
end
local function leave(name, place, taken)
  if place and taken then
    redis.call('ZREM', places .. ':' .. place, name)
    resize(place, -taken)
  end
end
local function drop(name)
  local kept = redis.call('HMGET', name, 'json', 'kind', 'place', 'size')
  redis.call('DEL', name)
  unlist(name)
  redis.call('ZREM', ends, name)
  leave(name, kept[3], kept[4])
  if kept[1] then
    redis.call('DECR', entries)
    if kept[2] then redis.call('HINCRBY', kinds, kept[2], -1) end
  end
  return kept[1], kept[3] or ''
end
local function drop_oldest(reason, whose, answer)
  local oldest = whose and redis.call('ZRANGE', places .. ':' .. whose, 0, 0)[1]
  if not oldest then return false end
  drop(oldest)
  answer[#answer + 1] = reason
  answer[#answer + 1] = whose
  return true
end
local function make_room(limit, answer)
  for _ = 1, ROOM_AT_ONCE do
    if tonumber(redis.call('GET', size) or 0) <= limit then return end
    if not drop_oldest('total', redis.call('ZREVRANGE', places, 0, 0)[1], answer) then return end
  end
end
""".replace("ROOM_AT_ONCE", str(ROOM_AT_ONCE))
_POST = (
    _ROOM
    + """
local head = redis.call('HMGET', KEYS[1], 'next', 'order', 'json', 'kind', 'place', 'size', 'target', 'checked',
  'deletion')
local kind = 'next'
if not head[3] then
  kind = 'first'
  if ARGV[1] ~= '0' then return {'not zero'} end
elseif head[1] ~= ARGV[1] then
  return {'sequence'}
end
if head[2] and ARGV[3] <= head[2] then
  if head[3] then return {'time'} end
  return {'deleted', head[2], head[9] or ''}
end
local place, taken, most, limit = ARGV[10], ARGV[11], tonumber(ARGV[12]), tonumber(ARGV[13])
local checked, look_at = ARGV[15], ARGV[8]
if head[3] and checked == '0' and (head[7] or ARGV[16]) == ARGV[16] then
  checked = head[8] or '1'
  if ARGV[7] == '1' then look_at = redis.call('ZSCORE', looks, KEYS[1]) or look_at end
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[1], 'next', ARGV[2], 'order', ARGV[3], 'json', ARGV[4], 'kind', ARGV[9],
  'place', place, 'size', taken, 'target', ARGV[16], 'checked', checked, 'refreshes', ARGV[7])
redis.call('HDEL', KEYS[1], 'deletion')
if head[3] and head[4] then redis.call('HINCRBY', kinds, head[4], -1) end
redis.call('HINCRBY', kinds, ARGV[9], 1)
unlist(KEYS[1])
if ARGV[6] == '1' then
  redis.call('ZADD', looks, look_at, KEYS[1])
  if checked == '1' then redis.call('ZADD', ARGV[7] == '1' and servers or quiet, ARGV[5], KEYS[1]) end
end
if kind == 'first' then redis.call('INCR', entries) end
leave(KEYS[1], head[5], head[6])
redis.call('ZADD', places .. ':' .. place, ARGV[5], KEYS[1])
redis.call('ZADD', ends, ARGV[14], KEYS[1])
resize(place, taken)
local answer = {kind}
while tonumber(redis.call('ZSCORE', places, place) or 0) > most do
  if not drop_oldest('address', place, answer) then break end
end
make_room(limit, answer)
return answer
"""
)
_DELETE = (
    _ROOM
    + """
local head = redis.call('HMGET', KEYS[1], 'sequence', 'order', 'json', 'kind', 'place', 'size')
if not head[3] then return 'missing' end
if head[1] ~= ARGV[1] then return 'sequence' end
if ARGV[2] <= head[2] then return 'time' end
redis.call('HSET', KEYS[1], 'order', ARGV[2], 'size', ARGV[3], 'deletion', ARGV[5])
redis.call('HDEL', KEYS[1], 'json')
unlist(KEYS[1])
redis.call('ZADD', ends, ARGV[4], KEYS[1])
if head[4] then redis.call('HINCRBY', kinds, head[4], -1) end
redis.call('DECR', entries)
if head[5] and head[6] then resize(head[5], ARGV[3] - head[6]) end
return 'deleted'
"""
)
_SWEEP = (
    _ROOM
    + """
local answer = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', ends, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
  local body, place = drop(name)
  answer[#answer + 1] = body and 'ended' or 'deleted'
  answer[#answer + 1] = place
end
local swept = #answer / 2
make_room(tonumber(ARGV[3]), answer)
return {swept, answer}
"""
)
_SET_BACK = """
local function cut(key, from, to)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, from, to)) do redis.call('ZADD', key, ARGV[1], name) end
end
cut(KEYS[1], '(' .. ARGV[1], '+inf')
cut(KEYS[2], '(' .. ARGV[1], '+inf')
cut(KEYS[3], '(' .. ARGV[2], '(' .. ARGV[3])
"""
_ADOPT = (
    _ROOM
    + """
for at = 4, #ARGV do
  local name = ARGV[at]
  local kept = redis.call('HMGET', name, 'json', 'size')
  if not kept[2] and redis.call('EXISTS', name) == 1 then
    local taken = ARGV[1] + (kept[1] and #kept[1] or 0)
    redis.call('HSET', name, 'place', '', 'size', taken)
    redis.call('ZADD', places .. ':', 0, name)
    redis.call('ZADD', ends, kept[1] and ARGV[2] or ARGV[3], name)
    resize('', taken)
  end
end
"""
)
# the drawing is by rank, so that stale servers, which are at the front, cost nothing
_AVAILABLE = """
local live = redis.call('ZCOUNT', KEYS[1], ARGV[1], '+inf')
local all = redis.call('ZCARD', KEYS[1])
local most = math.min(tonumber(ARGV[2]), live)
math.randomseed(tonumber(ARGV[3]))
local ranks, swapped = {}, {}
for i = 1, most do
  local j = math.random(i, live)
  ranks[i] = swapped[j] or j
  swapped[j] = swapped[i] or i
end
local found = {}
for i = 1, most do
  local rank = all - live + ranks[i] - 1
  local name = redis.call('ZRANGE', KEYS[1], rank, rank)[1]
  found[i] = redis.call('HGET', name, 'json')
end
return found
"""
_DUE = """
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])) do
  redis.call('ZADD', KEYS[1], ARGV[3], name)
  found[#found + 1] = redis.call('HGET', name, 'json') or ''
  found[#found + 1] = redis.call('HGET', name, 'place') or ''
  found[#found + 1] = redis.call('HGET', name, 'refreshes') or ''
  found[#found + 1] = redis.call('HGET', name, 'checked') or ''
end
return found
"""
_SEEN = (
    _ROOM
    + """
if not redis.call('ZSCORE', looks, KEYS[1]) then return end
local target = redis.call('HGET', KEYS[1], 'target')
if target and target ~= ARGV[5] then return end
redis.call('ZADD', looks, ARGV[2], KEYS[1])
if ARGV[1] == '' then
  if ARGV[4] == '0' then
    redis.call('HSET', KEYS[1], 'checked', '0')
    redis.call('ZREM', servers, KEYS[1])
    redis.call('ZREM', quiet, KEYS[1])
  end
  return
end
local known = redis.call('HMGET', KEYS[1], 'checked', 'refreshes')
redis.call('HSET', KEYS[1], 'checked', '1')
if known[2] == '1' then
  if known[1] ~= '1' then redis.call('ZADD', servers, ARGV[1], KEYS[1]) end
  return
end
redis.call('ZADD', quiet, ARGV[1], KEYS[1])
local over = redis.call('ZSCORE', ends, KEYS[1])
if over and tonumber(over) < tonumber(ARGV[3]) then redis.call('ZADD', ends, ARGV[3], KEYS[1]) end
"""
)
_LISTED = """
local found = {}
for at = 2, #ARGV do
  local name = KEYS[2] .. ARGV[at]
  local posted = redis.call('ZSCORE', KEYS[1], name)
  if posted and tonumber(posted) >= tonumber(ARGV[1]) then
    found[#found + 1] = redis.call('HGET', name, 'json')
  end
end
return found
"""


@implementer(IEntryStore)
class RedisStore:
    """Entries in Redis.

    Keys: ``dmsg:entry:<static>`` a hash, ``dmsg:servers`` a sorted set of server entries by time of posting,
    ``dmsg:entries`` the number of all, ``dmsg:kinds`` by kind; quiet servers are in ``dmsg:quiet`` by the time when
    they were seen, in ``dmsg:looks`` by that of the next look.  ``dmsg:places`` has the address blocks by their bytes,
    ``dmsg:places:<block>`` the entries of one by time of posting, ``dmsg:size`` all bytes, ``dmsg:ends`` the entries
    by the time when they are dropped, ``dmsg:adopted`` is there when what an earlier version wrote is counted.
    """

    prefix = "dmsg:"

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """What Redis says, or that it says nothing."""
        from txredisapi import RedisError  # an extra

        return (RedisError,)

    def __init__(self, connection: Any, random: Random | None = None, limit: float = math.inf) -> None:
        """:param connection: of txredisapi, with ``charset=None``;
            see :func:`~dmsg.discovery.store.opening.open_store`.

        :param limit: bytes that are kept, in all.
        """
        self._redis = connection
        self._random = random or Random()
        self._limit = min(limit, _UNKNOWN_LIMIT)
        self.dropped: Dropped = nobody_told
        self.nameplates = RedisNameplates(connection, self.prefix)

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Deferred[Any]:
        result: Deferred[Any] = self._redis.eval(script, [self.prefix + key for key in keys], arguments)
        return result

    def _tell(self, answer: list[bytes]) -> None:
        words = [word.decode() for word in answer]
        for reason, place in zip(words[::2], words[1::2], strict=True):
            self.dropped(reason, place, 1)

    async def adopt(self, now: float) -> int:
        """Count what an earlier version wrote, which did not; fires with how many entries were looked at.

        It may be done more than once, and by several processes.
        """
        if await self._redis.exists(f"{self.prefix}adopted"):
            return 0
        cursor: Any = 0
        looked = 0
        while True:
            cursor, names = await self._redis.scan(cursor, f"{self.prefix}entry:*", ADOPTED_AT_ONCE)
            looked += len(names)
            if names:
                times = [repr(now + MIGRATED_TTL), repr(now + TOMBSTONE_TTL)]
                await self._run(_ADOPT, ["entry:", *_KEYS], [str(OVERHEAD), *times, *names])
            if int(cursor) == 0:
                await self._redis.set(f"{self.prefix}adopted", "1")
                return looked

    def post(self, entry: Entry, now: float, terms: Terms = Terms()) -> Deferred[bool]:
        def posted(answer: list[bytes]) -> bool:
            result = answer[0]
            if result in (b"first", b"next"):
                self._tell(answer[1:])
                return result == b"first"
            if result == b"deleted":
                raise DeletedLater(Head(0, answer[1].decode(), deleted=True, deletion=answer[2] or None), entry)
            raise EntryInvalid(
                {b"not zero": WRONG_FIRST_SEQUENCE, b"sequence": WRONG_SEQUENCE, b"time": WRONG_TIME}[result]
            )

        body = entry.to_json()
        return self._run(
            _POST,
            [f"entry:{entry.static}", *_KEYS],
            [
                str(entry.sequence),
                str(next_sequence(entry.sequence)),
                time_order(entry.timestamp),
                body,
                repr(now),
                "1" if listable(entry) else "0",
                "1" if terms.refreshes else "0",
                repr(NEVER if terms.checked else now),
                kind(entry),
                terms.place,
                str(size_of(body)),
                repr(min(terms.most, _UNKNOWN_LIMIT)),
                repr(self._limit),
                repr(ends(now, terms.lasts)),
                "1" if terms.checked else "0",
                target(entry),
            ],
        ).addCallback(posted)

    def get(self, static: str) -> Deferred[bytes]:
        def got(body: bytes | None) -> bytes:
            if body is None:
                raise EntryNotFound
            return body

        result: Deferred[bytes] = self._redis.hget(f"{self.prefix}entry:{static}", "json").addCallback(got)
        return result

    def delete(self, deletion: Deletion, now: float) -> Deferred[None]:
        def deleted(answer: bytes) -> None:
            if answer == b"missing":
                raise EntryNotFound
            if answer != b"deleted":
                raise EntryInvalid({b"sequence": WRONG_DELETE_SEQUENCE, b"time": WRONG_TIME}[answer])

        return self._run(
            _DELETE,
            [f"entry:{deletion.static}", *_KEYS],
            [
                str(deletion.sequence),
                time_order(deletion.timestamp),
                str(OVERHEAD),
                repr(ends(now, TOMBSTONE_TTL)),
                deletion.to_json(),
            ],
        ).addCallback(deleted)

    def available(self, most: int, since: float) -> Deferred[list[bytes]]:
        return self._draw("servers", most, since)

    def quiet(self, most: int, since: float) -> Deferred[list[bytes]]:
        return self._draw("quiet", most, since)

    def _draw(self, key: str, most: int, since: float) -> Deferred[list[bytes]]:
        seed = str(self._random.getrandbits(31))
        return self._run(_AVAILABLE, [key], [repr(since), str(most), seed]).addCallback(_whole)

    def listed(self, statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        since = max(since, -_UNKNOWN_LIMIT)
        return self._run(_LISTED, ["servers", "entry:"], [repr(since), *statics]).addCallback(_whole)

    def due(self, most: int, now: float, next_look: float) -> Deferred[list[Due]]:
        def rows_of(found: list[bytes]) -> list[Due]:
            rows = zip(found[::4], found[1::4], found[2::4], found[3::4], strict=True)
            return [
                Due(body, place.decode(), refreshes == b"1", listed == b"1") for body, place, refreshes, listed in rows
            ]

        return self._run(_DUE, ["looks"], [repr(now), str(most), repr(next_look)]).addCallback(rows_of)

    def seen(
        self, static: str, target: str, at: float | None, next_look: float, lasts: float = 0.0, listed: bool = True
    ) -> Deferred[None]:
        arguments = [
            "" if at is None else repr(at),
            repr(next_look),
            repr(ends(at or 0.0, lasts)),
            "1" if listed else "0",
            target,
        ]
        return self._run(_SEEN, [f"entry:{static}", *_KEYS], arguments).addCallback(lambda _: None)

    def set_back(self, now: float) -> Deferred[None]:
        arguments = [repr(now), repr(now + LATEST_LOOK), repr(NEVER)]
        return self._run(_SET_BACK, ["servers", "quiet", "looks"], arguments).addCallback(lambda _: None)

    def sweep(self, now: float, most: int) -> Deferred[int]:
        def swept(answer: Any) -> int:
            number, dropped = answer
            self._tell(dropped)
            return int(number)

        arguments = [repr(now), str(most), repr(self._limit)]
        return self._run(_SWEEP, ["entry:", *_KEYS], arguments).addCallback(swept)

    def counts(self) -> Deferred[dict[str, int]]:
        def counted(found: dict[Any, Any]) -> dict[str, int]:
            return {bytes(one).decode(): int(number) for one, number in found.items()}

        result: Deferred[dict[str, int]] = self._redis.hgetall(f"{self.prefix}kinds").addCallback(counted)
        return result

    def count(self) -> Deferred[int]:
        return self._number("entries")

    def is_full(self, error: BaseException) -> bool:
        return False

    def size(self) -> Deferred[int]:
        return self._number("size")

    def _number(self, key: str) -> Deferred[int]:
        result: Deferred[int] = self._redis.get(f"{self.prefix}{key}").addCallback(lambda n: int(n or 0))
        return result

    def close(self) -> Deferred[None]:
        result: Deferred[None] = self._redis.disconnect()
        return result


def _whole(found: list[bytes | None]) -> list[bytes]:
    """Without those that went meanwhile."""
    return [body for body in found if body]
