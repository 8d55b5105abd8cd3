"""Charts in SVG. The entity draws them, so that browsers without scripts can show them. No I/O."""

from __future__ import annotations

from twisted.web.template import Tag, tags

from dmsg.base.units import human_count, human_size, human_time
from dmsg.pages.history import History
from dmsg.pages.model import Chart, Line

WIDTH, HEIGHT = 300.0, 72.0
"""Width and height of a chart in the units of its SVG. The page stretches the chart."""
GAP = 30.0
"""Seconds without a value after which a line is interrupted. Values that are measured only while there is traffic, such
as the relay delay, come every 10 seconds from a client that only sends PINGs."""


def draw(chart: Chart, samples: History) -> Tag:
    """Return a chart with a legend that shows the present values."""
    lines = [(line, samples.points(line)) for line in chart.lines]
    top = max((value for _, points in lines for _, value in points), default=0.0)
    span = max(samples.seconds, 1.0)
    svg = Tag("svg")(
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
    )
    svg(Tag("title")(f"{chart.title}, the last {human_time(span)}, at most {with_unit(top, chart.unit)}"))
    for place in (0.25, 0.5, 0.75):
        height = f"{HEIGHT * place:.1f}"
        svg(Tag("line")(class_="grid", x1="0", x2=f"{WIDTH:.0f}", y1=height, y2=height))
    for number, (_, points) in enumerate(lines):
        if len(points) > 1 and top > 0:
            _draw_line(svg, number, points, top, span)
    legend = tags.p(class_="legend")
    for number, (line, _) in enumerate(lines):
        now = samples.now(line)
        legend(
            tags.span(
                tags.i(class_=f"c{number}"),
                f"{line.label} ",
                tags.b("-" if now is None else with_unit(now, chart.unit)),
            )
        )
    legend(tags.span(f"last {human_time(span)}, maximum {with_unit(top, chart.unit)}", class_="top"))
    return tags.figure(tags.figcaption(chart.title), svg, legend)


def sparkline(line: Line, samples: History) -> Tag:
    """Return a sparkline of one number, for a row of a table."""
    points = samples.points(line)
    span = max(samples.seconds, 1.0)
    top = max((value for _, value in points), default=0.0)
    svg = Tag("svg")(viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none", **{"aria-hidden": "true"})
    if len(points) > 1 and top > 0:
        _draw_line(svg, 0, points, top, span)
    return svg


def _draw_line(svg: Tag, number: int, points: list[tuple[float, float]], top: float, span: float) -> None:
    for run in _runs(points):
        places = [(WIDTH * (1 - age / span), (HEIGHT - 2) * (1 - value / top) + 1) for age, value in run]
        if len(places) == 1:
            # A line needs two points, so a value alone becomes a short dash.
            ((x, y),) = places
            places = [(max(0.0, x - 1), y), (min(WIDTH, x + 1), y)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        if number == 0:
            first, last = places[0][0], places[-1][0]
            svg(Tag("polygon")(class_="area", points=f"{first:.1f},{HEIGHT:.0f} {drawn} {last:.1f},{HEIGHT:.0f}"))
        svg(Tag("polyline")(class_=f"line c{number}", points=drawn))


def _runs(points: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the points in runs, between which at least :data:`GAP` seconds have no value."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if not runs or runs[-1][-1][0] - point[0] >= GAP:
            runs.append([])
        runs[-1].append(point)
    return runs


def with_unit(value: float, unit: str) -> str:
    """Return a number with its unit."""
    if unit == "bytes":
        return human_size(value)
    if unit == "bytes/s":
        return f"{human_size(value)}/s"
    if unit == "ms":
        return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"
    return f"{human_count(value)}{unit}"
