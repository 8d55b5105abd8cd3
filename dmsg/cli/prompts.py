"""Questions to the user at the terminal, asked without blocking the reactor."""

from __future__ import annotations

import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dmsg.cli.output import say, state

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from dmsg.apps.codes.words import Code
    from dmsg.net.reactor import Reactor


def can_ask() -> bool:
    """Whether a user can answer questions."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def check_can_ask() -> None:
    """Check that a user can answer the question of ``--verify``.

    :raises click.UsageError: no user can answer.
    """
    if not can_ask():
        raise click.UsageError("--verify asks whether two numbers are the same: it needs a terminal")


def ask_code() -> Code:
    """Ask for a code at the terminal, with completion of its words, until a valid one is typed.

    :raises click.UsageError: the input has ended.
    """
    from dmsg.apps.codes.words import Code, CodeError, completions

    # Standard output is redirected meanwhile, because readline would write the prompt among the results.
    edited = sys.stdout.isatty() and not state.json
    if edited:
        import readline

        def complete(text: str, number: int) -> str | None:
            found = completions(text)
            return found[number] if number < len(found) else None

        readline.set_completer(complete)
        # No character separates words, so that completion treats the whole code as one word.
        readline.set_completer_delims("")
        readline.set_auto_history(False)  # The code is removed from the history, because it is secret.
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        with suppress(AttributeError):
            readline.parse_and_bind("set completion-query-items 20")
    while True:
        try:
            text = _read_line("code: ", edited)
        except EOFError:
            raise click.UsageError("no CODE was typed") from None
        if not text.strip():
            continue
        try:
            return Code.parse(text)
        except CodeError as error:
            say(f"dmsg: {error}", err=True)


def _read_line(prompt: str, edited: bool) -> str:
    """Read a line.

    :raises EOFError: the input has ended.
    """
    if edited:
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def ask(reactor: Reactor, question: str, *, default: bool) -> Deferred[bool]:
    """Ask a yes-or-no question and wait for a line; an empty one means ``default``, and the end of input means no.

    Cancelling withdraws the question.
    """
    from dmsg.cli.line_input import LineReader

    with suppress(termios.error, OSError):  # The error is ignored, because the input may be no terminal.
        # Pending input is dropped, because text that was typed before the question appeared is no answer to it.
        termios.tcflush(0, termios.TCIFLUSH)
    sys.stderr.write(f"{question} [{'Y/n' if default else 'y/N'}] ")
    sys.stderr.flush()

    return LineReader(reactor, default).answered
