"""Commands ``dmsg send`` and ``dmsg receive``."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from dmsg.apps.codes.words import MAX_RECEIVERS, Code
from dmsg.cli.access import (
    Access,
    AllowOption,
    accepting_options,
    check_offered,
    check_takes,
    hidden_option,
    max_total_option,
)
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.completion_values import complete_code, complete_path_or_name
from dmsg.cli.options import DIRECTORY, command
from dmsg.cli.params import client_options, expires_option, lan_option, qr_option, timeout_option, words_option
from dmsg.cli.prompts import ask_code, can_ask, check_can_ask
from dmsg.clients.address_book import AddressBook
from dmsg.clients.groups import GROUP_PREFIX, Groups
from dmsg.errors import DmsgError
from dmsg.keys import PubKey

if TYPE_CHECKING:
    from dmsg.apps.codes.stream import CodeAgreement
    from dmsg.cli.files.parcel_factory import ParcelFactory
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client
    from dmsg.v2019.lan.peer import LanPeer


@command()
@click.argument("what", nargs=-1, metavar="FILE... [KEY]", shell_complete=complete_path_or_name)
@click.option("--text", help="Send this text instead of files.")
@hidden_option
@words_option
@click.option("--to-many", is_flag=True, help="Make a code for several receivers; needs --receivers or --expires.")
@click.option(
    "--receivers",
    type=click.IntRange(1, MAX_RECEIVERS),
    metavar="N",
    help=f"With --to-many: number of receivers that may use the code.  Default with --expires: {MAX_RECEIVERS}.",
)
@expires_option
@click.option("--verify", is_flag=True, help="Show a number to compare with the peer's before anything is sent.")
@qr_option
@lan_option
@client_options
@timeout_option
# The function has many branches, because it checks many invalid combinations of arguments.
def send(  # noqa: C901, PLR0915
    what: tuple[str, ...],
    text: str | None,
    hidden: bool,
    words: int,
    to_many: bool,
    receivers: int | None,
    expires: float | None,
    verify: bool,
    no_qr: bool,
    lan: str,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Send files, directories, text or standard input (-) by a code.

    The command shows a code such as 5274-guitar-alpha-juice. Only a person who types that code into ``dmsg receive`` on
    another machine gets the files. Each code works for one transfer, with --to-many for several, and uses a temporary
    key of its own. If the last argument is a KEY, a name or a @GROUP, the files go to those peers, who must run ``dmsg
    receive --listen``.

    \b
    Examples:
      dmsg send film.mkv
      dmsg send notes/ photo.jpg
      dmsg send --text 'the door is open'
      tar c . | dmsg send -
      dmsg send <(tar c .)
      dmsg send notes/ photo.jpg alice
      dmsg send film.mkv @family
      dmsg send --to-many --receivers 3 --expires 1h film.mkv
      dmsg send --lan only film.mkv
    """

    if text is None and not what:
        raise click.UsageError("nothing to send: give FILE..., - for standard input, or --text TEXT")
    if verify:
        check_can_ask()
    if "" in what:
        raise click.UsageError("a FILE argument is empty; perhaps a shell variable is not set")
    members = _members_of(what, without_files=text is not None)
    key = _key_of(what, without_files=text is not None) if members is None else None
    to = members if key is None else key
    if to is not None:
        what = what[:-1]
    _check_code_options(to_many, receivers, expires, by_code=to is None)
    if to is not None:
        check_no_lan("a KEY, a name or a @GROUP")
    missing = next((one for one in what if one != "-" and not os.path.lexists(one)), None)
    if missing is not None:
        raise click.UsageError(f"{missing}: {os.strerror(errno.ENOENT)}")
    if text is not None and what:
        raise click.UsageError("--text and FILE exclude each other")
    if "-" in what and (len(what) > 1 or to is not None):
        raise click.UsageError(
            "standard input (-) can only be sent alone and by a code; to send it to a key, use dmsg nc"
        )
    from dmsg.apps.sources import is_pipe, open_pipe

    pipes = [one for one in what if one != "-" and is_pipe(one)]
    if to_many and (pipes or "-" in what):
        raise click.UsageError("a pipe can only be read once: put its data into a file to send it to many")
    if pipes and (len(what) > 1 or to is not None):
        raise click.UsageError(
            f"{pipes[0]}: a pipe can only be sent alone and by a code; to send it to a key, use dmsg nc"
        )
    if text is not None:
        _check_text(text)
    if to is not None:
        _send_to(what, text, to, hidden, settings, timeout)

    from dmsg.cli.client_run import run
    from dmsg.cli.files.lan_run import with_offer_paths
    from dmsg.cli.files.parcel_factory import InputToSend, TextToSend, files_to_send
    from dmsg.cli.files.send_by_code import send_by_code
    from dmsg.cli.files.send_by_key import transfer_progress

    async def main(reactor: Reactor) -> None:
        progress = transfer_progress()
        if text is not None:
            make: ParcelFactory = TextToSend(progress, text)
        elif what == ("-",):
            make = InputToSend(reactor, progress)
        elif pipes:
            make = InputToSend(reactor, progress, *open_pipe(pipes[0]))
        else:
            make = await files_to_send([Path(one) for one in what], progress, hidden=hidden)

        if lan != "off":
            make.type_there += f" --lan {lan}"

        async def use(client: Client | None, nearby: LanPeer | None) -> None:
            if not to_many:
                await send_by_code(
                    reactor,
                    client,
                    make,
                    words,
                    verify=verify,
                    show_qr=not no_qr,
                    nearby=nearby,
                    expires=expires,
                )
                return
            from dmsg.cli.files.send_to_many import send_to_receivers

            await send_to_receivers(
                reactor,
                client,
                make,
                words,
                receivers=receivers or MAX_RECEIVERS,
                is_limit_only=receivers is None,
                expires=expires,
                verify=verify,
                show_qr=not no_qr,
                nearby=nearby,
            )

        await with_offer_paths(reactor, settings.with_own_key(), lan, use)

    run(main)


