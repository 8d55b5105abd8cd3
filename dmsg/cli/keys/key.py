"""Command ``dmsg key``: creates and shows keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dmsg.cli.options import WrittenPath, group
from dmsg.cli.output import fail, tell
from dmsg.cli.params import discovery_option
from dmsg.errors import KeyFileError
from dmsg.keys import SecKey, read_key_file, write_key_file

if TYPE_CHECKING:
    from dmsg.discovery.entries.entry import Entry
    from dmsg.net.reactor import Reactor


@group()
def key() -> None:
    """Create and show keys.

    \b
    Examples:
      dmsg key new alice.key
      dmsg key show alice.key
    """


@key.command()
@click.argument("file", type=WrittenPath(dir_okay=False))
def new(file: str) -> None:
    """Create a key, write it to FILE (mode 0600) and print its public key."""
    secret = SecKey.generate()
    try:
        write_key_file(file, secret)
    except KeyFileError as error:
        fail(error)
    tell(secret.public.text, public=secret.public.hex())


@key.command()
@click.argument("old", type=click.Path(dir_okay=False))
@click.argument("new_file", metavar="NEW", type=click.Path(dir_okay=False))
@discovery_option
def succeed(old: str, new_file: str, discovery: tuple[str, ...]) -> None:
    """Name the key in NEW as the successor of the key in OLD.

    Both keys sign the succession, and discovery stores it. Peers that connect to the old key then reach the new one.

    \b
    Example:
      dmsg key succeed alice.key alice-2027.key -d http://127.0.0.1:9090
    """

    from dmsg.cli.client_run import run
    from dmsg.discovery.entries.entry import ClientMeta, Successor
    from dmsg.discovery.lookup.lookup import Lookup
    from dmsg.discovery.lookup.lookups import Lookups

    async def main(reactor: Reactor) -> None:
        before, after = read_key_file(old), read_key_file(new_file)
        successor = Successor.make(before.public, after)
        lookups = Lookups([Lookup(reactor, url) for one in discovery for url in one.split()])

        def make(entry: Entry) -> Entry:
            return replace(entry, successor=successor, client=entry.client or ClientMeta(()))

        await lookups.update(before, make)
        await lookups.close()
        tell(
            f"{before.public.text} now has the successor {after.public.text}",
            old=str(before.public),
            new=str(after.public),
        )

    run(main)


@key.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--hex", "as_hex", is_flag=True, help="Print the key as 66 hexadecimal digits, the form used in entries and JSON."
)
def show(file: str, as_hex: bool) -> None:
    """Print the public key of the key in FILE."""
    try:
        public = read_key_file(file).public
        tell(str(public) if as_hex else public.text, public=str(public))
    except KeyFileError as error:
        fail(error)
