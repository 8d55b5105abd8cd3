"""Where entries are kept: in memory, in SQLite, in Redis; one interface.

Each store compares and sets in one step, by the rules of
:func:`dmsg.discovery.entry.check_iteration`; for Redis the rule is a script
that runs there, so that several discovery processes can share a database.
Entries come in verified; times come in as arguments.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from zope.interface import Interface, implementer

from dmsg.discovery.entry import (
    REFRESHING,
    WRONG_DELETE_SEQUENCE,
    WRONG_FIRST_SEQUENCE,
    WRONG_SEQUENCE,
    WRONG_TIME,
    Deletion,
    Entry,
    EntryInvalid,
    Form,
    Head,
    check_deletion,
    check_iteration,
    decode,
    features,
    next_sequence,
    time_order,
)
from dmsg.discovery.looks import NEVER, may_look
from dmsg.errors import DmsgError, EntryError, EntryNotFound
from dmsg.net.redis import RedisUnavailable, open_redis, without_password

REDIS_PATIENCE = 1.5
"""Seconds for an answer of Redis: who asks discovery hears within two that it cannot be had now."""


FIRST_LOOK = 30.0
"""Seconds after its entry was posted when a quiet server is looked at."""


class StoreError(DmsgError):
    """The store cannot be opened or reached."""


class IEntryStore(Interface):
    """Entries by key."""

    def post(entry: Entry, now: float, refreshes: bool = True, looked_at: bool = True) -> Deferred[bool]:
        """Store a verified entry in place of the key's present one.

        :param refreshes: a server's owner posts it again and again; else it is *quiet*: listed behind others for as
            long as it is seen, and looked at from time to time if ``looked_at``.

        Fires with True for the first entry of a key, False for a later one.
        Fails with EntryInvalid when sequence or timestamp do not follow.
        """

    def get(static: str) -> Deferred[bytes]:
        """The JSON of a key's entry.  Fails with EntryNotFound."""

    def delete(deletion: Deletion) -> Deferred[None]:
        """Carry out a verified deletion.  Fails with EntryNotFound or EntryInvalid."""

    def available(most: int, since: float) -> Deferred[list[bytes]]:
        """JSON of at most ``most`` random servers with free connections posted after ``since``."""

    def quiet(most: int, since: float) -> Deferred[list[bytes]]:
        """JSON of at most ``most`` random quiet servers that were seen after ``since``."""

    def due(most: int, now: float, next_look: float) -> Deferred[list[bytes]]:
        """JSON of at most ``most`` quiet servers that are to be looked at now, those first that wait longest.

        It is time for them again at ``next_look``.
        """

    def seen(static: str, at: float | None, next_look: float) -> Deferred[None]:
        """A quiet server was there at that time, or was not (None); look at it again at ``next_look``."""

    def count() -> Deferred[int]:
        """Entries that are there."""

    def counts() -> Deferred[dict[str, int]]:
        """The same by kind: ``client``, ``server``, ``both``."""

    def close() -> Deferred[None]:
        """Let go of files and connections."""


def _listable(entry: Entry) -> bool:
    return entry.server is not None and entry.server.available_connections > 0


KINDS = ("client", "server", "both")


def _kind(entry: Entry) -> str:
    if entry.server is None:
        return "client"
    return "server" if entry.client is None else "both"


def _first_look(now: float, looked_at: bool) -> float:
    return now + FIRST_LOOK if looked_at else NEVER


def _first_migrated_look(entry: Entry) -> float:
    """Who posted it is not known any more: only what is public is looked at."""
    return 0.0 if entry.server is not None and may_look(entry.server.address, "") else NEVER


