"""Values that shell completion suggests: names, codes, files.

Completion sends no request to the network, and ignores all errors, because a user who presses Tab expects none.
"""

from __future__ import annotations

from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from dmsg.clients.address_book import AddressBook
from dmsg.clients.groups import GROUP_PREFIX, Groups
from dmsg.errors import DmsgError

KEY_BEGINS = 2
"""Minimum number of hexadecimal digits of a key that the user must type before the key is suggested."""
KEY_TEXT_BEGINS = 4
"""Minimum number of characters of a key in its text form that the user must type before the key is suggested."""


def complete_names(incomplete: str, after: str = "") -> list[CompletionItem]:
    """Return the names of the address book that begin with the typed text.  If the text is the beginning of a key,
    return also the keys in the address book that begin with it.

    :param after: text to append to each completion.
    """
    found = []
    with suppress(DmsgError):
        for name, key in sorted(AddressBook().all().items()):
            if name.startswith(incomplete.lower()):
                found.append(CompletionItem(name + after, help=key.short))
            elif len(incomplete) >= KEY_BEGINS:
                # The beginning of a key's text form may also be the beginning of a name, so names are always searched
                # as well.
                forms = (str(key), key.text) if len(incomplete) >= KEY_TEXT_BEGINS else (str(key),)
                found += [CompletionItem(one + after, help=name) for one in forms if one.startswith(incomplete.lower())]
    return found


def complete_groups(incomplete: str) -> list[CompletionItem]:
    """Return the groups of the address book that begin with the typed text, which begins with ``@``."""
    begun = incomplete.removeprefix(GROUP_PREFIX).lower()
    with suppress(DmsgError):
        found = [(name, members) for name, members in sorted(Groups().all().items()) if name.startswith(begun)]
        return [CompletionItem(GROUP_PREFIX + name, help=" ".join(members)) for name, members in found]
    return []


def complete_names_or_groups(incomplete: str) -> list[CompletionItem]:
    """Return the groups that begin with the typed text if it begins with ``@``, else the names."""
    return complete_groups(incomplete) if incomplete.startswith(GROUP_PREFIX) else complete_names(incomplete)


def complete_networks(incomplete: str) -> list[CompletionItem]:
    """Return the joined networks whose names begin with the typed text."""
    from dmsg.cli.networks import joined_networks

    with suppress(DmsgError):
        found = joined_networks().values()
        return [CompletionItem(one.name, help=one.discovery) for one in found if one.name.startswith(incomplete)]
    return []


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of the address book that begin with the typed text."""
    return complete_names(incomplete)


def complete_group(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the groups that begin with the typed text.  They have an ``@`` if the user typed one."""
    found = complete_groups(incomplete)
    return (
        found
        if incomplete.startswith(GROUP_PREFIX)
        else [CompletionItem(one.value[1:], help=one.help) for one in found]
    )


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete a file name."""
    return [CompletionItem(incomplete, type="file")]


def complete_path_or_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names or groups that begin with the typed text.  If there are none, let the shell complete a file
    name.
    """
    return (incomplete and complete_names_or_groups(incomplete)) or complete_path(ctx, param, incomplete)


def complete_copied(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names that begin with the typed text, each with a colon.  If there are none, let the shell complete a
    file name.
    """
    return (incomplete and complete_names(incomplete, ":")) or complete_path(ctx, param, incomplete)


def complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the possible completions of a code whose last word is incomplete."""
    from dmsg.apps.codes.words import completions

    return [CompletionItem(code) for code in completions(incomplete)]
