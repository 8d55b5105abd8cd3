"""``dmsg completion``."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from dmsg.cli.options import command
from dmsg.cli.output import say

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DMSG_COMPLETE"
"""By which a shell asks; click's own choice for a program of this name."""


@command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print what makes a SHELL complete commands, options, names, codes and files.

    Without SHELL it is the one that you use.

    \b
    Examples:
      dmsg completion bash > ~/.local/share/bash-completion/completions/dmsg
      dmsg completion zsh > ~/.zfunc/_dmsg
      dmsg completion fish > ~/.config/fish/completions/dmsg.fish
    """

    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in SHELLS:
            raise click.UsageError(f"which shell?  One of {', '.join(SHELLS)}")
    found = get_completion_class(shell)
    assert found is not None
    source = found(ctx.find_root().command, {}, "dmsg", VARIABLE)
    # as click's own source(), which asks the bash that is installed how old it is
    say(source.source_template % source.source_vars(), as_it_is=True)
