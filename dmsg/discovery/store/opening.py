"""A store from what ``--store`` says."""

from __future__ import annotations

import math
import time
from random import Random
from typing import Any

from twisted.internet.interfaces import IReactorTime

from dmsg.discovery.store.base import StoreError
from dmsg.discovery.store.memory import MemoryStore
from dmsg.discovery.store.redis import RedisStore
from dmsg.discovery.store.sqlite import SQLiteStore
from dmsg.net.redis import RedisUnavailable, open_redis, without_password

REDIS_PATIENCE = 1.5
"""Seconds for an answer of Redis: who asks discovery hears within two that it cannot be had now."""
STORE_LIMIT = 4096 * 1024 * 1024
"""Bytes of entries that a file or Redis has, by default; in memory it is :func:`dmsg.base.memory.default_limit`."""


def parse_store(description: str) -> tuple[str, str]:
    """``memory``, ``sqlite`` or ``redis``, and what follows the colon.

    :raises ~dmsg.discovery.store.base.StoreError: it is none of them.
    """
    kind, colon, rest = description.partition(":")
    if not colon or kind not in ("memory", "sqlite", "redis") or bool(rest) == (kind == "memory"):
        raise StoreError(f"{without_password(description)}: not memory:, sqlite:PATH or redis://HOST:PORT/DB")
    return kind, rest


async def open_store(
    description: str, reactor: IReactorTime, limit: float = math.inf, random: Random | None = None
) -> Any:
    """A store from what ``--store`` says.

    :param description: ``memory:``, ``sqlite:PATH`` or
        ``redis://HOST[:PORT][/DATABASE]``; the password of Redis is taken from
        the environment, ``DMSG_REDIS_PASSWORD``.
    :param limit: bytes that are kept, in all.
    :param random: chooses which servers a store in memory names.
    :raises ~dmsg.discovery.store.base.StoreError: unknown, cannot be opened, or Redis does not answer.
    """
    kind, rest = parse_store(description)
    if kind == "memory":
        return MemoryStore(random, limit)
    if kind == "sqlite":
        return SQLiteStore(rest, limit)
    try:
        connection = await open_redis(description, reactor, reply_timeout=REDIS_PATIENCE)
        store = RedisStore(connection, limit=limit)
        await store.adopt(time.time())
    except RedisUnavailable as error:
        raise StoreError(str(error)) from None
    return store
