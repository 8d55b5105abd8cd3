"""Blocks of addresses: a limit is applied to an address and to the wider blocks that contain it.

Whoever holds an IPv6 /64 often holds the surrounding /56 or /48 as well, and an IPv4 /24 is often rented as a whole. So
each limit applies to the narrowest block of an address (a /64 or a single IPv4 address), and a larger limit to each
wider block. The larger limit is the block's *factor* times the limit of the narrowest block. The factor is above 1,
because independent neighbours may share the wider block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from heapq import nlargest
from ipaddress import IPv6Address
from typing import NamedTuple

from dmsg.base.bounded_tables import decrement
from dmsg.base.priority_queue import PriorityQueue
from dmsg.net.addresses import parse_ip

WIDTHS_IPV6 = ((64, 1), (56, 4), (48, 8))
"""Prefix lengths of the blocks of an IPv6 address to which limits apply, each with its factor."""
WIDTHS_IPV4 = ((32, 1), (24, 8))
"""Prefix lengths of the blocks of an IPv4 address to which limits apply, each with its factor."""
MIN_FACTOR = 4
"""Smallest factor above 1 in ``WIDTHS_IPV6`` and ``WIDTHS_IPV4``."""
INSIDE_SLACK = 8
"""Number of stale entries that the priority queue of one block may contain before it is rebuilt. The number is small,
because there are many blocks with few addresses each.
"""
MAX_CHANGED_BLOCKS = 256
"""Maximum number of blocks whose counts have changed since their ranks were updated."""
BLOCKS_REMEMBERED = 16_384
"""Maximum number of addresses whose blocks are cached. Computing the blocks of an address takes some microseconds."""


class Block(NamedTuple):
    """Block of addresses.

    :ivar name: name such as ``1.2.3.4``, ``1.2.3.0/24`` or ``2001:db8::/64``.
    :ivar factor: factor by which the limit of one address is multiplied for this block.
    """

    name: str
    factor: int


@lru_cache(maxsize=BLOCKS_REMEMBERED)
def blocks_of(host: str) -> tuple[Block, ...]:
    """Return the blocks that contain an address and to which limits apply, the narrowest first.

    :param host: address, or the name of a block; the result then begins with this block. Any other text is a block of
        its own, such as the key of a stream's other end or the name of a connection behind a proxy.
    """
    address, _, bits = host.partition("/")
    found = parse_ip(address) if "." in address or ":" in address else None
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
    """Counter of things, such as connections, per block of addresses."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._ranks: PriorityQueue[str] = PriorityQueue()
        self._inside: dict[str, PriorityQueue[str]] = {}
        """Narrow blocks inside each wide block, ordered by count, the largest first."""
        self._changed: dict[str, None] = {}
        """Narrow blocks whose counts have changed since the ranks were last updated, in the order of their changes.
        Counts change with each request, and ranks are needed only when a limit is reached."""

    def __getitem__(self, host: str) -> int:
        """Return the count of the narrowest block of ``host``."""
        return self._counts[blocks_of(host)[0].name]

    def __len__(self) -> int:
        """Return the number of narrow blocks with a count above 0."""
        return sum(1 for _ in self.narrow_blocks())

    def narrow_blocks(self) -> Iterator[tuple[str, int]]:
        """Iterate over the narrow blocks and their counts."""
        self._update_ranks()
        return ((name, count) for name, count in self._counts.items() if name not in self._inside)

    def add(self, host: str, number: int = 1) -> None:
        """Count ``number`` more things, such as connections, at ``host`` and in each block around it."""
        blocks = blocks_of(host)
        for name, _ in blocks:
            self._counts[name] += number
        self._note_change(blocks[0].name)

    def remove(self, host: str, number: int = 1) -> None:
        """Count ``number`` fewer things at ``host`` and in each block around it."""
        blocks = blocks_of(host)
        for name, _ in blocks:
            decrement(self._counts, name, number)
        self._note_change(blocks[0].name)

    def _note_change(self, narrow: str) -> None:
        self._changed.pop(narrow, None)
        self._changed[narrow] = None
        if len(self._changed) > MAX_CHANGED_BLOCKS:
            self._update_ranks()

    def _update_ranks(self) -> None:
        """Update the ranks of all blocks whose counts have changed."""
        for narrow in self._changed:
            blocks = blocks_of(narrow)
            for name, factor in blocks:
                if name in self._counts:
                    self._ranks.put(name, -self._counts[name] / factor)
                else:
                    self._ranks.remove(name)
            for name, _ in blocks[1:]:
                self._rank_inside(name, narrow)
        self._changed.clear()

    def _rank_inside(self, wide: str, narrow: str) -> None:
        inside = self._inside.get(wide)
        if narrow in self._counts:
            if inside is None:
                inside = self._inside[wide] = PriorityQueue(INSIDE_SLACK)
            inside.put(narrow, -self._counts[narrow])
        elif inside is not None:
            inside.remove(narrow)
            if not inside:
                del self._inside[wide]

    def load(self, host: str) -> float:
        """Return the load of ``host``. The load of one block is its count divided by its factor; that of ``host`` is
        the largest load of its blocks."""
        return max(self._counts[name] / factor for name, factor in blocks_of(host))

    def crowded_block(self, host: str, limit: float, wide: float | None = None) -> str:
        """Return the narrowest address block that contains ``host`` and whose count has reached its limit, or an empty
        text if there is none.

        :param limit: limit of the narrowest block.
        :param wide: limit of each wider block; by default ``limit`` times the factor of that block.
        """
        for name, factor in blocks_of(host):
            if self._counts[name] >= (limit * factor if wide is None or factor == 1 else wide):
                return name
        return ""

    def heaviest(self, block: str = "") -> str:
        """Return the narrow block that has the largest count in a wide block; an empty text if nothing is counted.

        :param block: wide block to search; by default the block with the highest load.
        """
        self._update_ranks()
        first = block or self._ranks.first()
        if first is None:
            return ""
        inside = self._inside.get(first)
        return first if inside is None else inside.first() or first

    def by_load(self, limit: int) -> list[str]:
        """Return at most ``limit`` narrow blocks, ordered by load, the highest first."""
        loads: dict[str, float] = dict(self.narrow_blocks())
        for wide, inside in self._inside.items():
            load = -self._ranks.rank(wide)
            for name in inside:
                loads[name] = max(loads[name], load)
        return nlargest(limit, loads, key=lambda name: (loads[name], self._counts[name]))
