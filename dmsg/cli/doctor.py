"""``dmsg doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.loading import load
from dmsg.cli.options import command
from dmsg.cli.params import URLType, key_option, split_urls

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor


@command()
@click.option(
    "--discovery",
    "-d",
    multiple=True,
    type=URLType(),
    envvar="DMSG_DISCOVERY",
    metavar="URL",
    help="Discovery to ask; may be repeated.  Also: DMSG_DISCOVERY.",
)
@key_option
@click.option("--servers", default=8, show_default=True, type=click.IntRange(1, 128), help="Servers to try, at most.")
def doctor(discovery: tuple[str, ...], key_file: str | None, servers: int) -> None:
    """Look at what this machine needs to use dmsg, and say what to do where something is wrong.

    Versions, the address book, the key file, each discovery and its clock,
    the servers that it offers, a stream through one of them, and the entry of
    the key.  Nothing is changed.  The status is 1 if something is wrong.

    \b
    Examples:
      dmsg doctor
      dmsg doctor --key-file alice.key --json
    """

    load("dmsg.cli.running", "dmsg.v2019.client", "dmsg.cli.examining")
    from dmsg.cli.examining import examine
    from dmsg.cli.running import run

    async def main(reactor: Reactor) -> None:
        if not await examine(reactor, split_urls(discovery), key_file, servers):
            raise SystemExit(1)

    run(main)
