"""Account of the memory that a process holds for others, and who loses when it is too much.  No I/O, no clock.

Every queue has a limit of its own; this is the limit of their sum.  Whoever holds
something for others is a *source*: asked from time to time, it says what it
holds and for whom.  Nothing is counted on the way of a frame, and the books
cannot be wrong.

When there is too much, what has been held for a while goes before what is younger;
within each, the largest holding of the owner who has most.  A trickle does not
help: what counts is the age of the oldest byte.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from attrs import frozen

LOOK_INTERVAL = 0.25
"""Seconds between looks at what is held."""
OLD = 2.0
"""Seconds after which what is held is old: who reads has long taken it."""
ENOUGH = 0.8
"""Part of the limit to which what is old is brought down; others give only what is above it."""
SHARE = 4
"""Default limit, as a part of the machine's memory."""
LEAST = 64 * 1024 * 1024
"""Bytes of the smallest limit."""


@frozen
class Holding:
    """Something that is held.

    :ivar owner: for whom: first who is reached at one place (a block of addresses), then a key.
    :ivar kind: what it is, as a metric names it.
    :ivar size: bytes.
    :ivar age: seconds for which the oldest of it has been held.
    :ivar give: lets go of it, or of what it is for.
    :ivar around: names of what the first of ``owner`` is a part of (wider blocks of addresses), each with a factor: how
        many times as much it may have.
    """

    owner: tuple[Hashable, ...]
    kind: str
    size: int
    age: float
    give: Callable[[], object]
    around: tuple[tuple[str, int], ...] = ()


Source = Callable[[], Iterable[Holding]]


UNKNOWN = 1024 * 1024 * 1024
"""Bytes that a machine is taken to have which does not say it."""


def default_limit() -> int:
    """A quarter of what this machine, or this container, has."""
    said = []
    with suppress(OSError, ValueError):  # a system that does not say it, or says -1
        said.append(max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # no limit, or no such thing on this machine
        said.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    have = min((size for size in said if size > 0), default=UNKNOWN)
    return max(LEAST, have // SHARE)


def resident() -> int:
    """Bytes of memory that this process has now; where nobody says that, the most that it ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Memory:
    """Account of the memory that a process holds for others.

    :ivar limit: bytes.
    :ivar held: bytes by kind, at the last look.
    :ivar given: how often something was given, by kind.
    """

    def __init__(self, limit: int | None = None) -> None:
        """:param limit: bytes; None: see :func:`default_limit`."""
        self.limit = default_limit() if limit is None else limit
        self.held: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self._sources: dict[Source, Callable[[Holding], None] | None] = {}

    def add(self, source: Source, told: Callable[[Holding], None] | None = None) -> None:
        """Ask another source, too.

        :param told: called with each holding of the process that is about to be given, whichever source has it.
        """
        self._sources[source] = told

    def remove(self, source: Source) -> None:
        """Ask it no more."""
        self._sources.pop(source, None)

    @property
    def total(self) -> int:
        """Bytes at the last look."""
        return sum(self.held.values())

    def look(self) -> int:
        """See what is held, and let somebody give if it is too much.

        :returns: how many have given.
        """
        holdings = [one for source in list(self._sources) for one in source()]
        self.held = Counter()
        for one in holdings:
            self.held[one.kind] += one.size
        total = self.total
        if total <= self.limit:
            return 0
        given = 0
        for one in _in_order(holdings):
            if total <= (self.limit * ENOUGH if one.age >= OLD else self.limit):
                break
            for told in self._sources.values():
                if told is not None:
                    told(one)
            one.give()
            self.given[one.kind] += 1
            self.held[one.kind] -= one.size
            given += 1
            total -= one.size
        return given


CLIENTS = Memory()
"""Account that the clients of this process share."""


class _Sizes:
    """Bytes that are held for each owner and for each block of addresses."""

    def __init__(self, group: list[Holding]) -> None:
        self._sizes: Counter[tuple[Hashable, ...]] = Counter()
        self._wide: Counter[str] = Counter()
        self._around: dict[Hashable, tuple[tuple[str, int], ...]] = {}
        for one in group:
            self._around[one.owner[0]] = one.around
            self.count(one, one.size)

    def count(self, holding: Holding, size: int) -> None:
        for depth in range(1, len(holding.owner) + 1):
            self._sizes[holding.owner[:depth]] += size
        for name, _ in holding.around:
            self._wide[name] += size

    def rank(self, owner: tuple[Hashable, ...]) -> tuple[float, ...]:
        """Return the sort key of an owner: the bytes of its block of addresses by width, then its own bytes."""
        own = [self._sizes[owner[:depth]] for depth in range(1, len(owner) + 1)]
        around = [self._wide[name] / factor for name, factor in self._around[owner[0]]]
        return max([own[0], *around]), *own


def _in_order(holdings: list[Holding]) -> Iterator[Holding]:
    """Return the owners in the order in which they lose memory: largest of the fullest block first."""
    for group in ([one for one in holdings if one.age >= OLD], [one for one in holdings if one.age < OLD]):
        left: dict[tuple[Hashable, ...], list[Holding]] = {}
        for one in sorted(group, key=_size):
            left.setdefault(one.owner, []).append(one)
        sizes = _Sizes(group)
        while left:
            owner = max(left, key=sizes.rank)
            largest = left[owner].pop()
            if not left[owner]:
                del left[owner]
            sizes.count(largest, -largest.size)
            yield largest


def _size(holding: Holding) -> int:
    return holding.size
