"""Commands ``dmsg forward`` and ``dmsg expose``: TCP ports over dmsg."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from dmsg.base.log_throttle import LogThrottle
from dmsg.cli.access import Access, AllowOption, allow_option, describe_reach
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import describe, notice, say, tell
from dmsg.cli.params import ADDRESS, client_options, timeout_option

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from dmsg.net.reactor import Reactor
    from dmsg.net.streams.address import DmsgAddress
    from dmsg.v2019.client import Client


def warn(failure: Failure, target: str = "", lines: LogThrottle | None = None) -> None:
    """Print one line about a connection that has failed.  The command continues to accept connections.

    :param target: destination of the connection, if the error does not name it.
    :param lines: throttle of these lines, if strangers can cause them; None to print each.
    """
    text = describe(failure.value)
    more = "" if lines is None else lines.suffix(text)
    if more is not None:
        say(f"dmsg: {f'cannot connect to {target}: ' if target else ''}{text}{more}", err=True)


@command()
@click.argument("local_port", type=click.IntRange(0, 65535))
@click.argument("address", type=ADDRESS)
@click.option("--interface", default="127.0.0.1", show_default=True, help="Local address to listen on.")
@client_options
@timeout_option
def forward(local_port: int, address: DmsgAddress, interface: str, settings: ClientSettings, timeout: float) -> None:
    """Forward LOCAL_PORT of this machine to ADDRESS, a KEY:PORT or NAME:PORT.

    If LOCAL_PORT is 0, the system chooses a port.

    \b
    Example:
      dmsg forward 8000 alice:80
    """

    from twisted.internet.endpoints import TCP4ServerEndpoint

    from dmsg.apps.splice import SpliceFactory
    from dmsg.cli.client_run import run, serve_until_interrupted, with_client
    from dmsg.cli.reconnect_notice import Texts, resume_timeout_of, watch_connections
    from dmsg.clients.address_book import AddressBook

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            factory = SpliceFactory(lambda inner: client.connect(address, inner, timeout=timeout), on_failed=warn)
            port = await TCP4ServerEndpoint(reactor, local_port, interface=interface).listen(factory)
            here = f"{interface}:{port.getHost().port}"
            tell(f"{here} leads to {address.text}", listening=here, leads_to=str(address), **describe_reach(interface))
            name = AddressBook().name_or_short(address.public_key)
            texts = Texts(
                f"{name} is away; its connections wait for it until {{until}}",
                f"{name} is back",
                f"{name} is back; the connections that waited for it have ended",
                f"the connections that waited for {name} have ended",
            )
            waits = resume_timeout_of(client)
            with watch_connections(reactor, lambda: factory.second_transports, waits, notice, texts):
                await serve_until_interrupted(port)

        await with_client(reactor, settings, use, peer=address.public_key)

    run(main)


@command()
@click.argument("tcp_port", type=click.IntRange(1, 65535))
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the TCP port.")
@click.option("--port", "-p", type=click.IntRange(0, 65535), help="Port for peers.  Default: the same as the TCP port.")
@allow_option
@client_options
@timeout_option
def expose(
    tcp_port: int, host: str, port: int | None, allow: tuple[AllowOption, ...], settings: ClientSettings, timeout: float
) -> None:
    """Expose TCP_PORT of this machine to peers, at a port of your key.

    \b
    Examples:
      dmsg expose 22 --key-file home.key --allow laptop
      dmsg expose 8000 --allow @friends
    """

    from dmsg.apps.splice import SpliceFactory
    from dmsg.cli.client_run import listening_at, run, serve_until_interrupted, with_client
    from dmsg.net.outgoing import host_endpoint

    access = Access(allow)

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            endpoint = host_endpoint(reactor, host, tcp_port, timeout)
            target = f"{host}:{tcp_port}"
            lines = LogThrottle(reactor.seconds)
            listening = await listening_at(
                client,
                SpliceFactory(
                    endpoint.connect, is_allowed=access, on_failed=lambda failure: warn(failure, target, lines)
                ),
                tcp_port if port is None else port,
                access=access,
                offers=f"{host}:{tcp_port}",
            )
            at = cast("DmsgAddress", listening.getHost())
            tell(f"{at.text} leads to {target}", listening=str(at), leads_to=target, **access.fields)
            access.show()
            await serve_until_interrupted(listening)

        await with_client(reactor, settings, use, published=True)

    run(main)
