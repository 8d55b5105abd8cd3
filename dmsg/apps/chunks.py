"""Chunks: framing of a file's bytes that lets the sender report between two chunks that the file has changed.

A chunk is ``length(4) || bytes``, big endian.  A length of 0 ends the chunks, and a message follows.  The message is
``{"sha256": H}`` of the whole file, with ``"changed": true`` if the file was written to during the transfer, or
``{"error": TEXT, "changed": true}``.  Programs before 0.2 do not know chunks.  So each side says ``"pieces": true``
when the other side may use them.
"""

from __future__ import annotations

from dmsg.apps.sources import SourceChanged
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.printable import MAX_WORDS_OF_STRANGERS, shorten

CHUNK_LIMIT = 256 * 1024
"""Maximum bytes of one chunk."""
END = bytes(4)


def encode_chunk(data: bytes) -> bytes:
    """Return a chunk with its length prefix."""
    return len(data).to_bytes(4, "big") + data


def error_of(message: dict[str, object], before: str) -> TransferError:
    """Return the error that the other side reports at the end of a file.

    :param before: text before the reason, unless the reason is that the file has changed.
    """
    text = shorten(str(message["error"]), MAX_WORDS_OF_STRANGERS)
    return SourceChanged(text) if message.get("changed") is True else TransferRefused(f"{before}: {text}")


class ChunkReader:
    """Parser that removes chunks from a buffer, which may contain any part of the stream."""

    def __init__(self) -> None:
        self._left = 0

    def take(self, buffer: bytearray, left: int) -> bytes | None:
        """Remove bytes of the file from the buffer and return them.

        :param left: number of bytes of the file that are still missing.
        :returns: the bytes; empty if more data are needed; None after the last chunk, when a message follows.
        :raises TransferError: there are more bytes than the file should have.
        """
        if not self._left:
            if len(buffer) < 4:
                return b""
            self._left = int.from_bytes(buffer[:4], "big")
            del buffer[:4]
            if not self._left:
                return None
            if self._left > min(left, CHUNK_LIMIT):
                raise TransferError("the other side sent more bytes than it had offered")
        data = bytes(buffer[: self._left])
        del buffer[: len(data)]
        self._left -= len(data)
        return data


def digest_of(message: dict[str, object], left: int) -> bytes:
    """Return the SHA-256 in the message that follows the chunks.

    :param left: number of bytes of the file that are still missing.
    :raises TransferError: the message has no SHA-256, or bytes are missing.
    """
    value = message.get("sha256")
    try:
        digest = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        digest = b""
    if left or len(digest) != 32:
        raise TransferError("the other side ended the file too early")
    return digest


def encode_end(digest: bytes, *, changed: bool) -> bytes:
    """Return the bytes that follow the last chunk of a complete file."""
    body = b'{"sha256":"%s"%s}' % (digest.hex().encode(), b',"changed":true' if changed else b"")
    return END + len(body).to_bytes(4, "big") + body
