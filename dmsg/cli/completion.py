"""Command ``dmsg completion``: prints scripts for shell completion."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from dmsg.cli.options import command
from dmsg.cli.output import say

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DMSG_COMPLETE"
"""Environment variable with which the completion script calls dmsg. click derives this name from the program's name."""

PATCHES = {
    "bash": (
        (
            '    response=$(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD ',
            # Bash splits @friends into the words @ and friends, so they are joined again.
            "    local word words=()\n"
            '    for word in "${COMP_WORDS[@]:0:COMP_CWORD+1}"; do\n'
            "        if [[ ${#words[@]} -gt 0 && ${words[-1]} == @ ]]; then\n"
            "            words[-1]=@$word\n"
            "        else\n"
            '            words+=("$word")\n'
            "        fi\n"
            "    done\n"
            '    response=$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]} - 1)) ',
        ),
        # If a completion ends with a dash or a colon, no blank is added after it, because more text must follow.
        (
            "    done\n\n    return 0\n",
            "    done\n\n"
            "    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[-:] ]] && compopt -o nospace 2>/dev/null\n\n"
            "    return 0\n",
        ),
    ),
    "zsh": (
        (
            "        compadd -U -V unsorted -a completions\n",
            "        if [[ ${completions[1]} == *- ]]; then\n"
            "            compadd -U -V unsorted -S '' -a completions\n"
            "        else\n"
            "            compadd -U -V unsorted -a completions\n"
            "        fi\n",
        ),
    ),
}
"""Replacements in click's completion scripts, by shell: pairs of old and new text."""


@command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the script with which SHELL completes commands, options, names, codes and files.

    SHELL defaults to your login shell.

    \b
    Examples:
      dmsg completion bash > ~/.local/share/bash-completion/completions/dmsg
      dmsg completion zsh > ~/.zfunc/_dmsg
      dmsg completion fish > ~/.config/fish/completions/dmsg.fish
    """

    if shell is None:
        shell = os.path.basename(os.environ.get("SHELL", ""))
        if shell not in SHELLS:
            raise click.UsageError(f"name the shell, one of {', '.join(SHELLS)}")
    found = get_completion_class(shell)
    assert found is not None
    source = found(ctx.find_root().command, {}, "dmsg", VARIABLE)
    # click's method source() would also run bash to find out its version, so the script is formatted here.
    say(_patched(shell, source.source_template % source.source_vars()), as_it_is=True)


def _patched(shell: str, script: str) -> str:
    """Return a completion script of click with the replacements of :data:`PATCHES`."""
    for before, after in PATCHES.get(shell, ()):
        if before not in script:
            raise RuntimeError(
                f"click's completion script for {shell} has changed: this version of click is not supported"
            )
        script = script.replace(before, after)
    return script
