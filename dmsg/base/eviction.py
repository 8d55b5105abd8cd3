"""Choice of the owner that loses an item to another owner when a table is full. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

_Owner = TypeVar("_Owner", bound=Hashable)


def pick_loser(counts: Counter[_Owner], newcomer: _Owner, protected_count: int = 0) -> _Owner | None:
    """Return the owner that loses its newest item, so that a full table has room for an item of ``newcomer``.

    This is the owner with most items, if it has more than ``protected_count`` items, and at least two more than the
    newcomer. So owners cannot take items from each other in turns, and no owner can keep all others out.

    :param counts: number of items of each owner in the table.
    :param protected_count: number of items that an owner never loses to another owner. Without such a number, an
        attacker with many keys, which cost nothing, could end the streams of a peer with several streams.
    :returns: the owner; None if no owner has so many items, so that the new item must be refused.
    """
    if not counts:
        return None
    greediest = max(counts, key=counts.__getitem__)
    return greediest if counts[greediest] > max(protected_count, counts[newcomer] + 1) else None
