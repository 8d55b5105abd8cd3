"""Parsers of HTTP/1.1 responses (RFC 9112) and JSON from untrusted servers, without I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from dmsg.errors import DmsgError

MAX_HEAD = 64 * 1024
"""Maximum number of bytes of a response besides its body: status lines, headers and trailers."""
_MAX_CHUNK_LINE = 1024
"""Maximum number of bytes of the line before a chunk."""
_BLANK_LINE = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9][0-9])(?: .*)?")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""Pattern of the name of an HTTP header."""
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?")
"""Pattern of the line with a chunk's size. It allows eight hexadecimal digits, which is enough for a chunk of 4 GiB."""
_LENGTH = re.compile(rb"[0-9]{1,15}")
_NO_BODY = frozenset((204, 304))
"""Status codes of responses that never have a body."""


class HeadTooLong(DmsgError):
    """Error: the headers of a response exceed the limit."""


class AnswerTooLong(DmsgError):
    """Error: the response was longer than allowed, and its connection was dropped."""


class MalformedResponse(DmsgError):
    """Error: a response is not HTTP/1.1, or has a form that different programs may parse differently."""


class ResponseParser:
    """Parser of one response to a request other than HEAD and CONNECT.

    :param limit: maximum number of bytes of the body.
    :ivar status: status code; 0 until the head is complete.
    :ivar is_complete: whether the response is complete.
    :ivar keeps_connection: whether the connection can carry another request once the response is complete.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._step: Callable[[], bool] = self._read_head
        self._body = bytearray()
        self._left = 0
        """Number of bytes of the body that have not arrived yet; in a chunked body, of the current chunk."""
        self._head = 0
        """Number of bytes of heads and trailers so far, including the heads of interim responses (status 1xx)."""
        self._searched = 0
        """Number of bytes at the start of the buffer that contain no end of a head."""
        self.status = 0
        self.is_complete = False
        self.keeps_connection = False

    @property
    def body(self) -> bytes:
        """Body as far as it was received."""
        return bytes(self._body)

    def receive_data(self, data: bytes) -> None:
        """Parse the next bytes of the connection.

        :raises HeadTooLong, AnswerTooLong, MalformedResponse: the response must be dropped, with its connection.
        """
        self._buffer += data
        while not self.is_complete and self._step():
            pass
        if self.is_complete and self._buffer:
            # The connection is not used again, because further bytes have arrived that would be taken for the response
            # to the next request.
            self.keeps_connection = False

    def receive_end(self) -> bool:
        """Handle the end of the connection; return whether the response is complete."""
        if self._step == self._read_to_end:
            self.is_complete = True
        return self.is_complete

    def _take_line(self, limit: int) -> bytes | None:
        """Remove and return the next line without its end; None if its end has not arrived."""
        end = self._buffer.find(b"\n")
        if end > limit or (end < 0 and len(self._buffer) > limit):
            raise MalformedResponse("a line of the answer is too long")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line.removesuffix(b"\r")

    def _read_head(self) -> bool:
        head = _BLANK_LINE.search(self._buffer, max(0, self._searched - 2))
        self._searched = 0 if head else len(self._buffer)
        self._count_head(head.end() if head else self._searched)
        if head is None:
            self._head -= self._searched
            return False
        text = bytes(self._buffer[: head.start()])
        del self._buffer[: head.end()]
        # A line that begins with a blank continues the line before (RFC 9112, section 5.2).
        lines = re.sub(rb"\r?\n[ \t]+", b" ", text).replace(b"\r\n", b"\n").split(b"\n")
        status = _STATUS_LINE.fullmatch(lines[0].removesuffix(b"\r"))
        if status is None:
            raise MalformedResponse("the answer is not an HTTP/1 response")
        code = int(status[2])
        if code < 200:
            if code == 101:
                raise MalformedResponse("the answer changes the protocol, which was not requested")
            return True
        self.status = code
        self._begin_body(_headers(lines[1:]), is_old=status[1] == b"0")
        return True

    def _count_head(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise HeadTooLong(f"the headers of an answer have more than {MAX_HEAD} bytes")

    def _begin_body(self, headers: dict[bytes, list[bytes]], *, is_old: bool) -> None:
        connection = _words(headers, b"connection")
        self.keeps_connection = not is_old and b"close" not in connection
        codings = _words(headers, b"transfer-encoding")
        lengths = set(_words(headers, b"content-length"))
        if self.status in _NO_BODY:
            self.is_complete = True
        elif codings:
            if codings != [b"chunked"] or is_old:
                raise MalformedResponse("the answer has an unknown Transfer-Encoding")
            if lengths:
                # The response also has a Content-Length, and a proxy may have used it to find the end of the body. So
                # the connection must not be used again.
                self.keeps_connection = False
            self._step = self._read_chunk_line
        elif lengths:
            length = lengths.pop()
            if lengths or not _LENGTH.fullmatch(length):
                raise MalformedResponse("the answer has an invalid Content-Length")
            self._left = int(length)
            self._check_limit()
            self._step = self._read_counted
            self.is_complete = not self._left
        else:
            self.keeps_connection = False
            self._step = self._read_to_end

    def _check_limit(self) -> None:
        if len(self._body) + self._left > self._limit:
            raise AnswerTooLong(f"an answer has more than {self._limit} bytes")

    def _read_to_end(self) -> bool:
        self._body += self._buffer
        self._buffer.clear()
        self._check_limit()
        return False

    def _take_counted(self) -> None:
        part = self._buffer[: self._left]
        del self._buffer[: self._left]
        self._body += part
        self._left -= len(part)

    def _read_counted(self) -> bool:
        self._take_counted()
        self.is_complete = not self._left
        return False

    def _read_chunk_line(self) -> bool:
        line = self._take_line(_MAX_CHUNK_LINE)
        if line is None:
            return False
        size = _SIZE.fullmatch(line)
        if size is None:
            raise MalformedResponse("the answer has an invalid chunk")
        self._left = int(size[1], 16)
        self._check_limit()
        self._step = self._read_chunk if self._left else self._read_trailers
        return True

    def _read_chunk(self) -> bool:
        self._take_counted()
        if self._left:
            return False
        self._step = self._read_chunk_end
        return True

    def _read_chunk_end(self) -> bool:
        line = self._take_line(2)
        if line is None:
            return False
        if line:
            raise MalformedResponse("the answer has an invalid chunk")
        self._step = self._read_chunk_line
        return True

    def _read_trailers(self) -> bool:
        line = self._take_line(MAX_HEAD)
        if line is None:
            return False
        self._count_head(len(line) + 2)
        self.is_complete = not line
        return True


def _headers(lines: list[bytes]) -> dict[bytes, list[bytes]]:
    """Return the values of each header, by its name in lower case."""
    headers: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _NAME.fullmatch(name):
            raise MalformedResponse("the answer has an invalid header")
        headers.setdefault(name.lower(), []).append(value.strip(b" \t\r"))
    return headers


def _words(headers: dict[bytes, list[bytes]], name: bytes) -> list[bytes]:
    """Return the elements of a header's list, in lower case."""
    return [word.strip(b" \t").lower() for value in headers.get(name, ()) for word in value.split(b",") if word.strip()]


def parse_json(body: bytes | str) -> Any:
    """Parse JSON from an untrusted sender.

    :raises ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
