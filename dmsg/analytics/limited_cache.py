"""Cache of values whose sizes together have a limit. No I/O."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

UNUSED_SECONDS = 900.0
"""Seconds after its last use from which a value can be removed to make room. A stream uses the values of its present
days much more often, and no longer those of files that were merged or of earlier days."""
T = TypeVar("T")


class LimitedCache(Generic[T]):
    """Values by path and column of a file. Several threads may use it.

    :param most: maximum of the sizes of all values together.
    :param clock: function that returns monotonic seconds; None for ``time.monotonic``.
    """

    def __init__(self, most: int, clock: Callable[[], float] | None = None) -> None:
        self._most = most
        self._clock = clock or time.monotonic
        self._size = 0
        self._values: OrderedDict[tuple[str, str], tuple[T, int, float]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._values

    def __getitem__(self, key: tuple[str, str]) -> T:
        """Return a value, and count this as a use.

        Another thread may remove a value after a test with ``in``, so users of several threads handle the error.

        :raises KeyError: there is no such value.
        """
        with self._lock:
            value, size, _ = self._values[key]
            self._values[key] = value, size, self._clock()
            self._values.move_to_end(key)
            return value

    def add(self, key: tuple[str, str], value: T, size: int) -> None:
        """Add a value, or replace the value of the same key. If there is no room, remove values that were not used for
        :data:`UNUSED_SECONDS`, the longest unused first. If there is still no room, do not add the value."""
        with self._lock:
            self._remove(key)
            now = self._clock()
            while self._size + size > self._most and self._values:
                oldest = next(iter(self._values))
                if now - self._values[oldest][2] < UNUSED_SECONDS:
                    break
                self._remove(oldest)
            if self._size + size <= self._most:
                self._values[key] = value, size, now
                self._size += size

    def _remove(self, key: tuple[str, str]) -> None:
        if (former := self._values.pop(key, None)) is not None:
            self._size -= former[1]
