"""Looks again and again at what is held for others, and knows who stands still: for :mod:`dmsg.memory`."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from typing import Generic, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from dmsg.memory import LOOK_INTERVAL, Memory

WORTH_GIVING_BACK = 32 * 1024 * 1024
"""Bytes by which what is held has to fall before the allocator is asked to give to the system what it keeps."""

_log = Logger()


def _give_back() -> None:
    """What was freed stays with glibc, in pieces below what is in use, until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


Holder = TypeVar("Holder", bound=Hashable)


class Looks(Generic[Holder]):
    """What a source of holdings is built on.

    A source calls :meth:`next_look` before it goes through its holders, then :meth:`still_for` for each.

    :cvar interval: seconds between looks.
    :ivar now: when the look under way began.
    """

    interval = LOOK_INTERVAL

    def __init__(self, reactor: IReactorTime, memory: Memory) -> None:
        self._reactor = reactor
        self._memory = memory
        self.now = 0.0
        self._before: dict[Holder, tuple[object, float]] = {}
        self._moved: dict[Holder, tuple[object, float]] = {}
        self._most = 0
        self._call = LoopingCall(self._look)
        self._call.clock = reactor

    def start(self) -> None:
        """Look from time to time."""
        self._call.start(self.interval, now=False).addErrback(lambda failure: _log.failure("no more looks", failure))

    def stop(self) -> None:
        """Look no more."""
        if self._call.running:
            self._call.stop()

    def given_up(self, count: int) -> None:
        """A look gave up so many holdings, one or more."""

    def _look(self) -> None:
        try:
            given = self._memory.look()
        except Exception:
            _log.failure("what is held could not be seen")
            return
        if given:
            self.given_up(given)
        held = self._memory.total
        self._most = max(self._most, held)
        if held < self._most // 2 and held < self._most - WORTH_GIVING_BACK:
            self._most = held
            _give_back()

    def next_look(self) -> None:
        """Who is not asked about until the next one is forgotten."""
        self.now = self._reactor.seconds()
        self._before, self._moved = self._moved, {}

    def still_for(self, holder: Holder, gone: object) -> float:
        """Seconds since ``gone``, whatever tells how far a holder has come, was last seen to change."""
        last = self._before.get(holder)
        since = last[1] if last is not None and last[0] == gone else self.now
        self._moved[holder] = (gone, since)
        return self.now - since
