"""Command ``dmsg analytics self-dealing``: lists servers that may carry the traffic of their operator's own clients."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date, datetime

import click

from dmsg.base.printable import printable
from dmsg.cli import output
from dmsg.cli.options import command
from dmsg.cli.pipeline.common import as_of_option, needs_tables, tables_option
from dmsg.errors import DmsgError


@command("self-dealing")
@tables_option()
@click.argument("day", required=False, metavar="[DAY]", type=click.DateTime(["%Y-%m-%d"]))
@as_of_option
@needs_tables
def self_dealing(out: str, day: datetime | None, as_of: datetime | None) -> None:
    """List servers whose credit may come from their operator's own clients; needs no Java.

    The list has the servers with a flag; with --json, it has all servers with credit. A flag is a reason to ask the
    operator who the clients are. It proves nothing, because anybody can create many keys. Credits and rankings do not
    depend on flags. DAY defaults to the newest day.
    """
    from dmsg.analytics.self_dealing import find_dealings, lines_of
    from dmsg.analytics.store import Store

    store = Store(out)
    state = store.computed_state(as_of)
    wanted = date.fromisoformat(max(state.days)) if day is None else day.date()
    if str(wanted) not in state.days:
        raise DmsgError(f"the tables have no data of {wanted}; the newest day is {max(state.days)}")
    found = find_dealings(store, state, wanted)
    if output.state.json:
        for one in found:
            servers, clients, closed = one.network
            network = {"servers": servers, "clients": clients, "closed_clients": closed}
            output.say(json.dumps({**asdict(one), "day": str(wanted), "flags": one.flags, "network": network}))
        return
    flagged = [one for one in found if one.flags]
    output.say(f"{wanted}: {len(flagged):,} of {len(found):,} servers with credit have a flag")
    for one in flagged:
        output.say(f"{printable(one.server)}: {', '.join(one.flags)}")
        for line in lines_of(one):
            output.say(f"    {line}")
