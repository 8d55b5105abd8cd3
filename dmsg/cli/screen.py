"""Output of tables on standard output, as wide as the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dmsg.cli.output import EXIT_PIPE, writing_output


class Screen(Console):
    """Console of rich that ends the command if standard output cannot be written."""

    def print(self, *objects: object, **options: Any) -> None:
        """Print like rich's console, and end the command if this fails."""
        with writing_output():
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_PIPE) from None


def screen(width: int | None = None) -> Console:
    """Return the console for standard output.

    :param width: width in characters if standard output is not a terminal; None for rich's default.
    """
    found = Screen()
    return found if found.is_terminal or width is None else Screen(width=width)


AMPLE_WIDTH = 10_000
"""Terminal width, in characters, that suffices for any table."""


def print_table(console: Console, table: Table) -> None:
    """Print a table.  If the terminal is too narrow for it, print each cell as a line ``HEADER: CELL``.

    A cell without a header is printed before the next one.
    """
    needed = Measurement.get(console, console.options.update(max_width=AMPLE_WIDTH), table).maximum
    if not console.is_terminal or needed <= console.width:
        console.print(table)
        return
    rows = zip(*(list(column.cells) for column in table.columns), strict=True)
    for number, row in enumerate(rows):
        if number:
            console.print()
        mark = ""
        for column, cell in zip(table.columns, row, strict=True):
            header = str(column.header)
            if header:
                console.print(Text(f"{mark}{header}: {cell}", overflow="fold"))
            # A cell without a header is only a mark, such as an asterisk, so it gets no line of its own.
            mark = f"{cell} " if str(cell) and not header else ""
