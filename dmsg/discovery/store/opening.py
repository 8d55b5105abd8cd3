"""Functions that open the store which ``--store`` describes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from random import Random

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.discovery.store.base import Dropped, IEntryStore, StoreError, ignore_dropped
from dmsg.net.clock import SteadyClock
from dmsg.net.turn_end import at_turn_end

REDIS_TIMEOUT = 1.5
"""Seconds to wait for an answer of Redis. Clients of discovery then get an error within two seconds."""
STORE_LIMIT = 4096 * 1024 * 1024
"""Default maximum number of bytes of entries in a file or in Redis. The default for a store in memory is
:func:`dmsg.base.memory.default_limit`.
"""

_log = Logger()


def parse_store(description: str) -> tuple[str, str]:
    """Split a description into ``memory``, ``sqlite`` or ``redis``, and the text after the colon.

    :raises ~dmsg.discovery.store.base.StoreError: the description is none of these.
    """
    kind, colon, rest = description.partition(":")
    if not colon or kind not in ("memory", "sqlite", "redis") or bool(rest) == (kind == "memory"):
        from dmsg.net.redis import without_password

        raise StoreError(
            f"{without_password(description)}: not a store; use memory:, sqlite:PATH or redis://HOST:PORT/DB"
        )
    return kind, rest


def clock_of(description: str, reactor: IReactorTime) -> tuple[Callable[[], float], bool]:
    """Return the clock from which the times in a store are taken.

    Processes on other machines may share a Redis, so its times are those of the system's clock. The clock of other
    stores does not change when the system's clock is set while the process runs. Otherwise all entries would seem
    expired after the system's clock was set forward.

    :returns: a function that returns seconds since 1970, and whether these jump when the system's clock is set.
    """
    if parse_store(description)[0] == "redis":
        return time.time, True
    return SteadyClock(reactor), False


async def open_store(
    description: str,
    reactor: IReactorTime,
    limit: float = math.inf,
    random: Random | None = None,
    now: Callable[[], float] | None = None,
    on_dropped: Dropped = ignore_dropped,
    *,
    durable: bool = False,
) -> IEntryStore:
    """Open the store that ``--store`` names.

    :param description: ``memory:``, ``sqlite:PATH`` or ``redis://HOST[:PORT][/DATABASE]``; the password of Redis is in
        the environment variable ``DMSG_REDIS_PASSWORD``.
    :param limit: maximum number of bytes of entries that are kept.
    :param random: random numbers with which a store in memory draws the servers that it returns.
    :param now: clock of the store, see :func:`clock_of`; None for the system's clock.
    :param on_dropped: called for entries that the store drops.
    :param durable: whether changes in an SQLite file survive a power cut; Redis has its own settings for that.
    :raises ~dmsg.discovery.store.base.StoreError: the description is unknown, the store cannot be opened, or Redis does
        not answer.
    """
    clock = now or time.time
    kind, rest = parse_store(description)
    if kind == "redis":
        return await _open_redis_store(description, reactor, limit, clock(), on_dropped)
    # Each store is imported here, because a discovery uses only one of them.
    from dmsg.discovery.store.sqlite import SQLiteStore

    if kind == "memory":
        return SQLiteStore(":memory:", limit, random, on_dropped)
    file = SQLiteStore(rest, limit, on_dropped=on_dropped, at_turn_end=at_turn_end(reactor), durable=durable)
    try:
        await file.shift_times(clock())
    except file.failures as error:
        _log.warn(
            "{path}: times of entries that are ahead of the clock could not be set to the present: {error}",
            path=rest,
            error=str(error),
        )
    return file


async def _open_redis_store(
    description: str, reactor: IReactorTime, limit: float, now: float, on_dropped: Dropped
) -> IEntryStore:
    from dmsg.discovery.store.redis import RedisStore
    from dmsg.net.redis import RedisUnavailable, open_redis

    try:
        connection = await open_redis(description, reactor, reply_timeout=REDIS_TIMEOUT)
        store = RedisStore(connection, limit=limit, on_dropped=on_dropped)
        await store.shift_times(now)
    except RedisUnavailable as error:
        raise StoreError(str(error)) from None
    return store
