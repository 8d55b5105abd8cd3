"""Entries in memory, gone with the process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

from attrs import define
from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from dmsg.base.ranked import Ranked
from dmsg.discovery.entries.entry import Entry, EntryInvalid
from dmsg.discovery.entries.rules import Deletion, Head, check_deletion, check_iteration, time_order
from dmsg.discovery.store.base import (
    LATEST_LOOK,
    NEVER,
    OVERHEAD,
    ROOM_AT_ONCE,
    TOMBSTONE_TTL,
    Dropped,
    Due,
    IEntryStore,
    Terms,
    ends,
    kind,
    listable,
    nobody_told,
    size_of,
    target,
)
from dmsg.discovery.store.nameplates import MemoryNameplates
from dmsg.errors import EntryNotFound
from dmsg.net.blocks import BlockCounts, blocks_of


@define
class _Kept:
    """An entry, or what is remembered of one that was deleted (no JSON)."""

    head: Head
    json: bytes | None
    kind: str
    place: str
    size: int
    posted: float = 0.0
    refreshes: bool = True
    target: str = ""
    checked: bool = True


@define
class _Place:
    """What an address block posted: keys, the one posted longest ago first."""

    statics: dict[str, None]
    size: int = 0


@implementer(IEntryStore)
class MemoryStore:
    """Entries in a dict.

    :param limit: bytes that are kept, in all.
    """

    failures: tuple[type[Exception], ...] = ()

    def __init__(self, random: Random | None = None, limit: float = math.inf) -> None:
        self._kept: dict[str, _Kept] = {}
        # what is listed, by when it was posted, or was seen last
        self._servers: dict[str, float] = {}
        self._quiet: dict[str, float] = {}
        self._looks: Ranked[str] = Ranked()
        self._counts: Counter[str] = Counter()
        self._places: dict[str, _Place] = {}
        self._sizes = BlockCounts()
        self._ends: Ranked[str] = Ranked()
        self._size = 0
        self._limit = limit
        self._random = random or Random()
        self.dropped: Dropped = nobody_told
        self.nameplates = MemoryNameplates()

    def post(self, entry: Entry, now: float, terms: Terms = Terms()) -> Deferred[bool]:
        static = entry.static
        known = self._kept.get(static)
        try:
            first = check_iteration(None if known is None else known.head, entry)
        except EntryInvalid:
            return fail()
        look_at = NEVER if terms.checked else now
        checked = terms.checked
        if known is not None:
            if known.json is not None and known.target == target(entry):
                checked = checked or known.checked
                if terms.refreshes and static in self._looks:
                    look_at = self._looks.rank(static)
            self._remove(static, known)
        body = entry.to_json()
        kept = _Kept(
            Head(entry.sequence, time_order(entry.timestamp)),
            body,
            kind(entry),
            terms.place,
            size_of(body),
            now,
            terms.refreshes,
            target(entry),
            checked,
        )
        self._add(static, kept, ends(now, terms.lasts))
        if listable(entry):
            self._looks.put(static, look_at)
            if checked:
                self._list(static, kept, now)
        for name, factor in blocks_of(terms.place):
            while self._sizes[name] > terms.most * factor:
                self._drop_oldest(self._sizes.heaviest(name), "address")
        self._make_room()
        return succeed(first)

    def get(self, static: str) -> Deferred[bytes]:
        kept = self._kept.get(static)
        return fail(EntryNotFound()) if kept is None or kept.json is None else succeed(kept.json)

    def delete(self, deletion: Deletion, now: float) -> Deferred[None]:
        static = deletion.static
        known = self._kept.get(static)
        try:
            check_deletion(None if known is None else known.head, deletion)
        except KeyError:
            return fail(EntryNotFound())
        except EntryInvalid:
            return fail()
        assert known is not None
        self._remove(static, known)
        head = Head(deletion.sequence, time_order(deletion.timestamp), deleted=True, deletion=deletion.to_json())
        self._add(static, _Kept(head, None, known.kind, known.place, OVERHEAD), ends(now, TOMBSTONE_TTL))
        return succeed(None)

    def available(self, most: int, since: float) -> Deferred[list[bytes]]:
        return succeed(self._draw([static for static, posted in self._servers.items() if posted >= since], most))

    def quiet(self, most: int, since: float) -> Deferred[list[bytes]]:
        return succeed(self._draw([static for static, at in self._quiet.items() if at >= since], most))

    def listed(self, statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        return succeed(self._bodies([static for static in statics if self._servers.get(static, -math.inf) >= since]))

    def due(self, most: int, now: float, next_look: float) -> Deferred[list[Due]]:
        found: list[str] = []
        while len(found) < most and (first := self._looks.first()) is not None and self._looks.rank(first) <= now:
            self._looks.remove(first)
            found.append(first)
        for static in found:
            self._looks.put(static, next_look)
        kept = [self._kept[static] for static in found]
        return succeed([Due(one.json or b"", one.place, one.refreshes, one.checked) for one in kept])

    def seen(
        self, static: str, target: str, at: float | None, next_look: float, lasts: float = 0.0, listed: bool = True
    ) -> Deferred[None]:
        if static not in self._looks or self._kept[static].target != target:
            return succeed(None)
        self._looks.put(static, next_look)
        kept = self._kept[static]
        if at is None and not listed:
            kept.checked = False
            self._servers.pop(static, None)
            self._quiet.pop(static, None)
        elif at is not None:
            if not kept.checked or not kept.refreshes:
                self._list(static, kept, at)
            kept.checked = True
            if not kept.refreshes:
                self._ends.put(static, max(self._ends.rank(static), ends(at, lasts)))
        return succeed(None)

    def set_back(self, now: float) -> Deferred[None]:
        for listed in (self._servers, self._quiet):
            listed.update({static: now for static, at in listed.items() if at > now})
        for static in [static for static in self._kept if static in self._looks]:
            if now + LATEST_LOOK < self._looks.rank(static) < NEVER:
                self._looks.put(static, now)
        return succeed(None)

    def sweep(self, now: float, most: int) -> Deferred[int]:
        swept = 0
        while swept < most and (first := self._ends.first()) is not None and self._ends.rank(first) <= now:
            self._drop(first, "ended")
            swept += 1
        self._make_room()
        return succeed(swept)

    def count(self) -> Deferred[int]:
        return succeed(self._counts.total())

    def counts(self) -> Deferred[dict[str, int]]:
        return succeed(dict(self._counts))

    def is_full(self, error: BaseException) -> bool:
        return False

    def size(self) -> Deferred[int]:
        return succeed(self._size)

    def close(self) -> Deferred[None]:
        return succeed(None)

    def _bodies(self, statics: list[str]) -> list[bytes]:
        return [body for static in statics if (body := self._kept[static].json) is not None]

    def _draw(self, statics: list[str], most: int) -> list[bytes]:
        return self._bodies(self._random.sample(statics, min(most, len(statics))))

    def _list(self, static: str, kept: _Kept, at: float) -> None:
        (self._servers if kept.refreshes else self._quiet)[static] = at

    def _add(self, static: str, kept: _Kept, ends_at: float) -> None:
        self._kept[static] = kept
        self._ends.put(static, ends_at)
        if kept.json is not None:
            self._counts[kept.kind] += 1
        place = self._places.setdefault(kept.place, _Place({}))
        place.statics[static] = None
        self._resize(kept.place, place, kept.size)

    def _remove(self, static: str, kept: _Kept) -> None:
        del self._kept[static]
        self._ends.remove(static)
        self._looks.remove(static)
        self._servers.pop(static, None)
        self._quiet.pop(static, None)
        if kept.json is not None:
            self._counts[kept.kind] -= 1
        place = self._places[kept.place]
        del place.statics[static]
        self._resize(kept.place, place, -kept.size)

    def _resize(self, name: str, place: _Place, by: int) -> None:
        place.size += by
        self._size += by
        if by > 0:
            self._sizes.add(name, by)
        elif by < 0:
            self._sizes.remove(name, -by)
        if not place.statics:
            del self._places[name]

    def _make_room(self) -> None:
        room = ROOM_AT_ONCE
        while self._size > self._limit and (room := room - 1) >= 0:
            self._drop_oldest(self._sizes.heaviest(), "total")

    def _drop_oldest(self, place: str, reason: str) -> None:
        self._drop(next(iter(self._places[place].statics)), reason)

    def _drop(self, static: str, reason: str) -> None:
        kept = self._kept[static]
        self._remove(static, kept)
        self.dropped("deleted" if reason == "ended" and kept.json is None else reason, kept.place, 1)
