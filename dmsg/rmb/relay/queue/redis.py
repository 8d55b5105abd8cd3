"""Queues of relays in Redis, under the same keys as in the reference implementation. Several processes may share them.

``stream:<twin>[:<sid>]`` is the Redis stream of a session, with one field ``_``. ``relay.federation.stream`` is the
Redis stream for other relays, with the field ``msg``. This package adds:

- ``rmb.session:<twin>[:<sid>]``: names the process to which a session is connected.

- ``rmb.until``: a sorted set of all stored messages, in the order in which they expire.

- ``rmb.kept``: a hash with the number of stored bytes, in all and of each sender.

- ``rmb.queue``: a channel on which processes announce what they have appended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.net.isolate import call_isolated
from dmsg.net.own_pauses import TimeLeft
from dmsg.net.redis import open_redis, subscribe, with_timeout, without_password
from dmsg.net.turn_end import at_turn_end
from dmsg.rmb.errors import QueueUnavailable
from dmsg.rmb.relay.queue.interface import (
    BATCH,
    BATCH_BYTES,
    FEDERATION,
    REFUSALS,
    QueuedMessage,
    QueueId,
    QueueLimits,
    QueueWatcher,
    RelayQueue,
)
from dmsg.rmb.relay.queue.removals import Removals
from dmsg.rmb.relay.queue.sqlite import MAX_REMOVED_PER_CALL
from dmsg.rmb.twins.address import STREAM_PREFIX

if TYPE_CHECKING:
    from txredisapi import ConnectionHandler, RedisFactory

FEDERATION_STREAM = "relay.federation.stream"
CHANNEL = "rmb.queue"
UNTIL = "rmb.until"
KEPT = "rmb.kept"
PROBE = "rmb.probe"
"""Key that is written to find out whether Redis accepts writes again."""
PRESENT = "rmb.session:"
EXPIRE = 3600
"""Seconds without a new message after which a queue is deleted."""
GROUP = "federation"
ABANDONED_AFTER = 60
"""Seconds after which a message that a process has read but not finished is returned again, to the next process that
reads the queue. This may be the same process."""
FEDERATION_LENGTH = 100_000
"""Maximum number of messages in the Redis stream ``FEDERATION_STREAM``, the queue of messages for other relays."""
PRESENCE = 75
"""Seconds for which a session counts as connected after its last announcement."""
APPEND_BATCH = 100
"""Maximum number of messages appended in one call. More would take too long, because Redis serves no other call while a
script runs."""
BATCH_SIZE = 4 * 1024 * 1024
"""Number of bytes in one call. Once it is reached, no further message is added to the call."""
MAX_POLLED_SESSIONS = 1000
"""Maximum number of sessions whose queues are polled in one call."""
RETRY_FOR = 5.0
"""Maximum seconds for which an append is repeated while Redis is unavailable."""
RETRY_EVERY = 0.2
"""Seconds between two attempts of an append."""

_READ = """
local found, size, step, start = {}, 0, 1, ARGV[1]
local most, bytes = tonumber(ARGV[2]), tonumber(ARGV[3])
while #found < most and size < bytes do
  local wanted = math.min(step, most - #found)
  local some = redis.call('XRANGE', KEYS[1], start, '+', 'COUNT', wanted)
  for _, one in ipairs(some) do
    found[#found + 1] = one
    size = size + #one[2][2]
    start = '(' .. one[1]
  end
  if #some < wanted then break end
  -- number of messages that reach the limit of bytes if they are as long as those so far
  step = math.max(1, math.min(200, math.floor((bytes - size) / (size / #found + 1))))
end
return found
"""
# One hash contains the bytes of all stored messages ("total"), the bytes of each sender's messages ("from:<twin>"), and
# the size and sender of each message ("<id> <key>").
_FORGET = """
local function forget(kept, member)
  local added = redis.call('HGET', kept, member)
  if not added then return end
  redis.call('HDEL', kept, member)
  local blank = string.find(added, ' ', 1, true)
  local size, sender = string.sub(added, 1, blank - 1), string.sub(added, blank + 1)
  redis.call('HINCRBY', kept, 'total', '-' .. size)
  if sender ~= '0' and redis.call('HINCRBY', kept, 'from:' .. sender, '-' .. size) <= 0 then
    redis.call('HDEL', kept, 'from:' .. sender)
  end
end
"""
# MAXLEN ~ is cheap, because it only cuts whole nodes of the stream. So a queue may exceed its limit a little. A message
# that was cut is counted until it expires.
_APPEND = """
local results = {}
local until_, kept, channel, federation = KEYS[#KEYS - 3], KEYS[#KEYS - 2], KEYS[#KEYS - 1], KEYS[#KEYS]
local total, part, name, prefix = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
local of_session, expire, of_federation, federated = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
for index = 1, #KEYS - 4 do
  local key, at = KEYS[index], 8 + (index - 1) * 3
  local data, ends, sender = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local size = #data
  if tonumber(redis.call('HGET', kept, 'total') or 0) + size > total then
    results[index] = {'', 0}
  elseif sender ~= '0' and tonumber(redis.call('HGET', kept, 'from:' .. sender) or 0) + size > part then
    results[index] = {'', 1}
  else
    local before = redis.call('XLEN', key)
    local id, session
    if key == federation then
      id = redis.call('XADD', key, 'MAXLEN', '~', of_federation, '*', 'msg', data)
      session = federated
    else
      id = redis.call('XADD', key, 'MAXLEN', '~', of_session, '*', '_', data)
      redis.call('EXPIRE', key, expire)
      session = string.sub(key, #prefix + 1)
    end
    redis.call('ZADD', until_, ends, id .. ' ' .. key)
    redis.call('HSET', kept, id .. ' ' .. key, size .. ' ' .. sender)
    redis.call('HINCRBY', kept, 'total', size)
    if sender ~= '0' then redis.call('HINCRBY', kept, 'from:' .. sender, size) end
    redis.call('PUBLISH', channel, name .. ' + ' .. session)
    results[index] = {id, before + 1 - redis.call('XLEN', key)}
  end
end
return results
"""
_REMOVE = (
    _FORGET
    + """
for index = 1, #ARGV do
  local member = ARGV[index] .. ' ' .. KEYS[1]
  redis.call('XDEL', KEYS[1], ARGV[index])
  redis.call('ZREM', KEYS[2], member)
  forget(KEYS[3], member)
end
"""
)
# Redis executes a script atomically, so each message is taken by exactly one process.
_EXPIRED = (
    _FORGET
    + """
local found = {}
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(due) do
  local blank = string.find(member, ' ', 1, true)
  local id, key = string.sub(member, 1, blank - 1), string.sub(member, blank + 1)
  local entry = redis.call('XRANGE', key, id, id)[1]
  if entry then
    found[#found + 1] = {key, entry[2][2], id}
    redis.call('XDEL', key, id)
  end
  redis.call('ZREM', KEYS[1], member)
  forget(KEYS[2], member)
end
return found
"""
)
_PRESENT = """
for index = 1, #KEYS do redis.call('SET', KEYS[index], ARGV[1], 'EX', ARGV[2]) end
"""
_ABSENT = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""
_NOT_EMPTY = """
local found = {}
for index, key in ipairs(KEYS) do
  if redis.call('XLEN', key) > 0 then found[#found + 1] = index end
end
return found
"""

_log = Logger()


class _Append(NamedTuple):
    """Message that is waiting to be appended."""

    session: str
    data: bytes
    until: float
    sender: int
    appended: Deferred[QueueId]


@implementer(RelayQueue)
class RedisQueue:
    """Queues in Redis. They survive the loss of the relay's machine, and several processes can share them.

    A message counts as stored when it is in Redis. Whether it then survives a power cut depends on the settings of
    Redis (``appendonly``, ``appendfsync``). If delivered messages cannot be deleted, because Redis is unavailable or
    refuses writes, their ids are remembered.  They are not returned again, and are deleted as soon as Redis accepts
    writes.

    :ivar trouble: reason why Redis refused the last append, or None.
    """

    def __init__(
        self, reactor: IReactorTime, connection: ConnectionHandler, url: str, limits: QueueLimits | None = None
    ) -> None:
        self._reactor: IReactorTime = reactor
        self._redis = connection
        self._public_url = without_password(url)
        self.limits = limits or QueueLimits()
        self._watcher: QueueWatcher | None = None
        self.trouble: str | None = None
        self._removals = Removals()
        self._removing = False
        self._name = uuid4().hex
        self._batch: list[_Append] = []
        self._appending: dict[Deferred[None], None] = {}
        self._closed = False
        self._grouped = False
        self._url = url
        self._subscription: RedisFactory | None = None

    @classmethod
    async def open(cls, reactor: IReactorTime, url: str, limits: QueueLimits | None = None) -> RedisQueue:
        """Connect to Redis.

        :raises RedisUnavailable: Redis does not answer.
        """
        return cls(reactor, await open_redis(url, reactor), url, limits)

    @property
    def forgotten(self) -> int:
        return self._removals.forgotten

    def _key(self, session: str) -> str:
        return FEDERATION_STREAM if session == FEDERATION else f"{STREAM_PREFIX}{session}"

    # --- messages ---

    def append(self, session: str, data: bytes, until: float, sender: int = 0) -> Deferred[QueueId]:
        # All appends of a reactor turn share one call, because a call costs more than the work that Redis does for it.
        appended: Deferred[QueueId] = Deferred()
        if not self._batch:
            at_turn_end(self._reactor)(self._flush)
        self._batch.append(_Append(session, data, until, sender, appended))
        return appended

    def _flush(self) -> None:
        batch, self._batch = deque(self._batch), []
        while batch:
            some: list[_Append] = []
            size = 0
            while batch and len(some) < APPEND_BATCH and size < BATCH_SIZE:
                some.append(batch.popleft())
                size += len(some[-1].data)
            appending = Deferred.fromCoroutine(self._append(some))
            self._appending[appending] = None
            appending.addErrback(self._append_failed, some).addBoth(self._ended, appending)

    def _ended(self, result: object, appending: Deferred[None]) -> None:
        self._appending.pop(appending, None)

    def _append_failed(self, failure: Failure, batch: list[_Append]) -> None:
        why = "the relay is shutting down" if failure.check(CancelledError) else str(failure.value)
        if self.trouble is None and not self._closed:
            _log.error(
                "{queue} cannot store messages; they are refused until it can: {error}",
                queue=self._public_url,
                error=why,
            )
        self.trouble = f"{self._public_url}: {why}"
        for one in batch:
            if not one.appended.called:
                one.appended.errback(QueueUnavailable(f"{self._public_url}: {why}"))

    async def _append(self, batch: list[_Append]) -> None:
        # The arguments that are the same for all messages are sent only once. Encoding a call takes as long as its
        # execution.
        limits = self.limits
        common = limits.total, limits.sender_size, self._name, STREAM_PREFIX, limits.messages, EXPIRE
        arguments: list[str | bytes] = [*(str(one) for one in common), str(FEDERATION_LENGTH), FEDERATION]
        for one in batch:
            arguments += one.data, repr(one.until), str(one.sender)
        keys = [*(self._key(one.session) for one in batch), UNTIL, KEPT, CHANNEL, FEDERATION_STREAM]
        time_left = TimeLeft(self._reactor, RETRY_FOR)
        try:
            results = await self._append_in_time(keys, arguments, time_left)
        finally:
            time_left.stop(None)
        for one, (number, dropped) in zip(batch, results, strict=True):
            if not number:
                one.appended.errback(QueueUnavailable(REFUSALS[int(dropped)].format(sender=one.sender)))
                continue
            if int(dropped) > 0 and self._watcher is not None:
                call_isolated(self._watcher.dropped, one.session, int(dropped))
            one.appended.callback(bytes(number))

    async def _append_in_time(
        self, keys: list[str], arguments: list[str | bytes], time_left: TimeLeft
    ) -> list[tuple[int | bytes, int]]:
        while True:
            try:
                # A call to Redis is never cancelled, because replies are matched to calls by their order.
                appending = self._redis.eval(_APPEND, keys, arguments)
                results: list[tuple[int | bytes, int]] = await with_timeout(
                    self._reactor, appending, max(0.0, time_left.seconds)
                )
            except CancelledError:
                raise
            except Exception:
                if self._closed or time_left.seconds <= 0.0:
                    raise
                await deferLater(self._reactor, RETRY_EVERY)
            else:
                self._works()
                return results

    def read(self, session: str, after: QueueId | None) -> Deferred[list[QueuedMessage]]:
        return Deferred.fromCoroutine(self._read(session, after))

    async def _read(self, session: str, after: QueueId | None) -> list[QueuedMessage]:
        while True:
            start = b"(" + after if isinstance(after, bytes) else b"-"
            try:
                entries = await self._redis.eval(_READ, [self._key(session)], [start, str(BATCH), str(BATCH_BYTES)])
            except Exception as error:
                raise QueueUnavailable(f"{self._public_url}: {error or type(error).__name__}") from None
            batch = [QueuedMessage(bytes(number), bytes(fields[1])) for number, fields in entries or ()]
            left = self._removals.without_removed(session, batch)
            if left or not batch:
                return left
            after = batch[-1].id

    def take_federation(self) -> Deferred[list[QueuedMessage]]:
        return Deferred.fromCoroutine(self._take_federation())

    async def _take_federation(self) -> list[QueuedMessage]:
        """Take messages for other relays that no process has taken, or that a process took long ago and did not
        finish."""
        run = self._redis.execute_command
        try:
            if not self._grouped:
                try:
                    await run("XGROUP", "CREATE", FEDERATION_STREAM, GROUP, "0", "MKSTREAM")
                except Exception as error:
                    # This error means that another process, or an earlier run, has created the group already. It is
                    # ignored.
                    if "BUSYGROUP" not in str(error):
                        raise
                self._grouped = True
            left = await run(
                "XAUTOCLAIM", FEDERATION_STREAM, GROUP, self._name, str(ABANDONED_AFTER * 1000), "0", "COUNT", BATCH
            )
            read = await run(
                "XREADGROUP", "GROUP", GROUP, self._name, "COUNT", BATCH, "STREAMS", FEDERATION_STREAM, ">"
            )
        except Exception as error:
            self._grouped = False
            raise QueueUnavailable(f"{self._public_url}: {error or type(error).__name__}") from None
        entries = [*left[1], *(read[0][1] if read else ())]
        batch = [QueuedMessage(bytes(number), bytes(fields[1])) for number, fields in entries if fields]
        return self._removals.without_removed(FEDERATION, batch)

    def poll(self, sessions: Sequence[str]) -> Deferred[list[str]]:
        keys = [self._key(session) for session in sessions[:MAX_POLLED_SESSIONS]]
        result: Deferred[list[int]] = self._redis.eval(_NOT_EMPTY, keys, [])
        return result.addCallbacks(lambda found: [sessions[int(index) - 1] for index in found], lambda _: [])

    def remove(self, session: str, ids: Sequence[QueueId]) -> None:
        def failed(failure: Failure) -> None:
            if not self._removals:
                _log.info(
                    "delivered messages could not be deleted from the queue; the relay will try again: {error}",
                    error=failure.value,
                )
            self._removals.add(session, ids)

        self._remove(session, ids).addErrback(failed)

    def _remove(self, session: str, ids: Sequence[QueueId]) -> Deferred[object]:
        if session == FEDERATION:
            self._execute_quietly("XACK", FEDERATION_STREAM, GROUP, *ids)
        removing: Deferred[object] = self._redis.eval(_REMOVE, [self._key(session), UNTIL, KEPT], list(ids))
        return removing

    async def _remove_again(self) -> None:
        """Delete the messages whose deletion has failed before, and find out whether Redis accepts writes again."""
        while found := self._removals.oldest():
            for session, ids in found.items():
                await self._remove(session, ids)
                self._removals.done(session, ids)
        if self.trouble is not None:
            await self._redis.execute_command("SET", PROBE, "1", "EX", "1")
            self._works()

    def _works(self) -> None:
        if self.trouble is not None:
            _log.info("{queue} stores messages again", queue=self._public_url)
        self.trouble = None

    def expired(self, now: float) -> Deferred[list[tuple[str, bytes]]]:
        # Relays of the reference implementation do not add their messages to the sorted set, so this method does not
        # find these messages. Their expiry is checked when they are read.
        return Deferred.fromCoroutine(self._take_expired(now))

    async def _take_expired(self, now: float) -> list[tuple[str, bytes]]:
        # Deletions that failed before are repeated here, because this method is called periodically.
        if (self._removals or self.trouble is not None) and not self._removing:
            self._removing = True
            try:
                await self._remove_again()
            finally:
                self._removing = False
        found = await self._redis.eval(_EXPIRED, [UNTIL, KEPT], [repr(now), str(MAX_REMOVED_PER_CALL)])
        expired = [
            (bytes(key).decode().removeprefix(STREAM_PREFIX), bytes(data), bytes(number)) for key, data, number in found
        ]
        return [(session, data) for session, data, number in expired if not self._removals.has(session, number)]

    # --- other processes ---

    def watch(self, watcher: QueueWatcher) -> None:
        self._watcher = watcher
        if self._subscription is None:
            self._subscription = subscribe(self._reactor, self._url, CHANNEL, self._on_notice)

    def _on_notice(self, message: bytes) -> None:
        name, _, rest = message.decode(errors="replace").partition(" ")
        what, _, session = rest.partition(" ")
        watcher = self._watcher
        # Redis also delivers this process's own announcements, which are ignored.
        if name == self._name or watcher is None:
            return
        if what == "+":
            watcher.appended_elsewhere(session)
        elif what == "=":
            watcher.connected_elsewhere(session)

    def _execute_quietly(self, *command: str | QueueId) -> None:
        self._redis.execute_command(*command).addErrback(lambda _: None)

    def note_connected(self, session: str) -> None:
        """Register the session as connected here. Other processes then end their connections of the session."""
        self.present([session])
        self._execute_quietly("PUBLISH", CHANNEL, f"{self._name} = {session}")

    def present(self, sessions: Sequence[str]) -> None:
        for start in range(0, len(sessions), MAX_POLLED_SESSIONS):
            keys = [PRESENT + session for session in sessions[start : start + MAX_POLLED_SESSIONS]]
            self._redis.eval(_PRESENT, keys, [self._name, str(PRESENCE)]).addErrback(lambda _: None)

    def note_absent(self, session: str) -> None:
        # The script does not delete the key if another process has registered the session meanwhile.
        self._redis.eval(_ABSENT, [PRESENT + session], [self._name]).addErrback(lambda _: None)

    def release_federation(self) -> None:
        """Do nothing, because ``XAUTOCLAIM`` returns unfinished messages after ``ABANDONED_AFTER`` seconds."""

    def is_elsewhere(self, session: str) -> Deferred[bool]:
        result: Deferred[bytes | None] = self._redis.execute_command("GET", PRESENT + session)
        return result.addCallbacks(lambda name: name not in (None, self._name.encode()), lambda _: False)

    async def _close(self) -> None:
        self._closed = True
        self._flush()
        for appending in list(self._appending):
            appending.cancel()
        if self._subscription is not None:
            await self._subscription.disconnect()
        await self._redis.disconnect()

    def close(self) -> Deferred[None]:
        return Deferred.fromCoroutine(self._close())
