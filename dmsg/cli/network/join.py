"""Commands ``dmsg join`` and ``dmsg leave``: use a network that another person runs, or stop using it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from dmsg.cli.config_file import NETWORKS, config_path
from dmsg.cli.config_writer import change_settings
from dmsg.cli.networks import NoSuchNetwork, joined_networks
from dmsg.cli.options import command
from dmsg.cli.output import fail, notice, tell
from dmsg.cli.params import proxy_option
from dmsg.errors import DmsgError, EntryNotFound, WrongUse

if TYPE_CHECKING:
    from dmsg.clients.invitations import Invitation
    from dmsg.net.reactor import Reactor


class _NameTaken(WrongUse):
    """Error: the user has joined another network under this name."""


class OtherNetwork(DmsgError):
    """Error: discovery does not know the server of the invitation."""


@command()
@click.argument("invitation", nargs=-1, required=True)
@click.option(
    "--name",
    help="Name by which you will call the network, as in --network NAME.  Default: the name in the invitation.",
)
@proxy_option
@click.option(
    "--no-check", is_flag=True, help="Join without the check that discovery has the entry of the invited server."
)
def join(invitation: tuple[str, ...], name: str | None, no_check: bool) -> None:
    """Join the network of an invitation that 'dmsg host' has printed.

    You can then use the network's name wherever a command accepts the URL of a discovery. The first network that you
    join becomes the default. Before joining, the command checks that the network's discovery has the entry of the
    invited server. The check finds typing mistakes, and addresses that now belong to another network.

    \b
    Examples:
      dmsg join dmsg1aacmwad...
      dmsg join dmsg1aacmwad... --name work
      dmsg send photo.jpg --network work
    """
    from dmsg.clients.address_book import check_name
    from dmsg.clients.invitations import parse_invitation

    try:
        found = parse_invitation(_without_command(invitation))
        name = check_name(name) if name is not None else found.name
        _check_free(name, found)
    except DmsgError as error:
        fail(error)
    if no_check:
        _write(name, found)
        return

    from dmsg.cli.client_run import run

    async def main(reactor: Reactor) -> None:
        await _check(reactor, found)
        _write(name, found)

    run(main)


def _without_command(words: tuple[str, ...]) -> str:
    """Return the invitation in the arguments.  People paste the whole line, so the words ``dmsg join`` are removed."""
    split = " ".join(words).split()
    while split and split[0].lower() in ("$", "dmsg", "join"):
        del split[0]
    return "".join(split)


def _check_free(name: str, invitation: Invitation, content: dict[str, object] | None = None) -> None:
    known = joined_networks(content).get(name)
    if known is not None and known.discovery != invitation.discovery:
        raise _NameTaken(
            f"a network {name} was joined already, with discovery {known.discovery}; leave it (dmsg leave {name}), or "
            f"join this one by another --name"
        )


async def _check(reactor: Reactor, invitation: Invitation) -> None:
    """Check that the network's discovery has the entry of the server in the invitation.

    :raises DmsgError: discovery does not answer, or does not have the entry.
    """
    from dmsg.discovery.lookup.lookup import Lookup

    try:
        await Lookup(reactor, invitation.discovery).entry(invitation.server)
    except EntryNotFound:
        raise OtherNetwork(
            f"the discovery at {invitation.discovery} does not know the server of this invitation: another network has "
            "this address now, or the server was never up (--no-check joins all the same)"
        ) from None


def _write(name: str, invitation: Invitation) -> None:
    before: object = None

    def choose(content: dict[str, object]) -> dict[str, object]:
        nonlocal before
        # Another program may have taken the name since the first check.
        _check_free(name, invitation, content)
        before = content.get("discovery")
        default = {"discovery": name} if before is None else {}
        return {
            f"{NETWORKS}.{name}.discovery": invitation.discovery,
            f"{NETWORKS}.{name}.server": invitation.server.text,
            **default,
        }

    try:
        change_settings(choose)
    except DmsgError as error:
        fail(error)
    is_default = before in (None, name)
    tell(f"joined {name}: {invitation.discovery}", joined=name, discovery=invitation.discovery, default=is_default)
    if not is_default:
        notice(
            f"use it with --network {name}; {before} stays the default (dmsg config set discovery {name} changes it)"
        )
    elif os.environ.get("DMSG_DISCOVERY"):
        notice(f"DMSG_DISCOVERY is set and overrides {config_path()}: unset it, or use --network {name}")


@command()
@click.argument("name", shell_complete=lambda ctx, param, incomplete: _complete(incomplete))
def leave(name: str) -> None:
    """Remove the joined network NAME from your settings. The network itself is not contacted.

    \b
    Example:
      dmsg leave work
    """
    was_default = False

    def choose(content: dict[str, object]) -> dict[str, object]:
        nonlocal was_default
        network = joined_networks(content).get(name)
        if network is None:
            known = ", ".join(sorted(joined_networks(content))) or "none"
            raise NoSuchNetwork(f"there is no network {name[:80]!r} (joined: {known})")
        names = [f"{NETWORKS}.{name}.discovery", *([f"{NETWORKS}.{name}.server"] if network.server else [])]
        was_default = content.get("discovery") == name
        return dict.fromkeys(names + (["discovery"] if was_default else []))

    try:
        change_settings(choose)
    except DmsgError as error:
        fail(error)
    tell(f"left {name}", left=name, default=was_default)
    others = sorted(joined_networks().keys() - {name})
    if was_default and others:
        notice(f"no network is the default now; dmsg config set discovery {others[0]} makes {others[0]} the default")


def _complete(incomplete: str) -> list[click.shell_completion.CompletionItem]:
    from dmsg.cli.completion_values import complete_networks

    return complete_networks(incomplete)
