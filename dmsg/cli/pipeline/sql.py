"""Command ``dmsg analytics sql``: runs an SQL query of the tables."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from datetime import datetime
from typing import TYPE_CHECKING

import click

from dmsg.base.printable import printable
from dmsg.cli import output
from dmsg.cli.options import command
from dmsg.cli.pipeline.common import as_of_option, needs_tables, tables_option
from dmsg.errors import ExtraNotInstalled, needs_extra

if TYPE_CHECKING:
    from dmsg.analytics.queries import Answer

ROWS = 100
MAX_ROWS = 1_000_000
"""Maximum number of rows of an answer.  An answer is held in memory."""


@command()
@tables_option()
@click.argument("query")
@click.option(
    "--rows", default=ROWS, show_default=True, type=click.IntRange(1, MAX_ROWS), help="Maximum number of rows."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values with a header line.")
@as_of_option
@needs_tables
def sql(out: str, query: str, rows: int, as_csv: bool, as_of: datetime | None) -> None:
    """Run an SQL query of the silver and gold tables; needs no Java.

    DuckDB runs QUERY, which must be one SELECT, EXPLAIN or SHOW, because the tables are only read. Times are in UTC.
    The command needs dmsg's extra "sql".

    \b
    Examples:
      dmsg analytics sql --out tables 'SHOW TABLES'
      dmsg analytics sql --out tables 'SELECT dt, sum(bytes) FROM traffic_hour GROUP BY dt ORDER BY dt'
    """
    if importlib.util.find_spec("duckdb") is None:
        raise ExtraNotInstalled(f"DuckDB is not installed: {needs_extra('sql')}")
    from dmsg.analytics.queries import run_sql
    from dmsg.analytics.store import Store

    store = Store(out)
    found = run_sql(store, store.computed_state(as_of), query, rows)
    if output.state.json:
        for row in found.rows:
            output.say(json.dumps(dict(zip(found.names, map(_plain, row), strict=True)), default=str))
    elif as_csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(found.names)
        writer.writerows(found.rows)
        output.say(text.getvalue().removesuffix("\n"), as_it_is=True)
    else:
        _show(found)
    if found.more:
        output.notice(f"only the first {rows:,} rows are shown (--rows)")
    if output.state.status is not None:
        raise SystemExit(output.state.status)


def _plain(value: object) -> object:
    """Return a value in a form that JSON allows.  Infinity and NaN become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(answer: Answer) -> None:
    from rich.table import Table
    from rich.text import Text

    from dmsg.cli.screen import screen

    grid = Table()
    numbers = {
        index
        for row in answer.rows
        for index, value in enumerate(row)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for index, name in enumerate(answer.names):
        grid.add_column(Text(printable(name)), justify="right" if index in numbers else "left", overflow="fold")
    for row in answer.rows:
        grid.add_row(*(Text(_text(value)) for value in row))
    screen(10_000).print(grid)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return printable(str(value), "\n")
