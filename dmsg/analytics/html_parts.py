"""Functions that return parts of the report page as HTML strings: names, cells, sortable tables, legends."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from re import fullmatch

from dmsg.analytics.charts import NOTHING


def short_name(key: object) -> str:
    """Return HTML for a name. A key is shortened to 8 digits; any other name stays complete."""
    text = str(key)
    shown = text[:8] if fullmatch("[0-9a-f]{16,}", text) else text
    return f'<code title="{escape(text, quote=True)}">{escape(shown)}</code>'


def cell(value: object, *, kind: str = "", shown: str | None = None) -> str:
    """Return a table cell. The page's script sorts cells by ``value``.

    :param kind: CSS class of the cell.
    :param shown: HTML to show in place of ``value``.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = shown if shown is not None else NOTHING if value is None else f"{value:,}" if number else escape(str(value))
    sort = "" if value is None else escape(str(value), quote=True)
    return f'<td class="{"n" if number or value is None else ""} {kind}" data-value="{sort}">{text}</td>'


def sortable_table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Return a table that the page's script can sort.

    :param numbers: indices of the columns that hold numbers.
    """
    if not rows:
        return '<p class="note">Nothing.</p>'
    head = "".join(
        f'<th class="{"n" if index in numbers else ""}"><button>{escape(text)}</button></th>'
        for index, text in enumerate(heads)
    )
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="sort"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def legend_line(entries: Sequence[tuple[str, str]]) -> str:
    """Return the legend of a chart.

    :param entries: the label and CSS colour of each series.
    """
    return (
        '<div class="legend">'
        + "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
        + "</div>"
    )


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share as a percentage. A share below 1 is never rounded up to 100 %."""
    if value is None:
        return NOTHING
    shown = round(value * 100, digits)
    if value < 1 <= shown / 100:
        shown = 100 - 10**-digits
    return f"{shown:.{digits}f}\N{NO-BREAK SPACE}%"


def more_line(count: int, what: str) -> str:
    """Return a note with the number of rows that a table leaves out; an empty text if there are none."""
    return f"<p class='note'>And {count:,} more {what}.</p>" if count else ""
