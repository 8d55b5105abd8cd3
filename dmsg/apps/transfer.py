"""Errors, results and message framing that all file transfers share."""

from __future__ import annotations

import json
from dataclasses import dataclass

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, Unwanted

HEADER_LIMIT = 4096
"""Maximum bytes of a message, unless the caller sets another limit."""


class TransferError(DmsgError):
    """Error: a transfer has failed."""


class TransferRefused(TransferError, Unwanted):
    """Error: the other side refuses to receive or to send a file."""


def lost_text(reason: Failure) -> str:
    """Return the text for an error message about a connection that ended before the end of the transfer."""
    if reason.check(ConnectionDone):
        return "the other side ended the connection"
    if reason.check(ConnectionAborted):
        return "the connection was given up on this side"
    return f"the connection was lost: {reason.value}"


class Measured:
    """Base of the results of transfers.

    :ivar size: number of bytes transferred.
    :ivar seconds: duration of the transfer.
    """

    size: int
    seconds: float

    @property
    def rate(self) -> float:
        """Transfer rate in bytes per second."""
        return self.size / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TransferResult(Measured):
    """Result of a transfer of one file or directory.

    :ivar size: number of bytes transferred.
    :ivar seconds: duration from acceptance to the final answer.
    :ivar sha256: hash in hexadecimal of a file; empty for a directory.
    :ivar changed: whether somebody changed the source while it was sent.
    :ivar resumed: number of bytes that an earlier transfer had transferred.
    """

    name: str
    size: int
    seconds: float
    sha256: str
    changed: bool = False
    resumed: int = 0


def _message(value: dict[str, object]) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def take_framed(buffer: bytearray, limit: int, name: str) -> bytes | None:
    """Remove a length-prefixed message from the start of the buffer and return its body; None if it is incomplete.

    :param limit: maximum bytes of the body.
    :param name: name of the protocol, for errors.
    :raises TransferError: the message is longer than ``limit``.
    """
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if size > limit:
        raise TransferError(f"the other side does not use dmsg's protocol for {name}")
    if len(buffer) < 4 + size:
        return None
    body = bytes(buffer[4 : 4 + size])
    del buffer[: 4 + size]
    return body


def _take_message(
    buffer: bytearray, limit: int = HEADER_LIMIT, name: str = "file transfer"
) -> dict[str, object] | None:
    """Remove the length-prefixed JSON object at the start of the buffer and return it; None if it is incomplete.

    :raises TransferError: the message is too long, or is not a JSON object.
    """
    body = take_framed(buffer, limit, name)
    if body is None:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TransferError(f"the other side does not use dmsg's protocol for {name}")
    return value
