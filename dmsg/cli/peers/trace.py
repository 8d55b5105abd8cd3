"""Command ``dmsg trace``: shows the servers through which a peer is reachable, and their round trips."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from dmsg.base.printable import shorten
from dmsg.base.units import milliseconds
from dmsg.cli.carrier_text import describe_carrier
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.options import command
from dmsg.cli.output import describe, notice, say, state, tell
from dmsg.cli.params import WHO, client_options_of, timeout_option
from dmsg.cli.peers.ping import port_option, target_and_port
from dmsg.clients.address_book import AddressBook
from dmsg.errors import NOBODY_LISTENS, ConnectFailed
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


SAMPLE_COUNT = 5
"""Number of round trips that are measured through each server.  The shortest one is printed."""
MAX_CAUSE = 40
"""Maximum characters of an error in a table cell."""


@command()
@click.argument("who", metavar="PUBLIC_KEY", type=WHO)
@port_option
@client_options_of(by_agent=False)
@timeout_option
def trace(who: tuple[PubKey, int | None], port: int | None, settings: ClientSettings, timeout: float) -> None:
    """Show the servers through which PUBLIC_KEY or KEY:PORT is reachable, and their round-trip times.

    The peer needs no listening program unless you name a port.

    \b
    Examples:
      dmsg trace alice
      dmsg trace alice:80
    """
    from twisted.internet.defer import CancelledError

    from dmsg.apps.pings import open_probe
    from dmsg.cli.client_run import run, with_client
    from dmsg.streams.core.agreement import FEATURE

    asked, at = target_and_port(who, port)

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            key, entry = await client.resolve(asked)
            if key != asked:
                say(f"{_key_and_name(asked)} was replaced by the key {_key_and_name(key)}", err=True)
            if entry.client is None or not entry.client.delegated_servers:
                raise ConnectFailed(
                    f"{key.short} is not connected to a server: its program is stopped, or just starting"
                )
            secure = entry.offers(FEATURE)
            if not state.json:
                say(f"{_key_and_name(key)} offers {'' if secure else 'no '}secure transports", wraps=True)
            used = cipher = None
            try:
                transport = await open_probe(client, key, at, timeout, notice)
                used, cipher = transport.server, transport.cipher
                transport.loseConnection()
            except CancelledError:
                raise
            except Exception as error:
                say(f"the peer cannot be reached: {describe(error)}", err=True)
            await _show_servers(reactor, client, key, at, entry.client.delegated_servers, used, cipher, timeout)
            if used is None:
                raise SystemExit(1)
            if not state.json:
                say(f"* marks the server that is used; cipher to the peer: {cipher or 'none'}", wraps=True)

        await with_client(reactor, settings, use, peer=asked)

    run(main)


def _key_and_name(key: PubKey) -> str:
    name = AddressBook().name_of(key)
    return f"{key.text} ({name})" if name else key.text


def _cause(error: Exception) -> str:
    """Return the cause of an error, short enough for a table cell."""
    if isinstance(error, ConnectFailed) and error.attempts:
        text = error.attempts[-1][1]
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    text = text.removeprefix("transport closed: ").removeprefix("refused: ")
    return "nobody listens there" if text.startswith(NOBODY_LISTENS) else shorten(text, MAX_CAUSE)


async def _show_servers(
    reactor: Reactor,
    client: Client,
    peer: PubKey,
    port: int | None,
    servers: Iterable[str],
    used: PubKey | None,
    cipher: str | None,
    timeout: float,
) -> None:
    """Print a table with a row for each server, and the reasons why carriers failed.

    :param servers: keys of the servers through which the peer is reachable.
    :param used: server through which a first stream went, or None.
    :param cipher: cipher of that stream.
    """
    from rich.table import Table

    from dmsg.cli.screen import print_table, screen

    table = Table("", "server", "address", "free", "by", "to the server", "to the peer", box=None, pad_edge=False)
    notes: list[str] = []
    for text in servers:
        server = PubKey.from_hex(text)
        row, failed = await _row(reactor, client, peer, port, server, timeout)
        mark = "*" if server == used else ""
        if state.json:
            cells = dict(zip(("address", "free", "carrier", "to_server", "to_peer"), row, strict=True))
            taken = {"taken": bool(mark), "cipher": cipher if mark else None}
            tell("", server=text, **taken, **cells, carriers_failed=failed)
        table.add_row(mark, server.short + "...", *row)
        if failed:
            notes.append(f"{server.short}...: {describe_carrier(row[2], failed)}")
    if not state.json:
        print_table(screen(160), table)
        for one in notes:
            say(one, wraps=True)


async def _row(
    reactor: Reactor, client: Client, peer: PubKey, port: int | None, server: PubKey, timeout: float
) -> tuple[tuple[str, str, str, str, str], dict[str, str]]:
    """Return the cells of a server's row, and the reasons why carriers failed, by carrier."""
    from twisted.internet.defer import CancelledError

    from dmsg.apps.pings import open_probe

    address = free = carrier = to_server = to_peer = "?"
    failed: dict[str, str] = {}
    try:
        entry = await client.entry(server)
        if entry.server is not None:
            address, free = entry.server.address, str(entry.server.available_connections)
        session = await client.server_session(server)
        carrier = str(session.carrier)
        failed = {str(one): why for one, why in session.carriers_failed.items()}
        if session.pings.known:
            to_server = milliseconds(min([await session.ping() for _ in range(SAMPLE_COUNT)]))
        transport = await open_probe(client, peer, port, timeout, notice, via=server)
        times = []
        for _ in range(SAMPLE_COUNT):
            started = reactor.seconds()
            await transport.send(b"", timeout)
            times.append(reactor.seconds() - started)
        transport.loseConnection()
        to_peer = milliseconds(min(times))
    except CancelledError:
        raise
    except Exception as error:
        to_peer = _cause(error)
    return (address, free, carrier, to_server, to_peer), failed
