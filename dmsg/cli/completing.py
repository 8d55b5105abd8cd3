"""What is completed while a command is typed: names, codes, files.

Nothing here is asked of the network, and nothing fails: who presses Tab wants no error.
"""

from __future__ import annotations

from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from dmsg.clients.names import Names
from dmsg.errors import DmsgError

KEY_BEGINS = 2
"""Digits of a key from which on it is completed."""


def names(incomplete: str, after: str = "") -> list[CompletionItem]:
    """Names of the address book, and its keys where one is begun.  :param after: what stands behind each."""
    found = []
    with suppress(DmsgError):
        for name, key in sorted(Names().all().items()):
            if name.startswith(incomplete.lower()):
                found.append(CompletionItem(name + after, help=key.short))
            elif len(incomplete) >= KEY_BEGINS and str(key).startswith(incomplete.lower()):
                found.append(CompletionItem(str(key) + after, help=name))
    return found


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names alone."""
    return names(incomplete)


def complete_path(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files."""
    return [CompletionItem(incomplete, type="file")]


def complete_path_or_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names, or files where no name begins so."""
    return (incomplete and names(incomplete)) or complete_path(ctx, param, incomplete)


def complete_copied(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``NAME:``, or files."""
    return (incomplete and names(incomplete, ":")) or complete_path(ctx, param, incomplete)


def complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Words of the code that is being typed."""
    from dmsg.apps.codes.words import completions

    return [CompletionItem(code) for code in completions(incomplete)]
