"""Command group ``dmsg analytics``: the commands that show tables."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path

import click

from dmsg.base.printable import printable
from dmsg.cli import output
from dmsg.cli.options import WRITTEN_FILE, command
from dmsg.cli.params import Seconds, create_option
from dmsg.cli.pipeline.common import (
    as_of_option,
    errors_in_one_line,
    local_directory_option,
    needs_spark,
    needs_tables,
    tables_option,
)
from dmsg.errors import DmsgError, WrongUse
from dmsg.keys import PubKey, load_or_create_key

RANKING_HOURS = 24.0
TOP_ROWS = 15


@command()
@tables_option()
@click.option(
    "--html",
    default="report.html",
    show_default=True,
    type=WRITTEN_FILE,
    help="File to write.",
)
@as_of_option
@needs_tables
def report(out: str, html: Path, as_of: datetime | None) -> None:
    """Write the tables as one HTML file; needs no Java."""
    from dmsg.analytics.main import write_report

    write_report(out, html, as_of)
    output.tell(f"wrote {html}", wrote=str(html))


@command()
@tables_option()
@click.argument("table", default="placement")
@click.option(
    "--rows", default=TOP_ROWS, show_default=True, type=click.IntRange(1, 10_000), help="Maximum number of rows."
)
@click.option("--by", metavar="COLUMN", help="Sort by this column, largest value first.")
@click.option("--day", metavar="DAY", help="Show only this day, as in 2026-01-31.  Default: the newest day.")
@as_of_option
@needs_tables
# The function has many branches: it checks three options, and has two layouts of the table.
def top(out: str, table: str, rows: int, by: str | None, day: str | None, as_of: datetime | None) -> None:  # noqa: C901
    """Show a gold table in the terminal; needs no Java.

    TABLE defaults to placement. `dmsg analytics tables` lists the names of all gold tables.
    """
    from pyarrow import compute
    from rich.table import Table
    from rich.text import Text

    from dmsg.analytics.schemas import DAILY, GOLD
    from dmsg.analytics.store import Store
    from dmsg.cli.screen import screen

    if table not in GOLD:
        raise WrongUse(f"there is no table {table}; there are {', '.join(GOLD)}")
    names = GOLD[table].schema.fieldNames()
    if by is not None and by not in names:
        raise WrongUse(f"{table} has no column {by}; it has {', '.join(names)}")
    if by is not None and GOLD[table].schema[by].dataType.typeName() == "array":
        raise WrongUse(f"{by} holds a list of numbers: tables cannot be sorted by it")
    store = Store(out)
    state = store.computed_state(as_of)
    if day is not None and day not in state.days:
        raise DmsgError(f"nothing is known of {day}; the newest day is {max(state.days)}")
    only = day or (max(state.days) if table in DAILY else None)
    order = by or _first_number(table)
    found = store.answer(table, state, only, only).select(names)
    keys = [(order, "descending"), *((name, "ascending") for name in names[:3] if name != order)]
    chosen = compute.sort_indices(found, sort_keys=keys).slice(0, rows)
    grid = Table(title=f"{table}: {GOLD[table].text}", title_justify="left")
    for field in GOLD[table].schema.fields:
        text = field.dataType.simpleString() in ("string", "date", "boolean")
        grid.add_column(field.name, justify="left" if text else "right", overflow="ellipsis", no_wrap=text)
    shown = found.take(chosen).to_pylist()
    if output.state.json:
        for row in shown:
            output.say(json.dumps({"table": table, **row}, default=str))
        return
    for row in shown:
        grid.add_row(*(Text(_cell_text(row[name])) for name in names))
    console = screen(10_000)  # Without wrapping, the output suits other programs and less -S.
    if not console.is_terminal:
        grid.expand = False
    elif console.measure(grid, options=console.options.update(width=10_000)).maximum > console.width:
        grid = Table(title=f"{table}: {GOLD[table].text}", title_justify="left", show_header=False)
        for row in shown:
            for name in names:
                grid.add_row(name, Text(_cell_text(row[name])))
            grid.add_section()
    console.print(grid)


def _first_number(table: str) -> str:
    from dmsg.analytics.schemas import GOLD

    for field in GOLD[table].schema.fields:
        if field.dataType.simpleString() in ("double", "bigint") and field.name != "hour":
            return str(field.name)
    return str(GOLD[table].schema.fieldNames()[0])


def _cell_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = printable(str(value))
    return text[:8] if len(text) in (16, 32, 66) and all(one in "0123456789abcdef" for one in text) else text


@command()
@tables_option()
@needs_spark
def tables(out: str) -> None:
    """Print the location of each gold table as JSON, for programs that read Delta Lake."""
    from dmsg.analytics import main as jobs

    click.echo(json.dumps(jobs.table_paths(out), indent=None if output.state.json else 1))


@command()
@tables_option()
@click.option("--key-file", "-k", required=True, metavar="FILE", help="File with the operator's secret key.")
@create_option
@click.option("--ranking", required=True, type=WRITTEN_FILE, help="File to write.")
@click.option(
    "--hours",
    default=RANKING_HOURS,
    show_default=True,
    type=Seconds(0.01, 720),
    help="Hours for which the ranking is valid.",
)
@needs_tables
def rank(out: str, key_file: str, create: bool, ranking: Path, hours: float) -> None:
    """Sign the ranking of servers in table placement, for `twistd dmsg-discovery --ranking FILE --ranking-key KEY`."""
    from dmsg.analytics.atomic_write import write_atomically
    from dmsg.analytics.store import Store
    from dmsg.discovery.service.ranking import MAX_RANKED, sign_ranking

    store = Store(out)
    rows = store.gold("placement", store.computed_state())
    key = load_or_create_key(key_file, create=create)
    servers = []
    for row in sorted(rows, key=lambda row: (-row["weight"], row["server"]))[:MAX_RANKED]:
        try:
            PubKey.from_hex(row["server"])
        except DmsgError:
            continue  # A name that is not a key cannot be ranked, because no server can post an entry with it.
        servers.append({"static": row["server"], "weight": row["weight"], "reasons": row["reasons"].split(", ")})
    if len(servers) < len(rows):
        click.echo(
            f"{len(rows) - len(servers)} of {len(rows)} servers are left out: only public keys can be ranked, and "
            f"at most {MAX_RANKED} of them",
            err=True,
        )
    now = int(time.time())
    write_atomically(ranking, sign_ranking(servers, key, now, now + int(hours * 3600)))
    text = f"{len(servers)} servers, valid for {hours:g} h, signed by {key.public.text}"
    output.tell(text, servers=len(servers), hours=hours, key=key.public.hex(), wrote=str(ranking))


@command()
@local_directory_option("--telemetry", "Telemetry directory of the entity, which holds its secret.", exists=True)
@click.option(
    "--secret",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="File with the secret, if the server has --telemetry-secret FILE.",
)
@click.option("--day", type=click.DateTime(["%Y-%m-%d"]), help="Day for which to name networks.  Default: today.")
@click.argument("names", nargs=-1, required=True, metavar="KEY|ADDRESS...")
@errors_in_one_line
def name(telemetry: Path, secret: Path | None, day: datetime | None, names: tuple[str, ...]) -> None:
    """Print the pseudonym that an entity's events use for a key or a network.

    To find out which key a pseudonym stands for, pass all keys that may be meant, and compare.
    """
    from dmsg.telemetry.pseudonyms import SECRET_NAME, Pseudonyms, read_secret, read_secret_file

    try:
        pseudonyms = Pseudonyms(read_secret(telemetry) if secret is None else read_secret_file(secret))
    except FileNotFoundError:
        raise DmsgError(f"there is no {SECRET_NAME} in {telemetry}") from None
    if day is not None and day.year < 1970:
        raise WrongUse(f"{day:%Y-%m-%d} is before 1970")
    since_1970 = int((day or datetime.now(UTC)).replace(tzinfo=UTC).timestamp() // 86400)
    called = []
    for one in names:
        try:
            called.append(pseudonyms.network(str(ip_address(one)), since_1970))
        except ValueError:
            called.append(pseudonyms.client(PubKey.from_text(one)))
    for one, pseudonym in zip(names, called, strict=True):
        output.tell(f"{pseudonym} {one}", name=pseudonym, of=one)
