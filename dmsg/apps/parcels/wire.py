"""Messages between the sender and the receiver of a parcel.

Messages are ``length(4) || JSON``, big endian.  The sender offers::

    {"offer": "files", "things": [{"name", "kind", "size", "files", "directories"}, ...], "size": N, "files": N}
    {"offer": "text", "text": T}
    {"offer": "pipe", "name": NAME}

The receiver says ``{"take": true}``, or ``{"take": false, "why": TEXT}``.  A pipe follows as ``length(4) || bytes``,
the last one of length 0, and the SHA-256 (32 bytes) of all.  Of files the sender says what there is,
``{"entries": [...]}`` as often as it takes and ``{"whole": true}``; the receiver answers what it has of them,
``{"have": [[INDEX, BYTES, SHA256], ...]}``, and ``{"whole": true}``; the sender, where each file goes on if its first
bytes are the same, ``{"from": [[INDEX, OFFSET], ...]}`` and ``{"whole": true}``; and then, file after file, the rest of
its bytes and the SHA-256 of the whole of it: in pieces, see :mod:`dmsg.apps.chunks`, if the receiver took it with
``"pieces": true`` and that last message of the sender has the same.  The receiver ends with ``{"ok": true}``.
Either side may say ``{"error": TEXT}`` instead of a message.
"""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.apps.chunks import CHUNK_LIMIT, ChunkReader, error_of
from dmsg.apps.transfer import TransferError, _take_message, lost_text, take_framed
from dmsg.errors import CloseReason, CutShort, Unwanted

MESSAGE_LIMIT = 256 * 1024
"""Bytes of a message."""
MESSAGE_FULL = 128 * 1024
"""Bytes from which entries go into a message of their own."""
TEXT_LIMIT = 32 * 1024
"""Characters of a text; a longer one is a file."""
THINGS_LIMIT = 1000
"""Things that are offered in one parcel; what is in directories does not count."""
CHANGED_LIMIT = 20
"""Files of a parcel that are named because they were written to while they were sent."""
DIGEST_SIZE = 32
GAVE_UP = "the other side gave up"
WHAT = "parcels"
"""Name of the protocol in error messages."""


class ParcelCut(TransferError):
    """The connection was lost before all had arrived."""


class GivenUp(ParcelCut, Unwanted):
    """The other side ended it before anything had arrived."""


class PartKept(ParcelCut, CutShort):
    """A part of the parcel has arrived; the same parcel, sent again, resumes there."""


def lost_error(reason: Failure, moved: int) -> TransferError:
    """A connection that ended before everything was said.  :param moved: bytes that have arrived."""
    gone = reason.check(ConnectionDone) or getattr(reason.value, "close_reason", None) == CloseReason.ABORTED
    why = GAVE_UP if gone else lost_text(reason)
    if moved:
        return PartKept(f"{why}; what has arrived is kept: sent again, it goes on from there")
    return GivenUp(why) if gone else ParcelCut(why)


def encode(**message: object) -> bytes:
    """A message as it travels."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


class Messages:
    """Messages out of a stream, and the bytes between them.

    :param refusal: text in front of the reason that the other side gives for its end.
    """

    def __init__(self, refusal: str = GAVE_UP) -> None:
        self._buffer = bytearray()
        self._refusal = refusal

    @property
    def held(self) -> int:
        """Bytes that nobody has taken."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """More of the stream."""
        self._buffer += data

    def take(self) -> dict[str, object] | None:
        """The next message; None: it is not whole.

        :raises TransferError: it is none, or says that the other side has given up.
        """
        message = _take_message(self._buffer, MESSAGE_LIMIT, WHAT)
        if message is None:
            return None
        if "error" in message:
            raise error_of(message, self._refusal)
        return message

    def piece(self) -> bytes | None:
        """The next piece of a pipe; None: it is not whole.  :raises TransferError: it is too long."""
        return take_framed(self._buffer, CHUNK_LIMIT, WHAT)

    def part_of_piece(self, reader: ChunkReader, left: int) -> bytes | None:
        """See :meth:`~dmsg.apps.chunks.ChunkReader.take`."""
        return reader.take(self._buffer, left)

    def some(self, most: int) -> bytes:
        """Take at most this many bytes from the buffer."""
        data = bytes(self._buffer[:most])
        del self._buffer[:most]
        return data

    def exactly(self, size: int) -> bytes | None:
        """So many bytes; None: there are less."""
        return self.some(size) if len(self._buffer) >= size else None


def parse_numbers(message: dict[str, object], name: str, fields: int) -> list[list[Any]]:
    """A list of lists of so many fields, the first of each a number.

    :raises TransferError: it is none.
    """
    found = message.get(name)
    if not isinstance(found, list):
        raise TransferError("the other side does not speak dmsg's parcels")
    for one in found:
        if not isinstance(one, list) or len(one) != fields or any(type(number) is not int for number in one[:2]):
            raise TransferError("the other side does not speak dmsg's parcels")
        if one[0] < 0 or one[1] < 0:
            raise TransferError("the other side does not speak dmsg's parcels")
    return found


class ParcelEnd(Protocol):
    """Base of both ends of a parcel.

    :param refusal: text in front of the reason that the other side gives for its end.
    """

    def __init__(self, refusal: str) -> None:
        self._messages = Messages(refusal)
        self._given_up = False

    def _say(self, **message: object) -> None:
        self.transport.write(encode(**message))  # type: ignore[union-attr]

    def _stop(self) -> None:
        """End the work that is under way."""
        raise NotImplementedError

    def _give_up(self) -> None:
        self._given_up = True
        self._stop()
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]
