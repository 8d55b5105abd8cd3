"""Byte stream in the binary messages of a websocket (RFC 6455, section 5). No I/O.

Boundaries of messages and fragments have no meaning in the byte stream. So payload is returned as it arrives, and no
frame is buffered as a whole. The message bus needs whole messages, so it uses
:class:`~dmsg.net.websocket.frames.Frames` instead.
"""

from __future__ import annotations

from typing import NamedTuple

from dmsg.net.websocket.frames import MAX_CONTROL, MAX_HEADER, PONG, encode, mask

NORMAL, BAD_PROTOCOL, BAD_DATA = 1000, 1002, 1003
"""Close codes of RFC 6455, section 7.4.1."""
CLOSE = 0x88
"""First byte of a close frame."""
MAX_FRAME = 2**32
"""Maximum number of payload bytes that a frame may announce. A large frame needs no memory, because frames are not
buffered as a whole."""
_FIN, _MASKED = 0x80, 0x80


class StreamError(Exception):
    """Error: the other end violated the websocket protocol.

    :ivar code: close code to send.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Frame(NamedTuple):
    first: int
    size: int
    key: bytes


def close_frame(code: int, key: bytes | None = None) -> bytes:
    """Return a close frame.

    :param key: 4-byte mask of a client; None for a server, which does not mask.
    """
    return encode(CLOSE, code.to_bytes(2, "big"), key)


class StreamReader:
    """Parser for one direction of a websocket.

    :param masked: whether the frames are masked, as those of clients are.
    :ivar closed: whether the other end has sent a close frame. Data after it are ignored.
    """

    __slots__ = ("_continued", "_control", "_frame", "_head", "_left", "_masked", "_pong", "closed")

    def __init__(self, masked: bool) -> None:
        self._masked = masked
        self._head = b""
        """Bytes of an incomplete header, at most ``MAX_HEADER``."""
        self._frame: _Frame | None = None
        self._left = 0
        """Number of payload bytes of the current frame that are still to come."""
        self._control = b""
        self._continued = False
        """Whether the final fragment of the current message is still to come."""
        self._pong: bytes | None = None
        self.closed = False

    @property
    def held(self) -> int:
        """Number of bytes of an incomplete header or control frame."""
        return len(self._head) + len(self._control)

    def take_answer(self, key: bytes | None = None) -> bytes:
        """Return the pong that is due, and clear it; empty if none is due.

        Only the newest ping is answered (RFC 6455, section 5.5.3), so many pings in one read cost one pong.

        :param key: 4-byte mask of a client; None for a server, which does not mask.
        """
        pong, self._pong = self._pong, None
        return b"" if pong is None else encode(PONG, pong, key)

    def read(self, data: memoryview, start: int, frames: int) -> tuple[bytes | memoryview, int]:
        """Return the next piece of payload in ``data``, and the position after it. The piece is empty if there is no
        further one, and may be a view of ``data``.

        :param start: position in ``data`` from which to read.
        :param frames: maximum number of frame headers to read. Without this limit, empty frames could take any amount
            of time.
        :raises StreamError: the other end violated the websocket protocol.
        """
        end = len(data)
        while start < end and not self.closed:
            frame = self._frame
            if frame is None:
                if not frames:
                    break
                frames -= 1
                start = self._read_head(data, start)
                continue
            piece = data[start : start + self._left]
            start += len(piece)
            self._left -= len(piece)
            if not self._left:
                self._frame = None
            if frame.first & 0x08:
                self._control += bytes(piece)
                if not self._left:
                    self._end_control(frame)
            elif not any(frame.key):
                return piece, start
            else:
                # The mask is rotated to the position at which the previous piece of this frame ended.
                done = (frame.size - self._left - len(piece)) % 4
                return mask(bytes(piece), frame.key[done:] + frame.key[:done]), start
        return b"", end if self.closed else start

    def _read_head(self, view: memoryview, start: int) -> int:
        """Parse a frame header, which may have begun in an earlier read. Return the position after the parsed bytes."""
        known = len(self._head)
        head = self._head + bytes(view[start : start + MAX_HEADER - known])
        length = head[1] & 0x7F if len(head) > 1 else 0
        long = {126: 2, 127: 8}.get(length, 0)
        need = 2 + long + (4 if len(head) > 1 and head[1] & _MASKED else 0)
        if len(head) < need:
            self._head = head
            return len(view)
        self._head = b""
        size = int.from_bytes(head[2 : 2 + long], "big") if long else length
        self._check(head[0], head[1], size)
        frame = _Frame(head[0], size, head[need - 4 : need] if self._masked else b"")
        if size:
            self._frame, self._left = frame, size
        elif head[0] & 0x08:
            self._end_control(frame)
        return start + need - known

    def _check(self, first: int, second: int, size: int) -> None:
        opcode = first & 0x0F
        if bool(second & _MASKED) is not self._masked:
            raise StreamError(BAD_PROTOCOL, "a frame is masked by a server, or not masked by a client")
        if first & 0x70:
            raise StreamError(BAD_PROTOCOL, "a frame uses an extension that was not agreed on")
        if opcode & 0x08:
            if opcode > 0x0A or not first & _FIN or size > MAX_CONTROL:
                raise StreamError(BAD_PROTOCOL, "a control frame is unknown, fragmented or too long")
            return
        if opcode == 0x01:
            raise StreamError(BAD_DATA, "a message is text, but only binary messages are allowed")
        if opcode > 0x02 or (opcode == 0x00) is not self._continued:
            raise StreamError(BAD_PROTOCOL, "a frame is unknown, or out of order")
        if size > MAX_FRAME:
            raise StreamError(BAD_PROTOCOL, "a frame is too long")
        self._continued = not first & _FIN

    def _end_control(self, frame: _Frame) -> None:
        payload, self._control = self._control, b""
        if frame.key:
            payload = mask(payload, frame.key)
        opcode = frame.first & 0x0F
        if opcode == 0x08:
            self.closed = True
        elif opcode == 0x09:
            self._pong = payload