@implementer(IEntryStore)
class MemoryStore:
    """Entries in a dict; gone with the process."""

    def __init__(self, random: Random | None = None) -> None:
        self._heads: dict[str, Head] = {}
        self._json: dict[str, bytes] = {}
        # ordered by the time of posting, oldest first
        self._servers: dict[str, float] = {}
        self._quiet: dict[str, list[float]] = {}
        self._kinds: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._random = random or Random()

    def post(self, entry: Entry, now: float, refreshes: bool = True, looked_at: bool = True) -> Deferred[bool]:
        static = entry.static
        try:
            first = check_iteration(self._heads.get(static), entry)
        except EntryInvalid:
            return fail()
        self._heads[static] = Head(entry.sequence, time_order(entry.timestamp))
        self._json[static] = entry.to_json()
        self._set_kind(static, _kind(entry))
        self._servers.pop(static, None)
        self._quiet.pop(static, None)
        if _listable(entry) and refreshes:
            self._servers[static] = now
        elif _listable(entry):
            self._quiet[static] = [now, _first_look(now, looked_at)]
        return succeed(first)

    def get(self, static: str) -> Deferred[bytes]:
        body = self._json.get(static)
        return fail(EntryNotFound()) if body is None else succeed(body)

    def delete(self, deletion: Deletion) -> Deferred[None]:
        static = deletion.static
        try:
            check_deletion(self._heads.get(static), deletion)
        except KeyError:
            return fail(EntryNotFound())
        except EntryInvalid:
            return fail()
        self._heads[static] = Head(deletion.sequence, time_order(deletion.timestamp), deleted=True)
        del self._json[static]
        self._set_kind(static, None)
        self._servers.pop(static, None)
        self._quiet.pop(static, None)
        return succeed(None)

    def available(self, most: int, since: float) -> Deferred[list[bytes]]:
        live = []
        for static, posted in reversed(self._servers.items()):
            if posted < since:
                break
            live.append(static)
        chosen = self._random.sample(live, min(most, len(live)))
        return succeed([self._json[static] for static in chosen])

    def quiet(self, most: int, since: float) -> Deferred[list[bytes]]:
        seen = [static for static, (at, _) in self._quiet.items() if at >= since]
        chosen = self._random.sample(seen, min(most, len(seen)))
        return succeed([self._json[static] for static in chosen])

    def due(self, most: int, now: float, next_look: float) -> Deferred[list[bytes]]:
        waiting = sorted((look_at, static) for static, (_, look_at) in self._quiet.items() if look_at <= now)
        found = [static for _, static in waiting[:most]]
        for static in found:
            self._quiet[static][1] = next_look
        return succeed([self._json[static] for static in found])

    def seen(self, static: str, at: float | None, next_look: float) -> Deferred[None]:
        known = self._quiet.get(static)
        if known is not None:
            known[:] = [known[0] if at is None else at, next_look]
        return succeed(None)

    def count(self) -> Deferred[int]:
        return succeed(len(self._json))

    def counts(self) -> Deferred[dict[str, int]]:
        return succeed(dict(self._counts))

    def _set_kind(self, static: str, kind: str | None) -> None:
        before = self._kinds.pop(static, None)
        if before is not None:
            self._counts[before] -= 1
        if kind is not None:
            self._kinds[static] = kind
            self._counts[kind] += 1

    def close(self) -> Deferred[None]:
        return succeed(None)


_COUNT_TRIGGERS = (
    "CREATE TRIGGER counts_new AFTER INSERT ON entries WHEN NEW.json IS NOT NULL BEGIN "
    "UPDATE counts SET number = number + 1 WHERE kind = NEW.kind; END",
    "CREATE TRIGGER counts_was AFTER UPDATE ON entries WHEN OLD.json IS NOT NULL BEGIN "
    "UPDATE counts SET number = number - 1 WHERE kind = OLD.kind; END",
    "CREATE TRIGGER counts_became AFTER UPDATE ON entries WHEN NEW.json IS NOT NULL BEGIN "
    "UPDATE counts SET number = number + 1 WHERE kind = NEW.kind; END",
)


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing.  A full disk has SQLite roll back by itself, and the error is to be that one."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


