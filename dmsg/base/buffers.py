"""Splitting a byte stream: by a length prefix, or where many headers are the same.

:class:`PrefixedBuffer` is for the few messages of a handshake; records and
frames have loops of their own, because there each microsecond counts.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import Any, cast

NO_QUEUE: deque[Any] = cast(Any, ())
"""Stands for a queue without entries until the first one comes: an empty deque takes 760 bytes."""
NO_TABLE: dict[Any, Any] = cast(Any, MappingProxyType({}))
"""Stands for a dict without entries until the first one comes: an empty dict takes 64 bytes."""


def count_equal(buffer: bytearray, position: int, step: int, most: int, size: int) -> int:
    """Count the pieces, ``step`` bytes apart from ``position`` on, that begin with the same ``size`` bytes.

    Each of those bytes is one strided slice, compared at the speed of C.

    :param most: pieces that are there, and the answer at most.
    """
    count = most
    limit = position + most * step
    for offset in range(size):
        column = buffer[position + offset : limit : step]
        rest = len(column.lstrip(column[:1]))
        count = min(count, most - rest)
    return count


class PrefixedBuffer:
    """Messages with a 2-byte big-endian length in front, from pieces of any size."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        """:param limit: the longest message that is accepted, in bytes."""
        self._data = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._data += data

    def next_message(self) -> bytes | None:
        """The next whole message without its prefix, or None.

        :raises ValueError: the prefix says more than the limit.
        """
        data = self._data
        if len(data) < 2:
            return None
        size = data[0] << 8 | data[1]
        if size > self._limit:
            raise ValueError(f"message of {size} bytes, the limit is {self._limit}")
        if len(data) < 2 + size:
            return None
        message = bytes(data[2 : 2 + size])
        del data[: 2 + size]
        return message

    def rest(self) -> bytes:
        """Return the unparsed rest and forget it."""
        data = bytes(self._data)
        self._data = bytearray()
        return data
