"""Command ``dmsg analytics explain``: explains the pipeline's verdict on a server for a day."""

from __future__ import annotations

import json
from datetime import date, datetime

import click

from dmsg.base.printable import printable
from dmsg.cli.options import command
from dmsg.cli.output import writing_output
from dmsg.cli.pipeline.common import as_of_option, needs_tables, tables_option
from dmsg.errors import DmsgError


def _full_name(known: list[str], beginning: str) -> str:
    """Return the full name, in the tables, of the server that the user means.

    :param known: names of all servers in the tables.
    :param beginning: beginning of a name, or a name of the address book.
    :raises DmsgError: no server matches, or several do.
    """
    from dmsg.analytics.explain import find_server
    from dmsg.clients.address_book import AddressBook

    found = find_server(known, beginning)
    if not found:
        try:
            found = find_server(known, AddressBook().find(beginning).hex())
        except DmsgError:
            pass
    if not found:
        raise DmsgError(
            f"no server or discovery is called {beginning}; refused clients are in `dmsg analytics top actor` "
            "and `dmsg analytics top abuse_day`"
        )
    if len(found) > 1 and beginning not in found:
        more = f" or {len(found) - 5} others" if len(found) > 5 else ""
        raise DmsgError(
            f"{beginning or 'that'} may mean {', '.join(one[:12] for one in found[:5])}{more}: type more of the name"
        )
    return beginning if beginning in found else found[0]


@command()
@tables_option()
@click.argument("server")
@click.argument("day", required=False, metavar="[DAY]", type=click.DateTime(["%Y-%m-%d"]))
@click.option("--json", "as_json", is_flag=True, help="Print each section as one line of JSON.")
@as_of_option
@needs_tables
def explain(out: str, server: str, day: datetime | None, as_json: bool, as_of: datetime | None) -> None:
    """Explain the verdict on SERVER for DAY, down to single events; needs no Java.

    SERVER is a key, the beginning of a key, or a name of the address book. DAY defaults to the newest day.

    \b
    Example:
      dmsg analytics explain --out tables 02ab 2026-01-31
    """
    from rich.text import Text

    from dmsg.analytics.explain import explain as sections_of, other_crash_days
    from dmsg.analytics.store import Store
    from dmsg.cli.screen import screen

    store = Store(out)
    state = store.computed_state(as_of)
    wanted = date.fromisoformat(max(state.days)) if day is None else day.date()
    if str(wanted) not in state.days:
        raise DmsgError(f"the tables have no data of {wanted}; the newest day is {max(state.days)}")
    known = {row["producer"] for row in store.gold("boot", state)}
    known |= {row["server"] for row in store.gold("uptime_day", state)}
    name = _full_name(sorted(known), server)
    sections = sections_of(store, state, name, wanted)
    if as_json:
        for one in sections:
            with writing_output():
                click.echo(json.dumps({"section": one.title, "verdict": one.verdict, "lines": one.lines}))
        return
    console = screen(10_000)
    console.print(Text(f"{name} on {wanted}", style="bold"))
    for one in sections:
        console.print(Text.assemble(("\n" + one.title, "bold"), f": {printable(one.verdict)}"))
        for line in one.lines:
            indent = len(line) - len(line.lstrip())
            console.print(Text(" " * (2 + indent) + printable(line.strip())), soft_wrap=True)
    if not sections:
        console.print(Text(f"the tables have no data about {name} on {wanted}"))
    if day is None:
        for other in sorted(other_crash_days(store, state, name, wanted)):
            text = f"crashed on {other}: dmsg analytics explain --out {out} {printable(server)} {other}"
            console.print(Text(text, style="dim"), soft_wrap=True)
