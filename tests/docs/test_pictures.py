"""Pictures are as their texts say, and nothing in them is of another host."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

from twisted.trial.unittest import SynchronousTestCase

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


class PictureTests(SynchronousTestCase):
    """What docs/pictures/draw.py draws."""

    def test_they_are_drawn_anew(self) -> None:
        picture = runpy.run_path(str(PICTURES / "draw.py"))["Picture"]
        texts = sorted(PICTURES.glob("*.txt"))
        self.assertGreaterEqual(len(texts), 5)
        for text in texts:
            drawn = text.with_suffix(".svg").read_text()
            self.assertEqual(picture(text.read_text()).svg(), drawn, "python docs/pictures/draw.py")
            self.assertIn("prefers-color-scheme: dark", drawn)

    def test_what_stands_in_a_box_fits_into_it(self) -> None:
        """As far as the width of letters can be told without drawing them."""
        for text in PICTURES.glob("*.txt"):
            for width, words in re.findall(r'^box \S+ \S+ \S+ (\S+) \S+ "([^"]*)"', text.read_text(), re.MULTILINE):
                for line in words.split("|"):
                    self.assertLessEqual(6.4 * len(line), float(width), f"{text.name}: {line}")

    def test_a_line_that_is_none(self) -> None:
        picture = runpy.run_path(str(PICTURES / "draw.py"))["Picture"]
        for text in ("circle 1 2", "size 1", "box a 1 2 3", 'arrow a b "x"', "size one two"):
            with self.assertRaisesRegex(ValueError, "line 1"):
                picture(text)

    def test_nothing_of_other_hosts(self) -> None:
        for path in PICTURES.glob("*.svg"):
            text = path.read_text()
            ElementTree.fromstring(text)  # noqa: S314  # our own
            found = set(re.findall(r'(?:href|src)="([^"]+)"|url\(["\']?(https?:[^)]*)', text))
            self.assertEqual({one for pair in found for one in pair if one.startswith("http")}, set(), path.name)

    def test_each_is_shown_somewhere(self) -> None:
        pages = "".join(path.read_text() for path in PICTURES.parent.rglob("*.md") if "_build" not in path.parts)
        for path in (*PICTURES.glob("*.svg"), *PICTURES.glob("*.png")):
            self.assertIn(path.name, pages)
