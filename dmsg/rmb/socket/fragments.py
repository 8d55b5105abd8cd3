"""Fragmented messages: messages that arrive in several frames (RFC 6455, section 5.4).

Clients split a message where their write buffer is full; clients written in Go do so every 4 KiB. A fragment of one
byte costs as much work as one of 4 KiB. So the number of a message's fragments is limited, and small fragments are
counted.
"""

from __future__ import annotations

from dmsg.errors import DmsgError
from dmsg.net.websocket.frames import BEGINNING, ENDING, FrameTooLarge, PieceBuffer

MAX_FRAGMENTS = 16_384
"""Maximum number of fragments of one message: four times as many as a client written in Go needs for the largest
message."""
SMALL_FRAGMENT = 1024
"""Size in bytes below which a fragment counts as small, unless it is the last of its message."""
OVERHEAD = 64
"""Number of bytes that are counted for each fragment in addition to its payload, so that empty fragments are counted,
too."""


class FragmentError(DmsgError):
    """Error: the fragment continues no message, or begins a message inside another."""


class Fragments:
    """Incomplete message of one connection.

    :param limit: maximum size of a message in bytes.
    :ivar small: number of small fragments since this attribute was last set to zero.
    """

    __slots__ = ("_count", "_most", "_pieces", "small")

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._pieces = PieceBuffer()
        self._count = 0
        self.small = 0

    @property
    def size(self) -> int:
        """Number of bytes that are charged for the incomplete message in the memory account: its payload, and
        ``OVERHEAD`` for each fragment."""
        return self._pieces.size + OVERHEAD * self._count

    def add(self, first: int, payload: bytes) -> bytes | None:
        """Add one fragment.

        :param first: first byte of the fragment's frame: ``BEGINNING``, ``MIDDLE`` or ``ENDING``.
        :returns: the complete message if this is its last fragment, else None.
        :raises FragmentError: the fragment continues no message, or begins a message inside another.
        :raises FrameTooLarge: the message has too many bytes or fragments.
        """
        if (first == BEGINNING) is (self._count > 0):
            raise FragmentError("a fragment continues no message, or begins a message inside another")
        if self._pieces.size + len(payload) > self._most:
            raise FrameTooLarge(f"a message has more than {self._most} bytes")
        if self._count >= MAX_FRAGMENTS:
            raise FrameTooLarge(f"a message has more than {MAX_FRAGMENTS} fragments")
        self._count += 1
        self._pieces.add(payload)
        if first == ENDING:
            self._count = 0
            return self._pieces.take()
        if len(payload) < SMALL_FRAGMENT:
            self.small += 1
        return None
