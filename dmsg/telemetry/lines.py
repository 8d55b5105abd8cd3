"""Reading finished files as far as they can be read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from dmsg.telemetry.schema import MAX_LINE

CHUNK = 256 * 1024


def read_lines(path: Path, limit: int) -> Iterator[bytes]:
    """Lines, as far as the file can be read: gzip's own reader keeps back what lies just before a tear.

    :param limit: bytes of text; what is beyond is not read.
    """
    text, read = b"", 0
    unpack = zlib.decompressobj(31)
    with open(path, "rb") as file:
        while (packed := unpack.unused_data or file.read(CHUNK)) and read < limit:
            if unpack.eof:
                unpack = zlib.decompressobj(31)  # another member
            try:
                while packed:
                    piece = unpack.decompress(packed, CHUNK)
                    read += len(piece)
                    *lines, text = (text + piece).split(b"\n")
                    yield from (line + b"\n" for line in lines)
                    if len(text) > MAX_LINE:
                        return
                    packed = unpack.unconsumed_tail
            except zlib.error:
                break
    if text:
        yield text + b"\n"
