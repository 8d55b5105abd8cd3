"""Errors, results and message framing that all file transfers share."""

from __future__ import annotations

import json
from dataclasses import dataclass

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, Unwanted

HEADER_LIMIT = 4096
"""Bytes of a header or an answer."""


class TransferError(DmsgError):
    """The file did not arrive."""


class TransferRefused(TransferError, Unwanted):
    """The other side does not take it, or does not give it."""


def lost_text(reason: Failure) -> str:
    """A connection that ended too soon, in words."""
    if reason.check(ConnectionDone):
        return "the other side ended the connection"
    if reason.check(ConnectionAborted):
        return "the connection was given up on this side"
    return f"the connection was lost: {reason.value}"


@dataclass(frozen=True)
class TransferResult:
    """Result of a transfer.

    :ivar seconds: from the first byte to the answer.
    :ivar changed: the source was written to while it was sent.
    """

    name: str
    size: int
    seconds: float
    sha256: str
    changed: bool = False

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.size / self.seconds if self.seconds else 0.0


def _message(value: dict[str, object]) -> bytes:
    body = json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def take_framed(buffer: bytearray, limit: int, what: str) -> bytes | None:
    """Take a length-prefixed message from the start of the buffer; return None while it is incomplete.

    :param what: is spoken, as an error says it.
    :raises TransferError: it is longer than ``limit``.
    """
    if len(buffer) < 4:
        return None
    size = int.from_bytes(buffer[:4], "big")
    if size > limit:
        raise TransferError(f"the other side does not speak dmsg's {what}")
    if len(buffer) < 4 + size:
        return None
    body = bytes(buffer[4 : 4 + size])
    del buffer[: 4 + size]
    return body


def _take_message(
    buffer: bytearray, limit: int = HEADER_LIMIT, what: str = "file transfer"
) -> dict[str, object] | None:
    """The JSON object at the start of the buffer, taken out; None while it is not whole.

    :raises TransferError: it is none.
    """
    body = take_framed(buffer, limit, what)
    if body is None:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TransferError(f"the other side does not speak dmsg's {what}")
    return value
