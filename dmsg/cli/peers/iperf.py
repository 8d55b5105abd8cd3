"""Command ``dmsg iperf``: measures throughput over time through the client API."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from dmsg.cli.access import Access, AllowOption, allow_option
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import tell
from dmsg.cli.params import AddressType, Seconds, client_options, port_option, timeout_option

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress
    from dmsg.v2019.client import Client


PORT = 5201
MAX_SECONDS = 3600


@command()
@click.argument("address", type=AddressType(PORT), required=False)
@click.option("--serve", is_flag=True, help="Serve: let peers measure the throughput to this machine.")
@port_option(PORT, "dmsg iperf --serve")
@click.option(
    "--time",
    "-t",
    "seconds",
    default=10.0,
    show_default=True,
    type=Seconds(0.1, MAX_SECONDS),
    help="Seconds to measure.",
)
@click.option(
    "--parallel", "-P", default=1, show_default=True, type=click.IntRange(1, 100), help="Number of parallel streams."
)
@click.option("--reverse", "-R", is_flag=True, help="Measure the throughput from the peer to this machine instead.")
@allow_option
@client_options
@timeout_option
def iperf(
    address: DmsgAddress | None,
    serve: bool,
    port: int,
    seconds: float,
    parallel: int,
    reverse: bool,
    allow: tuple[AllowOption, ...],
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Measure the throughput to ADDRESS, where ``dmsg iperf --serve`` runs.

    \b
    Examples:
      dmsg iperf --serve --key-file alice.key
      dmsg iperf alice -t 5 -P 2
    """

    from dmsg.cli.client_run import listening_at, run, serve_until_interrupted, with_client
    from dmsg.cli.peers.iperf_run import MeasurementFactory, measure

    if serve == (address is not None):
        raise click.UsageError("give ADDRESS or --serve")

    async def main(reactor: Reactor) -> None:
        async def be_measured(client: Client) -> None:
            access = Access(allow)
            listening = await listening_at(
                client, MeasurementFactory(reactor, access, MAX_SECONDS), port, access=access, offers="measurements"
            )
            at = cast("DmsgAddress", listening.getHost())
            tell(f"measured at {at.text}", serving=str(at), **access.fields)
            access.show()
            await serve_until_interrupted(listening)

        async def use(client: Client) -> None:
            assert address is not None
            await measure(reactor, client, address, seconds, parallel, reverse, timeout)

        await with_client(
            reactor,
            settings,
            be_measured if serve else use,
            published=serve,
            peer=None if address is None else address.public_key,
        )

    run(main)