@implementer(IEntryStore)
class SQLiteStore:
    """Entries in a file, write-ahead logged.

    A statement takes some tens of microseconds and none waits for the disk
    (``synchronous=NORMAL``), so they run in the reactor thread: what is
    answered survives ``kill -9``; a power cut may take the last seconds, and
    never leaves a damaged file.
    """

    def __init__(self, path: str) -> None:
        """:raises StoreError: cannot be opened, or is not a database of ours."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                """CREATE TABLE IF NOT EXISTS entries (
                    static TEXT PRIMARY KEY, sequence TEXT NOT NULL, time_order TEXT NOT NULL,
                    json BLOB, posted REAL NOT NULL, listable INTEGER NOT NULL) WITHOUT ROWID"""
            )
            self._add_columns()
            self._db.execute("CREATE INDEX IF NOT EXISTS servers ON entries (posted) WHERE listable")
            self._db.execute("CREATE INDEX IF NOT EXISTS looks ON entries (look_at) WHERE listable AND quiet")
            self._count_once()
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from None

    def _add_columns(self) -> None:
        """To files of earlier versions."""
        there = {row[1] for row in self._db.execute("PRAGMA table_info(entries)")}
        for column in (
            "quiet INTEGER NOT NULL DEFAULT 0",
            "seen REAL NOT NULL DEFAULT 0",
            "look_at REAL NOT NULL DEFAULT 0",
            "kind TEXT NOT NULL DEFAULT 'client'",
        ):
            if column.split()[0] not in there:
                self._db.execute(f"ALTER TABLE entries ADD COLUMN {column}")
        if "quiet" in there:
            return
        for static, body, posted in self._db.execute(
            "SELECT static, json, posted FROM entries WHERE listable AND json IS NOT NULL"
        ).fetchall():
            try:
                entry, _ = decode(bytes(body), Form.GO2019)
            except EntryError:
                continue
            self._db.execute(
                "UPDATE entries SET quiet = ?, seen = ?, look_at = ?, kind = ? WHERE static = ?",
                (not features(entry.version) & REFRESHING, posted, _first_migrated_look(entry), _kind(entry), static),
            )

    def _count_once(self) -> None:
        """From now on the file counts by itself: who asks for health must not have all of it looked at."""
        self._db.execute("BEGIN IMMEDIATE")
        there = self._db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'counts'").fetchone()
        if there is None:
            self._db.execute("CREATE TABLE counts (kind TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID")
            for kind in KINDS:
                self._db.execute(
                    "INSERT INTO counts SELECT ?, count(*) FROM entries WHERE json IS NOT NULL AND kind = ?",
                    (kind, kind),
                )
            for trigger in _COUNT_TRIGGERS:
                self._db.execute(trigger)
        self._db.execute("COMMIT")

    def _head(self, static: str) -> Head | None:
        row = self._db.execute(
            "SELECT sequence, time_order, json IS NULL FROM entries WHERE static = ?", (static,)
        ).fetchone()
        return None if row is None else Head(int(row[0]), row[1], bool(row[2]))

    def post(self, entry: Entry, now: float, refreshes: bool = True, looked_at: bool = True) -> Deferred[bool]:
        db = self._db
        try:
            with _transaction(db):
                first = check_iteration(self._head(entry.static), entry)
                db.execute(
                    "INSERT INTO entries "
                    "(static, sequence, time_order, json, posted, listable, quiet, seen, look_at, kind) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (static) DO UPDATE SET "
                    "sequence = excluded.sequence, time_order = excluded.time_order, json = excluded.json, "
                    "posted = excluded.posted, listable = excluded.listable, quiet = excluded.quiet, "
                    "seen = excluded.seen, look_at = excluded.look_at, kind = excluded.kind",
                    (
                        entry.static,
                        str(entry.sequence),
                        time_order(entry.timestamp),
                        entry.to_json(),
                        now,
                        _listable(entry),
                        not refreshes,
                        now,
                        _first_look(now, looked_at),
                        _kind(entry),
                    ),
                )
        except (EntryInvalid, sqlite3.Error):
            return fail()
        return succeed(first)

    def get(self, static: str) -> Deferred[bytes]:
        row = self._db.execute("SELECT json FROM entries WHERE static = ?", (static,)).fetchone()
        return fail(EntryNotFound()) if row is None or row[0] is None else succeed(row[0])

    def delete(self, deletion: Deletion) -> Deferred[None]:
        db = self._db
        try:
            with _transaction(db):
                check_deletion(self._head(deletion.static), deletion)
                db.execute(
                    "UPDATE entries SET time_order = ?, json = NULL, listable = 0 WHERE static = ?",
                    (time_order(deletion.timestamp), deletion.static),
                )
        except KeyError:
            return fail(EntryNotFound())
        except (EntryInvalid, sqlite3.Error):
            return fail()
        return succeed(None)

    def available(self, most: int, since: float) -> Deferred[list[bytes]]:
        rows = self._db.execute(
            "SELECT json FROM entries WHERE listable AND NOT quiet AND posted >= ? ORDER BY random() LIMIT ?",
            (since, most),
        ).fetchall()
        return succeed([row[0] for row in rows])

    def quiet(self, most: int, since: float) -> Deferred[list[bytes]]:
        rows = self._db.execute(
            "SELECT json FROM entries WHERE listable AND quiet AND seen >= ? ORDER BY random() LIMIT ?", (since, most)
        ).fetchall()
        return succeed([row[0] for row in rows])

    def due(self, most: int, now: float, next_look: float) -> Deferred[list[bytes]]:
        try:
            with _transaction(self._db):
                rows = self._db.execute(
                    "SELECT static, json FROM entries WHERE listable AND quiet AND look_at <= ? "
                    "ORDER BY look_at LIMIT ?",
                    (now, most),
                ).fetchall()
                for static, _ in rows:
                    self._db.execute("UPDATE entries SET look_at = ? WHERE static = ?", (next_look, static))
        except sqlite3.Error:
            return fail()
        return succeed([row[1] for row in rows])

    def seen(self, static: str, at: float | None, next_look: float) -> Deferred[None]:
        self._db.execute(
            "UPDATE entries SET seen = coalesce(?, seen), look_at = ? WHERE static = ? AND quiet",
            (at, next_look, static),
        )
        return succeed(None)

    def count(self) -> Deferred[int]:
        row = self._db.execute("SELECT sum(number) FROM counts").fetchone()
        return succeed(int(row[0]))

    def counts(self) -> Deferred[dict[str, int]]:
        rows = self._db.execute("SELECT kind, number FROM counts WHERE number").fetchall()
        return succeed({str(kind): int(number) for kind, number in rows})

    def close(self) -> Deferred[None]:
        self._db.close()
        return succeed(None)


# Numbers are compared as text: Lua's are doubles, ours have 64 bits.
_POST = """
local head = redis.call('HMGET', KEYS[1], 'next', 'order', 'json', 'kind')
local kind = 'next'
if not head[3] then
  kind = 'first'
  if ARGV[1] ~= '0' then return 'not zero' end
