"""Pictures match their sources, and refer to no other host."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.codes.words import DEFAULT_WORDS, Code
from tests.docs.blocks import all_pages

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


class PictureTests(SynchronousTestCase):
    """Tests of the pictures that docs/pictures/draw.py draws."""

    def test_pictures_are_current(self) -> None:
        picture = runpy.run_path(str(PICTURES / "draw.py"))["Picture"]
        texts = sorted(PICTURES.glob("*.txt"))
        self.assertGreaterEqual(len(texts), 5)
        for text in texts:
            drawn = text.with_suffix(".svg").read_text()
            self.assertEqual(picture(text.read_text()).svg(), drawn, "python docs/pictures/draw.py")
            self.assertIn("prefers-color-scheme: dark", drawn)

    def test_text_fits_into_its_box(self) -> None:
        """Texts fit into their boxes, as far as the width of letters can be estimated without drawing them."""
        for text in PICTURES.glob("*.txt"):
            for width, words in re.findall(r'^box \S+ \S+ \S+ (\S+) \S+ "([^"]*)"', text.read_text(), re.MULTILINE):
                for line in words.split("|"):
                    self.assertLessEqual(6.4 * len(line), float(width), f"{text.name}: {line}")

    def test_a_line_that_is_none(self) -> None:
        picture = runpy.run_path(str(PICTURES / "draw.py"))["Picture"]
        for text in ("circle 1 2", "size 1", "box a 1 2 3", 'arrow a b "x"', "size one two"):
            with self.assertRaisesRegex(ValueError, "line 1"):
                picture(text)

    def test_pictures_load_no_other_hosts(self) -> None:
        for path in PICTURES.glob("*.svg"):
            text = path.read_text()
            ElementTree.fromstring(text)  # noqa: S314  # our own
            found = set(re.findall(r'(?:href|src)="([^"]+)"|url\(["\']?(https?:[^)]*)', text))
            self.assertEqual({one for pair in found for one in pair if one.startswith("http")}, set(), path.name)

    def test_codes_are_such_as_commands_make(self) -> None:
        """Codes in recordings and pages are valid for the present commands."""
        texts = [html.unescape(path.read_text()).replace("\xa0", " ") for path in PICTURES.glob("*.svg")]
        texts += [block.text for page in all_pages() for block in page.blocks]
        found = {code for text in texts for code in re.findall(r"(?:code: |receive |pair \w+ )(\d+-[a-z-]+)", text)}
        self.assertGreaterEqual(len(found), 3)  # Two pictures are in the session, and one is in pages.
        for code in found:
            self.assertEqual((len(Code.parse(code).words), str(Code.parse(code))), (DEFAULT_WORDS, code))

    def test_each_picture_is_used(self) -> None:
        pages = "".join(path.read_text() for path in PICTURES.parent.rglob("*.md") if "_build" not in path.parts)
        for path in (*PICTURES.glob("*.svg"), *PICTURES.glob("*.png")):
            self.assertIn(path.name, pages)
