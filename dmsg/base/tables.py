"""Tables that strangers fill, and that do not grow for ever.  No I/O."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def uncount(counter: Counter[Key], key: Key, number: int = 1) -> None:
    """So much less; what counts nothing has no place any more."""
    counter[key] -= number
    if counter[key] <= 0:
        del counter[key]


def remember(known: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """As the newest; of more than ``most`` the oldest is forgotten."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
