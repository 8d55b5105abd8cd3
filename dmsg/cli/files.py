"""``dmsg send`` and ``dmsg receive``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure

from dmsg.cli.running import PUBLIC_KEY, ClientSettings, client_options, human_size, run, timeout_option, with_client
from dmsg.cli.transfer import ReceiveFile, SendFile, TransferError, Transferred
from dmsg.keys import PubKey
from dmsg.transport.service import Client


def transfer_progress() -> Progress:
    """A bar for each file, on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _report(verb: str, done: Transferred, whom: str) -> None:
    click.echo(
        f"{verb} {done.name} {whom}: {human_size(done.size)} in {done.seconds:.2f} s, "
        f"{human_size(done.rate)}/s, sha256 {done.sha256}"
    )


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path))
@click.argument("public_key", type=PUBLIC_KEY)
@client_options
@timeout_option
def send(
    file: Path,
    public_key: PubKey,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Send FILE to PUBLIC_KEY, where ``dmsg receive`` runs.

    \b
    Example:
      dmsg send photo.jpg 02ab... -d http://127.0.0.1:9090
    """

    async def main(reactor: Any) -> None:
        async def use(client: Client) -> None:
            with transfer_progress() as progress:
                bar = progress.add_task(file.name, total=file.stat().st_size)
                protocol = SendFile(file, lambda done: progress.update(bar, completed=done))
                factory = Factory.forProtocol(lambda: protocol)
                factory.noisy = False
                await client.connect(public_key, factory, timeout)
                done = await protocol.done
            _report("sent", done, f"to {public_key}")

        await with_client(reactor, settings, use)

    run(main)


class _Receiving(Factory):
    noisy = False

    def __init__(self, make: Callable[[], ReceiveFile], ended: Callable[[Any, str], None]) -> None:
        self._make = make
        self._ended = ended

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        protocol = self._make()
        protocol.done.addBoth(self._ended, f"from {str(addr).removeprefix('dmsg:')}")
        return protocol


@click.command()
@click.option(
    "--dir",
    "directory",
    default=".",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Where files go.",
)
@click.option("--once", is_flag=True, help="End after one file.")
@click.option("--overwrite", is_flag=True, help="Replace files of the same name.")
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="Refuse larger files.")
@client_options
def receive(
    directory: Path,
    once: bool,
    overwrite: bool,
    max_size: int | None,
    settings: ClientSettings,
) -> None:
    """Receive files; prints the public key to send them to.

    \b
    Example:
      dmsg receive --key-file bob.key --dir inbox -d http://127.0.0.1:9090
    """

    async def main(reactor: Any) -> None:
        finished: Deferred[None] = Deferred()

        async def use(client: Client) -> None:
            with transfer_progress() as progress:

                def started(name: str, size: int) -> Callable[[int], None]:
                    bar = progress.add_task(name, total=size)
                    bars.append(bar)
                    return lambda done: progress.update(bar, completed=done)

                def ended(result: Any, whom: str) -> None:
                    if isinstance(result, Failure):
                        click.echo(f"dmsg: file {whom} did not arrive: {result.value}", err=True)
                        failure: Failure | None = result
                    else:
                        _report("received", result, whom)
                        failure = None
                    while bars and progress.tasks and progress.tasks[0].finished:
                        progress.remove_task(bars.pop(0))
                    if once and not finished.called:
                        # the answer to the sender leaves before we do
                        reactor.callLater(0.2, finish, failure)

                def finish(failure: Failure | None) -> None:
                    if not finished.called:
                        finished.callback(failure)

                bars: list[Any] = []
                port = client.listen(
                    _Receiving(
                        lambda: ReceiveFile(directory, overwrite=overwrite, max_size=max_size, started=started), ended
                    )
                )
                click.echo(f"receiving at {client.public_key}")
                try:
                    await finished
                except TransferError:
                    raise SystemExit(1) from None
                finally:
                    await maybeDeferred(port.stopListening)

        await with_client(reactor, settings, use, published=True)

    run(main)
