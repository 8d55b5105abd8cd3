"""Command ``dmsg ping``: measures round-trip times to a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from dmsg.base.units import milliseconds
from dmsg.cli.agent_choice import ask_agent
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import notice, tell
from dmsg.cli.params import WHO, Seconds, client_options_of, timeout_option
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.apps.pings import Event
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


port_option = click.option(
    "--port",
    "-p",
    type=click.IntRange(0, 65535),
    help=(
        "Connect to this port, on which a program of the peer must listen.  Default: no port; the peer's client "
        "answers itself."
    ),
)


def target_and_port(target: tuple[PubKey, int | None], port: int | None) -> tuple[PubKey, int | None]:
    """Return the key and the port to measure, from the argument ``KEY:PORT`` and the option ``--port``.

    :raises click.UsageError: argument and option name different ports.
    """
    key, said = target
    if said is not None and port not in (None, said):
        raise click.UsageError(f"the address names port {said}, but --port names port {port}: give only one of them")
    return key, port if said is None else said


class _PingPrinter:
    """Printer of the round-trip times of a measurement, and of their summary."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._times: list[float] = []

    def on_event(self, event: Event) -> None:
        """Print an event of :func:`dmsg.apps.pings.ping`."""
        if "notice" in event:
            notice(event["notice"])
        elif "connected" in event:
            tell(
                f"connected to {PubKey.from_hex(event['connected']).text} in {milliseconds(event['seconds'])}", **event
            )
        elif "error" in event:
            tell(f"{event['number']}: {event['error']}", **event)
        elif "number" in event:
            self._times.append(event["seconds"])
            tell(f"{event['number']}: {milliseconds(event['seconds'])}", **event)

    def end(self) -> None:
        """Print the summary.

        :raises SystemExit: some round trips had no answer.
        """
        lost = self._count - len(self._times)
        if self._times:
            low, mean, high = min(self._times), sum(self._times) / len(self._times), max(self._times)
            times = f"min {milliseconds(low)}, mean {milliseconds(mean)}, max {milliseconds(high)}"
            text = f"{self._count} sent, {lost} lost; {times}"
            tell(text, sent=self._count, lost=lost, min=low, mean=mean, max=high)
        if lost:
            raise SystemExit(1)


@command()
@click.argument("who", metavar="PUBLIC_KEY", type=WHO)
@click.option("--count", "-c", default=5, show_default=True, type=click.IntRange(1, 10**6), help="Number of pings.")
@click.option("--interval", "-i", default=0.2, show_default=True, type=Seconds(0, 3600), help="Seconds between pings.")
@port_option
@client_options_of(loads=False)
@timeout_option
def ping(
    who: tuple[PubKey, int | None],
    count: int,
    interval: float,
    port: int | None,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Measure round-trip times to PUBLIC_KEY or KEY:PORT through its server.

    The peer's client answers, and its programs do not notice. If you name a port, a program must listen there.

    \b
    Examples:
      dmsg ping akvy... -c 10
      dmsg ping alice:80
    """

    key, at = target_and_port(who, port)
    shown = _PingPrinter(count)
    if settings.agent is not None:
        request = {"do": "ping", "to": str(key), "count": count, "interval": interval, "timeout": timeout}
        if at is not None:
            request["port"] = at
        for event in ask_agent(settings.agent, request, interval + 2 * timeout):
            shown.on_event(cast("Event", event))
        shown.end()
        return
    settings.load()

    from dmsg.apps.pings import ping as measure
    from dmsg.cli.client_run import run, with_client

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await measure(
                reactor, client, key, at, count=count, interval=interval, timeout=timeout, on_event=shown.on_event
            )
            shown.end()

        await with_client(reactor, settings, use, peer=key)

    run(main)
