"""Pool of large buffers for reuse, so that the kernel need not zero new memory for each buffer."""

from __future__ import annotations

DIRECT_SIZE = 16 * 1024
"""Size in bytes from which data are encrypted or written directly to a separate buffer, instead of being joined with
other data first. Frames of streams and records of links have the same limit, so that no data are joined in between."""


class BufferPool:
    """Pool of buffers of one size.

    :param size: size of each buffer in bytes.
    :param limit: maximum number of unused buffers in the pool. Further returned buffers are freed.
    """

    __slots__ = ("_free_buffers", "_most", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self._most = limit
        self._free_buffers: list[bytearray] = []

    def take(self) -> bytearray:
        """Return an unused buffer or a new one. Its content is undefined."""
        return self._free_buffers.pop() if self._free_buffers else bytearray(self.size)

    def give_back(self, buffer: bytearray) -> None:
        """Return an unused buffer to the pool."""
        if len(self._free_buffers) < self._most:
            self._free_buffers.append(buffer)
