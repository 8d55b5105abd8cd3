"""Chunks: framing of a file's content that lets the sender report an error between two pieces of the content.

A chunk is ``length(4) || bytes``, big endian.  A chunk of length 0 ends the content.  A message follows:

* ``{"sha256": H}``, the hash of the whole file, with ``"changed": true`` if the file was written to during the
  transfer;
* or ``{"error": TEXT, "changed": true}``, if the sender stopped because the file had changed.

Programs before 0.2 do not know chunks.  Chunks are used only if both sides have sent ``"pieces": true``.
"""

from __future__ import annotations

from dmsg.apps.sources import SourceChanged
from dmsg.apps.transfer import TransferError, TransferRefused
from dmsg.base.printable import MAX_PEER_TEXT, shorten

CHUNK_LIMIT = 256 * 1024
"""Maximum bytes of one chunk."""
END = bytes(4)


def encode_chunk(data: bytes) -> bytes:
    """Return a chunk that contains ``data``."""
    return len(data).to_bytes(4, "big") + data


def error_of(message: dict[str, object], before: str) -> TransferError:
    """Return the error that a message of the other side reports.

    :param message: message with a field ``error``.
    :param before: text to put before the reported text; left out if the reason is that the file has changed.
    """
    text = shorten(str(message["error"]), MAX_PEER_TEXT)
    return SourceChanged(text) if message.get("changed") is True else TransferRefused(f"{before}: {text}")


class ChunkReader:
    """Parser that removes chunks from the start of a buffer.  The buffer may end in the middle of a chunk."""

    def __init__(self) -> None:
        self._left = 0

    def take(self, buffer: bytearray, left: int) -> bytes | None:
        """Remove content of the file from the buffer and return it.

        :param left: number of bytes of the file that are still missing.
        :returns: content; empty if the buffer has too few bytes; None after the last chunk, when a message follows.
        :raises TransferError: a chunk is longer than ``left`` or than the limit.
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
    """Return the SHA-256 from the message that follows the chunks.

    :param left: number of bytes of the file that are still missing.
    :raises TransferError: the message has no SHA-256, or ``left`` is not 0.
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
    """Return the end of the chunks and the message that follows, for a completely sent file."""
    body = b'{"sha256":"%s"%s}' % (digest.hex().encode(), b',"changed":true' if changed else b"")
    return END + len(body).to_bytes(4, "big") + body
