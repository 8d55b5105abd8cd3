"""Rate limit that several sources share fairly: a source that requests less than its share is always served, even if
others request much more.

A source is named by a path, from the largest group to the smallest: the address blocks that contain it, then its key.
At each level, the members of a group divide the share of the group. Therefore all keys at one address together get no
more than a single key at this address would get.

All sources together have one token bucket, the common bucket.  While it is at least half full, sources are not counted
separately, and a single source may use the whole rate.  Below that, each source gets only its share.  A tenth of the
rate and the lower half of the bucket are reserved for sources without a recent request.  No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from dmsg.base.buckets import Bucket

KNOWN_FRACTION = 0.9
"""Fraction of a rate limit that is divided among the known sources of requests. The rest is for new sources."""
COMMON_FRACTION = 0.5
"""Fraction of the tokens of the common bucket. While at least this fraction is left, sources are not counted
separately."""
MIN_NEW_SOURCE_BURST = 1.0
"""Minimum number of requests that a new source may make at once, even if other sources use up the rate."""
FORGET_AFTER = 30.0
"""Seconds without a request after which a source counts as new."""
MAX_SOURCES = 4096
"""Maximum number of sources and groups of sources that one rate limit remembers. Above it, the least recently used one
is forgotten."""
MAX_CROWDED = 64
"""Maximum number of rate limits of one server that count sources separately. Above it, the least recently used rate
limit forgets its sources."""
BURST_SECONDS = 2.0
"""Burst of a source: as many requests as its share of the rate allows in this number of seconds."""
START_SECONDS = 0.1
"""Initial tokens of a new source: as many as its share of the rate gives in this number of seconds. Without them, the
keys of a new address block would have to wait for their first tokens."""


class _Source:
    """Record of one source or group of sources.

    :ivar bucket: bucket with the tokens of the source's share.
    :ivar seen: time of the source's last request, in seconds.
    :ivar below: members of the group by name, which divide its share; None before the first member.
    """

    __slots__ = ("below", "bucket", "seen")

    def __init__(self, now: float) -> None:
        self.bucket = Bucket(0.0, now)
        self.seen = now
        self.below: OrderedDict[Hashable, _Source] | None = None

    def count(self) -> int:
        """Return the number of sources in this subtree, including this source itself."""
        return 1 + (sum(one.count() for one in self.below.values()) if self.below else 0)


class FairRate:
    """Token bucket that counts its sources separately when less than half of its tokens are left.  It starts full."""

    __slots__ = ("_common", "_count", "_sources")

    def __init__(self) -> None:
        self._common: Bucket | None = None
        self._count = 0
        self._sources: OrderedDict[Hashable, _Source] | None = None

    @property
    def remembered(self) -> int:
        """Number of sources that are counted separately now, of all levels together."""
        return self._count

    def forget(self) -> None:
        """Forget all sources, so that all count as new. The tokens in the common bucket stay as they are."""
        self._sources = None
        self._count = 0

    @property
    def sources(self) -> int:
        """Number of outermost groups (the largest address blocks) that are counted separately now."""
        return 0 if self._sources is None else len(self._sources)

    def take(self, path: Sequence[Hashable], rate: float, burst: float, now: float) -> bool:
        """If a request is within the rate, count it for the source at ``path`` and return True. Otherwise return
        False.

        :param rate: requests per second of all sources together.
        :param burst: requests of all sources together in a burst.
        """
        common = self._common
        if common is None:
            common = self._common = Bucket(burst, now)
        common.fill(rate, burst, now)
        if common.level >= COMMON_FRACTION * burst:
            if common.level + 1.0 > burst:
                # The bucket is full, so there were few requests for a long time, and all sources count as new.
                self.forget()
        elif common.level < 1.0 or not self._take_part(path, rate, now):
            return False
        common.level -= 1.0
        return True

    def _take_part(self, path: Sequence[Hashable], rate: float, now: float) -> bool:
        """Take one token from the share of each level of ``path`` and return True. If a level has none left, return
        False."""
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
            rate *= KNOWN_FRACTION / len(sources)
            if is_new:
                source.bucket.level = max(MIN_NEW_SOURCE_BURST, rate * START_SECONDS)
            source.bucket.fill(rate, max(MIN_NEW_SOURCE_BURST, rate * BURST_SECONDS), now)
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
        """Forget the least recently used group of sources, at the outermost level that has several groups."""
        sources = self._sources
        assert sources is not None
        while len(sources) == 1 and (below := next(iter(sources.values())).below):
            sources = below
        self._count -= sources.popitem(last=False)[1].count()


class CrowdedRates:
    """Set of rate limits of one server: those that now have a separate count for each source.

    The size of the set is limited. Otherwise an attacker could send requests to many destinations, and the rate limit
    of each destination would store many sources.
    """

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: OrderedDict[FairRate, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def take(self, rate: FairRate, path: Sequence[Hashable], per_second: float, burst: float, now: float) -> bool:
        """Count a request with :meth:`FairRate.take` of ``rate`` and return its result.

        Afterwards, if ``rate`` counts sources separately, ``rate`` is the most recently used rate of the set. Otherwise
        the set does not contain ``rate``.
        """
        may = rate.take(path, per_second, burst, now)
        self._rates.pop(rate, None)
        if rate.remembered:
            self._rates[rate] = None
            if len(self._rates) > MAX_CROWDED:
                self._rates.popitem(last=False)[0].forget()
        return may