elseif head[1] ~= ARGV[1] then
  return 'sequence'
end
if head[2] and ARGV[3] <= head[2] then return 'time' end
redis.call('HSET', KEYS[1], 'sequence', ARGV[1], 'next', ARGV[2], 'order', ARGV[3], 'json', ARGV[4], 'kind', ARGV[9])
if head[3] and head[4] then redis.call('HINCRBY', KEYS[6], head[4], -1) end
redis.call('HINCRBY', KEYS[6], ARGV[9], 1)
for index = 2, 4 do redis.call('ZREM', KEYS[index], KEYS[1]) end
if ARGV[6] == '1' and ARGV[7] == '1' then
  redis.call('ZADD', KEYS[2], ARGV[5], KEYS[1])
elseif ARGV[6] == '1' then
  redis.call('ZADD', KEYS[3], ARGV[5], KEYS[1])
  redis.call('ZADD', KEYS[4], ARGV[8], KEYS[1])
end
if kind == 'first' then redis.call('INCR', KEYS[5]) end
return kind
"""
_DELETE = """
local head = redis.call('HMGET', KEYS[1], 'sequence', 'order', 'json', 'kind')
if not head[3] then return 'missing' end
if head[1] ~= ARGV[1] then return 'sequence' end
if ARGV[2] <= head[2] then return 'time' end
redis.call('HSET', KEYS[1], 'order', ARGV[2])
redis.call('HDEL', KEYS[1], 'json')
for index = 2, 4 do redis.call('ZREM', KEYS[index], KEYS[1]) end
if head[4] then redis.call('HINCRBY', KEYS[6], head[4], -1) end
redis.call('DECR', KEYS[5])
return 'deleted'
"""
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
  found[#found + 1] = redis.call('HGET', name, 'json')
end
return found
"""
_SEEN = """
if not redis.call('ZSCORE', KEYS[2], KEYS[1]) then return end
if ARGV[1] ~= '' then redis.call('ZADD', KEYS[2], ARGV[1], KEYS[1]) end
redis.call('ZADD', KEYS[3], ARGV[2], KEYS[1])
"""
_NAMES = ("servers", "quiet", "looks", "entries", "kinds")


