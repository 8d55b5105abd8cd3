"""Reading finished files as far as they can be read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from dmsg.telemetry.schema import MAX_LINE

CHUNK = 256 * 1024
"""Bytes of text that are unpacked at a time."""
READ = 16 * 1024
"""Bytes that are read at a time: what is behind the end of a member is copied for each member in them."""


def unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """The text of a gzip file, of one member behind the other, in pieces of 256 KiB at most.

    Gzip's own reader keeps back what lies just before a tear.

    :raises zlib.error: what comes is not packed by gzip.
    :raises EOFError: its end is missing.
    """
    unpack = zlib.decompressobj(31)
    while packed := unpack.unused_data or file.read(READ):
        if unpack.eof:
            unpack = zlib.decompressobj(31)  # another member
        # at the end of a member the tail is no tail any more, but zlib leaves it as it was
        while packed and not unpack.eof:
            yield unpack.decompress(packed, CHUNK)
            packed = unpack.unconsumed_tail
    if not unpack.eof:
        raise EOFError("the end is missing")


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Lines, as far as the file can be read.

    :param limit: bytes of text; what is beyond is not read.
    """
    text, read = b"", 0
    with open(path, "rb") as file, suppress(zlib.error, EOFError):
        for piece in unpacked(file):
            read += len(piece)
            *lines, text = (text + piece).split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(text) > MAX_LINE:
                return
            if read >= limit:
                break
    if text:
        yield text + b"\n"
