"""Pool of large buffers, which saves the kernel's zeroing of new memory."""

from __future__ import annotations


class BufferPool:
    """Pool of buffers of one size.

    :param size: bytes of each buffer.
    :param most: maximum number of unused buffers to keep; further ones are freed.
    """

    __slots__ = ("_kept", "_most", "size")

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        self._most = most
        self._kept: list[bytearray] = []

    def take(self) -> bytearray:
        """Take a buffer; its content is undefined."""
        return self._kept.pop() if self._kept else bytearray(self.size)

    def give_back(self, buffer: bytearray) -> None:
        """Return a buffer that nobody uses any more."""
        if len(self._kept) < self._most:
            self._kept.append(buffer)
