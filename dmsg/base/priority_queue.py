"""Priority queue of names whose ranks can change.  No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Name = TypeVar("Name")

MAX_STALE_ENTRIES = 64
"""Number of stale heap entries, in addition to one for each name, above which the heap is rebuilt."""


class PriorityQueue(Generic[Name]):
    """Priority queue that contains each name once, with a number as its rank. The smallest rank is first.

    A change of a rank leaves a stale entry in the heap, which :meth:`first` later discards.  The heap is rebuilt before
    most of its entries are stale.  So a change costs the logarithm of the number of names.

    :param slack: number of stale heap entries, in addition to one for each name, above which the heap is rebuilt.  Use
        a small number if there are many queues.
    """

    def __init__(self, slack: int = MAX_STALE_ENTRIES) -> None:
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
        """Add ``name`` with ``rank``, or change its rank."""
        self._ranks[name] = rank
        self._count += 1
        heappush(self._heap, (rank, self._count, name))
        self._compact()

    def remove(self, name: Name) -> None:
        """Remove ``name`` if it is in the queue."""
        self._ranks.pop(name, None)
        self._compact()

    def rank(self, name: Name) -> float:
        """Return the rank of ``name``.

        :raises KeyError: the name is not in the queue.
        """
        return self._ranks[name]

    def first(self) -> Name | None:
        """Return the name with the smallest rank, or None if the queue is empty."""
        heap = self._heap
        while heap:
            rank, _, name = heap[0]
            if self._ranks.get(name) == rank:
                return name
            heappop(heap)
        return None

    def _compact(self) -> None:
        if not self._ranks:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._ranks) + self._slack:
            self._heap = [(rank, number, name) for number, (name, rank) in enumerate(self._ranks.items())]
            heapify(self._heap)
