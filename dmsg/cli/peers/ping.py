"""``dmsg ping``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dmsg.base.units import milliseconds
from dmsg.cli.options import command
from dmsg.cli.output import notice, tell
from dmsg.cli.params import WHO, ClientSettings, Seconds, client_options, timeout_option
from dmsg.errors import DmsgTimeout, PingUnavailable
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


port_option = click.option(
    "--port", "-p", type=click.IntRange(0, 65535), help="Somebody has to listen there; else the peer alone is measured."
)


def who_and_port(who: tuple[PubKey, int | None], port: int | None) -> tuple[PubKey, int | None]:
    """What ``KEY:PORT`` and ``--port`` say together.

    :raises click.UsageError: two different ports.
    """
    key, said = who
    if said is not None and port not in (None, said):
        raise click.UsageError(f"port {said} or port {port}?")
    return key, port if said is None else said


async def open_probe(client: Client, key: PubKey, port: int | None, timeout: float, via: PubKey | None = None) -> Any:
    """The transport of a stream that measures; programs of the peer see it only where the peer cannot do better."""

    from twisted.internet.protocol import Factory, Protocol

    try:
        protocol: Any = await client.probe(key, port, timeout, via=via)
    except PingUnavailable as error:
        notice(f"{error}: its program sees this one")
        protocol = await client.connect(key, Factory.forProtocol(Protocol), timeout, port=port or 0, via=via)
    return protocol.transport


@command()
@click.argument("who", metavar="PUBLIC_KEY", type=WHO)
@click.option("--count", "-c", default=5, show_default=True, type=click.IntRange(1, 10**6), help="How many.")
@click.option("--interval", "-i", default=0.2, show_default=True, type=Seconds(0, 3600), help="Seconds between.")
@port_option
@client_options
@timeout_option
def ping(
    who: tuple[PubKey, int | None],
    count: int,
    interval: float,
    port: int | None,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Measure round trips to PUBLIC_KEY, or KEY:PORT, through its server.

    The remote's dmsg answers; its programs see nothing of it, and none has to
    listen unless a port is named.

    \b
    Examples:
      dmsg ping 02ab... -c 10
      dmsg ping alice:80
    """

    from twisted.internet.task import deferLater

    from dmsg.cli.running import run, with_client

    key, at = who_and_port(who, port)

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            started = reactor.seconds()
            transport = await open_probe(client, key, at, timeout)
            reached = transport.getPeer().public_key
            took = reactor.seconds() - started
            tell(f"connected to {reached} in {milliseconds(took)}", connected=str(reached), seconds=took)
            times = []
            for number in range(1, count + 1):
                started = reactor.seconds()
                try:
                    await transport.send(b"", timeout)
                except DmsgTimeout as error:
                    tell(f"{number}: {error}", number=number, error=str(error))
                else:
                    times.append(reactor.seconds() - started)
                    tell(f"{number}: {milliseconds(times[-1])}", number=number, seconds=times[-1])
                if number < count:
                    await deferLater(reactor, interval)
            transport.loseConnection()
            lost = count - len(times)
            if times:
                low, mean, high = min(times), sum(times) / len(times), max(times)
                times_text = f"min {milliseconds(low)}, mean {milliseconds(mean)}, max {milliseconds(high)}"
                tell(f"{count} sent, {lost} lost; {times_text}", sent=count, lost=lost, min=low, mean=mean, max=high)
            if lost:
                raise SystemExit(1)

        await with_client(reactor, settings, use)

    run(main)
