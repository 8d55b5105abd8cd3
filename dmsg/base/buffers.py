"""Helpers to split a byte stream into messages, and to find many equal headers at once.

:class:`PrefixedBuffer` is for the few messages of a handshake.  Records and frames have loops of their own, because
they must be fast.
"""

from __future__ import annotations

from collections import deque
from types import MappingProxyType
from typing import Any, cast

NO_QUEUE: deque[Any] = cast(Any, ())
"""Placeholder for an empty queue, until its first entry is added: an empty deque takes 760 bytes."""
NO_TABLE: dict[Any, Any] = cast(Any, MappingProxyType({}))
"""Placeholder for an empty dict, until its first entry is added: an empty dict takes 64 bytes."""


def count_equal(buffer: bytearray, position: int, step: int, most: int, size: int) -> int:
    """Count the pieces, ``step`` bytes apart from ``position`` on, that begin with the same ``size`` bytes.

    Each of these bytes is compared for all pieces at once, by a strided slice, which runs at the speed of C.

    :param most: number of pieces to compare, and thus the highest possible result.
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
        """:param limit: maximum bytes of one message."""
        self._data = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream."""
        self._data += data

    def next_message(self) -> bytes | None:
        """Remove and return the next whole message without its prefix, or None.

        :raises ValueError: the prefix exceeds the limit.
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
