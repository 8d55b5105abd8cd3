"""Tolerant reader of sealed event files: reads a damaged file up to the damage."""

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
"""Bytes read at a time. The number is small, because for each gzip member in a read zlib copies all bytes after it."""


def unpack_gzip(file: IO[bytes]) -> Iterator[bytes]:
    """Unpack a gzip file of one or more members, in pieces of at most 256 KiB.

    Python's gzip reader would lose the text just before the damage.

    :raises zlib.error: the data is not gzip, or is damaged.
    :raises EOFError: the end is missing.
    """
    unpack = zlib.decompressobj(31)
    while packed := unpack.unused_data or file.read(READ):
        if unpack.eof:
            unpack = zlib.decompressobj(31)  # Another member of the gzip file begins.
        # At the end of a member zlib leaves unconsumed_tail as it was, so eof must be checked as well.
        while packed and not unpack.eof:
            yield unpack.decompress(packed, CHUNK)
            packed = unpack.unconsumed_tail
    if not unpack.eof:
        raise EOFError("the end of the file is missing")


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Read lines as far as the file can be read, without raising an error for damage.

    :param limit: number of bytes of text after which reading stops.
    """
    with open(path, "rb") as file:
        yield from lines_of(file, limit)


def lines_of(file: IO[bytes], limit: int) -> Iterator[bytes]:
    """Read lines of an open file, in the same way as :func:`read_lines`."""
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
