"""Command ``dmsg socks``: runs a SOCKS5 proxy to peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.cli.access import describe_reach
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import tell
from dmsg.cli.params import client_options, timeout_option

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


@command()
@click.option(
    "--listen",
    "local_port",
    default=1080,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Local port to listen on.",
)
@click.option("--interface", default="127.0.0.1", show_default=True, help="Local address to listen on.")
@client_options
@timeout_option
def socks(local_port: int, interface: str, settings: ClientSettings, timeout: float) -> None:
    """Run a SOCKS5 proxy for the hosts KEY.dmsg and NAME.dmsg.

    The proxy refuses all other hosts. Programs must let the proxy resolve host names (socks5h).

    \b
    Example:
      dmsg socks &
      curl --proxy socks5h://127.0.0.1:1080 http://alice.dmsg/
    """

    from twisted.internet.endpoints import TCP4ServerEndpoint

    from dmsg.cli.client_run import run, serve_until_interrupted, with_client
    from dmsg.cli.tunnels.socks_run import SocksFactory

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            endpoint = TCP4ServerEndpoint(reactor, local_port, interface=interface)
            port = await endpoint.listen(SocksFactory(reactor, client, timeout))
            here = f"{interface}:{port.getHost().port}"
            tell(f"SOCKS5 at {here}", listening=here, **describe_reach(interface))
            await serve_until_interrupted(port)

        await with_client(reactor, settings, use)

    run(main)
