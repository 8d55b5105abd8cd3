"""Stores of entries: SQLite in memory or in a file, or Redis, behind one interface.

Each store compares and sets in one transaction, by the rules of
:func:`dmsg.discovery.entries.rules.decide_post`; in Redis a script implements them. Several discovery processes can
share a file, or a Redis. The caller verifies entries and passes the time as an argument.

Strangers can create any number of keys. So the size of a store is limited, in all and for each address block that
posts (a *place*). Every entry expires unless it is posted again.
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
