"""Command ``dmsg pair``: exchanges keys with another person by a code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dmsg.apps.codes.words import Code
from dmsg.cli.client_settings import ClientSettings
from dmsg.cli.completion_values import complete_code, complete_group
from dmsg.cli.options import command
from dmsg.cli.output import say, tell
from dmsg.cli.params import client_options, qr_option, timeout_option, words_option
from dmsg.cli.prompts import check_can_ask
from dmsg.clients.address_book import AddressBook, check_name
from dmsg.clients.groups import GROUP_PREFIX, Groups
from dmsg.errors import DmsgError
from dmsg.keys import load_or_create_key

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.v2019.client import Client


def _with_key(settings: ClientSettings) -> ClientSettings:
    """Return settings with a key file: the user's, or else the default key file.

    :raises click.UsageError: the agent uses another key file, whose path is not known here.
    """
    from dmsg.cli.agent.up_run import default_key_file
    from dmsg.cli.agent_choice import key_in

    if settings.key_file is not None:
        return settings
    agent = settings.agent
    settings = default_key_file(settings)
    if agent is not None and key_in(settings.key_file) != agent.key:
        raise click.UsageError(
            f"the agent's key {agent.key.text} is not the one in {settings.key_file}: name the agent's key file with"
            " --key-file, or use --no-agent"
        )
    return settings


@command()
@click.argument("name")
@click.argument("code", nargs=-1, metavar="[CODE]", shell_complete=complete_code)
@words_option
@click.option("--verify", is_flag=True, help="Show a number to compare with the peer's before keys are exchanged.")
@click.option("--replace", "replaces", is_flag=True, help="Replace the key that NAME stands for.")
@click.option(
    "--group",
    metavar="GROUP",
    shell_complete=complete_group,
    help="Add NAME to this group; a new group is created.",
)
@qr_option
@client_options
@timeout_option
def pair(
    name: str,
    code: tuple[str, ...],
    words: int,
    verify: bool,
    replaces: bool,
    group: str | None,
    no_qr: bool,
    settings: ClientSettings,
    timeout: float,
) -> None:
    """Exchange keys with another person by a code, and store the person's key as NAME.

    Without CODE, the command shows a code; the other person types `dmsg pair`, a name for you, and the code. The
    exchanged key is that of --key-file. Without --key-file, it is the key of `dmsg up`, which is created if it does not
    exist. The connection itself uses temporary keys.

    \b
    Examples:
      dmsg pair bob
      dmsg pair alice 5274-guitar-alpha-juice
      dmsg pair bob --group family
      dmsg pair bob --key-file alice.key
    """

    try:
        name = check_name(name)
        known = AddressBook().all().get(name)
        group = check_name(group.removeprefix(GROUP_PREFIX)) if group is not None else None
        typed = Code.parse(" ".join(code)) if code else None
    except DmsgError as error:
        raise click.UsageError(str(error)) from None
    if verify:
        check_can_ask()
    settings = _with_key(settings)

    from dmsg.apps.codes.pairing import Pairing
    from dmsg.apps.codes.pake import Role
    from dmsg.cli.client_run import run, with_client
    from dmsg.cli.code_display import accept_code, offer_code

    key_file, create = settings.key_file, settings.create
    assert key_file is not None

    async def main(reactor: Reactor) -> None:
        key = load_or_create_key(key_file, create=create)

        async def use(client: Client) -> None:
            if typed is None:
                hint = "dmsg pair NAME"
                agreed = await offer_code(reactor, client, words, hint, verify=verify, show_qr=not no_qr)
            else:
                agreed = await accept_code(reactor, client, typed, verify=verify, timeout=timeout)
            pairing = Pairing(reactor, Role.SENDER if typed is None else Role.RECEIVER, key)
            agreed.proceed(pairing)
            other = await pairing.key
            try:
                AddressBook().add(name, other, replace=replaces)
                if group is not None:
                    Groups().add(group, (name,))
            except DmsgError:
                pairing.refuse("it did not keep the key")
                raise
            pairing.confirm_stored()
            try:
                await pairing.done
            except DmsgError as error:
                say(
                    f"dmsg: this side stored {other.text} as {name}; if the other side has not stored your key, "
                    "pair again",
                    err=True,
                )
                raise error from None
            tell(f"{name} is {other.text}", name=name, key=str(other))

        await with_client(reactor, settings.with_own_key(), use, published=typed is None)

    if known is not None and not replaces:
        raise click.UsageError(
            f"the name {name} already stands for {known.text}: choose another name, or use --replace"
        )
    run(main)
