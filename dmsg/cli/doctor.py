"""Command ``dmsg doctor``: checks the installation and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.loading import load
from dmsg.cli.options import command
from dmsg.cli.params import URLType, key_option, proxy_option, split_urls

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor


@command()
@click.option(
    "--discovery",
    "--network",
    "-d",
    multiple=True,
    type=URLType(),
    envvar="DMSG_DISCOVERY",
    metavar="URL",
    help="URL of a discovery, or name of a joined network; repeatable.  Environment: DMSG_DISCOVERY.",
)
@proxy_option
@key_option
@click.option(
    "--servers", default=8, show_default=True, type=click.IntRange(1, 128), help="Maximum number of servers to try."
)
def doctor(discovery: tuple[str, ...], key_file: str | None, servers: int) -> None:
    """Check the installation and the network, and say what to do about each problem.

    The command checks versions, the address book, the key file, each discovery and its clock, the servers that
    discovery offers, a stream through one of these servers, and the entry of the key. On a machine where you run
    `dmsg host`, the command also checks the network of `dmsg host`, unless you name a discovery with -d. The command
    changes nothing. The exit status is 1 if a check fails.

    \b
    Examples:
      dmsg doctor
      dmsg doctor --key-file alice.key --json
    """

    load("dmsg.cli.client_run", "dmsg.v2019.client", "dmsg.cli.doctor_run")
    from dmsg.cli.client_run import run
    from dmsg.cli.doctor_run import examine

    source = click.get_current_context().get_parameter_source("discovery")
    is_named = source is click.core.ParameterSource.COMMANDLINE

    async def main(reactor: Reactor) -> None:
        if not await examine(reactor, split_urls(discovery), key_file, servers, with_hosted=not is_named):
            raise SystemExit(1)

    run(main)
