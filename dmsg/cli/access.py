"""Access control of services: which peers may connect to a command's service, and what they may do with a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from dmsg.cli.completion_values import complete_names_or_groups
from dmsg.cli.output import say
from dmsg.clients.groups import allowed_keys
from dmsg.errors import DmsgError
from dmsg.keys import PUBKEY_TEXT_SIZE, PubKey

if TYPE_CHECKING:
    from twisted.internet.interfaces import IAddress

SHOWN_ALLOWED = 5
"""Maximum number of ``--allow`` values that a command prints.  Further values are only counted."""


@dataclass(frozen=True)
class AllowOption:
    """Value of one ``--allow`` option.

    :ivar text: text as the user typed it.
    :ivar keys: keys of the peers that the text names; never empty.
    """

    text: str
    keys: frozenset[PubKey]


class AllowedType(click.ParamType[AllowOption]):
    """Parameter type of ``--allow``: a public key, a name of the address book, or a group with ``@`` before its
    name.
    """

    name = "peers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> AllowOption:
        if isinstance(value, AllowOption):
            return value
        try:
            return AllowOption(str(value), allowed_keys(str(value)))
        except DmsgError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with the typed text, or the groups after ``@``."""
        return complete_names_or_groups(incomplete)


class Access:
    """Predicate that decides whether a peer may reach a service; the service calls it with the peer's address.

    :ivar keys: keys of the allowed peers; None if all peers are allowed.
    """

    def __init__(self, allow: tuple[AllowOption, ...]) -> None:
        self._allow = allow
        self.keys = frozenset(key for one in allow for key in one.keys) if allow else None

    def __call__(self, address: IAddress) -> bool:
        """Whether a peer may reach the service."""
        from dmsg.net.streams.address import DmsgAddress

        return self.keys is None or (isinstance(address, DmsgAddress) and address.public_key in self.keys)

    def is_known(self, key: PubKey) -> bool:
        """Whether the user has named a peer, by ``--allow`` or in the address book.  Any other peer is a stranger."""
        from dmsg.clients.address_book import AddressBook

        return self.keys is not None or AddressBook().has_key(key)

    @property
    def fields(self) -> dict[str, object]:
        """Fields for the JSON output that say which peers may connect."""
        return {"anyone": self.keys is None, "allow": sorted(str(key) for key in self.keys or ())}

    def __str__(self) -> str:
        if self.keys is None:
            return "open to anyone who knows the key; --allow NAME to restrict"
        shown = [one.text if len(one.text) < PUBKEY_TEXT_SIZE else f"{one.text[:8]}..." for one in self._allow]
        del shown[SHOWN_ALLOWED:]
        if len(self._allow) > SHOWN_ALLOWED:
            shown.append(f"{len(self._allow) - SHOWN_ALLOWED} more")
        several = f" ({len(self.keys)} keys)" if len(self.keys) != len(self._allow) else ""
        return f"open to {', '.join(shown)}{several}"

    def show(self) -> None:
        """Print one line that says which peers may connect.  It is printed even with ``--quiet``."""
        say(f"dmsg: {self}", err=True)


def describe_reach(interface: str) -> dict[str, object]:
    """Print who may connect to a local port.  Everybody who connects there acts with this client's key.

    :param interface: address that the port listens on; empty for all addresses.
    :returns: fields for the JSON output, as in :attr:`Access.fields`.
    """
    if is_loopback(interface):
        say("dmsg: open to every program on this machine; such programs act with this key", err=True)
        return {"anyone": False, "allow": []}
    where = interface or "this machine"
    say(
        f"dmsg: open to every machine that can reach {where}; such machines act with this key; "
        "omit --interface to allow only this machine",
        err=True,
    )
    return {"anyone": True, "allow": []}


def is_loopback(interface: str) -> bool:
    """Whether only programs of this machine can connect to a port at this address."""
    try:
        return ip_address(interface).is_loopback
    except ValueError:
        return interface == "localhost"


def _allow(otherwise: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return click.option(
        "--allow",
        multiple=True,
        type=AllowedType(),
        metavar="NAME",
        help=f"Allow only this peer: a name, a key or an @GROUP; repeatable.  {otherwise}",
    )


allow_option = _allow("Default: anyone who knows the key.")
anyone_option = click.option("--anyone", is_flag=True, help="Accept files from anyone who knows the key.")
max_total_option = click.option(
    "--max-total",
    type=click.IntRange(1),
    metavar="BYTES",
    help="With --listen: maximum bytes of all that peers leave here, complete or unfinished, while the command runs.  "
    "With --anyone, peers that are not in the address book get half of it together.  Default with --anyone: 10 GB; "
    "with --allow: no limit.",
)
hidden_option = click.option(
    "--hidden", is_flag=True, help="Include files and directories whose names begin with a dot."
)
anything_option = click.option(
    "--anything", is_flag=True, help="Give peers access even to a home directory, or to a directory that contains one."
)


def accepting_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options --allow, --anyone and --anything to a command that accepts files from peers."""
    return _allow("Accepting files needs --allow or --anyone.")(anyone_option(anything_option(command)))


def check_takes(access: Access, *, anyone: bool, option: str) -> None:
    """Check that the user has said which peers may send files.

    :param access: peers that --allow names.
    :param anyone: whether --anyone was given.
    :param option: name of the option that makes the command accept files, for the message.
    :raises click.UsageError: neither --allow nor --anyone was given, or both.
    """
    if access.keys is None and not anyone:
        raise click.UsageError(
            f"{option} would accept files from anyone who knows the key: "
            "restrict it with --allow NAME, or confirm with --anyone"
        )
    if access.keys is not None and anyone:
        raise click.UsageError("--allow and --anyone exclude each other")


def check_offered(directory: Path, *, any_directory: bool) -> None:
    """Check a directory before peers may read or write its files.

    :param any_directory: whether the directory may be or contain a home directory, because of --anything.
    :raises click.UsageError: the directory cannot be opened, belongs to dmsg itself, or is or contains a home directory
        that is not allowed.
    """
    from dmsg.apps.descriptors import open_within
    from dmsg.apps.exposure import is_home_or_above

    try:
        os.close(open_within(directory, directory))
    except OSError as error:
        raise click.UsageError(f"{directory}: {error.strerror}") from None
    if not any_directory and is_home_or_above(directory):
        raise click.UsageError(
            f"{directory} is a home directory or contains one: choose a directory inside it, or confirm with --anything"
        )
