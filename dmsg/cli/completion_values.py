"""Values that shell completion offers: names, codes, files.

Nothing here is asked of the network, and nothing fails: who presses Tab wants no error.
"""

from __future__ import annotations

from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from dmsg.clients.address_book import AddressBook
from dmsg.errors import DmsgError

KEY_BEGINS = 2
"""Digits of a key in hexadecimal from which on it is completed."""
KEY_TEXT_BEGINS = 4
"""Characters of a key's own text from which on it is completed."""


def complete_names(incomplete: str, after: str = "") -> list[CompletionItem]:
    """Names of the address book, and its keys where one is begun.  :param after: what stands behind each."""
    found = []
    with suppress(DmsgError):
        for name, key in sorted(AddressBook().all().items()):
            if name.startswith(incomplete.lower()):
                found.append(CompletionItem(name + after, help=key.short))
            elif len(incomplete) >= KEY_BEGINS:
                # The text of a key may begin like a name.
                forms = (str(key), key.text) if len(incomplete) >= KEY_TEXT_BEGINS else (str(key),)
                found += [CompletionItem(one + after, help=name) for one in forms if one.startswith(incomplete.lower())]
    return found


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names alone."""
    return complete_names(incomplete)


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files."""
    return [CompletionItem(incomplete, type="file")]


def complete_path_or_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names, or files where no name begins so."""
    return (incomplete and complete_names(incomplete)) or complete_path(ctx, param, incomplete)


def complete_copied(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``NAME:``, or files."""
    return (incomplete and complete_names(incomplete, ":")) or complete_path(ctx, param, incomplete)


def complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Words of the code that is being typed."""
    from dmsg.apps.codes.words import completions

    return [CompletionItem(code) for code in completions(incomplete)]
