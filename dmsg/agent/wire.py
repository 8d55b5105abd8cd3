"""Protocol between a program and the agent over the agent's socket. No I/O.

A connection begins with one request of the program, an object of JSON in one line, whose member ``do`` names the
request.  The agent answers with one line: an object without ``error``, or ``{"error": NAME, "text": ...}``.  The data
that follow depend on the request (docs/protocol/agent.md).  After ``connect`` and ``accept``, both sides send frames:

====== ==== =========================================
offset size field
====== ==== =========================================
0      1    type, a :class:`Kind`
1      4    length of the rest, big-endian
5      n    the rest
====== ==== =========================================
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from dmsg import errors
from dmsg.base.printable import shorten
from dmsg.errors import (
    ConnectFailed,
    ConnectTimeout,
    DiscoveryError,
    DmsgError,
    DmsgTimeout,
    EncryptionUnavailable,
    EntryNotFound,
    NobodyThere,
    PingUnavailable,
    TransportRefused,
    fit_close_reason,
)

PROTOCOL = 1
"""Number of the protocol in ``hello``.  A program that knows another number works without the agent."""
MAX_LINE = 65536
"""Maximum bytes of a request, or of a line of an answer, with its line end."""
MAX_STATUS = 4 * 1024 * 1024
"""Maximum bytes of the answer to ``status``, which lists streams."""
OFFERS_SIZE = 200
"""Maximum characters of a service's text about what peers get."""
ALLOW_LIMIT = 500
"""Maximum number of allowed keys that a program sends to the agent.  The agent can refuse other peers only if it gets
all allowed keys."""
MAX_PAYLOAD = 65536
"""Maximum bytes of a frame after its header."""
MAX_REASON = 4
"""Maximum bytes of a close reason; reasons of v2019 have one byte, other protocol families may have larger numbers."""
WINDOW = 1024 * 1024
"""Maximum bytes in flight on a stream, in each direction: sent by its program and not acknowledged by the peer, or sent
by the agent and not read by the program."""
WINDOW_FRAMES = 4096
"""Maximum number of unacknowledged DATA frames of a program, which may be empty."""

HEADER = struct.Struct("!BI")
_COUNT = struct.Struct("!I")


class Kind(IntEnum):
    """Type of a frame."""

    DATA = 0
    """Bytes of the stream; an empty frame measures the round trip, because the peer's end of the stream acknowledges
    it."""
    TAKEN = 1
    """Number of DATA frames (4 bytes, big-endian) that the peer has acknowledged; sent by the agent to the program."""
    CLOSE = 2
    """End of the stream with its :class:`~dmsg.errors.CloseReason` (1 byte, or up to ``MAX_REASON`` if the number needs
    them); the last frame that either side sends."""
    WAY = 3
    """Path of the stream as JSON, sent by the agent to the program: ``server``, and ``away``, the seconds without
    one."""
    READ = 4
    """Number of bytes (4 bytes, big-endian) that the program has read, so that the agent may send as many more; sent by
    the program to the agent."""
    END = 5
    """End of its sender's data; the other direction continues.  An END from a program is acknowledged like DATA.  Sent
    only if the program's request and the agent's answer both have ``half_close``."""


Answer = dict[str, Any]
"""JSON object that the other side of the socket has sent; its members are not checked yet."""


class WireError(DmsgError):
    """Error: the other side of the socket does not follow this protocol."""


def encode_line(content: Mapping[str, object]) -> bytes:
    """Encode an object as a line."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def parse_line(text: bytes) -> Answer:
    """Decode the object in a line.

    :raises WireError: the line contains no object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("not a line of JSON") from None
    if not isinstance(content, dict):
        raise WireError("not a JSON object")
    return content


def encode_frame(kind: Kind, payload: bytes | memoryview = b"") -> bytes:
    """Return a frame with its header."""
    return HEADER.pack(kind, len(payload)) + payload


def encode_count(kind: Kind, count: int) -> bytes:
    """Return a TAKEN or READ frame."""
    return encode_frame(kind, _COUNT.pack(count))


