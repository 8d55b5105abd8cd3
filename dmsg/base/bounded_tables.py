"""Helpers for tables that strangers fill, so that the tables stay bounded.  No I/O."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

SPARSE, SPARSE_ENTRY = 64 * 1024, 128
"""Size of a dict in bytes, and bytes per entry, above both of which :func:`compact` replaces the dict."""


def compact(table: dict[Key, Value]) -> dict[Key, Value]:
    """Return ``table``, or a smaller copy if it is mostly empty: a dict keeps its size when entries are deleted."""
    size = sys.getsizeof(table)
    return dict(table) if size > SPARSE and size > SPARSE_ENTRY * len(table) else table


def decrement(counter: Counter[Key], key: Key, number: int = 1) -> None:
    """Subtract from a count, and delete the key when its count reaches 0."""
    counter[key] -= number
    if counter[key] <= 0:
        del counter[key]


def remember(known: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Insert an entry as the newest; evict the oldest beyond ``limit``."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > limit:
        known.popitem(last=False)
