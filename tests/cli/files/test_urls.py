"""Names as people type them into a URL: with blanks and umlauts, or escaped already."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes, urlsplit

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.files.urls import http_url, name_of
from dmsg.keys import SecKey

KEY = SecKey.from_seed(b"bob").public
ESCAPED = {
    "a b/\u00fc.txt": b"a%20b/%C3%BC.txt",
    "a%20b/%C3%BC.txt": b"a%20b/%C3%BC.txt",
    "u\u0308.txt": b"u%CC%88.txt",
    "100%.txt": b"100%25.txt",
    "100%25.txt": b"100%25.txt",
    "[x] & 'y'.txt": b"%5Bx%5D%20&%20'y'.txt",
    os.fsdecode(b"\xff"): b"%FF",
    "a?sort=\u00fc b": b"a?sort=%C3%BC%20b",
}


class URLTests(SynchronousTestCase):
    """``dmsg://KEY/PATH``."""

    def test_each_name_is_escaped_once(self) -> None:
        for typed, escaped in ESCAPED.items():
            self.assertEqual(
                http_url(f"dmsg://{KEY}/{typed}"), b"http://%s:80/%s" % (KEY.text.encode(), escaped), typed
            )

    @given(st.text(st.characters(exclude_characters="/?#%\\", exclude_categories=["Cc", "Cs"]), min_size=1))
    def test_any_file_name_arrives_with_the_same_bytes(self, name: str) -> None:
        """Unicode normalisation changes no name, for instance with an umlaut."""
        path = urlsplit(http_url(f"dmsg://{KEY}/x{name}x")).path
        self.assertTrue(path.isascii())
        self.assertEqual(unquote_to_bytes(path), f"/x{name}x".encode())

    def test_the_file_is_named_after_the_last_path_segment(self) -> None:
        for url, name in (
            (f"dmsg://{KEY}/a b/\u00fc.txt", "\u00fc.txt"),
            (f"{KEY}/a%20b", "a b"),
            (f"dmsg://{KEY}/%FF", os.fsdecode(b"\xff")),
            (f"dmsg://{KEY}/u\u0308?x", "u\u0308"),
            (f"dmsg://{KEY}/", ""),
        ):
            self.assertEqual(name_of(url), name)
