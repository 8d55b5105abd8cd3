"""Text that is shown in one line."""

import re
from pathlib import Path

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

import dmsg
from dmsg.base.printable import MAX_ERROR, shorten


class ShortenedTests(SynchronousTestCase):
    def test_long_text_is_cut_between_words(self) -> None:
        self.assertEqual(shorten("use --encryption off at both ends", 33), "use --encryption off at both ends")
        self.assertEqual(shorten("use --encryption off at both ends", 32), "use --encryption off at both...")
        self.assertEqual(shorten("use --encryption off at both ends", 27), "use --encryption off at...")
        self.assertEqual(shorten("use\n --encryption\toff"), "use --encryption off")
        self.assertEqual(shorten("x" * 20, 10), "x" * 7 + "...")

    @given(st.text(max_size=60), st.integers(4, 80))
    def test_shortened_text_is_never_longer_than_the_limit(self, text: str, most: int) -> None:
        short = shorten(text, most)
        self.assertLessEqual(len(short), most)
        if short.endswith("...") and not " ".join(text.split()).endswith("...") and " " in short:
            self.assertLessEqual(set(short[:-3].split()), set(text.split()))

    def test_no_error_is_cut_within_a_word_or_before_its_advice(self) -> None:
        """Within a word, or before what to do."""
        cut = re.compile(
            r"(str\((error|[\w.]*\.value)\)|\[.(error|message|why|text).\]\)|\.split\(\)\))[^\n]*?\)?\[:\d+\]"
        )
        found = [
            f"{path.name}: {line.strip()}"
            for path in Path(dmsg.__path__[0]).rglob("*.py")
            for line in path.read_text().splitlines()
            if cut.search(line)
        ]
        self.assertEqual(found, [])

    def test_advice_of_an_error_has_room(self) -> None:
        advice = "see https://example.org/" + "x" * 300
        self.assertTrue(shorten(f"{'word ' * 100}{advice}").endswith(advice))
        self.assertGreater(MAX_ERROR, 500)
