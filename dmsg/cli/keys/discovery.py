"""Command ``dmsg discovery``: shows and changes entries in discovery."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from dmsg.cli.options import group
from dmsg.cli.output import notice, say, state, tell
from dmsg.cli.params import PUBLIC_KEY, discovery_option
from dmsg.errors import DiscoveryError
from dmsg.keys import PubKey, read_key_file

if TYPE_CHECKING:
    from dmsg.discovery.lookup.lookups import Lookups
    from dmsg.net.reactor import Reactor


def _lookups(reactor: Reactor, urls: tuple[str, ...]) -> Lookups:
    from dmsg.discovery.lookup.lookup import Lookup
    from dmsg.discovery.lookup.lookups import Lookups

    return Lookups([Lookup(reactor, url) for one in urls for url in one.split()])


@group()
def discovery() -> None:
    """Query and change entries in discovery.

    \b
    Examples:
      dmsg discovery list -d http://127.0.0.1:9090
      dmsg discovery show alice -d http://127.0.0.1:9090
      dmsg discovery delete --key-file alice.key -d http://127.0.0.1:9090
    """


@discovery.command("list")
@discovery_option
def list_servers(discovery: tuple[str, ...]) -> None:
    """List the servers that discovery offers to clients (a random choice if there are many)."""
    from rich.table import Table

    from dmsg.cli.client_run import run
    from dmsg.cli.screen import print_table, screen

    async def main(reactor: Reactor) -> None:
        entries = await _lookups(reactor, discovery).available_servers()
        if entries.refusal and not entries:
            raise DiscoveryError(entries.refusal)
        if entries.refusal:
            notice(entries.refusal)
        if state.json:
            for entry in entries:
                say(entry.to_json().decode())
            return
        if not entries:
            say("discovery lists no available server", err=True)
            return
        table = Table("server", "address", "free", "age of entry", box=None, pad_edge=False)
        for entry in sorted(entries, key=lambda entry: entry.static):
            assert entry.server is not None
            age = max(0.0, time.time() - entry.timestamp / 1e9)
            table.add_row(entry.key.text, entry.server.address, str(entry.server.available_connections), f"{age:.0f} s")
        print_table(screen(160), table)  # Without a width, rich would cut keys when the output is a pipe.

    run(main)


@discovery.command()
@click.argument("public_key", type=PUBLIC_KEY)
@discovery_option
def show(public_key: PubKey, discovery: tuple[str, ...]) -> None:
    """Show the verified entry of PUBLIC_KEY."""

    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        entry = await _lookups(reactor, discovery).entry(public_key)
        say(json.dumps(json.loads(entry.to_json()), indent=None if state.json else 2))

    run(main)


@discovery.command()
@click.option(
    "--key-file",
    "-k",
    required=True,
    envvar="DMSG_KEY_FILE",
    metavar="FILE",
    help="File with the secret key of the entry.",
)
@discovery_option
def delete(key_file: str, discovery: tuple[str, ...]) -> None:
    """Delete the entry of your key from discovery."""

    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        key = read_key_file(key_file)
        await _lookups(reactor, discovery).delete(key)
        tell(f"deleted the entry of {key.public.text}", deleted=str(key.public))

    run(main)
