"""Pool of large buffers that are reused, so that the kernel need not zero new memory for each."""

from __future__ import annotations


class BufferPool:
    """Pool of buffers of one size.

    :param size: bytes of each buffer.
    :param limit: maximum number of unused buffers to keep; further ones are freed.
    """

    __slots__ = ("_free_buffers", "_most", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self._most = limit
        self._free_buffers: list[bytearray] = []

    def take(self) -> bytearray:
        """Take a buffer; its content is undefined."""
        return self._free_buffers.pop() if self._free_buffers else bytearray(self.size)

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer that nobody uses any more."""
        if len(self._free_buffers) < self._most:
            self._free_buffers.append(buffer)
