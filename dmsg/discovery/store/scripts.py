"""Lua scripts of the store in Redis. Each script is atomic.

The scripts implement the rules for POSTs and deletions that :mod:`dmsg.discovery.entries.rules` explains.

The first Redis key that is passed to a script is that of the entry which the script changes. The other keys are
those of :data:`dmsg.discovery.store.redis._KEYS`.
"""

from __future__ import annotations

from dmsg.discovery.store.base import ROOM_AT_ONCE

ROOM = """
local servers, quiet, looks, entries, kinds = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local places, ends, size = KEYS[7], KEYS[8], KEYS[9]
local around, loads = places .. ':around', places .. ':loads'
local function inside(block) return places .. ':inside:' .. block end
local function load(place, block, factor, by, now)
  if tonumber(redis.call('ZINCRBY', loads, by / factor, block)) <= 0 then redis.call('ZREM', loads, block) end
  if now > 0 then redis.call('ZADD', inside(block), now, place) else redis.call('ZREM', inside(block), place) end
end
local function blocks_of(place) return string.gmatch(redis.call('HGET', around, place) or '', '(%S+)=(%d+)') end
local function resize(place, by)
  redis.call('INCRBY', size, by)
  local now = tonumber(redis.call('ZINCRBY', places, by, place))
  for block, factor in blocks_of(place) do load(place, block, factor, by, now) end
  if now <= 0 then
    redis.call('ZREM', places, place)
    redis.call('HDEL', around, place)
  end
end
local function know_around(place, blocks)
  if blocks == '' or redis.call('HEXISTS', around, place) == 1 then return end
  redis.call('HSET', around, place, blocks)
  local now = tonumber(redis.call('ZSCORE', places, place) or 0)
  for block, factor in blocks_of(place) do load(place, block, factor, now, now) end
end
local function greediest()
  local place = redis.call('ZREVRANGE', places, 0, 0, 'WITHSCORES')
  local block = redis.call('ZREVRANGE', loads, 0, 0, 'WITHSCORES')
  if not block[1] or tonumber(block[2]) <= tonumber(place[2] or 0) then return place[1] end
  return redis.call('ZREVRANGE', inside(block[1]), 0, 0)[1]
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
    if not drop_oldest('total', greediest(), answer) then return end
  end
end
""".replace("ROOM_AT_ONCE", str(ROOM_AT_ONCE))
POST = (
    ROOM
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
if head[3] and checked == '0' and head[7] == ARGV[16] then
  checked = head[8]
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
know_around(place, ARGV[17])
resize(place, taken)
local answer = {kind}
while tonumber(redis.call('ZSCORE', places, place) or 0) > most do
  if not drop_oldest('address', place, answer) then break end
end
for block in string.gmatch(ARGV[17], '(%S+)=%d+') do
  while tonumber(redis.call('ZSCORE', loads, block) or 0) > most do
    if not drop_oldest('address', redis.call('ZREVRANGE', inside(block), 0, 0)[1], answer) then break end
  end
end
make_room(limit, answer)
return answer
"""
)
DELETE = (
    ROOM
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
SWEEP = (
    ROOM
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
SET_BACK = """
local function cut(key, from, to)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, from, to)) do redis.call('ZADD', key, ARGV[1], name) end
end
cut(KEYS[1], '(' .. ARGV[1], '+inf')
cut(KEYS[2], '(' .. ARGV[1], '+inf')
cut(KEYS[3], '(' .. ARGV[2], '(' .. ARGV[3])
"""
# Servers are drawn at random by their ranks in the sorted set. Servers that have not posted recently have the lowest
# ranks, which are left out of the draw.
AVAILABLE = """
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
DUE = """
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
SEEN = (
    ROOM
    + """
if not redis.call('ZSCORE', looks, KEYS[1]) then return end
if redis.call('HGET', KEYS[1], 'target') ~= ARGV[5] then return end
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
LISTED = """
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
