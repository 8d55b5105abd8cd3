"""``dmsg send`` and ``dmsg receive``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dmsg.base.printable import printable
from dmsg.cli.options import DIRECTORY, command
from dmsg.cli.output import say, tell
from dmsg.cli.params import PUBLIC_KEY, ClientSettings, client_options, timeout_option
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from dmsg.apps.transfer import ReceiveFile
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


@command()
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

    from twisted.internet.protocol import Factory

    from dmsg.apps.transfer import SendFile, TransferError
    from dmsg.cli.files.sending import report, transfer_progress
    from dmsg.cli.running import run, with_client

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            with transfer_progress() as progress:
                bar = progress.add_task(file.name, total=file.stat().st_size)
                protocol = SendFile(file, lambda done: progress.update(bar, completed=done))
                factory = Factory.forProtocol(lambda: protocol)
                factory.noisy = False
                await client.connect(public_key, factory, timeout)
                try:
                    done = await protocol.done
                except TransferError as error:
                    raise TransferError(f"{file} is not sent to {public_key.short}: {error}") from None
            report("sent", done, f"to {public_key}")

        await with_client(reactor, settings, use)

    run(main)


@command()
@click.option(
    "--dir",
    "directory",
    default=".",
    type=DIRECTORY,
    help="Where files go; made if only it is absent.",
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

    from twisted.internet.defer import Deferred, maybeDeferred
    from twisted.python.failure import Failure

    from dmsg.apps.transfer import ReceiveFile, TransferError
    from dmsg.cli.files.sending import Receiving, beside, report, transfer_progress
    from dmsg.cli.running import run, with_client

    async def main(reactor: Reactor) -> None:
        finished: Deferred[None] = Deferred()

        async def use(client: Client) -> None:
            with transfer_progress() as progress:

                def make() -> ReceiveFile:
                    bars: list[Any] = []

                    def started(name: str, size: int) -> Callable[[int], None]:
                        bars.append(progress.add_task(printable(name), total=size))
                        return lambda done: progress.update(bars[0], completed=done) if bars else None

                    receiving = ReceiveFile(directory, overwrite=overwrite, max_size=max_size, started=started)

                    def over(result: Any) -> Any:
                        while bars:
                            progress.remove_task(bars.pop())
                        return result

                    receiving.done.addBoth(over)
                    return receiving

                def ended(result: Any, whom: str) -> None:
                    if isinstance(result, Failure):
                        text = f"dmsg: file {whom} did not arrive: {result.value}"
                        beside(progress, lambda: say(text, err=True))
                        failure: Failure | None = result
                    else:
                        beside(progress, lambda: report("received", result, whom))
                        failure = None
                    if once and not finished.called:
                        # the answer to the sender leaves before we do
                        reactor.callLater(0.2, finish, failure)

                def finish(failure: Failure | None) -> None:
                    if not finished.called:
                        finished.callback(failure)

                port = client.listen(Receiving(make, ended))
                tell(f"receiving at {client.public_key}", receiving=str(client.public_key))
                try:
                    await finished
                except TransferError:
                    raise SystemExit(1) from None
                finally:
                    await maybeDeferred(port.stopListening)

        await with_client(reactor, settings, use, published=True)

    run(main)
