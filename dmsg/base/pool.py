"""Large buffers that are used again: a new one is given by the kernel, which has to zero it."""

from __future__ import annotations


class BufferPool:
    """Buffers of one size.

    :param size: bytes of each.
    :param most: how many are kept when nobody uses them; those beyond are let go.
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