@implementer(IEntryStore)
class RedisStore:
    """Entries in Redis; any number of discovery processes may share one.

    Keys: ``dmsg:entry:<static>`` a hash, ``dmsg:servers`` a sorted set of
    server entries by time of posting, ``dmsg:entries`` the number of all, ``dmsg:kinds`` by kind; quiet servers are
    in ``dmsg:quiet`` by the time when they were seen, in ``dmsg:looks`` by that of the next look.
    """

    prefix = "dmsg:"

    def __init__(self, connection: Any, random: Random | None = None) -> None:
        """:param connection: of txredisapi, with ``charset=None``; see :func:`open_store`."""
        self._redis = connection
        self._random = random or Random()

    def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Deferred[Any]:
        result: Deferred[Any] = self._redis.eval(script, [self.prefix + key for key in keys], arguments)
        return result

    def post(self, entry: Entry, now: float, refreshes: bool = True, looked_at: bool = True) -> Deferred[bool]:
        def posted(answer: bytes) -> bool:
            if answer in (b"first", b"next"):
                return answer == b"first"
            raise EntryInvalid(
                {b"not zero": WRONG_FIRST_SEQUENCE, b"sequence": WRONG_SEQUENCE, b"time": WRONG_TIME}[answer]
            )

        return self._run(
            _POST,
            [f"entry:{entry.static}", *_NAMES],
            [
                str(entry.sequence),
                str(next_sequence(entry.sequence)),
                time_order(entry.timestamp),
                entry.to_json(),
                repr(now),
                "1" if _listable(entry) else "0",
                "1" if refreshes else "0",
                repr(_first_look(now, looked_at)),
                _kind(entry),
            ],
        ).addCallback(posted)

    def get(self, static: str) -> Deferred[bytes]:
        def got(body: bytes | None) -> bytes:
            if body is None:
                raise EntryNotFound
            return body

        result: Deferred[bytes] = self._redis.hget(f"{self.prefix}entry:{static}", "json").addCallback(got)
        return result

    def delete(self, deletion: Deletion) -> Deferred[None]:
        def deleted(answer: bytes) -> None:
            if answer == b"missing":
                raise EntryNotFound
            if answer != b"deleted":
                raise EntryInvalid({b"sequence": WRONG_DELETE_SEQUENCE, b"time": WRONG_TIME}[answer])

        return self._run(
            _DELETE,
            [f"entry:{deletion.static}", *_NAMES],
            [str(deletion.sequence), time_order(deletion.timestamp)],
        ).addCallback(deleted)

    def available(self, most: int, since: float) -> Deferred[list[bytes]]:
        seed = str(self._random.randrange(2**31))
        return self._run(_AVAILABLE, ["servers"], [repr(since), str(most), seed]).addCallback(
            lambda found: [body for body in found if body]
        )

    def quiet(self, most: int, since: float) -> Deferred[list[bytes]]:
        seed = str(self._random.getrandbits(31))
        return self._run(_AVAILABLE, ["quiet"], [repr(since), str(most), seed]).addCallback(_whole)

    def due(self, most: int, now: float, next_look: float) -> Deferred[list[bytes]]:
        return self._run(_DUE, ["looks"], [repr(now), str(most), repr(next_look)]).addCallback(_whole)

    def seen(self, static: str, at: float | None, next_look: float) -> Deferred[None]:
        arguments = ["" if at is None else repr(at), repr(next_look)]
        return self._run(_SEEN, [f"entry:{static}", "quiet", "looks"], arguments).addCallback(lambda _: None)

    def counts(self) -> Deferred[dict[str, int]]:
        def counted(found: dict[Any, Any]) -> dict[str, int]:
            return {bytes(kind).decode(): int(number) for kind, number in found.items()}

        result: Deferred[dict[str, int]] = self._redis.hgetall(f"{self.prefix}kinds").addCallback(counted)
        return result

    def count(self) -> Deferred[int]:
        result: Deferred[int] = self._redis.get(f"{self.prefix}entries").addCallback(lambda n: int(n or 0))
        return result

    def close(self) -> Deferred[None]:
        result: Deferred[None] = self._redis.disconnect()
        return result


def _whole(found: list[bytes | None]) -> list[bytes]:
    """Without those that went meanwhile."""
    return [body for body in found if body]


async def open_store(description: str, reactor: IReactorTime) -> Any:
    """A store from what ``--store`` says.

    :param description: ``memory:``, ``sqlite:PATH`` or
        ``redis://HOST[:PORT][/DATABASE]``; the password of Redis is taken from
        the environment, ``DMSG_REDIS_PASSWORD``.
    :raises StoreError: unknown, cannot be opened, or Redis does not answer.
    """
    kind, colon, rest = description.partition(":")
    if kind == "memory" and colon and not rest:
        return MemoryStore()
    if kind == "sqlite" and rest:
        return SQLiteStore(rest)
    if kind == "redis":
        try:
            return RedisStore(await open_redis(description, reactor, reply_timeout=REDIS_PATIENCE))
        except RedisUnavailable as error:
            raise StoreError(str(error)) from None
    raise StoreError(f"{without_password(description)}: not memory:, sqlite:PATH or redis://HOST:PORT")
