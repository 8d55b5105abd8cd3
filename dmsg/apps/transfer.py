"""Errors, results and message framing that all file transfers share."""

from __future__ import annotations

import json
from dataclasses import dataclass

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, Unwanted

HEADER_LIMIT = 4096
"""Maximum bytes of a header or an answer."""


class TransferError(DmsgError):
    """Error: the file did not arrive."""


class TransferRefused(TransferError, Unwanted):
    """Error: the other side refuses to receive the file, or to send it."""


def lost_text(reason: Failure) -> str:
    """Return the text for a connection that ended too early."""
    if reason.check(ConnectionDone):
        return "the other side ended the connection"
    if reason.check(ConnectionAborted):
        return "the connection was given up on this side"
    return f"the connection was lost: {reason.value}"


@dataclass(frozen=True)
class TransferResult:
    """Result of a transfer.

    :ivar seconds: duration from the first byte to the final answer.
    :ivar changed: whether the source was written to during the transfer.
    """

    name: str
    size: int
    seconds: float
    sha256: str
    changed: bool = False

    @property
    def rate(self) -> float:
        """Transfer rate in bytes per second."""
        return self.size / self.seconds if self.seconds else 0.0


def _message(value: dict[str, object]) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def take_framed(buffer: bytearray, limit: int, name: str) -> bytes | None:
    """Remove and return a length-prefixed message from the start of the buffer; None while it is incomplete.

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
    """Remove and return the JSON object at the start of the buffer; None while it is incomplete.

    :raises TransferError: the bytes are no JSON object.
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
