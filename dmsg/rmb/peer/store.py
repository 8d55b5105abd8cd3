"""State of a peer in Redis. No message is lost or delivered twice when the peer or Redis is killed.

The peer shares some keys with local programs. They have the same names as in the reference implementation:
``msgbus.system.local``, ``msgbus.system.reply``, ``msgbus.<command>``, ``msgbus.backlog.<uid>``, and the lists that
clients name. Other keys belong to the peer alone:

- ``msgbus.system.*.taken``: messages that were read and have no uid yet.

- ``msgbus.outgoing.*``: messages with a uid that no relay has confirmed yet.

- ``msgbus.seen.<hash>``: a mark for each message that was pushed to a service or client.

- ``msgbus.system.size.<list>``: the number of bytes pushed to a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.net.redis import RedisUnavailable, lazy_redis, open_redis
from dmsg.rmb.envelope.envelope_pb2 import Backlog

if TYPE_CHECKING:
    from txredisapi import ConnectionHandler

LOCAL, REPLY = "msgbus.system.local", "msgbus.system.reply"
REQUESTS, RESPONSES = "msgbus.outgoing.requests", "msgbus.outgoing.responses"
QUEUE_LENGTH = 10_000
"""Maximum number of messages in the list of a command or client. Further messages evict the oldest."""
QUEUE_SIZE = 256 * 1024 * 1024
"""Maximum bytes of the messages in one list. Above it, the oldest are evicted until three quarters of this size are
left."""
QUEUE_TTL = 3600
"""Seconds without a new message after which a list is deleted."""
BATCH = 100
"""Maximum number of messages that one call takes from a Redis list."""
BLOCK_TIMEOUT = 5
"""Seconds that a blocking read waits for a message."""
RETRY = 0.5
"""Seconds between two attempts of a failed call to Redis."""
ATTEMPTS = 7200
"""Maximum number of attempts of a call to Redis. With ``RETRY`` seconds between them they take one hour, the longest
lifetime of a message."""

# A message is stored with its uid before it is sent. If it must be sent again, it has the same uid.
_TAKE = """
local out = {}
for i = 2, #ARGV do
  local from = KEYS[1]
  local raw = redis.call('LINDEX', from, -1)
  if not raw then
    from = KEYS[2]
    raw = redis.call('LINDEX', from, -1)
  end
  if not raw then break end
  -- stored under its uid before it is removed from the list, so that a failure in between loses nothing
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[1] .. '\\n' .. raw)
  redis.call('RPOP', from)
  out[#out + 1] = ARGV[i]
  out[#out + 1] = raw
end
return out
"""
_HAND_OVER = """
if ARGV[1] ~= '' and not redis.call('SET', KEYS[1], '', 'NX', 'EX', ARGV[1]) then return -1 end
redis.call('LPUSH', KEYS[2], ARGV[2])
local over = redis.call('LLEN', KEYS[2]) - tonumber(ARGV[3])
if over > 0 then redis.call('LTRIM', KEYS[2], 0, ARGV[3] - 1) else over = 0 end
redis.call('EXPIRE', KEYS[2], ARGV[4])
-- number of bytes pushed since the list was last measured: programs that read the list do not subtract theirs
local size, most = redis.call('INCRBY', KEYS[3], #ARGV[2]), tonumber(ARGV[5])
redis.call('EXPIRE', KEYS[3], ARGV[4])
if size <= most then return over end
size = 0
local length = redis.call('LLEN', KEYS[2])
for at = 0, length - 1, 100 do
  for _, one in ipairs(redis.call('LRANGE', KEYS[2], at, at + 99)) do size = size + #one end
end
if size > most then
  while size > most * 3 / 4 and redis.call('LLEN', KEYS[2]) > 1 do
    size = size - #redis.call('RPOP', KEYS[2])
    over = over + 1
  end
end
redis.call('SET', KEYS[3], size, 'EX', ARGV[4])
return over
"""

_LATER = (
    *("LOADING", "BUSY", "MASTERDOWN", "READONLY", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS", "CLUSTERDOWN"),
    *("NOAUTH", "NOPERM", "max number of clients"),
)
"""Words by which temporary errors of Redis are recognised. A call that fails with such an error is repeated."""

_log = Logger()
_T = TypeVar("_T")


class PeerStore:
    """Access of a peer to Redis. While Redis is unavailable, calls wait.

    :ivar dropped: number of messages evicted from full lists.
    """

    def __init__(self, reactor: IReactorTime, url: str) -> None:
        self._reactor = reactor
        self._url = url
        self._redis: ConnectionHandler
        self._connections: list[ConnectionHandler] = []
        self._loops: list[Deferred[None]] = []
        self._closed = False
        self.dropped = 0

    async def open(self) -> None:
        """Connect to Redis.

        :raises RedisUnavailable: the URL is malformed, or Redis does not answer.
        """
        self._redis = await open_redis(self._url, self._reactor)
        self._connections.append(self._redis)

    # --- from local programs ---

    def take_from(
        self,
        name: str,
        outgoing: str,
        now: Callable[[], float],
        new_uid: Callable[[], str],
        room: Callable[[], Deferred[int]],
        on_taken: Callable[[str, float, bytes], None],
    ) -> None:
        """Read a list continuously, and call ``on_taken`` for each message, oldest first.

        The arguments of ``on_taken`` are the message's uid, the time at which it was read, and its bytes. After Redis
        was unavailable, ``on_taken`` may be called again for a message that is still being processed.

        :param outgoing: key under which the messages are stored with their uids.
        :param room: function that returns a Deferred. It fires with the number of messages that may be read now, when
            this is above 0.
        """
        # Redis answers a blocking read within BLOCK_TIMEOUT seconds, so a connection that is silent for longer is dead.
        blocking = lazy_redis(self._url, reply_timeout=BLOCK_TIMEOUT + 10)
        self._connections.append(blocking)
        held = f"{name}.taken"

        async def take() -> None:
            loaded = False
            while True:
                try:
                    if not loaded:
                        # Some messages may have a uid already: a killed process has read them, or the answer of Redis
                        # was lost. They are processed first.
                        for uid, value in await self._read_all(outgoing):
                            at, _, raw = value.partition(b"\n")
                            on_taken(uid, float(at), raw)
                        loaded = True
                    most = min(BATCH, await room())
                    time = now()
                    uids = [new_uid() for _ in range(most)]
                    answer = await self._redis.eval(_TAKE, [held, name, outgoing], [repr(time), *uids])
                    for index in range(0, len(answer), 2):
                        on_taken(answer[index].decode(), time, answer[index + 1])
                    if len(answer) < 2 * most:
                        await blocking.execute_command("BLMOVE", name, held, "RIGHT", "LEFT", BLOCK_TIMEOUT)
                except CancelledError:
                    raise
                except Exception as error:
                    if self._closed:
                        return
                    _log.info(
                        "the Redis list {name} cannot be read; retrying: {error}",
                        name=name,
                        error=str(error) or type(error).__name__,
                    )
                    loaded = False
                    await deferLater(self._reactor, RETRY)

        self._loops.append(Deferred.fromCoroutine(take()))

    async def _read_all(self, outgoing: str) -> list[tuple[str, bytes]]:
        found = []
        cursor = b"0"
        while True:
            cursor, flat = await self._redis.execute_command("HSCAN", outgoing, cursor, "COUNT", 1000)
            found += [(flat[at].decode(), bytes(flat[at + 1])) for at in range(0, len(flat), 2)]
            if bytes(cursor) == b"0":
                # HSCAN returns messages in no order, so they are sorted by the time at which the peer read them.
                return sorted(found, key=lambda one: float(one[1].partition(b"\n")[0]))

    async def confirmed(self, outgoing: str, uid: str) -> None:
        """Delete a message that needs no repetition, because a relay has confirmed it or it was answered."""
        await self._repeat_until_answered(lambda: self._redis.execute_command("HDEL", outgoing, uid))

    # --- to local programs ---

    async def hand_over(self, key: str, message: bytes, *, once: Sequence[str] = (), ttl: int = QUEUE_TTL) -> bool:
        """Push a message to a list of a local program. Return False, and push nothing, if it is a duplicate.

        :param once: words that identify the message. Without words, the message is always pushed.
        :param ttl: seconds for which these words are remembered.
        """
        mark = "msgbus.seen." + hashlib.sha256("\0".join(once).encode()).hexdigest()[:40]
        arguments = [str(ttl) if once else "", message, str(QUEUE_LENGTH), str(QUEUE_TTL), str(QUEUE_SIZE)]
        keys = [mark, key, f"msgbus.system.size.{key}"]
        over = int(await self._repeat_until_answered(lambda: self._redis.eval(_HAND_OVER, keys, arguments)))
        self.dropped += max(0, over)
        return over >= 0

    async def remember(self, backlog: Backlog, ttl: int) -> None:
        """Store the record of a request, which names the list for its answers.

        :param ttl: seconds after which Redis deletes the record.
        """
        key, value = f"msgbus.backlog.{backlog.uid}", backlog.SerializeToString()
        await self._repeat_until_answered(lambda: self._redis.execute_command("SETEX", key, ttl, value))

    async def recall(self, uid: str) -> Backlog | None:
        """Return the record of a request that :meth:`remember` stored, or None if the record has expired."""
        value = await self._repeat_until_answered(lambda: self._redis.execute_command("GET", f"msgbus.backlog.{uid}"))
        if value is None:
            return None
        backlog = Backlog()
        backlog.ParseFromString(value)
        return backlog

    async def _repeat_until_answered(self, call: Callable[[], Deferred[_T]]) -> _T:
        """Repeat a call until Redis answers. The call must be idempotent, because Redis may execute it twice."""
        from txredisapi import ResponseError

        told = False
        for _ in range(ATTEMPTS):
            try:
                return await call()
            except CancelledError:
                raise
            except ResponseError as error:
                # The text of a script's error contains the error of the failed command, so the whole text is searched.
                if not any(word in str(error) for word in _LATER):
                    raise
                why = str(error)
            except Exception as error:
                # When a connection is lost, txredisapi raises exceptions of many types. So all types are caught.
                why = repr(error)
            if self._closed:
                raise CancelledError
            if not told:
                _log.error("Redis cannot store messages; retrying: {why}", why=why)
                told = True
            await deferLater(self._reactor, RETRY)
        raise RedisUnavailable("Redis was unavailable for too long")

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for loop in self._loops:
            loop.addErrback(lambda _: None)
            loop.cancel()
        for connection in reversed(self._connections):
            await connection.disconnect()
