"""Protocol between a program and the agent over the agent's socket. No I/O.

A connection begins with one request of the program: a JSON object in one line, whose field ``do`` names the request.
The agent answers with one line: an object without ``error``, or ``{"error": NAME, "text": ...}``.  What follows depends
on the request (docs/protocol/agent.md).  After ``connect`` and ``accept``, both sides send frames:

====== ==== =========================================
offset size field
====== ==== =========================================
0      1    type, a :class:`Kind`
1      4    length of the payload, big-endian
5      n    payload
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
"""Version of the protocol, which the answer to ``hello`` contains.  Programs refuse an agent of another version."""
MAX_LINE = 65536
"""Maximum bytes of a line in either direction, with its line end.  The answer to ``status`` may be longer."""
MAX_STATUS = 4 * 1024 * 1024
"""Maximum bytes of the answer to ``status``, which is long because it lists streams."""
OFFERS_SIZE = 200
"""Maximum characters of the text that describes a service to peers."""
ALLOW_LIMIT = 500
"""Maximum number of allowed keys that a program sends to the agent.  If a service has more allowed keys, the agent
admits every peer, and the program itself refuses peers.
"""
MAX_PAYLOAD = 65536
"""Maximum bytes of a frame's payload, which follows the header."""
MAX_REASON = 4
"""Maximum bytes of a close reason.  Close reasons of v2019 have one byte; other protocol families may have larger
numbers.
"""
WINDOW = 1024 * 1024
"""Maximum bytes in flight on one stream, in each direction.  Bytes from the program are in flight until the peer has
acknowledged them, and bytes from the agent until the program has read them.
"""
WINDOW_FRAMES = 4096
"""Maximum number of unacknowledged frames from a program.  The limit exists because a DATA frame may be empty."""

HEADER = struct.Struct("!BI")
_COUNT = struct.Struct("!I")


class Kind(IntEnum):
    """Type of a frame."""

    DATA = 0
    """Bytes of the stream.  An empty DATA frame from the program measures a round trip, because the peer acknowledges
    it.
    """
    TAKEN = 1
    """Number of DATA and END frames that the peer has newly acknowledged (4 bytes, big-endian).  Sent by the agent."""
    CLOSE = 2
    """End of the stream, with a :class:`~dmsg.errors.CloseReason` in 1 to ``MAX_REASON`` bytes.  The last frame of
    either side.
    """
    WAY = 3
    """Path of the stream, as a JSON object with ``server``, the key of the server that carries it, and ``away``, the
    seconds since it lost its transport (null while it has one).  Sent by the agent.
    """
    READ = 4
    """Number of bytes that the program has newly read (4 bytes, big-endian).  The agent may then send the same number
    of further bytes. Sent by the program.
    """
    END = 5
    """End of the sender's data; the other direction continues.  The peer acknowledges an END from a program like a DATA
    frame.  END is valid only if the program's request and the agent's answer both contain ``half_close``.
    """


Answer = dict[str, Any]
"""JSON object from the other side of the socket, whose members have not been checked yet."""


class WireError(DmsgError):
    """Error: the other side of the socket does not follow this protocol."""


def encode_line(content: Mapping[str, object]) -> bytes:
    """Encode an object as one line of JSON."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def parse_line(text: bytes) -> Answer:
    """Decode a line of JSON.

    :raises WireError: the line is not a JSON object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise WireError("a line is not JSON") from None
    if not isinstance(content, dict):
        raise WireError("a line is not a JSON object")
    return content


def encode_frame(kind: Kind, payload: bytes | memoryview = b"") -> bytes:
    """Return a frame with its header."""
    return HEADER.pack(kind, len(payload)) + payload


def encode_count(kind: Kind, count: int) -> bytes:
    """Return a TAKEN or READ frame with a number."""
    return encode_frame(kind, _COUNT.pack(count))


def encode_close(reason: int) -> bytes:
    """Return a CLOSE frame, with the close reason in as few bytes as possible."""
    reason = fit_close_reason(reason, MAX_REASON)
    return encode_frame(Kind.CLOSE, reason.to_bytes(max(1, (reason.bit_length() + 7) // 8), "big"))


END_FRAME = HEADER.pack(Kind.END, 0)
"""END frame, which has no payload."""


def parse_count(payload: bytes) -> int:
    """Decode the payload of a TAKEN or READ frame.

    :raises WireError: the payload does not have 4 bytes.
    """
    if len(payload) != _COUNT.size:
        raise WireError("the payload of a TAKEN or READ frame does not have 4 bytes")
    return int(_COUNT.unpack(payload)[0])


def parse_close(payload: bytes) -> int:
    """Return the close reason in the payload of a CLOSE frame.

    :raises WireError: the payload is empty, or has more than ``MAX_REASON`` bytes.
    """
    if not 0 < len(payload) <= MAX_REASON:
        raise WireError("a CLOSE frame has no valid reason")
    return int.from_bytes(payload, "big")


class Reader:
    """Incremental parser of lines and frames; the bytes may arrive in pieces of any size."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that are buffered and have not been returned yet."""
        return len(self._data)

    def feed(self, data: bytes) -> None:
        """Add received bytes to the buffer."""
        self._data += data

    def next_line(self, limit: int = MAX_LINE) -> bytes | None:
        """Remove and return the next line without its line end; None if the line is incomplete.

        :param limit: maximum bytes of the line, with its line end.
        :raises WireError: the line is longer than ``limit``.
        """
        end = self._data.find(b"\n", 0, limit)
        if end < 0:
            if len(self._data) >= limit:
                raise WireError(f"a line has more than {limit} bytes")
            return None
        text = bytes(self._data[:end])
        del self._data[: end + 1]
        return text

    def next_frame(self) -> tuple[Kind, bytes] | None:
        """Remove and return the next frame as type and payload; None if the frame is incomplete.

        :raises WireError: the frame's type is unknown, or its payload is longer than :data:`MAX_PAYLOAD`.
        """
        if len(self._data) < HEADER.size:
            return None
        kind, size = HEADER.unpack_from(self._data)
        if kind not in _KINDS:
            raise WireError(f"a frame has the unknown type {kind}")
        if size > MAX_PAYLOAD:
            raise WireError(f"a frame has {size} bytes, the limit is {MAX_PAYLOAD}")
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
"""Errors that the socket transmits by name, subclasses before their base classes.  All other errors become
DmsgError.
"""


def error_line(error: BaseException) -> dict[str, object]:
    """Return the answer that reports an error.  With this answer, :func:`raise_error` raises the error in the
    program.
    """
    name = next((kind.__name__ for kind in _ERRORS if isinstance(error, kind)), "DmsgError")
    told: dict[str, object] = {"error": name, "text": shorten(str(error)) or type(error).__name__}
    for field in ("key", "reason", "status"):
        value = getattr(error, field, None)
        if isinstance(value, str | int):
            told[field] = value
    return told


def raise_error(answer: Answer) -> None:
    """Raise the error that an answer reports.  Do nothing if the answer reports none.

    :raises DmsgError: an error of the class that the answer names, if ``_ERRORS`` contains it; else DmsgError itself.
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
