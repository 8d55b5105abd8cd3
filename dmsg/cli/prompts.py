"""Questions to the user at the terminal, which do not block the reactor."""

from __future__ import annotations

import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dmsg.cli.output import columns_of_messages, say, state, wrap

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from dmsg.apps.codes.words import Code
    from dmsg.net.reactor import Reactor


def can_ask() -> bool:
    """Whether there is a terminal at which a user can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def check_can_ask() -> None:
    """Check that a user can answer the question of ``--verify``.

    :raises click.UsageError: there is no terminal.
    """
    if not can_ask():
        raise click.UsageError("--verify asks whether two numbers are the same: it needs a terminal")


def ask_code() -> Code:
    """Ask the user for a code until a valid one is typed.  The Tab key completes its words.

    :raises click.UsageError: the input has ended.
    """
    from dmsg.apps.codes.words import Code, CodeError, completions

    # readline writes the prompt to standard output, so it is used only if that is a terminal.
    edited = sys.stdout.isatty() and not state.json
    if edited:
        import readline

        def complete(text: str, number: int) -> str | None:
            found = completions(text)
            return found[number] if number < len(found) else None

        readline.set_completer(complete)
        # Without delimiters, completion treats the whole code as one word.
        readline.set_completer_delims("")
        readline.set_auto_history(False)  # A code is secret, so it must not be in the history.
        libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if libedit else "tab: complete")
        with suppress(AttributeError):
            readline.parse_and_bind("set completion-query-items 20")
    while True:
        try:
            text = _read_line("code: ", edited)
        except EOFError:
            say(err=True)  # At the end of input, the cursor is still on the line of the prompt.
            raise click.UsageError("no CODE was typed") from None
        if not text.strip():
            continue
        try:
            return Code.parse(text)
        except CodeError as error:
            say(f"dmsg: {error}", err=True)


def _read_line(prompt: str, edited: bool) -> str:
    """Print a prompt and read a line.

    :param edited: whether to use readline.
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
    """Ask a yes-or-no question, and return a Deferred that fires with the answer.  Cancelling it withdraws the
    question.

    :param default: answer that an empty line gives.  The end of input means no.
    """
    from dmsg.cli.line_input import LineReader

    choice = "Y/n" if default else "y/N"
    # Text that the user typed before the question appeared is no answer to it, so it is dropped. Dropping fails if
    # standard input is not a terminal.
    with suppress(termios.error, OSError):
        termios.tcflush(0, termios.TCIFLUSH)
    sys.stderr.write(f"{wrap(f'{question} [{choice}]', columns_of_messages() - 1)} ")
    sys.stderr.flush()

    return LineReader(reactor, default).answered
