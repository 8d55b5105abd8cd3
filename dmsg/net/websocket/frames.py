"""Parser of websocket frames for the message bus: binary, and limited in size (RFC 6455, section 5.2).

Messages and their fragments, pings and pongs are parsed here, because nearly all frames are of these kinds. Text and
close frames are returned unparsed.
"""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.errors import DmsgError

BINARY, PING, PONG = 0x82, 0x89, 0x8A
"""First byte of an unfragmented frame of each kind: the FIN bit and the opcode."""
BEGINNING, MIDDLE, ENDING = 0x02, 0x00, 0x80
"""First byte of the first, of a middle and of the last fragment of a binary message."""
OTHER_FRAME = -1
"""Value that is returned instead of the first byte for frames that are neither binary messages nor pings nor pongs."""
MAX_CONTROL = 125
"""Maximum number of payload bytes of a ping or pong."""
_CONTROL = frozenset((PING, PONG))
_READ_HERE = frozenset((BINARY, BEGINNING, MIDDLE, ENDING)) | _CONTROL
SMALL, PIECE = 4096, 64 * 1024
"""Size in bytes below which a piece is joined with others, and size at which the joined piece is full."""
MAX_HEADER = 14
"""Number of bytes of the longest frame header: two, plus eight for the length and four for the mask."""


class FrameTooLarge(DmsgError):
    """Error: a frame is larger than a message may be."""


NO_MASK = bytes(4)
"""Mask that does not change the payload. An end that sends ciphertext may use it, because a mask only protects against
bytes that an attacker chose."""


def mask(data: bytes, key: bytes) -> bytes:
    """XOR ``data`` with the four bytes of ``key``, repeated."""
    if key == NO_MASK:
        return data
    size = len(data)
    keys = (key * ((size + 3) // 4))[:size]
    return (int.from_bytes(data, "big") ^ int.from_bytes(keys, "big")).to_bytes(size, "big")


def encode(first: int, data: bytes | bytearray | memoryview, key: bytes | None = None) -> bytes:
    """Encode a frame.

    :param first: first byte: :data:`BINARY`, :data:`PING` or :data:`PONG`.
    :param key: 4-byte mask of a client; None for a server, which does not mask.
    """
    size = len(data)
    bit = 0 if key is None else 0x80
    if size < 126:
        head = bytes((first, bit | size))
    elif size < 65536:
        head = bytes((first, bit | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, bit | 127)) + size.to_bytes(8, "big")
    if key is None or key == NO_MASK:
        return b"".join((head, key or b"", data))
    return head + key + mask(bytes(data), key)


class PieceBuffer:
    """Buffer for data that arrive in pieces and are needed as a whole.

    The pieces are kept in a list. A buffer that grows to the length of a message would be copied a dozen times.

    :ivar size: number of bytes.
    """

    __slots__ = ("_pieces", "_tail", "size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._tail = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        """Append ``data``."""
        self.size += len(data)
        if len(data) < SMALL:
            self._tail += data
            if len(self._tail) < PIECE:
                return
            data = b""
        if self._tail:
            self._pieces.append(bytes(self._tail))
            self._tail.clear()
        if data:
            self._pieces.append(data)

    def take(self) -> bytes:
        """Remove and return all bytes."""
        whole = b"".join((*self._pieces, self._tail))
        self._pieces.clear()
        self._tail.clear()
        self.size = 0
        return whole


class Frames:
    """Parser that splits a byte stream into frames.

    :param masked: whether the frames are masked, as those of clients are.
    :param limit: maximum number of payload bytes of a frame.
    """

    __slots__ = ("_masked", "_most", "_pieces", "_want")

    def __init__(self, masked: bool, limit: int) -> None:
        self._masked = 0x80 if masked else 0
        self._most = limit
        self._pieces = PieceBuffer()
        self._want = 0

    @property
    def held(self) -> int:
        """Number of bytes of the incomplete frame."""
        return self._pieces.size

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Process ``data`` and yield the frames that are complete.

        A message, a fragment, a ping and a pong are yielded as their first byte and payload. Any other frame is yielded
        as :data:`OTHER_FRAME` and the whole frame.

        :raises FrameTooLarge: a frame will be larger than allowed.
        """
        if self._pieces.size:
            self._pieces.add(data)
            if self._pieces.size < self._want:
                return
            data = self._pieces.take()
        start, end = 0, len(data)
        want = 2
        while end - start >= 2:
            length = data[start + 1] & 0x7F
            head = 2
            if length == 126:
                head = 4
            elif length == 127:
                head = 10
            marked = data[start + 1] & 0x80
            want = head + (4 if marked else 0)
            if end - start < want:
                break
            if head > 2:
                length = int.from_bytes(data[start + 2 : start + head], "big")
            if length > self._most:
                raise FrameTooLarge(f"a frame has {length} bytes, the limit is {self._most}")
            body = start + want
            want += length
            stop = start + want
            if stop > end:
                break
            first = data[start]
            if first in _READ_HERE and marked == self._masked and (length <= MAX_CONTROL or first not in _CONTROL):
                payload = data[body:stop]
                yield first, mask(payload, data[body - 4 : body]) if marked else payload
            else:
                yield OTHER_FRAME, data[start:stop]
            start = stop
            want = 2
        if start < end:
            self._pieces.add(data[start:end])
            self._want = want
