"""A question to the person at the terminal, while everything else goes on."""

from __future__ import annotations

import os
import sys
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.output import say

ANSWER_LIMIT = 1024
"""Bytes of a line that is looked at."""


def can_ask() -> bool:
    """Whether there is somebody who could answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(reactor: Any, question: str, *, default: bool) -> Deferred[bool]:
    """Ask, and wait for a line; an empty one is ``default``, the end of input is a no.

    Cancelling takes the question back.
    """
    sys.stderr.write(f"{question} [{'Y/n' if default else 'y/N'}] ")
    sys.stderr.flush()
    return _Line(reactor, default).answered


@implementer(IReadDescriptor)
class _Line:
    """One line of standard input; what stands behind it is left to who reads next."""

    def __init__(self, reactor: Any, default: bool) -> None:
        self._reactor = reactor
        self._default = default
        self.answered: Deferred[bool] = Deferred(lambda _: self._end())
        reactor.addReader(self)

    def fileno(self) -> int:
        return 0

    def logPrefix(self) -> str:
        return "question"

    def doRead(self) -> None:
        try:
            # a terminal gives one line at a time
            data = os.read(0, ANSWER_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._end()
        if not data:
            say(err=True)  # the cursor is behind the question
        text = data.split(b"\n")[0].strip().lower()
        self.answered.callback(bool(data) and ((not text and self._default) or text in (b"y", b"yes")))

    def connectionLost(self, reason: Failure) -> None:
        self._end()
        if not self.answered.called:
            self.answered.callback(False)

    def _end(self) -> None:
        self._reactor.removeReader(self)
