"""Store of entries in Redis, which any number of discovery processes may share.

Each change that depends on stored values is a Lua script. Scripts compare sequences and times of entries as text,
because these have 64 bits, and Lua's numbers are doubles. The scripts implement
:func:`~dmsg.discovery.entries.rules.decide_post` once more; a test compares the two in every state. The alternative, to
read first and decide in Python, would cost 26 % more CPU time per POST.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from twisted.internet.defer import Deferred
from zope.interface import implementer

from dmsg.discovery.entries.entry import Entry, EntryInvalid
from dmsg.discovery.entries.rules import (
    NEVER,
    TOMBSTONE_TTL,
    WRONG_DELETE_SEQUENCE,
    WRONG_FIRST_SEQUENCE,
    WRONG_SEQUENCE,
    WRONG_TIME,
    DeletedLater,
    Deletion,
    Head,
    Terms,
    next_sequence,
    target,
    time_order,
)
from dmsg.discovery.store.base import (
    LATEST_CHECK,
    OVERHEAD,
    Dropped,
    DueServer,
    IEntryStore,
    ends,
    ignore_dropped,
    is_listable,
    kind,
    size_of,
)
from dmsg.discovery.store.nameplates import RedisNameplates
from dmsg.discovery.store.scripts import (
    AVAILABLE,
    DELETE,
    DUE,
    LISTED,
    POST,
    SEEN,
    SET_BACK,
    SWEEP,
)
from dmsg.errors import EntryNotFound
from dmsg.net.blocks import blocks_of
from dmsg.net.redis import RedisConnection

_UNKNOWN_LIMIT = 1e18
_Answer = TypeVar("_Answer")
_Read = TypeVar("_Read")

_KEYS = ("servers", "quiet", "looks", "entries", "kinds", "places", "ends", "size")
"""Keys in Redis that are passed to a script after the key of the entry, in the order in which the scripts expect them.
"""


@implementer(IEntryStore)
class RedisStore:
    """Store of entries in Redis.

    The keys in Redis are:

    * ``dmsg:entry:<static>``: hash with one entry and its state
    * ``dmsg:servers``: sorted set of the listed servers that post regularly, by the time of their last POST
    * ``dmsg:quiet``: sorted set of the listed quiet servers, by the time of their last POST or successful check
    * ``dmsg:looks``: sorted set of servers by the time of their next check
    * ``dmsg:ends``: sorted set of entries by the time at which they expire
    * ``dmsg:places``: sorted set of address blocks by the bytes of their entries
    * ``dmsg:places:<block>``: sorted set of the entries of a block by the time of their last POST
    * ``dmsg:places:around``: hash from each address block to the wider blocks that contain it
    * ``dmsg:places:loads``: sorted set of wider blocks by their load: bytes divided by the factor of the block
    * ``dmsg:places:inside:<block>``: sorted set of the address blocks in a wider block, by their bytes
    * ``dmsg:entries``, ``dmsg:kinds``: number of entries, in all and by kind
    * ``dmsg:size``: bytes of all entries
    """

    prefix = "dmsg:"

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Type of the errors of Redis, including timeouts."""
        from txredisapi import RedisError  # The import is here, because the package is an optional dependency.

        return (RedisError,)

    def __init__(
        self,
        connection: RedisConnection,
        random: Random | None = None,
        limit: float = math.inf,
        on_dropped: Dropped = ignore_dropped,
    ) -> None:
        """Create a store that uses an open connection to Redis.

        :param connection: connection of txredisapi, made with ``charset=None``; see
            :func:`~dmsg.discovery.store.opening.open_store`.
        :param limit: maximum number of bytes of entries that are kept.
        :param on_dropped: called for entries that the store drops.
        """
        self._redis = connection
        self._random = random or Random()
        self._limit = min(limit, _UNKNOWN_LIMIT)
        self.dropped = on_dropped
        self.nameplates = RedisNameplates(connection, self.prefix)

    def _run(
        self, script: str, keys: list[str], arguments: list[str | bytes], read: Callable[[_Answer], _Read]
    ) -> Deferred[_Read]:
        """Run a Lua script, and fire with its answer as parsed by ``read``."""
        return self._redis.eval(script, [self.prefix + key for key in keys], arguments).addCallback(read)

    def _tell(self, answer: list[bytes]) -> None:
        words = [word.decode() for word in answer]
        for reason, place in zip(words[::2], words[1::2], strict=True):
            self.dropped(reason, place, 1)

    def post(self, entry: Entry, now: float, terms: Terms = Terms()) -> Deferred[bool]:
        def posted(answer: list[bytes]) -> bool:
            result = answer[0]
            if result in (b"first", b"next"):
                self._tell(answer[1:])
                return result == b"first"
            if result == b"deleted":
                raise DeletedLater(Head(0, answer[1].decode(), deleted=True, deletion=answer[2] or None), entry)
            raise EntryInvalid(
                {b"not zero": WRONG_FIRST_SEQUENCE, b"sequence": WRONG_SEQUENCE, b"time": WRONG_TIME}[result]
            )

        body = entry.to_json()
        return self._run(
            POST,
            [f"entry:{entry.static}", *_KEYS],
            [
                str(entry.sequence),
                str(next_sequence(entry.sequence)),
                time_order(entry.timestamp),
                body,
                repr(now),
                "1" if is_listable(entry) else "0",
                "1" if terms.refreshes else "0",
                repr(NEVER if terms.checked else now),
                kind(entry),
                terms.place,
                str(size_of(body)),
                repr(min(terms.most, _UNKNOWN_LIMIT)),
                repr(self._limit),
                repr(ends(now, terms.lasts)),
                "1" if terms.checked else "0",
                target(entry),
                " ".join(f"{name}={factor}" for name, factor in blocks_of(terms.place)[1:]),
            ],
            posted,
        )

    def get(self, static: str) -> Deferred[bytes]:
        def got(body: bytes | None) -> bytes:
            if body is None:
                raise EntryNotFound
            return body

        return self._redis.hget(f"{self.prefix}entry:{static}", "json").addCallback(got)

    def delete(self, deletion: Deletion, now: float) -> Deferred[None]:
        def deleted(answer: bytes) -> None:
            if answer == b"missing":
                raise EntryNotFound
            if answer != b"deleted":
                raise EntryInvalid({b"sequence": WRONG_DELETE_SEQUENCE, b"time": WRONG_TIME}[answer])

        return self._run(
            DELETE,
            [f"entry:{deletion.static}", *_KEYS],
            [
                str(deletion.sequence),
                time_order(deletion.timestamp),
                str(OVERHEAD),
                repr(ends(now, TOMBSTONE_TTL)),
                deletion.to_json(),
            ],
            deleted,
        )

    def available(self, limit: int, since: float) -> Deferred[list[bytes]]:
        return self._draw("servers", limit, since)

    def quiet(self, limit: int, since: float) -> Deferred[list[bytes]]:
        return self._draw("quiet", limit, since)

    def _draw(self, key: str, limit: int, since: float) -> Deferred[list[bytes]]:
        seed = str(self._random.getrandbits(31))
        return self._run(AVAILABLE, [key], [repr(since), str(limit), seed], _existing)

    def listed(self, statics: Sequence[str], since: float) -> Deferred[list[bytes]]:
        since = max(since, -_UNKNOWN_LIMIT)
        return self._run(LISTED, ["servers", "entry:"], [repr(since), *statics], _existing)

    def due(self, limit: int, now: float, next_check: float) -> Deferred[list[DueServer]]:
        def rows_of(found: list[bytes]) -> list[DueServer]:
            rows = zip(found[::4], found[1::4], found[2::4], found[3::4], strict=True)
            return [
                DueServer(body, place.decode(), refreshes == b"1", listed == b"1")
                for body, place, refreshes, listed in rows
            ]

        return self._run(DUE, ["looks"], [repr(now), str(limit), repr(next_check)], rows_of)

    def record_check(
        self, static: str, target: str, at: float | None, next_check: float, lasts: float = 0.0, listed: bool = True
    ) -> Deferred[None]:
        arguments: list[str | bytes] = [
            "" if at is None else repr(at),
            repr(next_check),
            repr(ends(at or 0.0, lasts)),
            "1" if listed else "0",
            target,
        ]
        return self._run(SEEN, [f"entry:{static}", *_KEYS], arguments, _nothing)

    def shift_times(self, now: float) -> Deferred[None]:
        times: list[str | bytes] = [repr(now), repr(now + LATEST_CHECK), repr(NEVER)]
        return self._run(SET_BACK, ["servers", "quiet", "looks"], times, _nothing)

    def sweep(self, now: float, limit: int) -> Deferred[int]:
        def swept(answer: tuple[int, list[bytes]]) -> int:
            number, dropped = answer
            self._tell(dropped)
            return int(number)

        return self._run(SWEEP, ["entry:", *_KEYS], [repr(now), str(limit), repr(self._limit)], swept)

    def counts(self) -> Deferred[dict[str, int]]:
        def counted(found: dict[bytes, bytes]) -> dict[str, int]:
            return {one.decode(): int(number) for one, number in found.items()}

        return self._redis.hgetall(f"{self.prefix}kinds").addCallback(counted)

    def count(self) -> Deferred[int]:
        return self._number("entries")

    def is_full(self, error: BaseException | None) -> bool:
        return False

    def size(self) -> Deferred[int]:
        return self._number("size")

    def _number(self, key: str) -> Deferred[int]:
        return self._redis.get(f"{self.prefix}{key}").addCallback(lambda number: int(number or 0))

    def close(self) -> Deferred[None]:
        return self._redis.disconnect()


def _nothing(answer: object) -> None:
    """Ignore the answer of a script that returns nothing."""


def _existing(found: list[bytes | None]) -> list[bytes]:
    """Return those of the found entries that exist. None stands for an entry that was dropped in the meantime."""
    return [body for body in found if body]
