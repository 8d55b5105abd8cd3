"""Helpers that split a byte stream into messages, and that find many equal headers at once.

:class:`PrefixedBuffer` is for the few messages of a handshake.  Records and frames have their own, faster loops.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import Any, cast

FIRST_BURST = 16
"""Number of consecutive frames that a relay's first comparison of headers covers (:func:`count_equal`). The number
doubles as long as all headers are equal."""
NO_QUEUE: deque[Any] = cast(Any, ())
"""Placeholder for a queue that has no entries yet. An empty deque would take 760 bytes."""
NO_TABLE: dict[Any, Any] = cast(Any, MappingProxyType({}))
"""Placeholder for a dict that has no entries yet. An empty dict would take 64 bytes."""


def count_equal(buffer: bytearray, position: int, step: int, most: int, size: int) -> int:
    """Return how many consecutive pieces of ``buffer`` begin with the same ``size`` bytes as the first piece.

    A piece starts every ``step`` bytes, the first at ``position``. For each of the ``size`` bytes, one strided slice
    compares all pieces at once, at the speed of C.

    :param most: number of pieces to compare, and so the largest possible result.
    """
    count = most
    limit = position + most * step
    for offset in range(size):
        column = buffer[position + offset : limit : step]
        rest = len(column.lstrip(column[:1]))
        count = min(count, most - rest)
    return count


class PrefixedBuffer:
    """Parser of messages with a 2-byte big-endian length prefix, from a stream in pieces of any size."""

    __slots__ = ("_data", "_limit")

    def __init__(self, limit: int) -> None:
        """:param limit: maximum size of one message in bytes."""
        self._data = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._data += data

    def next_message(self) -> bytes | None:
        """Remove and return the next complete message without its prefix, or None if it is not complete.

        :raises ValueError: the prefix gives a size above the limit.
        """
        data = self._data
        if len(data) < 2:
            return None
        size = data[0] << 8 | data[1]
        if size > self._limit:
            raise ValueError(f"message has {size} bytes, the limit is {self._limit}")
        if len(data) < 2 + size:
            return None
        message = bytes(data[2 : 2 + size])
        del data[: 2 + size]
        return message

    def take_rest(self) -> bytes:
        """Remove and return the bytes that are not parsed yet."""
        data = bytes(self._data)
        self._data = bytearray()
        return data
