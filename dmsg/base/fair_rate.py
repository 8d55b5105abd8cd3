"""A rate that several sources share: who asks for less than his part is not refused because others ask for more.

A source has a path of names, from the coarsest to the finest: the blocks of addresses that it is in, then its key.
At each level the siblings share what their parent has, so many keys at one address have no more than one key.  While
the common bucket is more than half full nobody is counted at all, and one source alone may have the whole rate.  Below
that, each source has its part and no more; a tenth of the rate and the lower half of the bucket are left for sources
that have not been seen lately.  No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from dmsg.base.buckets import Bucket

ASSIGNED = 0.9
"""Part of a rate that is divided among the sources that are there; the rest is for new ones."""
UNCOUNTED = 0.5
"""Part of the common bucket above which sources are not told apart."""
FIRST = 1.0
"""Requests that a new source has, whatever the others ask for."""
FORGET_AFTER = 30.0
"""Seconds without a request after which a source counts as new."""
MAX_SOURCES = 4096
"""Sources of one rate that are remembered, of all levels; those that were silent longest are forgotten first."""
MAX_CROWDED = 64
"""Rates of one server that tell their sources apart; the one that was used longest ago forgets them."""
BURST_SECONDS = 2.0
"""Seconds of its part that a source may use at once."""
START_SECONDS = 0.1
"""The same of a source that is new: what lies below a block of addresses need not wait for its first part."""


class _Source:
    """Bucket of one source.

    :ivar bucket: what is left of its part.
    :ivar seen: seconds, when it asked last.
    :ivar below: the sources that share its part.
    """

    __slots__ = ("below", "bucket", "seen")

    def __init__(self, now: float) -> None:
        self.bucket = Bucket(0.0, now)
        self.seen = now
        self.below: OrderedDict[Hashable, _Source] | None = None

    def count(self) -> int:
        """Number of sources that this one and those below it are."""
        return 1 + (sum(one.count() for one in self.below.values()) if self.below else 0)


class FairRate:
    """Token bucket whose users are told apart once it runs low.

    It is full at its first use.
    """

    __slots__ = ("_common", "_count", "_sources")

    def __init__(self) -> None:
        self._common: Bucket | None = None
        self._count = 0
        self._sources: OrderedDict[Hashable, _Source] | None = None

    @property
    def remembered(self) -> int:
        """Number of sources that are told apart now, of all levels."""
        return self._count

    def forget(self) -> None:
        """Count all sources as new; what is left of the rate stays."""
        self._sources = None
        self._count = 0

    @property
    def sources(self) -> int:
        """Number of the coarsest sources that are told apart now."""
        return 0 if self._sources is None else len(self._sources)

    def take(self, path: Sequence[Hashable], rate: float, burst: float, now: float) -> bool:
        """Count a request of the source at ``path`` and return whether it is within the rate.

        :param rate: requests a second, of all sources.
        :param burst: requests at once, of all sources.
        """
        common = self._common
        if common is None:
            common = self._common = Bucket(burst, now)
        common.fill(rate, burst, now)
        if common.level >= UNCOUNTED * burst:
            if common.level + 1.0 > burst:
                self.forget()  # it was quiet for so long that all may count as new
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
        """Forget the coarsest source that was silent longest and is not the only one beside those that ask now."""
        sources = self._sources
        assert sources is not None
        while len(sources) == 1 and (below := next(iter(sources.values())).below):
            sources = below
        self._count -= sources.popitem(last=False)[1].count()


class CrowdedRates:
    """The rates of one server that tell their sources apart now: others may leave many of them so, and go."""

    __slots__ = ("_rates",)

    def __init__(self) -> None:
        self._rates: OrderedDict[FairRate, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def take(self, rate: FairRate, path: Sequence[Hashable], per_second: float, burst: float, now: float) -> bool:
        """Take a token as :meth:`FairRate.take` of ``rate`` does."""
        may = rate.take(path, per_second, burst, now)
        self._rates.pop(rate, None)
        if rate.remembered:
            self._rates[rate] = None
            if len(self._rates) > MAX_CROWDED:
                self._rates.popitem(last=False)[0].forget()
        return may
