"""Store of entries in SQLite: in a file, or in memory."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from functools import partial
from random import Random

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.databases import prepare_database
from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.entries.rules import (
    NEVER,
    TOMBSTONE_TTL,
    Deletion,
    Head,
    PresentState,
    Terms,
    check_deletion,
    decide_post,
    target,
    time_order,
)
from dmsg.discovery.store.base import (
    KINDS,
    LATEST_CHECK,
    OVERHEAD,
    ROOM_AT_ONCE,
    Dropped,
    DueServer,
    IEntryStore,
    StoreError,
    ends,
    ignore_dropped,
    is_listable,
    kind,
    size_of,
)
from dmsg.discovery.store.nameplates import SQLiteNameplates
from dmsg.discovery.store.transaction import Changes, transaction
from dmsg.errors import EntryNotFound
from dmsg.net.blocks import blocks_of
from dmsg.net.turn_end import AtTurnEnd

_ENTRIES = f"""CREATE TABLE IF NOT EXISTS entries (
    static TEXT PRIMARY KEY, sequence TEXT NOT NULL, time_order TEXT NOT NULL,
    json BLOB, posted REAL NOT NULL, listable INTEGER NOT NULL,
    quiet INTEGER NOT NULL DEFAULT 0, seen REAL NOT NULL DEFAULT 0, look_at REAL NOT NULL DEFAULT 0,
    kind TEXT NOT NULL DEFAULT 'client', place TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL DEFAULT {OVERHEAD},
    ends REAL NOT NULL DEFAULT {NEVER!r}, target TEXT NOT NULL DEFAULT '', checked INTEGER NOT NULL DEFAULT 1,
    deletion BLOB) WITHOUT ROWID"""
_INDICES = (
    # This covering index has all columns that a random draw of servers needs, so that SQLite need not read the table
    # for each candidate.
    "CREATE INDEX IF NOT EXISTS drawn ON entries (posted, listable, quiet, checked) "
    "WHERE listable AND NOT quiet AND checked",
    "CREATE INDEX IF NOT EXISTS drawn_quiet ON entries (seen, listable, quiet, checked) "
    "WHERE listable AND quiet AND checked",
    "CREATE INDEX IF NOT EXISTS looking ON entries (look_at) WHERE listable",
    "CREATE INDEX IF NOT EXISTS oldest ON entries (place, posted)",
    "CREATE INDEX IF NOT EXISTS ending ON entries (ends)",
    "CREATE INDEX IF NOT EXISTS greediest ON places (size)",
    "CREATE INDEX IF NOT EXISTS greediest_in ON around (block, size)",
    "CREATE INDEX IF NOT EXISTS greediest_block ON loads (load)",
)
# Triggers in the database update the counts, so that the counts are right even if a process of another version writes
# to the file. A trigger of columns is not called for statements that set other columns only, such as ``_REFRESH``. All
# statements that delete the JSON, or write it where there was none, also set ``kind`` or ``listable``.
_TRIGGERS = (
    "counts_new AFTER INSERT ON entries WHEN NEW.json IS NOT NULL BEGIN "
    "UPDATE counts SET number = number + 1 WHERE kind = NEW.kind; END",
    "counts_was AFTER UPDATE OF kind, listable ON entries "
    "WHEN OLD.json IS NOT NULL AND (NEW.json IS NULL OR NEW.kind <> OLD.kind) BEGIN "
    "UPDATE counts SET number = number - 1 WHERE kind = OLD.kind; END",
    "counts_became AFTER UPDATE OF kind, listable ON entries "
    "WHEN NEW.json IS NOT NULL AND (OLD.json IS NULL OR NEW.kind <> OLD.kind) BEGIN "
    "UPDATE counts SET number = number + 1 WHERE kind = NEW.kind; END",
    "counts_gone AFTER DELETE ON entries WHEN OLD.json IS NOT NULL BEGIN "
    "UPDATE counts SET number = number - 1 WHERE kind = OLD.kind; END",
    "places_new AFTER INSERT ON entries BEGIN "
    "INSERT INTO places SELECT NEW.place, 0 WHERE NOT EXISTS (SELECT 1 FROM places WHERE place = NEW.place); "
    "UPDATE places SET size = size + NEW.size WHERE place = NEW.place; "
    "UPDATE total SET size = size + NEW.size; END",
    "places_became AFTER UPDATE OF place, size ON entries WHEN NEW.place <> OLD.place OR NEW.size <> OLD.size BEGIN "
    "UPDATE places SET size = size - OLD.size WHERE place = OLD.place; "
    "INSERT INTO places SELECT NEW.place, 0 WHERE NOT EXISTS (SELECT 1 FROM places WHERE place = NEW.place); "
    "UPDATE places SET size = size + NEW.size WHERE place = NEW.place; "
    "DELETE FROM places WHERE place = OLD.place AND size <= 0; "
    "UPDATE total SET size = size + NEW.size - OLD.size; END",
    "places_gone AFTER DELETE ON entries BEGIN "
    "UPDATE places SET size = size - OLD.size WHERE place = OLD.place; "
    "DELETE FROM places WHERE place = OLD.place AND size <= 0; "
    "UPDATE total SET size = size - OLD.size; END",
    "around_sized AFTER UPDATE OF size ON places BEGIN "
    "UPDATE loads SET load = load + (NEW.size - OLD.size) / "
    "(SELECT factor FROM around WHERE around.place = NEW.place AND around.block = loads.block) "
    "WHERE block IN (SELECT block FROM around WHERE place = NEW.place); "
    "UPDATE around SET size = NEW.size WHERE place = NEW.place; END",
    "around_gone AFTER DELETE ON places BEGIN "
    "DELETE FROM around WHERE place = OLD.place; DELETE FROM loads WHERE load <= 0; END",
)
# These tables contain the number of entries by kind, the bytes of each place (address block of a poster), and the bytes
# of the whole store.
_COUNTS = (
    "CREATE TABLE IF NOT EXISTS counts (kind TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID",
    *(f"INSERT OR IGNORE INTO counts VALUES ('{one}', 0)" for one in KINDS),  # noqa: S608  # ours
    "CREATE TABLE IF NOT EXISTS places (place TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS total (size INTEGER NOT NULL)",
    "INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total)",
)
# Table ``around`` has a row for each place and each wider address block that contains the place, with the bytes of the
# place. Table ``loads`` has the load of each such block: its bytes divided by its factor.
_BLOCKS = (
    "CREATE TABLE IF NOT EXISTS around (place TEXT NOT NULL, block TEXT NOT NULL, factor REAL NOT NULL, "
    "size INTEGER NOT NULL, PRIMARY KEY (place, block)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS loads (block TEXT PRIMARY KEY, load REAL NOT NULL) WITHOUT ROWID",
)
_LOADS = (
    "SELECT (SELECT size FROM places WHERE place = ?), "
    "(SELECT max(load) FROM around JOIN loads USING (block) WHERE place = ?), (SELECT size FROM total), "
    "EXISTS (SELECT 1 FROM around WHERE place = ?)"
)
_POST = (
    "INSERT INTO entries "
    "(sequence, time_order, json, posted, seen, look_at, ends, target, checked, listable, quiet, kind, place, size, "
    "static) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (static) DO UPDATE SET "
    "sequence = excluded.sequence, time_order = excluded.time_order, json = excluded.json, "
    "posted = excluded.posted, listable = excluded.listable, quiet = excluded.quiet, "
    "seen = excluded.seen, look_at = excluded.look_at, kind = excluded.kind, "
    "place = excluded.place, size = excluded.size, ends = excluded.ends, "
    "target = excluded.target, checked = excluded.checked, deletion = NULL"
)
# Most entries are posted again with the same values in all other columns. This statement calls no trigger, and takes
# half the time of ``_POST``.
_REFRESH = (
    "UPDATE entries SET sequence = ?, time_order = ?, json = ?, posted = ?, seen = ?, look_at = ?, ends = ? "
    "WHERE static = ?"
)
_STATE = (
    "SELECT sequence, time_order, json IS NULL, deletion, CASE WHEN listable THEN look_at END, "
    "target, checked, listable, quiet, kind, place, size FROM entries WHERE static = ?"
)


@implementer(IEntryStore)
class SQLiteStore:
    """Store of entries in an SQLite file with a write-ahead log, or in memory.

    A statement takes some tens of microseconds, so statements run in the reactor thread. A change for which the client
    has got an answer survives ``kill -9``. A change does not wait for the disk (``synchronous=NORMAL``), so a power
    failure loses the changes that the operating system has not written yet, at most those since SQLite's last
    checkpoint. A power failure never damages the file. In a durable store, each transaction waits for the disk
    (``synchronous=FULL``), and no change is lost.

    :param path: path of the file; ``:memory:`` stores entries in memory until the store is closed.
    :param limit: maximum number of bytes of entries that are kept; the file becomes about twice as large.
    :param random: random numbers with which servers are drawn, if the draw has to be repeatable.
    :param on_dropped: called for entries that the store drops.
    :param at_turn_end: schedules the transaction for the changes of a reactor turn; None for a transaction for each
        change (:class:`~dmsg.discovery.store.transaction.Changes`).
    :param durable: whether changes in a file survive a power failure.
    """

    failures: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(
        self,
        path: str,
        limit: float = math.inf,
        random: Random | None = None,
        on_dropped: Dropped = ignore_dropped,
        *,
        at_turn_end: AtTurnEnd | None = None,
        durable: bool = False,
    ) -> None:
        """Open or create the file.

        :raises StoreError: the file cannot be opened, or is not a database of discovery.
        """
        self._limit = limit
        self.dropped = on_dropped
        try:
            with prepare_database(path, 5.0) as self._db:
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                if random is not None:
                    self._db.create_function("random", 0, lambda: random.getrandbits(63))
                with transaction(self._db):
                    _prepare(self._db)
                    self._changes = Changes(self._db, at_turn_end)
                    self.nameplates = SQLiteNameplates(self._db, self._changes)
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from None

    def _read_state(self, static: str) -> tuple[PresentState | None, float | None, tuple[object, ...]]:
        """Return the stored state of a key, the time of the next check of its server, and the values of the columns
        that :data:`_REFRESH` does not change.
        """
        row = self._db.execute(_STATE, (static,)).fetchone()
        if row is None:
            return None, None, ()
        sequence, order, deleted, deletion, look_at, target, checked = row[:7]
        head = Head(int(sequence), order, bool(deleted), deletion)
        return PresentState(head, target, bool(checked)), look_at, row[5:]

    def post(self, entry: Entry, now: float, terms: Terms = Terms()) -> Deferred[bool]:
        return self._changes.make(partial(self._post, entry, now, terms))

    def _post(self, entry: Entry, now: float, terms: Terms) -> bool:
        present, planned, kept = self._read_state(entry.static)
        decision = decide_post(present, entry, now, terms)
        check_at = planned if decision.keeps_check and planned is not None else decision.check_at
        body = entry.to_json()
        changing = str(entry.sequence), time_order(entry.timestamp), body, now, now, check_at, ends(now, terms.lasts)
        lasting = (
            target(entry),
            decision.checked,
            is_listable(entry),
            not terms.refreshes,
            kind(entry),
            terms.place,
            size_of(body),
        )
        if kept == lasting and not decision.first:
            self._db.execute(_REFRESH, (*changing, entry.static))
        else:
            self._db.execute(_POST, (*changing, *lasting, entry.static))
        dropped: list[tuple[str, str]] = []
        size, load, total = self._loads_of(terms.place)
        if max(size, load) > terms.most:
            dropped += self._shrink_place(terms.place, terms.most)
        if total > self._limit:
            dropped += self._make_room()
        self._tell(dropped)
        return decision.first

    def _make_room(self) -> list[tuple[str, str]]:
        """Drop entries until the store is within its limit, but at most :data:`ROOM_AT_ONCE` entries.

        :returns: reason and place of each dropped entry.
        """
        dropped: list[tuple[str, str]] = []
        while len(dropped) < ROOM_AT_ONCE and self._fetch_one("SELECT size FROM total") > self._limit:
            place = self._largest_place()
            self._drop_oldest(place)
            dropped.append(("total", place))
        return dropped

    def _loads_of(self, place: str) -> tuple[int, float, int]:
        """Return three numbers: the bytes of a place (address block of a poster), the highest load of the wider blocks
        that contain this place, and the bytes of the whole store. If the place is new, store its wider blocks.
        """
        values = place, place, place
        size, load, total, is_known = self._db.execute(_LOADS, values).fetchone()
        if not is_known and self._register_blocks(place, size or 0):
            size, load, total, _ = self._db.execute(_LOADS, values).fetchone()
        return size or 0, load or 0.0, total

    def _register_blocks(self, place: str, size: int) -> bool:
        """Store the names of the wider blocks that contain a place; return whether there are any."""
        blocks = blocks_of(place)[1:]
        for name, factor in blocks:
            self._db.execute("INSERT INTO around VALUES (?, ?, ?, ?)", (place, name, factor, size))
            self._db.execute(
                "INSERT INTO loads VALUES (?, ?) ON CONFLICT (block) DO UPDATE SET load = load + excluded.load",
                (name, size / factor),
            )
        return bool(blocks)

    def _shrink_place(self, place: str, most: float) -> list[tuple[str, str]]:
        """Drop entries until a place and the wider blocks that contain it are within their limit of bytes.

        :returns: reason and place of each dropped entry.
        """
        dropped: list[tuple[str, str]] = []
        while self._fetch_one("SELECT size FROM places WHERE place = ?", place) > most:
            self._drop_oldest(place)
            dropped.append(("address", place))
        for block, _ in blocks_of(place)[1:]:
            while self._fetch_one("SELECT load FROM loads WHERE block = ?", block) > most:
                largest = self._largest_place_in(block)
                self._drop_oldest(largest)
                dropped.append(("address", largest))
        return dropped

    def _largest_place(self) -> str:
        """Return the place (address block of a poster) whose oldest entry is dropped next.

        Usually this is the place with most bytes in the store. If a wider block has a load above the bytes of that
        place, the result is the place with most bytes inside the wider block with the highest load.
        """
        place, size = self._db.execute("SELECT place, size FROM places ORDER BY size DESC LIMIT 1").fetchone()
        block = self._db.execute("SELECT block, load FROM loads ORDER BY load DESC LIMIT 1").fetchone()
        return str(place) if block is None or block[1] <= size else self._largest_place_in(block[0])

    def _largest_place_in(self, block: str) -> str:
        row = self._db.execute(
            "SELECT place FROM around WHERE block = ? ORDER BY size DESC LIMIT 1", (block,)
        ).fetchone()
        return str(row[0])

    def _drop_oldest(self, place: str) -> None:
        self._db.execute(
            "DELETE FROM entries WHERE static = (SELECT static FROM entries WHERE place = ? ORDER BY posted LIMIT 1)",
            (place,),
        )

    def _fetch_one(self, question: str, *arguments: str) -> int:
        row = self._db.execute(question, arguments).fetchone()
        return 0 if row is None else int(row[0])

    def _tell(self, dropped: list[tuple[str, str]]) -> None:
        for reason, place in dropped:
            self.dropped(reason, place, 1)

    def get(self, static: str) -> Deferred[bytes]:
        row = self._db.execute("SELECT json FROM entries WHERE static = ?", (static,)).fetchone()
        return fail(EntryNotFound()) if row is None or row[0] is None else succeed(row[0])

    def delete(self, deletion: Deletion, now: float) -> Deferred[None]:
        return self._changes.make(partial(self._delete, deletion, now))

    def _delete(self, deletion: Deletion, now: float) -> None:
        present, _, _ = self._read_state(deletion.static)
        try:
            check_deletion(None if present is None else present.head, deletion)
        except KeyError:
            raise EntryNotFound from None
        self._db.execute(
            "UPDATE entries SET time_order = ?, json = NULL, listable = 0, size = ?, ends = ?, deletion = ? "
            "WHERE static = ?",
            (
                time_order(deletion.timestamp),
                OVERHEAD,
                ends(now, TOMBSTONE_TTL),
                deletion.to_json(),
                deletion.static,
            ),
        )

    def available(self, limit: int, since: float) -> Deferred[list[bytes]]:
        rows = self._db.execute(
            "SELECT json FROM entries WHERE static IN (SELECT static FROM entries "
            "WHERE listable AND NOT quiet AND checked AND posted >= ? ORDER BY random() LIMIT ?)",
            (since, limit),
        ).fetchall()
        return succeed([row[0] for row in rows])

    def quiet(self, limit: int, since: float) -> Deferred[list[bytes]]:
        rows = self._db.execute(
            "SELECT json FROM entries WHERE static IN (SELECT static FROM entries "
            "WHERE listable AND quiet AND checked AND seen >= ? ORDER BY random() LIMIT ?)",
            (since, limit),
        ).fetchall()
        return succeed([row[0] for row in rows])

    def listed(self, statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        rows = self._db.execute(
            "SELECT json FROM entries WHERE static IN (SELECT value FROM json_each(?)) "
            "AND listable AND NOT quiet AND checked AND posted >= ?",
            (json.dumps(list(statics)), since),
        ).fetchall()
        return succeed([row[0] for row in rows])

    def due(self, limit: int, now: float, next_check: float) -> Deferred[list[DueServer]]:
        return self._changes.make(partial(self._due, limit, now, next_check))

    def _due(self, limit: int, now: float, next_check: float) -> list[DueServer]:
        rows = self._db.execute(
            "SELECT static, json, place, quiet, checked FROM entries WHERE listable AND look_at <= ? "
            "ORDER BY look_at LIMIT ?",
            (now, limit),
        ).fetchall()
        for static, *_ in rows:
            self._db.execute("UPDATE entries SET look_at = ? WHERE static = ?", (next_check, static))
        return [DueServer(body, place, not quiet, bool(checked)) for _, body, place, quiet, checked in rows]

    def record_check(
        self, static: str, target: str, at: float | None, next_check: float, lasts: float = 0.0, listed: bool = True
    ) -> Deferred[None]:
        return self._changes.make(partial(self._record_check, static, target, at, next_check, lasts, listed))

    def _record_check(
        self, static: str, target: str, at: float | None, next_check: float, lasts: float, listed: bool
    ) -> None:
        if at is None:
            self._db.execute(
                "UPDATE entries SET look_at = ?, checked = checked AND ? WHERE static = ? AND listable AND target = ?",
                (next_check, listed, static, target),
            )
        else:
            self._db.execute(
                "UPDATE entries SET seen = ?, look_at = ?, checked = 1, "
                "posted = CASE WHEN quiet OR checked THEN posted ELSE ? END, "
                "ends = CASE WHEN quiet THEN max(ends, ?) ELSE ends END WHERE static = ? AND listable AND target = ?",
                (at, next_check, at, ends(at, lasts), static, target),
            )

    def shift_times(self, now: float) -> Deferred[None]:
        # A discovery that starts calls this method before the reactor has turns.
        return self._changes.make_at_once(partial(self._shift_times, now))

    def _shift_times(self, now: float) -> None:
        self._db.execute("UPDATE entries SET posted = ? WHERE posted > ?", (now, now))
        self._db.execute("UPDATE entries SET seen = ? WHERE listable AND seen > ?", (now, now))
        self._db.execute(
            "UPDATE entries SET look_at = ? WHERE listable AND look_at > ? AND look_at < ?",
            (now, now + LATEST_CHECK, NEVER),
        )

    def sweep(self, now: float, limit: int) -> Deferred[int]:
        return self._changes.make(partial(self._sweep, now, limit))

    def _sweep(self, now: float, limit: int) -> int:
        rows = self._db.execute(
            "SELECT static, place, json IS NULL FROM entries WHERE ends <= ? ORDER BY ends LIMIT ?",
            (now, limit),
        ).fetchall()
        self._db.executemany("DELETE FROM entries WHERE static = ?", [(static,) for static, _, _ in rows])
        self._tell(self._make_room())
        self._tell([("deleted" if was_deleted else "ended", place) for _, place, was_deleted in rows])
        return len(rows)

    def count(self) -> Deferred[int]:
        return succeed(self._fetch_one("SELECT sum(number) FROM counts"))

    def counts(self) -> Deferred[dict[str, int]]:
        rows = self._db.execute("SELECT kind, number FROM counts WHERE number").fetchall()
        return succeed({str(kind): int(number) for kind, number in rows})

    def is_full(self, error: BaseException | None) -> bool:
        return isinstance(error, sqlite3.Error)

    def size(self) -> Deferred[int]:
        return succeed(self._fetch_one("SELECT size FROM total"))

    def close(self) -> Deferred[None]:
        self._changes.commit()
        self._db.close()
        return succeed(None)


def _prepare(db: sqlite3.Connection) -> None:
    """Create the tables, indices and triggers that the database does not have yet, and replace triggers of an earlier
    version.
    """
    for statement in (_ENTRIES, *_COUNTS, *_BLOCKS, *_INDICES):
        db.execute(statement)
    present = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall())
    for trigger in _TRIGGERS:
        name, created = trigger.split()[0], f"CREATE TRIGGER {trigger}"
        if present.get(name) != created:
            db.execute(f"DROP TRIGGER IF EXISTS {name}")
            db.execute(created)
