"""``dmsg send`` and ``dmsg receive``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dmsg.apps.codes.words import Code
from dmsg.base.printable import printable
from dmsg.cli.asking import check_can_ask
from dmsg.cli.completing import complete_code, complete_path_or_name
from dmsg.cli.options import DIRECTORY, command
from dmsg.cli.output import say, tell
from dmsg.cli.params import ClientSettings, client_options, qr_option, timeout_option, words_option
from dmsg.clients.names import Names
from dmsg.errors import DmsgError
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from twisted.python.failure import Failure

    from dmsg.apps.transfer import ReceiveFile
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


@command()
@click.argument("what", nargs=-1, metavar="FILE... [KEY]", shell_complete=complete_path_or_name)
@click.option("--text", help="Send this text instead of files.")
@words_option
@click.option("--verify", is_flag=True, help="Show a number to compare with the other side's before anything is sent.")
@qr_option
@client_options
@timeout_option
def send(
    what: tuple[str, ...],
    text: str | None,
    words: int,
    verify: bool,
    no_qr: bool,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Send files, directories, a text or standard input (-) by a code.

    A code such as 5274-guitar-alpha-juice is shown; who types it into ``dmsg receive``
    on another machine gets what is sent, and nobody else does.  Each code is
    good for one transfer, with a key of its own.  With a KEY behind one FILE it is
    sent to that key, where ``dmsg receive`` runs without a code.

    \b
    Examples:
      dmsg send film.mkv
      dmsg send notes/ photo.jpg
      dmsg send --text 'the door is open'
      tar c . | dmsg send -
      dmsg send <(tar c .)
      dmsg send photo.jpg alice
    """

    if text is not None and what:
        raise click.UsageError("--text, or FILE...; not both")
    if text is None and not what:
        raise click.UsageError("what is to be sent?  FILE..., - for standard input, or --text TEXT")
    if verify:
        check_can_ask()
    if "" in what:
        raise click.UsageError("a FILE is empty: is a variable not set?")
    key = _key_of(what)
    if key is not None:
        _send_to(Path(what[0]), key, settings, timeout)
    missing = next((one for one in what if one != "-" and not os.path.lexists(one)), None)
    if missing is not None:
        raise click.UsageError(f"{missing}: {os.strerror(errno.ENOENT)}")
    if "-" in what and len(what) > 1:
        raise click.UsageError("standard input (-) is sent alone")
    from dmsg.apps.parcels.wire import TEXT_LIMIT
    from dmsg.apps.sources import is_pipe, open_pipe

    pipes = [one for one in what if one != "-" and is_pipe(one)]
    if pipes and len(what) > 1:
        raise click.UsageError(f"{pipes[0]}: a pipe is sent alone")
    if text is not None and len(text) > TEXT_LIMIT:
        raise click.UsageError(f"a text has at most {TEXT_LIMIT} characters; a longer one is a file")

    from dmsg.cli.files.codes import InputToSend, TextToSend, files_to_send, send_by_code
    from dmsg.cli.files.sending import transfer_progress
    from dmsg.cli.running import run, with_client

    async def main(reactor: Reactor) -> None:
        progress = transfer_progress()
        if text is not None:
            make: Any = TextToSend(progress, text)
        elif what == ("-",):
            make = InputToSend(reactor, progress)
        elif pipes:
            make = InputToSend(reactor, progress, *open_pipe(pipes[0]))
        else:
            make = await files_to_send([Path(one) for one in what], progress)

        async def use(client: Client) -> None:
            await send_by_code(reactor, client, make, words, verify=verify, show_qr=not no_qr)

        await with_client(reactor, settings.alone(), use, published=True)

    run(main)


def _key_of(what: tuple[str, ...]) -> PubKey | None:
    """The key behind one file, as this command was before there were codes; None: all are files."""
    if len(what) < 2:
        return None
    last = what[-1]
    if Path(last).exists():
        return None
    try:
        key = Names().find(last.removeprefix("dmsg:"))
    except DmsgError as error:
        raise click.UsageError(f"{last}: no such file, and no key: {error}") from None
    if len(what) > 2:
        raise click.UsageError("one FILE at a time is sent to a KEY")
    return key


