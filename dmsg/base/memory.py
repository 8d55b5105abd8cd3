"""Limit of the memory that a process uses for its peers: adds up the buffered bytes, and chooses which data to drop.

Every queue has its own limit; this module limits their sum.  A *source* is a function of an object that buffers data
for peers. It returns how much the object buffers, and for whom.  The memory account calls all sources from time to
time. So no bytes need to be counted while frames are processed, and the account always has the real sizes.

Above the limit, old data are dropped before young data, because a live reader would have read them by now.  Within each
of these two age groups, the owner with most bytes loses its largest buffer first.  The age of a buffer is that of its
oldest byte.  So a peer that only reads a little now and then does not make its data young.

The module has no clock. Its only I/O asks the system for sizes of memory.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from attrs import frozen

CHECK_INTERVAL = 0.25
"""Seconds between two checks of the memory account."""
OLD_AFTER = 2.0
"""Age in seconds from which buffered data count as old. A live reader would have read them by then."""
TARGET_FRACTION = 0.8
"""Fraction of the memory limit down to which old data are dropped once the limit is exceeded. Young data are
dropped only until the limit is no longer exceeded."""
MEMORY_DIVISOR = 4
"""Divisor of the machine's memory. The result is the default memory limit."""
V1_LIMIT, V2_LIMIT = "memory.limit_in_bytes", "memory.max"
"""Names of the files with the memory limit of a control group, in versions 1 and 2 of control groups."""
MIN_LIMIT = 16 * 1024 * 1024
"""Lower bound of the default memory limit, in bytes. It is small, because a server without clients needs 60 MB, and
between two checks, clients can exceed the limit by tens of MB. So more than a quarter of a small control group would
end with the death of the process."""


@frozen
class Holding:
    """Data that a source buffers for one owner.

    :ivar owner: owner of the data as a path: first its address block or other group, then its key.
    :ivar kind: kind of data, as named in the metrics.
    :ivar size: number of bytes.
    :ivar age: seconds for which the oldest byte has been buffered.
    :ivar drop: function that drops the data, or ends the connection or stream to which they belong.
    :ivar around: wider address blocks that contain the owner's address block, each with a factor. To choose the data to
        drop, the bytes of a wider block are divided by its factor. The quotient is compared with the bytes of the
        owner's block.
    """

    owner: tuple[Hashable, ...]
    kind: str
    size: int
    age: float
    drop: Callable[[], object]
    around: tuple[tuple[str, int], ...] = ()


Source = Callable[[], Iterable[Holding]]


ASSUMED_MEMORY = 1024 * 1024 * 1024
"""Memory in bytes that is assumed if the system does not report its size."""


def usable_memory() -> int:
    """Return the number of bytes of memory that this process may use: those of the machine, of its control groups, or
    of ulimit, whichever are least."""
    said = list(_control_group_limits())
    with suppress(OSError, ValueError):
        # Some systems do not know these names of sysconf(3), or return -1. The value is then ignored.
        said.append(max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    said += [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return min((size for size in said if size > 0), default=ASSUMED_MEMORY)


def default_limit() -> int:
    """Return the default limit in bytes: a quarter of the memory that this process may use."""
    return max(MIN_LIMIT, usable_memory() // MEMORY_DIVISOR)


def _control_group_limits() -> Iterator[int]:
    """Yield the memory limits of this process's control groups on Linux.

    A container sees the group with its limit as the topmost one.  The limit of a service, such as ``MemoryMax`` of
    systemd, belongs to a group below; the kernel also applies the limits of all groups above.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    for line in ["0::/", *lines]:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, file = ("/sys/fs/cgroup/memory", V1_LIMIT) if controllers else ("/sys/fs/cgroup", V2_LIMIT)
        own = PurePosixPath(name.lstrip("/"))
        for group in (own, *own.parents):
            # A group without a limit has no such file, or the file contains "max".
            with suppress(OSError, ValueError):
                yield int(Path(top, group, file).read_text())


def resident() -> int:
    """Return the number of bytes of memory that this process uses now, or its peak so far if the system does not report
    the current value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Memory:
    """Account of the memory that a process uses for its peers.

    :ivar limit: maximum bytes of all sources together.
    :ivar held: number of buffered bytes at the last check, by kind of data.
    :ivar dropped: number of holdings dropped so far, by kind of data.
    """

    def __init__(self, limit: int | None = None) -> None:
        """:param limit: maximum bytes of all sources together; None selects :func:`default_limit`."""
        self.limit = default_limit() if limit is None else limit
        self.held: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._sources: dict[Source, Callable[[Holding], None] | None] = {}

    def add(self, source: Source, on_drop: Callable[[Holding], None] | None = None) -> None:
        """Add a source to the account.

        :param on_drop: callback invoked with each holding that is about to be dropped, of any source.
        """
        self._sources[source] = on_drop

    def remove(self, source: Source) -> None:
        """Remove a source from the account."""
        self._sources.pop(source, None)

    @property
    def total(self) -> int:
        """Number of buffered bytes at the last check."""
        return sum(self.held.values())

    def check(self) -> int:
        """Call all sources, and drop holdings while the total is above the limit.

        :returns: number of holdings dropped.
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
            if total <= (self.limit * TARGET_FRACTION if one.age >= OLD_AFTER else self.limit):
                break
            for told in self._sources.values():
                if told is not None:
                    told(one)
            one.drop()
            self.dropped[one.kind] += 1
            self.held[one.kind] -= one.size
            given += 1
            total -= one.size
        return given


CLIENTS = Memory()
"""Memory account that all clients in this process share."""


class _Sizes:
    """Number of bytes that are buffered for each owner and for each address block."""

    def __init__(self, group: list[Holding]) -> None:
        self._sizes: Counter[tuple[Hashable, ...]] = Counter()
        self._wide: Counter[str] = Counter()
        self._wide_blocks: dict[Hashable, tuple[tuple[str, int], ...]] = {}
        for one in group:
            self._wide_blocks[one.owner[0]] = one.around
            self.count(one, one.size)

    def count(self, holding: Holding, size: int) -> None:
        for depth in range(1, len(holding.owner) + 1):
            self._sizes[holding.owner[:depth]] += size
        for name, _ in holding.around:
            self._wide[name] += size

    def rank(self, owner: tuple[Hashable, ...]) -> tuple[float, ...]:
        """Return the sort key of an owner. The owner with the largest key loses data first.

        The first item of the sort key is the maximum of these numbers: the bytes of the owner's outermost group, and,
        for each address block around this group, the bytes of the block divided by its factor. The other items are the
        numbers of bytes of the owner's groups, from the outermost group to the owner itself.
        """
        own = [self._sizes[owner[:depth]] for depth in range(1, len(owner) + 1)]
        around = [self._wide[name] / factor for name, factor in self._wide_blocks[owner[0]]]
        return max([own[0], *around]), *own


def _in_order(holdings: list[Holding]) -> Iterator[Holding]:
    """Yield the holdings in the order in which to drop them. Old holdings are before young ones. In each of these two
    groups, the next holding is always the largest one of the owner that then has the most bytes."""
    for group in ([one for one in holdings if one.age >= OLD_AFTER], [one for one in holdings if one.age < OLD_AFTER]):
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
