"""Rate limit that several sources share fairly: a source that asks for less than its part is always served, even if
others ask for much more.

A source is named by a path, from the largest group to the smallest: the address blocks that contain it, then its key.
At each level, the members of a group share the part of the group.  So many keys at one address together get no more
than one key there.

While the common bucket is more than half full, sources are not counted, and a single source may use the whole rate.
Below that, each source gets its part and no more.  A tenth of the rate and the lower half of the bucket are reserved
for sources that have not asked recently.  No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from dmsg.base.buckets import Bucket

ASSIGNED = 0.9
"""Part of the rate that is divided among the known sources; the rest is for new ones."""
UNCOUNTED = 0.5
"""Part of the common bucket above which sources are not counted separately."""
FIRST = 1.0
"""Minimum number of requests that a new source may make at once, even if others use up the rate."""
FORGET_AFTER = 30.0
"""Seconds without a request after which a source counts as new."""
MAX_SOURCES = 4096
"""Maximum number of sources of one rate, of all levels together; the one whose last request is oldest is forgotten
first."""
MAX_CROWDED = 64
"""Maximum number of rates of one server that count sources separately; the least recently used rate forgets its
sources."""
BURST_SECONDS = 2.0
"""Number of seconds whose part of the rate a source may use in a burst."""
START_SECONDS = 0.1
"""Number of seconds whose part of the rate a new source has at its start, so that keys of a new address block need not
wait for their first tokens."""


class _Source:
    """Record of one source.

    :ivar bucket: bucket with the tokens left of the source's part.
    :ivar seen: time of its last request, in seconds.
    :ivar below: sources that share its part.
    """

    __slots__ = ("below", "bucket", "seen")

    def __init__(self, now: float) -> None:
        self.bucket = Bucket(0.0, now)
        self.seen = now
        self.below: OrderedDict[Hashable, _Source] | None = None

    def count(self) -> int:
        """Return the number of sources in this subtree, including this one."""
        return 1 + (sum(one.count() for one in self.below.values()) if self.below else 0)


class FairRate:
    """Token bucket that counts its sources separately once it runs low.  It is full at first use."""

    __slots__ = ("_common", "_count", "_sources")

    def __init__(self) -> None:
        self._common: Bucket | None = None
        self._count = 0
        self._sources: OrderedDict[Hashable, _Source] | None = None

    @property
    def remembered(self) -> int:
        """Number of sources that are counted separately now, of all levels."""
        return self._count

    def forget(self) -> None:
        """Forget all sources, so that all count as new; the tokens that are left remain."""
        self._sources = None
        self._count = 0

    @property
    def sources(self) -> int:
        """Number of the largest groups (the outermost address blocks) that are counted separately now."""
        return 0 if self._sources is None else len(self._sources)

    def take(self, path: Sequence[Hashable], rate: float, burst: float, now: float) -> bool:
        """Count a request of the source at ``path`` and return whether it is within the rate.

        :param rate: requests per second of all sources together.
        :param burst: requests of all sources together in a burst.
        """
        common = self._common
        if common is None:
            common = self._common = Bucket(burst, now)
        common.fill(rate, burst, now)
        if common.level >= UNCOUNTED * burst:
            if common.level + 1.0 > burst:
                self.forget()  # All sources are forgotten, because after so long a pause they count as new.
        elif common.level < 1.0 or not self._take_part(path, rate, now):
            return False
        common.level -= 1.0
        return True

    def _take_part(self, path: Sequence[Hashable], rate: float, now: float) -> bool:
        """Take one request from the part of every source on the path, if all have one left."""
        if self._sources is None:
            self._sources = OrderedDict()
        sources = self._sources
        buckets = []
        depth = len(path)
        for name in path:
            depth -= 1
            source = sources.get(name)
            is_new = source is None
            if source is None:
                source = sources[name] = _Source(now)
                self._count += 1
            source.seen = now
            sources.move_to_end(name)
            while next(iter(sources.values())).seen < now - FORGET_AFTER:
                self._count -= sources.popitem(last=False)[1].count()
            rate *= ASSIGNED / len(sources)
            if is_new:
                source.bucket.level = max(FIRST, rate * START_SECONDS)
            source.bucket.fill(rate, max(FIRST, rate * BURST_SECONDS), now)
            buckets.append(source.bucket)
            if depth:
                if source.below is None:
                    source.below = OrderedDict()
                sources = source.below
        while self._count > MAX_SOURCES:
            self._forget_one()
        if any(bucket.level < 1.0 for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.level -= 1.0
        return True

    def _forget_one(self) -> None:
        """Forget the source with the oldest last request, at the outermost level that has more than one source."""
        sources = self._sources
        assert sources is not None
        while len(sources) == 1 and (below := next(iter(sources.values())).below):
            sources = below
        self._count -= sources.popitem(last=False)[1].count()


class CrowdedRates:
    """Set of the rates of one server that count sources separately now.

    Their number is limited, because an attacker could ask for many destinations and make each rate remember many
    sources.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: OrderedDict[FairRate, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def take(self, rate: FairRate, path: Sequence[Hashable], per_second: float, burst: float, now: float) -> bool:
        """Count a request with :meth:`FairRate.take` of ``rate``, and add ``rate`` to the set if it counts sources
        separately."""
        may = rate.take(path, per_second, burst, now)
        self._rates.pop(rate, None)
        if rate.remembered:
            self._rates[rate] = None
            if len(self._rates) > MAX_CROWDED:
                self._rates.popitem(last=False)[0].forget()
        return may