def _send_to(file: Path, public_key: PubKey, settings: ClientSettings, timeout: float) -> NoReturn:
    if not file.is_file():
        why = "is a directory" if file.is_dir() else "is no file" if file.exists() else "no such file"
        raise click.UsageError(
            f"{file}: {why}; without a KEY it is sent by a code" if file.exists() else f"{file}: {why}"
        )

    from twisted.internet.protocol import Factory

    from dmsg.apps.transfer import SendFile, TransferError
    from dmsg.cli.files.sending import report, transfer_progress
    from dmsg.cli.running import run, with_client

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            with transfer_progress() as progress:
                protocol = SendFile(file, lambda done: progress.update(bar, completed=done))
                bar = progress.add_task(file.name, total=protocol.size)
                factory = Factory.forProtocol(lambda: protocol)
                factory.noisy = False
                await client.connect(public_key, factory, timeout=timeout)
                try:
                    done = await protocol.done
                except TransferError as error:
                    raise TransferError(f"{file} is not sent to {public_key.short}: {error}") from None
            report("sent", done, public_key)

        await with_client(reactor, settings, use)

    run(main)


@command()
@click.argument("code", nargs=-1, metavar="[CODE]", shell_complete=complete_code)
@click.option(
    "--dir",
    "directory",
    default=".",
    type=DIRECTORY,
    help="Where files go; made if only it is absent.",
)
@click.option("--yes", "-y", is_flag=True, help="With CODE: take what is offered without being asked.")
@click.option("--verify", is_flag=True, help="With CODE: show a number to compare with the other side's.")
@click.option("--once", is_flag=True, help="Without CODE: end after one file.")
@click.option("--overwrite", is_flag=True, help="Replace files of the same name.")
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="Refuse what is larger.")
@client_options
@timeout_option
def receive(
    code: tuple[str, ...],
    directory: Path,
    yes: bool,
    verify: bool,
    once: bool,
    overwrite: bool,
    max_size: int | None,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Receive what ``dmsg send`` offers by CODE.

    Without CODE files are received at a key, which is printed, from everybody
    who sends there.  What a pipe sends goes to standard output.

    \b
    Examples:
      dmsg receive 5274-guitar-alpha-juice
      dmsg receive 5274-guitar-alpha-juice --yes --dir inbox
      dmsg receive --key-file bob.key --dir inbox
    """

    if code:
        _receive_code(" ".join(code), directory, yes, verify, overwrite, max_size, settings, timeout)

    from twisted.internet.defer import Deferred, maybeDeferred
    from twisted.python.failure import Failure

    from dmsg.apps.transfer import ReceiveFile, TransferError
    from dmsg.cli.files.sending import Receiving, beside, report, transfer_progress
    from dmsg.cli.running import listening_at, run, with_client

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

                def ended(result: Any, peer: PubKey) -> None:
                    if isinstance(result, Failure):
                        text = f"dmsg: file from {peer.text} did not arrive: {result.value}"
                        beside(progress, lambda: say(text, err=True))
                        failure: Failure | None = result
                    else:
                        beside(progress, lambda: report("received", result, peer))
                        failure = None
                    if once and not finished.called:
                        # the answer to the sender leaves before we do
                        reactor.callLater(0.2, finish, failure)

                def finish(failure: Failure | None) -> None:
                    if not finished.called:
                        finished.callback(failure)

                port = await listening_at(client, Receiving(make, ended))
                tell(f"receiving at {client.public_key.text}", receiving=str(client.public_key))
                try:
                    await finished
                except TransferError:
                    raise SystemExit(1) from None
                finally:
                    await maybeDeferred(port.stopListening)

        await with_client(reactor, settings, use, published=True)

    run(main)


def _receive_code(
    text: str,
    directory: Path,
    yes: bool,
    verify: bool,
    overwrite: bool,
    max_size: int | None,
    settings: ClientSettings,
    timeout: float,
) -> NoReturn:
    if verify:
        check_can_ask()
    try:
        code = Code.parse(text)
    except DmsgError as error:
        raise click.UsageError(str(error)) from None

    from dmsg.cli.files.codes import receive_by_code
    from dmsg.cli.running import run, with_client

    async def main(reactor: Reactor) -> None:
        async def use(client: Client) -> None:
            await receive_by_code(
                reactor,
                client,
                code,
                directory,
                overwrite=overwrite,
                max_size=max_size,
                yes=yes,
                verify=verify,
                timeout=timeout,
            )

        await with_client(reactor, settings.alone(), use)

    run(main)