def check_no_lan(instead: str) -> None:
    """Check that --lan was not given on the command line, because no code is used.  The configuration file may set it.

    :param instead: what the user has named in place of a code, for the message.
    :raises click.UsageError: --lan was given.
    """
    ctx = click.get_current_context()
    if ctx.params["lan"] != "off" and ctx.get_parameter_source("lan") is ParameterSource.COMMANDLINE:
        raise click.UsageError(f"--lan needs a code, and {instead} does not use one")


def _check_text(text: str) -> None:
    from dmsg.apps.parcels.wire import text_offer
    from dmsg.apps.transfer import TransferError

    try:
        text_offer(text)
    except TransferError as error:
        raise click.UsageError(f"--text: {error}") from None


def _check_code_options(to_many: bool, receivers: int | None, expires: float | None, *, by_code: bool) -> None:
    """Check the options for codes.

    :param by_code: whether a code is used.
    :raises click.UsageError: the options contradict each other, or one of them was given although no code is used.
    """
    if not by_code and (to_many or expires is not None):
        raise click.UsageError("--to-many and --expires need a code; a transfer to KEY, a name or @GROUP has none")
    if to_many and receivers is None and expires is None:
        raise click.UsageError("--to-many needs --receivers N, --expires TIME, or both")
    if receivers is not None and not to_many:
        raise click.UsageError("--receivers needs --to-many")


def _members_of(items: tuple[str, ...], *, without_files: bool) -> dict[str, PubKey] | None:
    """Return the members of the group that the last argument names; None if it does not name a group.

    :param items: arguments of the command.
    :param without_files: whether --text was given, so that the group need not follow a file.
    """
    if len(items) < (1 if without_files else 2) or not items[-1].startswith(GROUP_PREFIX):
        return None
    if Path(items[-1]).exists() and not without_files:
        return None
    try:
        return Groups().peers(items[-1])
    except DmsgError as error:
        raise click.UsageError(f"{items[-1]}: no such file, and no group: {error}") from None


def _key_of(items: tuple[str, ...], *, without_files: bool) -> PubKey | None:
    """Return the key that the last argument names; None if all arguments are files.

    :param items: arguments of the command.
    :param without_files: whether --text was given, so that the key need not follow a file.
    """
    if len(items) < (1 if without_files else 2):
        return None
    last = items[-1]
    if Path(last).exists() and not without_files:
        return None
    try:
        return AddressBook().find(last.removeprefix("dmsg:"))
    except DmsgError as error:
        if Path(last).exists():
            return None
        raise click.UsageError(f"{last}: no such file, and no key: {error}") from None


def _send_to(
    what: tuple[str, ...],
    text: str | None,
    to: PubKey | dict[str, PubKey],
    hidden: bool,
    settings: ClientSettings,
    timeout: float,
) -> NoReturn:
    """Send files or a text to a key, or to the members of a group."""
    for one in what:
        if not Path(one).is_file() and not Path(one).is_dir():
            raise click.UsageError(f"{one}: no such file")

    from dmsg.apps.transfer import TransferError
    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.files.cp_run import check_name
    from dmsg.cli.files.parcel_factory import TextToSend, files_to_send
    from dmsg.cli.files.send_by_code import send_to_key
    from dmsg.cli.files.send_by_key import transfer_progress

    file = Path(what[0]) if len(what) == 1 and Path(what[0]).is_file() else None

    async def main(reactor: Reactor) -> None:
        if file is not None:
            check_name(str(file), file.name, hidden=hidden)
        progress = transfer_progress()
        make: ParcelFactory
        if text is not None:
            make = TextToSend(progress, text)
        else:
            make = await files_to_send([Path(one) for one in what], progress, hidden=hidden)

        async def use(client: Client) -> None:
            if not isinstance(to, PubKey):
                from dmsg.cli.files.send_to_many import send_to_group

                await send_to_group(reactor, client, make, to, timeout)
                return
            try:
                await send_to_key(reactor, client, make, to, timeout)
            except TransferError as error:
                if file is None:
                    raise
                raise TransferError(f"{file} is not sent to {AddressBook().name_or_key(to)}: {error}") from None

        await with_client(reactor, settings, use, peer=to if isinstance(to, PubKey) else None)

    run(main)


