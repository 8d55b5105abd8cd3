"""The bytes of a file in pieces, between which who sends them can say something: that the file has changed.

A piece is ``length(4) || bytes``, big endian.  A length of 0 ends the pieces, and a message follows: ``{"sha256": H}``
of the whole file, with ``"changed": true`` if it was written to meanwhile; or ``{"error": TEXT, "changed": true}``.
Programs before 0.2 know no pieces: each side says ``"pieces": true`` when the other one may use them.
"""

from __future__ import annotations

from dmsg.apps.sources import SourceChanged
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.printable import MAX_WORDS_OF_STRANGERS, shorten

CHUNK_LIMIT = 256 * 1024
"""Bytes of a piece."""
END = bytes(4)


def encode_chunk(data: bytes) -> bytes:
    """Bytes of a file, as they travel: one piece."""
    return len(data).to_bytes(4, "big") + data


def error_of(message: dict[str, object], before: str) -> TransferError:
    """Return the error that the other side reports at the end of a file.

    :param before: what stands before the reason if the source is not it.
    """
    text = shorten(str(message["error"]), MAX_WORDS_OF_STRANGERS)
    return SourceChanged(text) if message.get("changed") is True else TransferRefused(f"{before}: {text}")


class ChunkReader:
    """Takes pieces out of a buffer, however they came."""

    def __init__(self) -> None:
        self._left = 0

    def take(self, buffer: bytearray, left: int) -> bytes | None:
        """Take bytes of the file out of the buffer.

        :param left: bytes of the file that are still missing.
        :returns: empty: more has to come first; None: the pieces are over, and a message is next.
        :raises TransferError: there are more of them.
        """
        if not self._left:
            if len(buffer) < 4:
                return b""
            self._left = int.from_bytes(buffer[:4], "big")
            del buffer[:4]
            if not self._left:
                return None
            if self._left > min(left, CHUNK_LIMIT):
                raise TransferError("more bytes of the file came than were offered")
        data = bytes(buffer[: self._left])
        del buffer[: len(data)]
        self._left -= len(data)
        return data


def digest_of(message: dict[str, object], left: int) -> bytes:
    """The SHA-256 that ends the pieces.

    :param left: bytes of the file that are missing.
    :raises TransferError: it is none, or there are some.
    """
    value = message.get("sha256")
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        digest = b""
    if left or len(digest) != 32:
        raise TransferError("the other side ended a file too early")
    return digest


def encode_end(digest: bytes, *, changed: bool) -> bytes:
    """Return the bytes that follow the last piece of a complete file."""
    body = b'{"sha256":"%s"%s}' % (digest.hex().encode(), b',"changed":true' if changed else b"")
    return END + len(body).to_bytes(4, "big") + body
