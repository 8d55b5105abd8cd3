"""Reader of sealed event files that reads a damaged file up to the damage."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from dmsg.telemetry.schema import MAX_LINE

CHUNK = 256 * 1024
"""Maximum number of bytes of text unpacked at a time."""
READ = 16 * 1024
"""Number of bytes to read from a file at a time. It is small, because zlib copies all bytes after the end of each gzip
member."""


def unpack_gzip(file: IO[bytes]) -> Iterator[bytes]:
    """Unpack a gzip file of one or more members, in pieces of at most :data:`CHUNK` bytes.

    From a damaged file, Python's own gzip reader would not return the text just before the damage.

    :raises zlib.error: the data is not gzip, or is damaged.
    :raises EOFError: the end of the file is missing.
    """
    unpack = zlib.decompressobj(31)
    while packed := unpack.unused_data or file.read(READ):
        if unpack.eof:
            unpack = zlib.decompressobj(31)  # Another member of the gzip file begins.
        # At the end of a member, zlib does not update unconsumed_tail, so the loop has to check eof as well.
        while packed and not unpack.eof:
            yield unpack.decompress(packed, CHUNK)
            packed = unpack.unconsumed_tail
    if not unpack.eof:
        raise EOFError("the end of the file is missing")


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Yield the lines of a file up to its first damage. Damage raises no error.

    :param limit: number of bytes of text after which reading stops.
    """
    with open(path, "rb") as file:
        yield from lines_of(file, limit)


def lines_of(file: IO[bytes], limit: int) -> Iterator[bytes]:
    """Yield the lines of an open file, like :func:`read_lines`."""
    text, read = b"", 0
    with suppress(zlib.error, EOFError):
        for piece in unpack_gzip(file):
            read += len(piece)
            *lines, text = (text + piece).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(text) > MAX_LINE:
                return
            if read >= limit:
                break
    if text:
        yield text + b"\n"
