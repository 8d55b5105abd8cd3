"""Cache of a registry.  It also remembers which ids are unknown, and returns old entries while the registry is
unavailable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.bounded_tables import remember
from dmsg.rmb.errors import RegistryUnavailable, TwinNotFound
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.twins.twin import Twin

TTL = 300.0
"""Seconds for which an entry is valid. After that, the registry is queried again."""
NEGATIVE_TTL = 5.0
"""Seconds for which an id counts as unknown after the registry has reported that no twin has it."""
MIN_NEGATIVE_AGE = 1.0
"""Seconds for which :meth:`CachedRegistry.mark_stale` keeps the answer that an id is unknown. Older answers are
dropped, so that the registry is queried again."""
MAX_STALE_AGE = 24 * 3600.0
"""Maximum age in seconds of an entry that is used while the registry is unavailable."""
FAILURE_PAUSE = 2.0
"""Seconds after a failed query for which the registry is not asked again about twins that are in the cache."""
MAX_TWINS = 50_000
"""Maximum number of entries in the cache. Above it, the least recently used entry is evicted."""
MAX_NONE = 10_000
"""Maximum number of unknown ids in the cache."""
MAX_QUERIES = 500
"""Maximum number of simultaneous queries to the registry. A further query fails at once."""

_log = Logger()


@implementer(TwinRegistry)
class CachedRegistry:
    """Cache in front of any registry.

    :ivar misses: number of look-ups for which the registry was queried.
    """

    def __init__(
        self,
        registry: TwinRegistry,
        clock: IReactorTime,
        *,
        ttl: float = TTL,
        negative_ttl: float = NEGATIVE_TTL,
        limit: int = MAX_TWINS,
    ) -> None:
        self.registry = registry
        self._clock = clock
        self._ttl, self._negative_ttl, self._most = ttl, negative_ttl, limit
        self._known: OrderedDict[int, tuple[float, Twin]] = OrderedDict()
        # Unknown ids have a separate table. So a caller that asks for many unknown ids cannot evict entries.
        self._none: OrderedDict[int, float] = OrderedDict()
        self._asking: dict[int, list[Deferred[Twin]]] = {}
        self._away_until = 0.0
        self.hits = 0
        self.misses = 0
        self.flushes = 0
        registry.watch(self._changed)

    def __len__(self) -> int:
        return len(self._known)

    def get_cached(self, twin: int) -> Twin | None:
        """Return the entry of a twin if it is in the cache and still valid, else None. The registry is never asked."""
        known = self._known.get(twin)
        if known is None or known[0] + self._ttl <= self._clock.seconds():
            return None
        self.hits += 1
        return known[1]

    def mark_stale(self, twin: int) -> None:
        """Make the next :meth:`get` of this twin query the registry, unless the cached answer is recent. An entry is
        recent for ``negative_ttl`` seconds, and the answer that the id is unknown is recent for ``MIN_NEGATIVE_AGE``
        seconds."""
        now = self._clock.seconds()
        known = self._known.get(twin)
        if known is not None and now - known[0] >= self._negative_ttl:
            self._known[twin] = (now - self._ttl, known[1])
        elif known is None and now - self._none.get(twin, now) >= MIN_NEGATIVE_AGE:
            del self._none[twin]

    def get(self, twin: int) -> Deferred[Twin]:
        now = self._clock.seconds()
        known = self._known.get(twin)
        if known is not None:
            said, value = known
            self._known.move_to_end(twin)
            if said + self._ttl > now or (self._away_until > now and said + MAX_STALE_AGE > now):
                self.hits += 1
                return succeed(value)
        elif twin in self._none and self._none[twin] + self._negative_ttl > now:
            self.hits += 1
            return fail(TwinNotFound(f"twin not found {twin}"))
        if len(self._asking) >= MAX_QUERIES and twin not in self._asking:
            return fail(RegistryUnavailable("too many simultaneous queries to the registry"))
        waiting: Deferred[Twin] = Deferred()
        others = self._asking.get(twin)
        if others is not None:
            others.append(waiting)
            return waiting
        self._asking[twin] = [waiting]
        self.misses += 1
        self.registry.get(twin).addBoth(self._store_answer, twin)
        return waiting

    def _store_answer(self, result: Twin | Failure, twin: int) -> None:
        now = self._clock.seconds()
        if isinstance(result, Twin):
            self._remember(twin, result)
            result = self._known[twin][1]
        elif result.check(TwinNotFound):
            self._known.pop(twin, None)
            remember(self._none, twin, now, MAX_NONE)
        else:
            self._away_until = now + FAILURE_PAUSE
            known = self._known.get(twin)
            if known is not None and known[0] + MAX_STALE_AGE > now:
                result = known[1]
        for waiting in self._asking.pop(twin):
            if not waiting.called:
                waiting.callback(result)

    def _remember(self, twin: int, value: Twin) -> None:
        before = self._known.get(twin)
        if before is not None and (before[1].account != value.account or value.counter < before[1].counter):
            # The registry's answer is outdated or forged, because an id always belongs to the same account, and its
            # counter only grows.
            _log.error(
                "the registry gives another account or key for twin {twin} than before; check --registry",
                twin=twin,
            )
            value = before[1]
        self._none.pop(twin, None)
        remember(self._known, twin, (self._clock.seconds(), value), self._most)

    def _changed(self, twin: Twin) -> None:
        # The cache may contain the id as unknown although it was registered meanwhile.
        if twin.id in self._known or twin.id in self._none:
            self._remember(twin.id, twin)

    def flush(self) -> None:
        """Empty the cache."""
        self._known.clear()
        self._none.clear()
        self.flushes += 1

    def id_by_account(self, account: bytes) -> Deferred[int]:
        return self.registry.id_by_account(account)

    def put(self, statement: Twin) -> Deferred[Twin]:
        def stored(twin: Twin) -> Twin:
            self._remember(twin.id, twin)
            return twin

        return self.registry.put(statement).addCallback(stored)

    def twins(self, after: int, limit: int) -> Deferred[list[Twin]]:
        return self.registry.twins(after, limit)

    def watch(self, on_change: Callable[[Twin], None]) -> None:
        self.registry.watch(on_change)

    def close(self) -> Deferred[None]:
        return self.registry.close()
