"""``dmsg name``."""

from __future__ import annotations

import click

from dmsg.cli.completing import complete_name
from dmsg.cli.options import OneLineGroup
from dmsg.cli.output import say, tell
from dmsg.clients.names import Names
from dmsg.errors import KeyFormatError, WrongUse
from dmsg.keys import PubKey


@click.group(cls=OneLineGroup)
def name() -> None:
    """The address book: names stand wherever a key does.

    \b
    Examples:
      dmsg name add alice akvy...
      dmsg ping alice
    """


@name.command()
@click.argument("new_name", metavar="NAME")
@click.argument("public_key", metavar="PUBLIC_KEY")
@click.option("--replace", is_flag=True, help="The name may stand for another key already.")
def add(new_name: str, public_key: str, replace: bool) -> None:
    """Let NAME stand for PUBLIC_KEY."""
    try:
        key = PubKey.from_text(public_key.removeprefix("dmsg:"))
    except KeyFormatError as error:
        raise WrongUse(str(error)) from None
    Names().add(new_name, key, replace=replace)


@name.command("list")
def list_names() -> None:
    """Show all names."""
    names = Names().all()
    for known, key in sorted(names.items()):
        tell(f"{known} {key.text}", name=known, key=str(key))
    if not names:
        say("there are no names yet", err=True)


@name.command()
@click.argument("known_name", metavar="NAME", shell_complete=complete_name)
def show(known_name: str) -> None:
    """Show the key that NAME stands for."""
    key = Names().find(known_name)
    tell(key.text, key=str(key))


@name.command()
@click.argument("known_name", metavar="NAME", shell_complete=complete_name)
def remove(known_name: str) -> None:
    """Forget NAME."""
    Names().remove(known_name)
