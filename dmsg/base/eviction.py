"""Choice of the owner that loses an item to another owner when a table is full. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner", bound=Hashable)

MAX_REMEMBERED = 4096
"""Maximum number of owners whose order is remembered. Later owners come after all of them, so that a stranger with many
keys cannot make the others be forgotten.
"""


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


def pick_replaced(counts: Counter[_Owner], newcomer: _Owner) -> _Owner | None:
    """Return the owner whose item is replaced by an item of ``newcomer``, in a full table that refuses no new item.

    This is the owner that :func:`pick_loser` returns, or otherwise the newcomer, so that no owner replaces more items
    of others than its share.

    :param counts: number of items of each owner in the table, without the new item.
    :returns: the owner; None if the newcomer has no item and all owners have few, so that any item may be replaced.
    """
    loser = pick_loser(counts, newcomer)
    return newcomer if loser is None and counts[newcomer] else loser


class Seniority(Generic[_Owner]):
    """Order in which owners had their first item in a table.

    Keys cost nothing. So a stranger with many new keys can fill a table, without any key having more items than an
    owner may keep. An owner that had items before these keys came then takes items from them.
    """

    def __init__(self) -> None:
        self._ranks: dict[_Owner, int] = {}

    def record(self, owner: _Owner) -> None:
        """Remember that an owner has an item."""
        if len(self._ranks) < MAX_REMEMBERED:
            self._ranks.setdefault(owner, len(self._ranks))

    def pick_loser(self, counts: Counter[_Owner], newcomer: _Owner, protected_count: int) -> _Owner | None:
        """Return the owner that loses its newest item to make room for an item of ``newcomer``, or None.

        This is the owner that the function :func:`pick_loser` returns, or otherwise the owner that came last, if the
        newcomer came before it, and has fewer than ``protected_count`` items.

        :param counts: number of items of each owner in the table.
        :param protected_count: number of items that an owner never loses to another owner that came later.
        """
        loser = pick_loser(counts, newcomer, protected_count)
        if loser is not None:
            return loser
        last = len(self._ranks)
        ranks = {owner: self._ranks.get(owner, last) for owner, count in counts.items() if count}
        if not ranks or counts[newcomer] >= protected_count:
            return None
        junior = max(ranks, key=ranks.__getitem__)
        return junior if self._ranks.get(newcomer, last) < ranks[junior] else None
