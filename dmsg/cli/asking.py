"""A question to the person at the terminal, while everything else goes on."""

from __future__ import annotations

import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred


def can_ask() -> bool:
    """Whether there is somebody who could answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def check_can_ask() -> None:
    """:raises click.UsageError: ``--verify`` asks, and nobody could answer."""
    if not can_ask():
        raise click.UsageError("--verify asks whether two numbers are the same: it needs a terminal")


def ask(reactor: Any, question: str, *, default: bool) -> Deferred[bool]:
    """Ask, and wait for a line; an empty one is ``default``, the end of input is a no.

    Cancelling takes the question back.
    """
    from dmsg.cli.answering import Line

    with suppress(termios.error, OSError):  # no terminal
        # what was typed before is no answer to what nobody had seen
        termios.tcflush(0, termios.TCIFLUSH)
    sys.stderr.write(f"{question} [{'Y/n' if default else 'y/N'}] ")
    sys.stderr.flush()

    return Line(reactor, default).answered
