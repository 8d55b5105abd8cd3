"""Figures as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 170


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table of whatever the rows have."""
    console = Console(width=WIDTH)
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*[name.replace("_", " ") for name in names], title=title, box=None, header_style="bold")
    for row in rows:
        table.add_row(*[_cell(row.get(name, "")) for name in names])
    console.print(table)
    console.print()


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
