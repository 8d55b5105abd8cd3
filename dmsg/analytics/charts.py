"""Charts as SVG strings, made from numbers without a library.

Colours are CSS variables of the page, which defines them for light and dark mode. Every mark has a
title, which browsers show as a tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Cell = tuple[float | None, str]
"""Cell of a strip, for one hour: share of the hour without a problem, from 0 to 1 (None if unknown), and a text that
explains the share."""
Series = tuple[str, str, Sequence[float | None]]
"""Series of a chart: label, CSS colour, and a value (or None) for each x."""

NOTHING = "\N{EN DASH}"
"""Text shown for an unknown value."""
WIDTH, HEIGHT = 960, 220
LEFT, BOTTOM, TOP = 64, 24, 10


def human(value: float | None, unit: str = "") -> str:
    """Format a number for people, such as ``1.2 k`` or ``3.4 M``."""
    if value is None:
        return NOTHING
    if unit == "ms" and abs(value) >= 999.5:
        value, unit = value / 1000, "s"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            # The next larger unit is used, because the value would otherwise be rounded up to 1000 of the smaller unit.
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g}{' ' + unit if unit else ''}"


def _ceiling(value: float) -> float:
    """Return the next higher round number, for the upper end of an axis."""
    if value <= 0:
        return 1.0
    step = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10):
        if value <= factor * step:
            return factor * step
    return 10 * step


def _frame(labels: Sequence[str], top: float, unit: str, ticks: int = 8) -> str:
    inner = HEIGHT - TOP - BOTTOM
    parts = []
    for step in range(5):
        y = TOP + inner * (1 - step / 4)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{human(top * step / 4, unit)}</text>'
        )
    every = max(1, -(-len(labels) // ticks))
    for number, index in enumerate(range(0, len(labels), every)):
        x = _x(index, len(labels))
        # Every second label has its own class: on a narrow screen, where text is larger, the page's style hides these
        # labels.
        kind = "axis second" if number % 2 else "axis"
        parts.append(
            f'<text class="{kind}" x="{x:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(labels[index])}</text>'
        )
    return "".join(parts)


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT) * (index + 0.5) / max(1, count)


def _svg(body: str, title: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}" '
        f'preserveAspectRatio="none">{body}</svg>'
    )


def dashes(number: int) -> str:
    """Return the dash pattern of a line, so that lines can be told apart without colour."""
    return ("none", "8 4", "2 3", "10 3 2 3")[number % 4]


def lines(labels: Sequence[str], series: Sequence[Series], unit: str, title: str) -> str:
    """Return a line chart over time; an unknown value leaves a gap."""
    top = _ceiling(max((value for _, _, values in series for value in values if value is not None), default=0.0))
    inner = HEIGHT - TOP - BOTTOM
    parts = [_frame(labels, top, unit)]
    for number, (name, colour, values) in enumerate(series):
        path, pen = [], "M"
        for index, value in enumerate(values):
            if value is None:
                pen = "M"
                continue
            path.append(f"{pen}{_x(index, len(labels)):.1f},{TOP + inner * (1 - value / top):.1f}")
            pen = "L"
        parts.append(
            f'<path class="line" style="stroke:{colour};stroke-dasharray:{dashes(number)}" '
            f'd="{" ".join(path)}"><title>{escape(name)}</title></path>'
        )
        for index, value in enumerate(values):
            if value is None:
                continue
            x, y = _x(index, len(labels)), TOP + inner * (1 - value / top)
            alone = (index == 0 or values[index - 1] is None) and (
                index + 1 == len(values) or values[index + 1] is None
            )
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if alone else 5}" class="{"dot" if alone else "hit"}" '
                f'style="fill:{colour}"><title>{escape(name)}, {escape(labels[index])}: '
                f"{human(value, unit)}</title></circle>"
            )
    return _svg("".join(parts), title)


def bars(labels: Sequence[str], series: Sequence[Series], unit: str, title: str) -> str:
    """Return a bar chart over time, with the series stacked."""
    totals = [sum(values[index] or 0 for _, _, values in series) for index in range(len(labels))]
    top = _ceiling(max(totals, default=0.0))
    inner = HEIGHT - TOP - BOTTOM
    width = max(1.0, (WIDTH - LEFT) / max(1, len(labels)) * 0.8)
    parts = [_frame(labels, top, unit)]
    for index, label in enumerate(labels):
        y = TOP + float(inner)
        for name, colour, values in series:
            value = values[index] or 0
            if value <= 0:
                continue
            height = inner * value / top
            y -= height
            parts.append(
                f'<rect x="{_x(index, len(labels)) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" style="fill:{colour}"><title>{escape(name)}, {escape(label)}: '
                f"{human(value, unit)}</title></rect>"
            )
    return _svg("".join(parts), title)


def strip(cells: Sequence[tuple[str, float | None, str]]) -> str:
    """Return a row of cells, one for each hour.

    :param cells: label of the hour, share of the hour without a problem (None if unknown), and a text that explains the
        share.
    """
    count = max(1, len(cells))
    width = 100 / count
    parts = []
    for index, (label, share, why) in enumerate(cells):
        if share is None:
            kind, text, height = "none", why, 100
        else:
            kind = "good" if share >= 0.995 else "fair" if share >= 0.9 else "poor" if share > 0 else "bad"
            text = f"{share:.0%}, {why}"
            # Bars must differ in height, because some people and printers see no colour.
            height = {"good": 100, "fair": 75, "poor": 45, "bad": 100}[kind]
        parts.append(
            f'<rect x="{index * width:.3f}%" width="{width * 0.86:.3f}%" y="{100 - height}%" height="{height}%" '
            f'class="cell {kind}">'
            f"<title>{escape(label)}: {escape(text)}</title></rect>"
        )
    return f'<svg class="strip" preserveAspectRatio="none">{"".join(parts)}</svg>'
