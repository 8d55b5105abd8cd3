"""``dmsg trace``: the ways to a peer, and how fast each is."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table
from twisted.internet.defer import CancelledError
from twisted.internet.protocol import Factory, Protocol

from dmsg.cli.running import PUBLIC_KEY, ClientSettings, client_options, milliseconds, run, timeout_option, with_client
from dmsg.errors import ConnectFailed
from dmsg.keys import PubKey
from dmsg.names import Names
from dmsg.transport.agreement import FEATURE
from dmsg.transport.service import Client

SAMPLES = 5
"""Round trips measured each way; the shortest is shown."""


@click.command()
@click.argument("public_key", type=PUBLIC_KEY)
@click.option("--port", "-p", default=0, type=click.IntRange(0, 65535), help="Port to measure to.")
@client_options
@timeout_option
def trace(public_key: PubKey, port: int, settings: ClientSettings, timeout: float) -> None:
    """Show over which servers PUBLIC_KEY is reached, and how fast each way is.

    The peer has to listen on the port, or only the servers are measured.

    \b
    Example:
      dmsg trace alice
    """

    async def main(reactor: Any) -> None:
        async def use(client: Client) -> None:
            entry = await client.entry(public_key)
            if entry.client is None or not entry.client.delegated_servers:
                raise ConnectFailed(f"{public_key.short} is connected to no server")
            name = Names().name_of(public_key)
            secure = "offers secure transports" if entry.offers(FEATURE) else "offers no secure transports"
            click.echo(f"{public_key}{f' ({name})' if name else ''}, {secure}")
            used = None
            try:
                used = await _used(client, public_key, port, timeout)
            except CancelledError:
                raise
            except Exception as error:
                click.echo(f"not reached: {' '.join(str(error).split())}", err=True)
            table = Table("", "server", "address", "free", "to the server", "to the peer", box=None, pad_edge=False)
            for text in entry.client.delegated_servers:
                server = PubKey.from_hex(text)
                table.add_row(
                    "*" if server == used else "", *await _row(reactor, client, public_key, port, server, timeout)
                )
            console = Console()
            (console if console.is_terminal else Console(width=160)).print(table)
            if used is None:
                raise SystemExit(1)
            click.echo("* is the way that is taken")

        await with_client(reactor, settings, use)

    run(main)


async def _used(client: Client, peer: PubKey, port: int, timeout: float) -> PubKey | None:
    protocol: Any = await client.connect(peer, Factory.forProtocol(Protocol), timeout, port=port)
    server: PubKey | None = protocol.transport.server
    protocol.transport.loseConnection()
    return server


async def _row(
    reactor: Any, client: Client, peer: PubKey, port: int, server: PubKey, timeout: float
) -> tuple[str, str, str, str, str]:
    address = free = to_server = to_peer = "?"
    try:
        entry = await client.entry(server)
        if entry.server is not None:
            address, free = entry.server.address, str(entry.server.available_connections)
        session = await client.server_session(server)
        if session.pings.known:
            to_server = milliseconds(min([await session.ping() for _ in range(SAMPLES)]))
        protocol: Any = await client.connect(peer, Factory.forProtocol(Protocol), timeout, port=port, via=server)
        times = []
        for _ in range(SAMPLES):
            started = reactor.seconds()
            await protocol.transport.send(b"", timeout)
            times.append(reactor.seconds() - started)
        protocol.transport.loseConnection()
        to_peer = milliseconds(min(times))
    except CancelledError:
        raise
    except Exception as error:
        to_peer = " ".join(str(error).split())[:80] or type(error).__name__
    return server.short + "...", address, free, to_server, to_peer
