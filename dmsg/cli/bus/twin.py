"""Command ``dmsg twin``: creates and shows twins of the message bus."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dmsg.cli.options import WrittenPath, group
from dmsg.cli.output import say, state, tell
from dmsg.errors import DmsgError
from dmsg.rmb.twins.identity import KEY_TYPES, parse_account
from dmsg.rmb.twins.secrets import SECRET, TwinSecret, read_secret, write_secret

if TYPE_CHECKING:
    from dmsg.net.reactor import Reactor
    from dmsg.rmb.twins.twin import Twin


def _registry(ctx: click.Context, param: click.Parameter, value: str) -> str:
    from dmsg.rmb.registry.service import check_registry

    try:
        return check_registry(value)
    except DmsgError as error:
        raise click.BadParameter(str(error)) from None


registry_option = click.option(
    "--registry",
    "-R",
    required=True,
    envvar="RMB_REGISTRY",
    metavar="URL",
    callback=_registry,
    help="Registry: http://HOST:PORT of an rmb-registry, or file:PATH.  Environment: RMB_REGISTRY.",
)
key_option = click.option(
    "--key-file",
    "-k",
    envvar="RMB_KEY_FILE",
    metavar="FILE",
    help=f"File with the twin's secret.  Environment: RMB_KEY_FILE, or the words themselves in {SECRET}.",
)


def relay_name(text: str) -> str:
    """Return a relay's name as the registry stores it.

    :param text: the name itself, or the URL of the relay's websocket.
    :raises ValueError: the text is neither.
    """

    from dmsg.rmb.twins.twin import check_relay, relay_of_websocket

    return relay_of_websocket(text) if text.startswith(("ws:", "wss:")) else check_relay(text)


def _relays(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(relay_name(value) for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


relay_option = click.option(
    "--relay",
    multiple=True,
    callback=_relays,
    metavar="RELAY",
    help="Domain or URL of a relay through which the twin is reached; repeatable.",
)


@group()
def twin() -> None:
    """Create, show and change twins of the message bus.

    \b
    Examples:
      dmsg twin create alice.twin -R http://127.0.0.1:9091
      dmsg twin list -R http://127.0.0.1:9091
    """


def _show(twin: Twin) -> None:
    from dmsg.cli.screen import Screen

    if state.json:
        say(json.dumps(twin.as_dict()))
        return
    console = Screen(highlight=False, soft_wrap=True)
    console.print(f"twin     {twin.id}")
    console.print(f"account  {twin.address}")
    console.print(f"relays   {', '.join(sorted(twin.relays - {''})) or '(none)'}")
    console.print(f"key      {twin.pk.hex() if twin.pk else '(none: messages to it are not encrypted)'}")
    console.print(f"strict   {'yes' if twin.strict else 'no'}")
    console.print(f"counter  {twin.counter}")


@twin.command()
@click.argument("file", type=WrittenPath(dir_okay=False))
@registry_option
@relay_option
@click.option(
    "--key-type",
    type=click.Choice(KEY_TYPES, case_sensitive=False),
    default="sr25519",
    show_default=True,
    help="Kind of key to create.",
)
@click.option(
    "--words", type=click.Choice(["12", "24"]), default="12", show_default=True, help="Number of words in a new secret."
)
def create(file: str, registry: str, relay: tuple[str, ...], key_type: str, words: str) -> None:
    """Create a twin: write a new secret to FILE (mode 0600), register it and print its number.

    If FILE exists, register its secret.
    """

    from mnemonic import Mnemonic

    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        try:
            secret = read_secret(file)
        except DmsgError as error:
            if "No such file" not in str(error):
                raise
            strength = {"12": 128, "24": 256}[words]
            secret = TwinSecret(Mnemonic("english").generate(strength), key_type)
            write_secret(file, secret)
        number = await _put(reactor, registry, secret, relay)
        tell(str(number), twin=number)

    run(main)


async def _put(reactor: Reactor, registry: str, secret: TwinSecret, relays: tuple[str, ...]) -> int:
    from dmsg.rmb.errors import RegistryRefused, TwinNotFound
    from dmsg.rmb.registry.service import open_registry
    from dmsg.rmb.session.participant import encryption_of
    from dmsg.rmb.twins.twin import Twin

    twins = open_registry(registry, reactor)
    try:
        identity = secret.identity()
        try:
            current: Twin | None = await twins.get(await twins.id_by_account(identity.account))
        except TwinNotFound:
            current = None
        if current is not None and not relays:
            raise RegistryRefused(f"this secret belongs to twin {current.id} already")
        encryption = encryption_of(secret.secret)
        statement = Twin(
            0,
            identity.account,
            "_".join(sorted(set(relays))) or None,
            None if encryption is None else encryption.pk,
            False,
            1 if current is None else current.counter + 1,
        )
        stored: Twin = await twins.put(statement.sign(identity))
        return stored.id
    finally:
        await twins.close()


@twin.command(name="list")
@registry_option
def list_twins(registry: str) -> None:
    """Show all twins."""
    from rich.table import Table

    from dmsg.cli.client_run import run
    from dmsg.cli.screen import Screen, print_table
    from dmsg.rmb.registry.service import open_registry

    async def main(reactor: Reactor) -> None:
        twins = open_registry(registry, reactor)
        table = Table("twin", "account", "relays", "key", "strict", box=None, header_style="bold")
        after = 0
        try:
            while page := await twins.twins(after, 1000):
                for one in page:
                    if state.json:
                        say(json.dumps(one.as_dict()))
                        continue
                    table.add_row(
                        str(one.id),
                        one.address,
                        ", ".join(sorted(one.relays - {""})) or "-",
                        one.pk.hex()[:16] + "..." if one.pk else "-",
                        "yes" if one.strict else "no",
                    )
                after = page[-1].id
        finally:
            await twins.close()
        if not table.row_count:
            if not after:
                say("there are no twins yet", err=True)
            return
        console = Screen(highlight=False)
        if not console.is_terminal:
            console.width = 200  # Lines are not wrapped, because programs that read the table need whole lines.
        print_table(console, table)

    run(main)


@twin.command()
@click.argument("who", metavar="TWIN|ACCOUNT|FILE")
@registry_option
def show(who: str, registry: str) -> None:
    """Show one twin: by its number, its account, or the file of its secret."""

    from dmsg.cli.client_run import run
    from dmsg.rmb.errors import RmbError
    from dmsg.rmb.registry.service import open_registry

    async def main(reactor: Reactor) -> None:
        twins = open_registry(registry, reactor)
        try:
            if who.isascii() and who.isdigit() and len(who) < 11:
                number = int(who)
            else:
                try:
                    account = parse_account(who)
                except RmbError:
                    account = read_secret(who).identity().account
                number = await twins.id_by_account(account)
            _show(await twins.get(number))
        finally:
            await twins.close()

    run(main)


@twin.command(name="set")
@registry_option
@key_option
@relay_option
@click.option(
    "--strict/--no-strict",
    default=None,
    help="Declare in the registry that all programs of this twin add the strict signature, which covers all fields of "
    "a message with their lengths; receivers then refuse messages of this twin without it.",
)
@click.option(
    "--no-encryption",
    is_flag=True,
    help="Remove the encryption key from the registry; messages to this twin are then not encrypted.",
)
def set_twin(
    registry: str, key_file: str | None, relay: tuple[str, ...], strict: bool | None, no_encryption: bool
) -> None:
    """Change the relays or keys of a twin; the change is signed with the twin's secret."""

    from dmsg.cli.client_run import run
    from dmsg.rmb.registry.service import open_registry
    from dmsg.rmb.session.participant import encryption_of

    async def main(reactor: Reactor) -> None:
        secret = read_secret(key_file)
        twins = open_registry(registry, reactor)
        try:
            identity, encryption = secret.identity(), encryption_of(secret.secret)
            current: Twin = await twins.get(await twins.id_by_account(identity.account))
            statement = replace(
                current,
                relay="_".join(sorted(set(relay))) if relay else current.relay,
                pk=None if no_encryption or encryption is None else encryption.pk,
                strict=current.strict if strict is None else strict,
                counter=current.counter + 1,
            )
            _show(await twins.put(statement.sign(identity)))
        finally:
            await twins.close()

    run(main)
