"""Command ``dmsg name``: manages the address book and groups."""

from __future__ import annotations

import click

from dmsg.cli.completion_values import complete_group, complete_name
from dmsg.cli.options import OneLineGroup
from dmsg.cli.output import notice, say, tell
from dmsg.clients.address_book import AddressBook
from dmsg.clients.groups import Groups
from dmsg.errors import KeyFormatError, WrongUse
from dmsg.keys import PubKey

RUNNING_COMMANDS_NOTICE = "running commands continue to use the group as it was when they started"
"""End of the notice that is printed when a group loses a member."""


@click.group(cls=OneLineGroup)
def name() -> None:
    """Manage the address book; a name can be used wherever a key is expected.

    \b
    Examples:
      dmsg name add alice akvy...
      dmsg ping alice
    """


@name.command()
@click.argument("new_name", metavar="NAME")
@click.argument("public_key", metavar="PUBLIC_KEY")
@click.option("--replace", is_flag=True, help="Replace the key that NAME stands for.")
def add(new_name: str, public_key: str, replace: bool) -> None:
    """Add NAME for PUBLIC_KEY to the address book."""
    try:
        key = PubKey.from_text(public_key.removeprefix("dmsg:"))
    except KeyFormatError as error:
        raise WrongUse(str(error)) from None
    AddressBook().add(new_name, key, replace=replace)


@name.command("list")
def list_names() -> None:
    """Show all names."""
    names = AddressBook().all()
    for known, key in sorted(names.items()):
        tell(f"{known} {key.text}", name=known, key=str(key))
    if not names:
        say("there are no names yet", err=True)


@name.command()
@click.argument("known_name", metavar="NAME", shell_complete=complete_name)
def show(known_name: str) -> None:
    """Show the key that NAME stands for."""
    key = AddressBook().find(known_name)
    tell(key.text, key=str(key))


@name.command()
@click.argument("known_name", metavar="NAME", shell_complete=complete_name)
def remove(known_name: str) -> None:
    """Remove NAME from the address book and from groups."""
    AddressBook().remove(known_name)
    for one in Groups().forget(known_name):
        notice(f"{known_name} is not in @{one} any more; {RUNNING_COMMANDS_NOTICE}")


@name.group(cls=OneLineGroup)
def group() -> None:
    """Manage groups of peers; @GROUP stands for its members in --allow and in 'dmsg send'.

    \b
    Examples:
      dmsg name group add friends alice bob
      dmsg cp --listen inbox --writable --allow @friends
    """


@group.command("add")
@click.argument("group_name", metavar="GROUP", shell_complete=complete_group)
@click.argument("members", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_name)
def add_to_group(group_name: str, members: tuple[str, ...]) -> None:
    """Add peers, by name or key, to GROUP; a new group is created."""
    Groups().add(group_name, members)


@group.command("list")
def list_groups() -> None:
    """Show all groups and their members."""
    groups = Groups().all()
    for known, members in sorted(groups.items()):
        tell(f"@{known} {' '.join(members)}", group=known, members=list(members))
    if not groups:
        say("there are no groups yet", err=True)


@group.command("remove")
@click.argument("group_name", metavar="GROUP", shell_complete=complete_group)
@click.argument("members", nargs=-1, metavar="[NAME...]", shell_complete=complete_name)
def remove_from_group(group_name: str, members: tuple[str, ...]) -> None:
    """Remove peers from GROUP, or the whole group if no NAME is given."""
    Groups().remove(group_name, members)
    notice(RUNNING_COMMANDS_NOTICE)
