"""Blocks of addresses: a limit for an address counts at several widths at once.

Whoever has a /64 of IPv6 often has the /56 or /48 around it, and a /24 of IPv4 is
rented as a whole.  So each limit holds for the narrow block, and a larger one for
each block around it: its *factor* times as much, because neighbours who do not
know each other share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from heapq import nlargest
from ipaddress import IPv6Address
from typing import NamedTuple

from dmsg.base.bounded_tables import uncount
from dmsg.base.priority_queue import PriorityQueue
from dmsg.net.addresses import literal

WIDTHS_IPV6 = ((64, 1), (56, 4), (48, 8))
"""Bits of the blocks that an IPv6 address counts in, and how many times the limit of an address each may have."""
WIDTHS_IPV4 = ((32, 1), (24, 8))
"""The same of IPv4."""
LEAST_FACTOR = 4
"""Least factor of a block that is wider than one address."""
INSIDE_SLACK = 8
"""Stale places in the order of what is inside one block: there are many blocks, most with few addresses."""
BLOCKS_REMEMBERED = 16_384
"""Addresses whose blocks are kept, because working them out takes some microseconds."""


class Block(NamedTuple):
    """A block of addresses.

    :ivar name: as ``1.2.3.4``, ``1.2.3.0/24`` or ``2001:db8::/64``.
    :ivar factor: how many times the limit of one address it may have.
    """

    name: str
    factor: int


@lru_cache(maxsize=BLOCKS_REMEMBERED)
def blocks_of(host: str) -> tuple[Block, ...]:
    """Return the blocks that an address counts in, the narrowest first.

    :param host: an address, or the name of a block, which counts in itself and those around it.  What is neither
        (the key at the end of a stream, a connection behind a proxy) counts as itself.
    """
    address, _, bits = host.partition("/")
    found = literal(address) if "." in address or ":" in address else None
    if found is None:
        return (Block(host, 1),)
    size, widths = (128, WIDTHS_IPV6) if isinstance(found, IPv6Address) else (32, WIDTHS_IPV4)
    widest = int(bits) if bits.isascii() and bits.isdigit() else size
    blocks = []
    for width, factor in widths:
        if width <= widest:
            first = type(found)(int(found) >> size - width << size - width)
            blocks.append(Block(str(first) if width == 32 and size == 32 else f"{first}/{width}", factor))
    return tuple(blocks) or (Block(host, 1),)


class BlockCounts:
    """How many of something each block of addresses has."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._ranks: PriorityQueue[str] = PriorityQueue()
        self._inside: dict[str, PriorityQueue[str]] = {}
        """Narrow blocks inside each wide one, the one with most first."""

    def __getitem__(self, host: str) -> int:
        """Number of the narrowest block of ``host``."""
        return self._counts[blocks_of(host)[0].name]

    def __len__(self) -> int:
        """Number of narrow blocks that have any."""
        return sum(1 for _ in self.narrow())

    def narrow(self) -> Iterator[tuple[str, int]]:
        """The narrow blocks, with their numbers."""
        return ((name, count) for name, count in self._counts.items() if name not in self._inside)

    def add(self, host: str, number: int = 1) -> None:
        """Count ``number`` more things, such as connections, at ``host`` and in each block around it."""
        blocks = blocks_of(host)
        for name, factor in blocks:
            self._counts[name] += number
            self._ranks.put(name, -self._counts[name] / factor)
        self._rank_inside(blocks)

    def remove(self, host: str, number: int = 1) -> None:
        """Count ``number`` fewer things at ``host`` and in each block around it."""
        blocks = blocks_of(host)
        narrow = blocks[0].name
        for name, factor in blocks:
            uncount(self._counts, name, number)
            if name in self._counts:
                self._ranks.put(name, -self._counts[name] / factor)
            else:
                self._ranks.remove(name)
        if narrow in self._counts:
            self._rank_inside(blocks)
            return
        for name, _ in blocks[1:]:
            inside = self._inside[name]
            inside.remove(narrow)
            if not inside:
                del self._inside[name]

    def _rank_inside(self, blocks: tuple[Block, ...]) -> None:
        narrow = blocks[0].name
        for name, _ in blocks[1:]:
            inside = self._inside.get(name)
            if inside is None:
                inside = self._inside[name] = PriorityQueue(INSIDE_SLACK)
            inside.put(narrow, -self._counts[narrow])

    def load(self, host: str) -> float:
        """How many times as much as one address ``host`` or a block around it has: the largest number by its factor."""
        return max(self._counts[name] / factor for name, factor in blocks_of(host))

    def crowded(self, host: str, most: float, wide: float | None = None) -> str:
        """The narrowest block of ``host`` that has its limit; empty: each may have more.

        :param most: limit of one address.
        :param wide: limit of each block around it; by default ``most`` times its factor.
        """
        for name, factor in blocks_of(host):
            if self._counts[name] >= (most * factor if wide is None or factor == 1 else wide):
                return name
        return ""

    def heaviest(self, block: str = "") -> str:
        """The narrow block that has most, of the block that has most for its width; empty: nobody has any.

        :param block: only of this one.
        """
        first = block or self._ranks.first()
        if first is None:
            return ""
        inside = self._inside.get(first)
        return first if inside is None else inside.first() or first

    def by_load(self, most: int) -> list[str]:
        """So many narrow blocks, the one with the largest load first."""
        loads: dict[str, float] = dict(self.narrow())
        for wide, inside in self._inside.items():
            load = -self._ranks.rank(wide)
            for name in inside:
                loads[name] = max(loads[name], load)
        return nlargest(most, loads, key=lambda name: (loads[name], self._counts[name]))