def encode_close(reason: int) -> bytes:
    """Return the CLOSE frame with a close reason, in as many bytes as the number needs."""
    reason = fit_close_reason(reason, MAX_REASON)
    return encode_frame(Kind.CLOSE, reason.to_bytes(max(1, (reason.bit_length() + 7) // 8), "big"))


END_FRAME = HEADER.pack(Kind.END, 0)
"""Frame that ends the data of its sender."""


def parse_count(payload: bytes) -> int:
    """Decode a number.

    :raises WireError: the payload is not a number.
    """
    if len(payload) != _COUNT.size:
        raise WireError("a TAKEN or READ frame without a byte count")
    return int(_COUNT.unpack(payload)[0])


def parse_close(payload: bytes) -> int:
    """Return the close reason of a frame.

    :raises WireError: there is no reason, or it has more than ``MAX_REASON`` bytes.
    """
    if not 0 < len(payload) <= MAX_REASON:
        raise WireError("a CLOSE frame without a reason")
    return int.from_bytes(payload, "big")


class Reader:
    """Parser of lines and frames from a stream in pieces of any size."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def waiting(self) -> int:
        """Number of bytes of an incomplete line or frame."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Append bytes of the stream."""
        self._data += data

    def next_line(self, limit: int = MAX_LINE) -> bytes | None:
        """Remove and return the next line without its end; None if it is incomplete.

        :raises WireError: the line is longer than the limit.
        """
        end = self._data.find(b"\n", 0, limit)
        if end < 0:
            if len(self._data) >= limit:
                raise WireError(f"a line of more than {limit} bytes")
            return None
        text = bytes(self._data[:end])
        del self._data[: end + 1]
        return text

    def next_frame(self) -> tuple[Kind, bytes] | None:
        """Remove and return the next frame; None if it is incomplete.

        :raises WireError: the frame's type is unknown, or the frame is longer than :data:`MAX_PAYLOAD`.
        """
        if len(self._data) < HEADER.size:
            return None
        kind, size = HEADER.unpack_from(self._data)
        if kind not in _KINDS:
            raise WireError(f"a frame of type {kind}")
        if size > MAX_PAYLOAD:
            raise WireError(f"a frame of {size} bytes")
        end = HEADER.size + size
        if len(self._data) < end:
            return None
        payload = bytes(self._data[HEADER.size : end])
        del self._data[:end]
        return Kind(kind), payload


_KINDS = frozenset(Kind)


_ERRORS: tuple[type[DmsgError], ...] = (
    EntryNotFound,
    DiscoveryError,
    ConnectTimeout,
    ConnectFailed,
    NobodyThere,
    EncryptionUnavailable,
    PingUnavailable,
    TransportRefused,
    DmsgTimeout,
)
"""Errors that the protocol names, most specific first; other errors become DmsgError."""


def error_line(error: BaseException) -> dict[str, object]:
    """Return the answer that reports an error, so that the program can raise the same error."""
    name = next((kind.__name__ for kind in _ERRORS if isinstance(error, kind)), "DmsgError")
    told: dict[str, object] = {"error": name, "text": shorten(str(error)) or type(error).__name__}
    for field in ("key", "reason", "status"):
        value = getattr(error, field, None)
        if isinstance(value, str | int):
            told[field] = value
    return told


def raise_error(answer: Answer) -> None:
    """Raise the error in an answer, if it has one.

    :raises DmsgError: of the class that the answer names, if that class is sent over the socket.
    """
    if "error" not in answer:
        return
    text = shorten(str(answer.get("text", "")))
    kind = getattr(errors, str(answer["error"]), None)
    if kind is EntryNotFound:
        raise EntryNotFound(text, str(answer.get("key", "")))
    if kind is DiscoveryError:
        raise DiscoveryError(text, _number(answer.get("status")))
    if kind is TransportRefused:
        raise TransportRefused(_number(answer.get("reason")), text)
    if kind in (ConnectFailed, ConnectTimeout):
        raise kind(text, (), str(answer.get("key", "")))
    if kind in _ERRORS:
        raise kind(text)
    raise DmsgError(text)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