@command()
@click.argument("code", nargs=-1, metavar="[CODE]", shell_complete=complete_code)
@click.option("--listen", "-l", is_flag=True, help="Receive what peers send to this key until the command is stopped.")
@click.option(
    "--dir",
    "directory",
    default=".",
    type=DIRECTORY,
    help="Directory for received files; created if its parent exists.",
)
@click.option("--yes", "-y", is_flag=True, help="With a code: receive without asking.")
@click.option("--verify", is_flag=True, help="With a code: show a number to compare with the peer's.")
@click.option("--once", is_flag=True, help="With --listen: exit after the first transfer.")
@click.option("--overwrite", is_flag=True, help="Overwrite existing files.")
@hidden_option
@click.option("--max-size", type=click.IntRange(0), metavar="BYTES", help="Refuse larger files.")
@max_total_option
@accepting_options
@lan_option
@client_options
@timeout_option
def receive(
    code: tuple[str, ...],
    listen: bool,
    directory: Path,
    yes: bool,
    verify: bool,
    once: bool,
    overwrite: bool,
    hidden: bool,
    max_size: int | None,
    max_total: int | None,
    allow: tuple[AllowOption, ...],
    anyone: bool,
    anything: bool,
    lan: str,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Receive what ``dmsg send`` offers by CODE. Without CODE, the command asks for one.

    With --listen, the command prints its key, and receives files, directories and texts from the peers that --allow
    names, or from everybody with --anyone. Data that the sender read from standard input is written to standard output.

    \b
    Examples:
      dmsg receive
      dmsg receive 5274-guitar-alpha-juice --yes --dir inbox
      dmsg receive --listen --allow alice --key-file bob.key --dir inbox
    """

    if listen:
        if code or yes or verify:
            raise click.UsageError(
                "--listen receives files for your key; it cannot be combined with CODE, --yes or --verify"
            )
        check_no_lan("--listen")
        access = Access(allow)
        check_takes(access, anyone=anyone, option="--listen")
        check_offered(directory, any_directory=anything)

        from dmsg.apps.intake import intake_of
        from dmsg.cli.client_run import run, with_client
        from dmsg.cli.files.receive_run import receive_at_key

        async def main(reactor: Reactor) -> None:
            async def use(client: Client) -> None:
                await receive_at_key(
                    reactor,
                    client,
                    access,
                    directory,
                    overwrite=overwrite,
                    hidden=hidden,
                    max_size=max_size,
                    intake=intake_of(reactor, max_total, AddressBook().has_key, anyone=anyone),
                    once=once,
                )

            await with_client(reactor, settings, use, published=True)

        run(main)
    if once or allow or anyone or anything or max_total is not None:
        raise click.UsageError("--once, --allow, --anyone, --anything and --max-total need --listen")
    if verify:
        check_can_ask()
    if code:
        try:
            found = Code.parse(" ".join(code))
        except DmsgError as error:
            raise click.UsageError(str(error)) from None
    elif can_ask():
        found = ask_code()
    else:
        raise click.UsageError(
            "CODE is missing, and standard input is not a terminal; to receive at a key: dmsg receive --listen"
        )
    _receive_code(found, directory, yes, verify, overwrite, hidden, max_size, lan, settings, timeout)


def _receive_code(
    code: Code,
    directory: Path,
    yes: bool,
    verify: bool,
    overwrite: bool,
    hidden: bool,
    max_size: int | None,
    lan: str,
    settings: ClientSettings,
    timeout: float,
) -> NoReturn:
    from dmsg.cli.client_run import run
    from dmsg.cli.files.lan_run import with_agreement
    from dmsg.cli.files.send_by_code import receive_by_code

    async def main(reactor: Reactor) -> None:
        async def use(agreed: CodeAgreement, resume_timeout: float) -> None:
            await receive_by_code(
                reactor,
                agreed,
                resume_timeout,
                directory,
                overwrite=overwrite,
                hidden=hidden,
                max_size=max_size,
                yes=yes,
            )

        await with_agreement(reactor, settings.with_own_key(), lan, code, use, verify=verify, timeout=timeout)

    run(main)
