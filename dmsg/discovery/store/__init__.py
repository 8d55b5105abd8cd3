"""Where entries are kept: in memory or a file by SQLite, or in Redis; one interface.

Each store compares and sets in one step, by the rules of
:func:`dmsg.discovery.entries.rules.decide_post`; for Redis they are a script
that runs there.  Several discovery processes can share a file, or a Redis.
Entries come in verified; times come in as arguments.

A stranger can make as many keys as he likes, so what is kept has a size in all
and of each address block that posts it (a *place*), and every entry ends unless
it is posted again.
"""

from dmsg.discovery.store.base import (
    KINDS,
    OVERHEAD,
    ROOM_AT_ONCE,
    TOMBSTONE_TTL,
    Dropped,
    Due,
    IEntryStore,
    StoreError,
)
from dmsg.discovery.store.opening import REDIS_PATIENCE, STORE_LIMIT, open_store, parse_store
from dmsg.discovery.store.redis import RedisStore
from dmsg.discovery.store.sqlite import SQLiteStore

__all__ = [
    "KINDS",
    "OVERHEAD",
    "REDIS_PATIENCE",
    "ROOM_AT_ONCE",
    "STORE_LIMIT",
    "TOMBSTONE_TTL",
    "Dropped",
    "Due",
    "IEntryStore",
    "RedisStore",
    "SQLiteStore",
    "StoreError",
    "open_store",
    "parse_store",
]
