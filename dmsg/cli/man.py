"""Command ``dmsg man``: prints or writes the manual pages."""

from __future__ import annotations

from pathlib import Path

import click

from dmsg.cli.options import WRITTEN_DIRECTORY, command
from dmsg.cli.output import fail, say, state, tell


@command()
@click.argument("words", nargs=-1, metavar="[COMMAND]...")
@click.option(
    "--write",
    "directory",
    type=WRITTEN_DIRECTORY,
    metavar="DIR",
    help="Write the pages of all commands into DIR, for example ~/.local/share/man/man1.",
)
@click.pass_context
def man(ctx: click.Context, words: tuple[str, ...], directory: Path | None) -> None:
    """Print the manual page of COMMAND, for man(1).

    \b
    Examples:
      dmsg man ping | man -l -
      dmsg man --write ~/.local/share/man/man1
    """
    from dmsg.cli.manual import page, write

    found: click.Command = ctx.find_root().command
    if directory is not None:
        try:
            number = write(found, directory)
        except OSError as error:
            fail(error)
        tell(f"{number} pages in {directory}", pages=number, directory=str(directory))
        return
    for word in words:
        below = found.get_command(ctx, word) if isinstance(found, click.Group) else None
        if below is None:
            raise click.UsageError(f"there is no command {' '.join(words)!r}")
        found = below
    text = page(found, ("dmsg", *words)).rstrip("\n")
    if state.json:
        tell("", command=" ".join(words), page=text)
    else:
        say(text, as_it_is=True)
