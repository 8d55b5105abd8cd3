"""``dmsg cp``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure

from dmsg.cli.copying import Copier, Get, Peer, Put
from dmsg.cli.files import transfer_progress
from dmsg.cli.forward import allow_option, only
from dmsg.cli.running import (
    ClientSettings,
    Seconds,
    client_options,
    human_size,
    run,
    serve_until_interrupted,
    with_client,
)
from dmsg.cli.transfer import TransferError, Transferred
from dmsg.errors import ConnectFailed, DiscoveryError, DmsgTimeout
from dmsg.keys import PubKey
from dmsg.names import Names
from dmsg.transport.service import Client

PORT = 24
"""Where ``dmsg cp --listen`` listens."""
RETRY_DELAY = 1.0
"""Seconds between tries to go on with a copy."""


class _Peers(Factory):
    noisy = False

    def __init__(self, make: Callable[[], Peer], allowed: Callable[[IAddress], bool]) -> None:
        self._make = make
        self._allowed = allowed

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        if addr is None or not self._allowed(addr):
            return None
        peer = self._make()
        whom = str(addr).removeprefix("dmsg:")[:8]

        def ended(result: Transferred | Failure) -> None:
            if isinstance(result, Failure):
                click.echo(f"{whom}: {result.value}", err=True)
            else:
                click.echo(f"{whom}: {result.name}, {human_size(result.size)}, {human_size(result.rate)}/s")

        peer.done.addBoth(ended)
        return peer


def _remote(text: str) -> tuple[PubKey, str] | None:
    """KEY:PATH or NAME:PATH; None for what is of this machine."""
    who, colon, path = text.partition(":")
    if not colon or "/" in who or not who:
        return None
    return Names().find(who), path


@click.command()
@click.argument("sources", nargs=-1)
@click.argument("target", required=False)
@click.option(
    "--listen",
    "-l",
    "directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Give peers the files of this directory.",
)
@click.option("--writable", "-w", is_flag=True, help="With --listen: take files too.")
@click.option("--overwrite", is_flag=True, help="With --listen: replace files of the same name.")
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="With --listen: refuse larger files.")
@click.option("--port", "-p", default=PORT, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--retry",
    default=60.0,
    show_default=True,
    type=Seconds(0, 86400),
    metavar="SECONDS",
    help="How long to try to go on when the peer is away.",
)
@allow_option
@client_options
def cp(
    sources: tuple[str, ...],
    target: str | None,
    directory: Path | None,
    writable: bool,
    overwrite: bool,
    max_size: int | None,
    port: int,
    retry: float,
    allow: tuple[PubKey, ...],
    settings: ClientSettings,
) -> None:
    """Copy files to and from a peer where ``dmsg cp --listen`` runs.

    A copy that was cut goes on where it was when the same command is given
    again: both ends compare the SHA-256 of what is there.

    \b
    Examples:
      dmsg cp --listen inbox --writable --key-file alice.key
      dmsg cp film.mkv alice:
      dmsg cp alice:notes/today.txt .
    """
    if (directory is None) == (target is None):
        raise click.UsageError("either SOURCE... TARGET or --listen DIRECTORY is needed")

    async def main(reactor: Any) -> None:
        async def listen(client: Client) -> None:
            assert directory is not None
            busy: set[Path] = set()

            def make() -> Peer:
                return Peer(reactor, directory, writable=writable, overwrite=overwrite, max_size=max_size, busy=busy)

            listening = client.listen(_Peers(make, only(allow)), port)
            click.echo(f"{directory} is at {client.public_key}:")
            await serve_until_interrupted(listening)

        if directory is not None:
            await with_client(reactor, settings, listen, published=True)
            return
        assert target is not None
        jobs = _jobs(sources, target)

        async def copy(client: Client) -> None:
            for peer, make in jobs:
                await _copy(reactor, client, peer, port, make, retry)

        await with_client(reactor, settings, copy)

    run(main)


Job = tuple[PubKey, Callable[[Any, Any], Copier]]


def _jobs(sources: tuple[str, ...], target: str) -> list[Job]:
    """What to copy.

    :raises TransferError: it makes no sense.
    """
    if not sources:
        raise TransferError("nothing to copy: SOURCE... TARGET is needed")
    there = _remote(target)
    jobs: list[Job] = []
    for source in sources:
        from_peer = _remote(source)
        if (there is None) == (from_peer is None):
            raise TransferError("one of SOURCE and TARGET has to be of a peer, KEY:PATH or NAME:PATH")
        if there is not None:
            name = Path(source).name
            path = there[1] + name if not there[1] or there[1].endswith("/") else there[1]
            if len(sources) > 1 and path != there[1] + name:
                raise TransferError("several files need a target that ends in : or /")
            jobs.append((there[0], _putter(Path(source), path)))
        else:
            assert from_peer is not None
            local = Path(target)
            if local.is_dir():
                local /= Path(from_peer[1]).name
            elif len(sources) > 1:
                raise TransferError(f"{target} is not a directory")
            jobs.append((from_peer[0], _getter(from_peer[1], local)))
    return jobs


def _putter(source: Path, path: str) -> Callable[[Any, Any], Copier]:
    if not source.is_file():
        raise TransferError(f"{source} is not a regular file")
    return lambda reactor, started: Put(reactor, source, path, started=started)


def _getter(path: str, target: Path) -> Callable[[Any, Any], Copier]:
    return lambda reactor, started: Get(reactor, path, target, started=started)


async def _copy(
    reactor: Any, client: Client, peer: PubKey, port: int, make: Callable[[Any, Any], Copier], retry: float
) -> None:
    with transfer_progress() as progress:
        bars: list[Any] = []

        def started(name: str, size: int, offset: int) -> Callable[[int], None]:
            bar = progress.add_task(name, total=size, completed=offset)
            bars.append(bar)
            return lambda done: progress.update(bar, completed=done)

        give_up = reactor.seconds() + retry
        reached = False
        while True:
            copier = make(reactor, started)
            factory = Factory.forProtocol(lambda copier=copier: copier)  # type: ignore[misc]
            factory.noisy = False
            try:
                await client.connect(peer, factory, port=port)
                reached = True
                done = await copier.done
                break
            except (ConnectFailed, DiscoveryError, DmsgTimeout, TransferError) as error:
                lost = not isinstance(error, TransferError) or str(error).startswith("connection lost")
                if not lost or not reached or reactor.seconds() >= give_up:
                    raise
            await deferLater(reactor, RETRY_DELAY)
            while bars:
                progress.remove_task(bars.pop())
    click.echo(
        f"{done.name}: {human_size(done.size)} in {done.seconds:.2f} s, {human_size(done.rate)}/s, sha256 {done.sha256}"
    )
