"""Commands ``dmsg listen``, ``dmsg connect`` and ``dmsg nc``: standard input and output over a transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.access import Access, AllowOption, allow_option
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.params import ANY_PORT, Seconds, client_options, timeout_option

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress
    from dmsg.v2019.client import Client


wait_option = click.option(
    "--wait",
    "-w",
    type=Seconds(0, 86400),
    help=(
        "Close this many seconds after the end of input.  Default: half-close and wait until "
        "the peer ends; close at once if the peer cannot half-close."
    ),
)


@command()
@click.option("--port", "-p", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@allow_option
@client_options
@wait_option
def listen(port: int, allow: tuple[AllowOption, ...], settings: ClientSettings, wait: float | None) -> None:
    """Accept one transport and connect it to standard input and output.

    \b
    Example:
      dmsg listen --key-file bob.key -w 60 > received
    """

    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.peers.pipe_run import take_one

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await take_one(reactor, client, wait, Access(allow), port)

        await with_client(reactor, settings, use, published=True)

    run(main)


@command()
@click.argument("address", type=ANY_PORT)
@client_options
@timeout_option
@wait_option
def connect(address: DmsgAddress, settings: ClientSettings, timeout: float, wait: float | None) -> None:
    """Open a transport to ADDRESS, a key or KEY:PORT, and connect it to standard input and output.

    \b
    Example:
      echo hello | dmsg connect akvy...
    """

    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.peers.pipe_run import open_one

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await open_one(reactor, client, address, timeout, wait)

        await with_client(reactor, settings, use, peer=address.public_key)

    run(main)


@command()
@click.argument("address", type=ANY_PORT, required=False)
@click.option(
    "--listen",
    "-l",
    "listen_port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Listen on this port instead of connecting.",
)
@allow_option
@client_options
@timeout_option
@wait_option
@click.pass_context
def nc(
    ctx: click.Context,
    address: DmsgAddress | None,
    listen_port: int | None,
    allow: tuple[AllowOption, ...],
    settings: ClientSettings,
    timeout: float,
    wait: float | None,
) -> None:
    """Connect standard input and output to a peer's port, like nc(1) over TCP.

    \b
    Examples:
      dmsg nc alice:7
      dmsg nc -l 7 --key-file alice.key --allow bob
      ssh -o ProxyCommand='dmsg nc %h:22' alice
    """
    if (address is None) == (listen_port is None):
        raise click.UsageError("give ADDRESS or --listen PORT")
    with_settings = listen if address is None else connect
    inner = with_settings.callback.__wrapped__  # type: ignore[union-attr]
    if address is None:
        ctx.invoke(inner, port=listen_port, allow=allow, settings=settings, wait=wait)
    else:
        ctx.invoke(inner, address=address, settings=settings, timeout=timeout, wait=wait)
