"""Helpers that bound the size of tables to which strangers can add entries.  No I/O."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

SPARSE, SPARSE_ENTRY = 64 * 1024, 128
"""Limits of :func:`compact`, in bytes: for the size of a dict, and for its size per entry. A dict that exceeds both is
copied."""


def compact(table: dict[Key, Value]) -> dict[Key, Value]:
    """Return ``table``, or a smaller copy of it if it is mostly empty. Deleting entries does not shrink a dict."""
    size = sys.getsizeof(table)
    return dict(table) if size > SPARSE and size > SPARSE_ENTRY * len(table) else table


def decrement(counter: Counter[Key], key: Key, number: int = 1) -> None:
    """Subtract ``number`` from a count, and delete the key if its count is then 0 or less."""
    counter[key] -= number
    if counter[key] <= 0:
        del counter[key]


def remember(known: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Set ``key`` to ``value`` as the newest entry. If there are more than ``limit`` entries, evict the oldest."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > limit:
        known.popitem(last=False)
