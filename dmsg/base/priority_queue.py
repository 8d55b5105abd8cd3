"""Names in the order of a number that changes: which one has the smallest?  No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Name = TypeVar("Name")

SLACK = 64
"""Places of the heap beyond twice the names before it is made anew: they keep names that are long gone."""


class PriorityQueue(Generic[Name]):
    """Each name once, with its number.

    A number that changed leaves its old place in the heap behind; what is stale is passed over when it comes up, and
    the heap is made anew before most of it is stale: each change costs the logarithm of the names.

    :param slack: places of the heap beyond twice the names before it is made anew; fewer where there are many of these.
    """

    def __init__(self, slack: int = SLACK) -> None:
        self._slack = slack
        self._ranks: dict[Name, float] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Name]:
        return iter(self._ranks)

    def __contains__(self, name: object) -> bool:
        return name in self._ranks

    def put(self, name: Name, rank: float) -> None:
        """``name`` has this number now."""
        self._ranks[name] = rank
        self._count += 1
        heappush(self._heap, (rank, self._count, name))
        self._tidy()

    def remove(self, name: Name) -> None:
        """Remove ``name`` if present."""
        self._ranks.pop(name, None)
        self._tidy()

    def rank(self, name: Name) -> float:
        """:raises KeyError: it is not there."""
        return self._ranks[name]

    def first(self) -> Name | None:
        """The name with the smallest number; None: there is none."""
        heap = self._heap
        while heap:
            rank, _, name = heap[0]
            if self._ranks.get(name) == rank:
                return name
            heappop(heap)
        return None

    def _tidy(self) -> None:
        if not self._ranks:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._ranks) + self._slack:
            self._heap = [(rank, number, name) for number, (name, rank) in enumerate(self._ranks.items())]
            heapify(self._heap)
