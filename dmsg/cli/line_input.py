"""Reading of an answer from the terminal, without blocking the reactor."""

from __future__ import annotations

import os
import sys

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.cli.output import say, state
from dmsg.net.reactor import Reactor

ANSWER_LIMIT = 1024
"""Maximum bytes of an answer."""


@implementer(IReadDescriptor)
class LineReader:
    """Reader of the user's answer to a yes-or-no question: one line of standard input.

    :param default: answer that an empty line gives.
    :ivar answered: Deferred that fires with True for yes and False for no.
    """

    def __init__(self, reactor: Reactor, default: bool) -> None:
        self._reactor = reactor
        self._default = default
        self.answered: Deferred[bool] = Deferred(lambda _: self._withdraw())
        reactor.addReader(self)

    def fileno(self) -> int:
        return 0

    def logPrefix(self) -> str:
        return "question"

    def doRead(self) -> None:
        try:
            # One read is enough, because a terminal returns one line at a time.
            data = os.read(0, ANSWER_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        text = data.split(b"\n")[0].strip().lower()
        if text not in (b"", b"y", b"yes", b"n", b"no"):
            sys.stderr.write("yes or no? ")
            sys.stderr.flush()
            return
        self._end()
        if not data:
            # At the end of input, the cursor is still on the line of the question.
            say(err=True)
        self.answered.callback(bool(data) and (text in (b"y", b"yes") or (not text and self._default)))

    def connectionLost(self, reason: Failure) -> None:
        self._end()
        if not self.answered.called:
            self.answered.callback(False)

    def _withdraw(self) -> None:
        self._end()
        if not state.interrupted:
            # The cursor is still on the line of the question. A message that says why the question is withdrawn
            # follows, and needs a line of its own.
            say(err=True)

    def _end(self) -> None:
        self._reactor.removeReader(self)
