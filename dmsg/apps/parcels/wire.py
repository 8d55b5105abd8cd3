"""Messages between the sender and the receiver of a parcel.

Messages are ``length(4) || JSON``, big endian.  The sender offers one of::

    {"offer": "files", "things": [{"name", "kind", "size", "files", "directories"}, ...], "size": N, "files": N}
    {"offer": "text", "text": T}
    {"offer": "pipe", "name": NAME}

The receiver answers ``{"take": true}``, or ``{"take": false, "why": TEXT}``.

The content of a pipe follows in pieces ``length(4) || bytes``.  The last piece has length 0, and the SHA-256 (32 bytes)
of the whole content comes after it.  Files follow in these steps:

* The sender lists the entries in messages ``{"entries": [...]}``, and ends the list with ``{"whole": true}``.
* The receiver says which parts it has, ``{"have": [[INDEX, BYTES, SHA256], ...]}``, and ends with ``{"whole": true}``.
* The sender compares hashes and names the offsets to resume at, ``{"from": [[INDEX, OFFSET], ...]}``, and ends with
  ``{"whole": true}``.
* The sender sends the rest of each file, and the SHA-256 of the whole file.  The bytes are in chunks
  (:mod:`dmsg.apps.chunks`) if the receiver's acceptance and the sender's last message have ``"pieces": true``.

The receiver ends with ``{"ok": true}``.  Either side may send ``{"error": TEXT}`` instead of a message.
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
"""Maximum bytes of a message."""
MESSAGE_FULL = 128 * 1024
"""Bytes of entries after which the sender begins a new message."""
TEXT_LIMIT = 32 * 1024
"""Maximum characters of a text; a longer one is sent as a file."""
THINGS_LIMIT = 1000
"""Maximum number of top-level items of a parcel.  Files inside directories do not count."""
CHANGED_LIMIT = 20
"""Maximum number of names in the list of files that changed during the transfer."""
DIGEST_SIZE = 32
GAVE_UP = "the other side gave up"
PROTOCOL_NAME = "parcels"
"""Name of the protocol in error messages."""


class ParcelCut(TransferError):
    """Error: the connection was lost before all bytes had arrived."""


class GivenUp(ParcelCut, Unwanted):
    """Error: the other side ended the transfer before any content had arrived."""


class PartKept(ParcelCut, CutShort):
    """Error: only a part of the parcel has arrived.  The part is stored, and a repeated transfer of the parcel resumes
    there.
    """


def lost_error(reason: Failure, moved: int) -> TransferError:
    """Return the error for a connection that ended before the end of the transfer.

    :param moved: number of bytes that were transferred before.
    """
    gone = reason.check(ConnectionDone) or getattr(reason.value, "close_reason", None) == CloseReason.ABORTED
    why = GAVE_UP if gone else lost_text(reason)
    if moved:
        return PartKept(f"{why}; what has arrived is kept, and a repeated transfer resumes there")
    return GivenUp(why) if gone else ParcelCut(why)


def encode(**message: object) -> bytes:
    """Return a message with its length prefix."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return len(body).to_bytes(4, "big") + body


def fits_into_message(**message: object) -> bool:
    """Whether a receiver accepts the length of this message."""
    return len(encode(**message)) - 4 <= MESSAGE_LIMIT


def text_offer(text: str) -> dict[str, object]:
    """Return the message that offers a text.

    :raises TransferError: the text is too long.
    """
    offer: dict[str, object] = {"offer": "text", "text": text}
    # Characters beyond ASCII take up to 12 bytes each in a message, so fewer of them fit.
    if len(text) > TEXT_LIMIT or not fits_into_message(**offer):
        raise TransferError(f"the text is too long ({TEXT_LIMIT} characters of ASCII are possible); put it into a file")
    return offer


class Messages:
    """Parser of messages, and of the content between messages.

    :param refusal: text to put before the reason that the other side gives when it ends the transfer.
    """

    def __init__(self, refusal: str = GAVE_UP) -> None:
        self._buffer = bytearray()
        self._refusal = refusal

    @property
    def held(self) -> int:
        """Number of bytes in the buffer."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add received bytes to the buffer."""
        self._buffer += data

    def take(self) -> dict[str, object] | None:
        """Remove and return the next message; None if it is incomplete.

        :raises TransferError: the message is malformed, or reports that the other side has ended the transfer.
        """
        message = _take_message(self._buffer, MESSAGE_LIMIT, PROTOCOL_NAME)
        if message is None:
            return None
        if "error" in message:
            raise error_of(message, self._refusal)
        return message

    def piece(self) -> bytes | None:
        """Remove and return the next piece of a pipe; None if it is incomplete.

        :raises TransferError: the piece is too long.
        """
        return take_framed(self._buffer, CHUNK_LIMIT, PROTOCOL_NAME)

    def part_of_piece(self, reader: ChunkReader, left: int) -> bytes | None:
        """Remove and return bytes of the current chunk; see :meth:`~dmsg.apps.chunks.ChunkReader.take`."""
        return reader.take(self._buffer, left)

    def take_some(self, limit: int) -> bytes:
        """Remove and return at most ``limit`` bytes."""
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    def exactly(self, size: int) -> bytes | None:
        """Remove and return ``size`` bytes; None if there are fewer."""
        return self.take_some(size) if len(self._buffer) >= size else None


def parse_numbers(message: dict[str, object], name: str, fields: int) -> list[list[Any]]:
    """Return the list of lists in a field of a message.

    :param name: name of the field.
    :param fields: length of each inner list.  Its first two items are integers of 0 or more.
    :raises TransferError: the field is malformed.
    """
    found = message.get(name)
    if not isinstance(found, list):
        raise TransferError("the other side does not use dmsg's protocol for sending files")
    for one in found:
        if not isinstance(one, list) or len(one) != fields or any(type(number) is not int for number in one[:2]):
            raise TransferError("the other side does not use dmsg's protocol for sending files")
        if one[0] < 0 or one[1] < 0:
            raise TransferError("the other side does not use dmsg's protocol for sending files")
    return found


class ParcelEnd(Protocol):
    """Base class of both sides of a parcel.

    :param refusal: text to put before the reason that the other side gives when it ends the transfer.
    """

    def __init__(self, refusal: str) -> None:
        self._messages = Messages(refusal)
        self._given_up = False

    def _say(self, **message: object) -> None:
        self.transport.write(encode(**message))  # type: ignore[union-attr]

    def _stop(self) -> None:
        """Stop the current task of this side, such as reading or writing files."""
        raise NotImplementedError

    def _give_up(self) -> None:
        self._given_up = True
        self._stop()
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]
