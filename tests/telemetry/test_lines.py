"""Finished files, as far as they can be read."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from itertools import islice
from pathlib import Path

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.telemetry.lines import CHUNK, READ, read_lines, unpack_gzip
from dmsg.telemetry.schema import MAX_LINE

LINE = b'{"a":1}\n'
MEMBERS = st.lists(st.sampled_from([0, 1, READ // 8, CHUNK // 8, CHUNK // 8 + 1, CHUNK // 4]), min_size=1, max_size=5)
MOST = 10_000
"""Maximum number of pieces that a text may have. With more, the test fails, because unpacking may not end."""


class UnpackedTests(SynchronousTestCase):
    """Text of gzip files."""

    @given(MEMBERS)
    def test_members_behind_each_other(self, sizes: list[int]) -> None:
        """At the end of a long member, zlib reports that more output follows."""
        packed = b"".join(gzip.compress(LINE * lines, 1) for lines in sizes)
        pieces = list(islice(unpack_gzip(io.BytesIO(packed)), MOST))
        self.assertEqual(b"".join(pieces), LINE * sum(sizes))
        self.assertLessEqual(max(map(len, pieces)), CHUNK)

    @given(MEMBERS, st.floats(0, 1))
    def test_torn_files_are_read_up_to_the_tear(self, sizes: list[int], share: float) -> None:
        packed = b"".join(gzip.compress(LINE * lines, 1) for lines in sizes)
        found = b""
        with contextlib.suppress(EOFError):
            for piece in unpack_gzip(io.BytesIO(packed[: int(share * len(packed))])):
                found += piece
        self.assertTrue((LINE * sum(sizes)).startswith(found))

    def test_other_files_yield_no_lines(self) -> None:
        self.assertRaises(EOFError, list, unpack_gzip(io.BytesIO(b"")))
        self.assertRaises(zlib.error, list, unpack_gzip(io.BytesIO(b"text")))


class LinesTests(SynchronousTestCase):
    """Lines of a file."""

    def file(self, content: bytes) -> Path:
        path = Path(self.mktemp())
        path.write_bytes(content)
        return path

    def test_of_several_members(self) -> None:
        half = b'{"b":'
        path = self.file(gzip.compress(LINE * CHUNK + half) + gzip.compress(b"2}\n" + LINE))
        lines = list(read_lines(path, 1 << 30))
        self.assertEqual(lines[-2:], [half + b"2}\n", LINE])
        self.assertEqual(len(lines), CHUNK + 2)

    def test_lines_are_limited_in_length(self) -> None:
        self.assertEqual(list(read_lines(self.file(gzip.compress(LINE + b"x" * (MAX_LINE + 1))), 1 << 30)), [LINE])
        some = sum(map(len, read_lines(self.file(gzip.compress(LINE * CHUNK)), CHUNK)))
        self.assertEqual(some, CHUNK)

    def test_the_last_may_have_no_end(self) -> None:
        self.assertEqual(list(read_lines(self.file(gzip.compress(LINE + b"{}")), 100)), [LINE, b"{}\n"])
