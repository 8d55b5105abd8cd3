"""Where entries are kept: in memory, in SQLite, in Redis; one interface.

Each store compares and sets in one step, by the rules of
:func:`dmsg.discovery.entries.rules.check_iteration`; for Redis the rule is a script
that runs there, so that several discovery processes can share a database.
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
    Terms,
)
from dmsg.discovery.store.memory import MemoryStore
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
    "MemoryStore",
    "RedisStore",
    "SQLiteStore",
    "StoreError",
    "Terms",
    "open_store",
    "parse_store",
]
