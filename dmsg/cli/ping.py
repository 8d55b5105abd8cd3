"""``dmsg ping``."""

from __future__ import annotations

from typing import Any

import click
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater

from dmsg.cli.running import (
    PUBLIC_KEY,
    ClientSettings,
    Seconds,
    client_options,
    milliseconds,
    run,
    timeout_option,
    with_client,
)
from dmsg.errors import DmsgTimeout
from dmsg.keys import PubKey
from dmsg.transport.service import Client


@click.command()
@click.argument("public_key", type=PUBLIC_KEY)
@click.option("--count", "-c", default=5, show_default=True, type=click.IntRange(1, 10**6), help="How many.")
@click.option("--interval", "-i", default=0.2, show_default=True, type=Seconds(0, 3600), help="Seconds between.")
@client_options
@timeout_option
def ping(
    public_key: PubKey,
    count: int,
    interval: float,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Measure round trips to PUBLIC_KEY through its server.

    Sends empty frames, which the remote's dmsg acknowledges and its program
    does not see; the remote has to accept transports.

    \b
    Example:
      dmsg ping 02ab... -c 10
    """

    async def main(reactor: Any) -> None:
        async def use(client: Client) -> None:
            started = reactor.seconds()
            protocol: Any = await client.connect(public_key, Factory.forProtocol(Protocol), timeout)
            click.echo(f"connected to {public_key} in {milliseconds(reactor.seconds() - started)}")
            times = []
            for number in range(1, count + 1):
                started = reactor.seconds()
                try:
                    await protocol.transport.send(b"", timeout)
                except DmsgTimeout as error:
                    click.echo(f"{number}: {error}")
                else:
                    times.append(reactor.seconds() - started)
                    click.echo(f"{number}: {milliseconds(times[-1])}")
                if number < count:
                    await deferLater(reactor, interval)
            protocol.transport.loseConnection()
            lost = count - len(times)
            if times:
                low, mean, high = min(times), sum(times) / len(times), max(times)
                times_text = f"min {milliseconds(low)}, mean {milliseconds(mean)}, max {milliseconds(high)}"
                click.echo(f"{count} sent, {lost} lost; {times_text}")
            if lost:
                raise SystemExit(1)

        await with_client(reactor, settings, use)

    run(main)
