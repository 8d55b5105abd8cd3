"""Recorded terminals show the present output of the commands."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.docs.blocks import ROOT

PICTURES = ROOT / "docs" / "pictures"
_TEXT = re.compile(r'<text[^>]*clip-path="url\(#\w+-line-(\d+)\)"[^>]*>(.*?)</text>', re.DOTALL)
_CODE = re.compile(r"\b\d+-[a-z]+-[a-z]+-[a-z]+\b")
_KEY = re.compile(r"\b(?:0[23][0-9a-f]{64}|a[i-p][a-z2-7]{51})\b")


def said(picture: Path) -> list[str]:
    """Return the lines of a terminal, without the parts that differ from run to run: keys, codes, numbers and their
    units.
    """
    rows: dict[int, str] = {}
    for number, text in _TEXT.findall(picture.read_text()):
        rows[int(number)] = rows.get(int(number), "") + html.unescape(text).replace("\xa0", " ")
    found = []
    for _, row in sorted(rows.items()):
        row = _KEY.sub("KEY", _CODE.sub("CODE", row))
        row = re.sub("─+", "─", row)
        row = re.sub(r"\d[\d.,:]*( [kMG]?B?(/s)?| m?s)?(?!\w)", "N", row)
        found.append(" ".join(row.split()))
    return [row for row in found if row]


class PictureTests(SynchronousTestCase):
    """Tests of the recordings of docs/pictures/record.py."""

    def test_terminal_pictures_are_current(self) -> None:
        target = Path(self.mktemp()).absolute()
        target.mkdir(parents=True)
        script = [sys.executable, str(PICTURES / "record.py"), "--to", str(target), "session", "top"]
        subprocess.run(script, check=True, capture_output=True, timeout=300)
        self.assertEqual(said(target / "session.svg"), said(PICTURES / "session.svg"))
        # The table is the same each time, but not the activity of the server.
        now, before = said(target / "top.svg"), said(PICTURES / "top.svg")
        self.assertEqual((now[:3], len(now)), (before[:3], len(before)))
        self.assertEqual(sorted(row.split()[:3] for row in now[3:]), sorted(row.split()[:3] for row in before[3:]))
