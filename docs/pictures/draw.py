"""Pictures of the documentation, drawn from text: ``python docs/pictures/draw.py`` writes an SVG beside each ``.txt``.

A line of a picture is one of::

    size WIDTH HEIGHT                       size of the picture, in points
    box NAME X Y WIDTH HEIGHT TEXT          box with TEXT, whose lines are divided by |; the first is bold
    group X Y WIDTH HEIGHT TEXT             frame behind boxes
    arrow NAME NAME [TEXT]                  arrow from edge to edge of two boxes
    line NAME NAME [TEXT]                   the same without a head
    dashed NAME NAME [TEXT]                 dashed arrow
    lost NAME NAME [TEXT]                   line that is crossed out
    text X Y TEXT                           text without a box
    # a comment

Colours are light or dark, as the reader's system prefers.
"""

from __future__ import annotations

import math
import shlex
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """\
.ground { fill: #f6f7f9; }
text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1b2330; }
.soft { fill: #5b6675; font-size: 12px; } .bold { font-weight: 600; }
.box { fill: #ffffff; stroke: #1f6feb; stroke-width: 1.5; }
.group { fill: none; stroke: #9aa6b5; stroke-dasharray: 3 4; }
.way { fill: none; stroke: #5b6675; stroke-width: 1.6; } .dashed { stroke-dasharray: 6 4; }
.lost { stroke: #b3261e; } .head { fill: #5b6675; } .plate { fill: #f6f7f9; opacity: .92; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #10141a; }
  text { fill: #e4e9f0; } .soft { fill: #9aa6b5; } .box { fill: #181e27; stroke: #6cb1ff; }
  .group { stroke: #5b6675; } .way { stroke: #9aa6b5; } .lost { stroke: #ff8a80; } .head { fill: #9aa6b5; }
  .plate { fill: #10141a; }
}
"""
LINE = 17.0
"""Distance between two lines of text, in points."""


class Picture:
    """Picture drawn from its text.

    :raises ValueError: a line cannot be parsed; the error names the line.
    """

    def __init__(self, text: str) -> None:
        self.width = self.height = 0.0
        self._boxes: dict[str, tuple[float, float, float, float]] = {}
        self._under: list[str] = []
        self._ways: list[str] = []
        self._over: list[str] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = shlex.split(line, comments=True)
            if not words:
                continue
            try:
                getattr(self, f"_{words[0]}")(*words[1:])
            except (AttributeError, TypeError, ValueError, KeyError) as error:
                raise ValueError(f"line {number}: {line}: {error}") from None

    def svg(self) -> str:
        """Return the picture as SVG."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img">',
            f"<style>{STYLE}</style><defs>{head}</defs>",
            # The picture needs a ground of its own, because a page may be light although the system prefers dark.
            '<rect class="ground" width="100%" height="100%" rx="10"/>',
            *self._under,
            *self._ways,
            *self._over,
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _size(self, width: str, height: str) -> None:
        self.width, self.height = float(width), float(height)

    def _box(self, name: str, x: str, y: str, width: str, height: str, text: str) -> None:
        left, top, wide, high = (float(one) for one in (x, y, width, height))
        self._boxes[name] = left, top, wide, high
        self._over.append(f'<rect class="box" x="{left:g}" y="{top:g}" width="{wide:g}" height="{high:g}" rx="7"/>')
        lines = text.split("|")
        first = top + high / 2 - (len(lines) - 1) * LINE / 2 + 4.5
        for number, one in enumerate(lines):
            kind = "soft" if number else "bold"
            self._over.append(
                f'<text class="{kind}" x="{left + wide / 2:g}" y="{first + number * LINE:g}" '
                f'text-anchor="middle">{escape(one)}</text>'
            )

    def _group(self, x: str, y: str, width: str, height: str, text: str) -> None:
        left, top = float(x), float(y)
        self._under.append(
            f'<rect class="group" x="{left:g}" y="{top:g}" width="{float(width):g}" height="{float(height):g}" rx="9"/>'
            f'<text class="soft" x="{left + 10:g}" y="{top + 18:g}">{escape(text)}</text>'
        )

    def _text(self, x: str, y: str, text: str) -> None:
        for number, one in enumerate(text.split("|")):
            self._over.append(f'<text class="soft" x="{x}" y="{float(y) + number * LINE:g}">{escape(one)}</text>')

    def _arrow(self, start: str, end: str, text: str = "", kind: str = "way") -> None:
        self._way(start, end, text, kind, 'marker-end="url(#head)"')

    def _dashed(self, start: str, end: str, text: str = "") -> None:
        self._arrow(start, end, text, "way dashed")

    def _line(self, start: str, end: str, text: str = "") -> None:
        self._way(start, end, text, "way", "")

    def _lost(self, start: str, end: str, text: str = "") -> None:
        x, y = self._way(start, end, text, "way lost dashed", "", away=16.0)
        for slope in (1, -1):
            self._over.append(
                f'<line class="way lost" x1="{x - 7:g}" y1="{y - 7 * slope:g}" x2="{x + 7:g}" y2="{y + 7 * slope:g}"/>'
            )

    def _way(self, start: str, end: str, text: str, kind: str, extra: str, away: float = 0.0) -> tuple[float, float]:
        """Draw a line from edge to edge of two boxes, and return the line's middle."""
        first, second = self._boxes[start], self._boxes[end]
        here, there = _centre(first), _centre(second)
        x1, y1 = _edge(first, there)
        x2, y2 = _edge(second, here)
        self._ways.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {extra}/>')
        x, y = (x1 + x2) / 2, (y1 + y2) / 2
        lines = text.split("|") if text else []
        for number, one in enumerate(lines):
            wide = 6.6 * len(one) + 10
            high = y - (len(lines) - 1) * LINE / 2 + number * LINE + away
            self._over.append(
                f'<rect class="plate" x="{x - wide / 2:.1f}" y="{high - 11:.1f}" width="{wide:.1f}" height="17" '
                f'rx="4"/>'
                f'<text class="soft" x="{x:.1f}" y="{high + 2:.1f}" text-anchor="middle">{escape(one)}</text>'
            )
        return x, y


def _centre(box: tuple[float, float, float, float]) -> tuple[float, float]:
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def _edge(box: tuple[float, float, float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Return the point at which a line from the centre of a box leaves the box, moved 4 points outwards."""
    x, y = _centre(box)
    across, down = towards[0] - x, towards[1] - y
    scale = min(
        box[2] / 2 / abs(across) if across else math.inf,
        box[3] / 2 / abs(down) if down else math.inf,
    )
    length = math.hypot(across, down) or 1.0
    return x + across * scale + 4 * across / length, y + down * scale + 4 * down / length


def main() -> None:
    """Draw all pictures.  With ``--check``, fail if a picture differs from its text instead."""
    check = "--check" in sys.argv
    for source in sorted(HERE.glob("*.txt")):
        drawn = Picture(source.read_text()).svg()
        target = source.with_suffix(".svg")
        if not check:
            target.write_text(drawn)
        elif not target.exists() or target.read_text() != drawn:
            raise SystemExit(f"{target} differs from {source.name}: run python docs/pictures/draw.py")


if __name__ == "__main__":
    main()
