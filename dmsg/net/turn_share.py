"""Sharing a turn of the reactor: nobody keeps the others waiting for longer than his part of it.

What a read costs depends on what is in it: 64 KiB may be one frame, or thirteen
thousand.  So the time that goes into the reads of each *owner*, a block of
addresses, is measured, and that of the wider blocks around it, whose part is as many times as large as
their factor (:mod:`dmsg.net.blocks`).  Who has used his part of a turn waits for the next
one, with what he has sent; then those who waited longest come first.  When
nobody else has anything to do, the next turn is there at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from dmsg.net.blocks import LEAST_FACTOR, blocks_of
from dmsg.net.isolate import isolated

TURN = 0.008
"""Seconds that the owners have between them in one turn."""
MOST = 0.002
"""Seconds of one owner, at most, however few there are."""
LEAST = 0.0002
"""Seconds of one owner, at least, however many there are; what is begun is finished."""
STEPS = 256
"""Frames of one read that are handled one by one; the rest comes again in the next turn."""
FRAMES = 1024
"""Frames of one read that a client takes; the rest comes again in the next turn."""


class Waiting(Protocol):
    """Something that has received more than it may handle in this turn."""

    def go_on(self) -> None:
        """The next turn is there."""


class Share:
    """Who has used how much of the present turn.

    :ivar waited: how often somebody had to wait for the next turn.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self.now = reactor.seconds
        self._began = self.now()
        self._used: dict[Hashable, float] = {}
        self._around: dict[str, float] = {}
        self._most_around = 0.0
        self._part = MOST
        self._waiting: deque[Waiting] = deque()
        self._is_due = False
        self._is_used = False
        self.waited = 0

    def allows(self, owner: Hashable) -> bool:
        """Whether there is something left for ``owner`` in this turn."""
        if self._most_around < self._part * LEAST_FACTOR:  # no block around anybody has used up its part
            return self._used.get(owner, 0.0) < self._part
        return self.left(owner) > 0.0

    def left(self, owner: Hashable) -> float:
        """Seconds that ``owner`` may still use in this turn: who works frame by frame looks at the clock after each."""
        left = self._part - self._used.get(owner, 0.0)
        if self._around and isinstance(owner, str):
            for name, factor in blocks_of(owner)[1:]:
                left = min(left, self._part * factor - self._around.get(name, 0.0))
        return left

    def used(self, owner: Hashable, seconds: float) -> None:
        """So much went into a read of ``owner``."""
        self._is_used = True
        if not self._is_due:
            # nobody asked for the next turn, so nobody says when it begins
            now = self.now()
            if not 0.0 <= now - self._began < TURN:
                self._next(now)
        self._used[owner] = self._used.get(owner, 0.0) + seconds
        if isinstance(owner, str):
            for name, _ in blocks_of(owner)[1:]:
                around = self._around[name] = self._around.get(name, 0.0) + seconds
                self._most_around = max(self._most_around, around)

    def wait(self, one: Waiting) -> None:
        """Tell ``one`` in the next turn to go on."""
        if not self._is_due:
            self._is_due = True
            self._reactor.callLater(0, self._run)
        self._waiting.append(one)
        self.waited += 1

    def _next(self, now: float) -> None:
        self._began = now
        self._part = min(MOST, max(LEAST, TURN / max(1, len(self._used))))
        self._used.clear()
        self._around.clear()
        self._most_around = 0.0

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._is_due = False
        self._next(self.now())
        passed_over: list[Waiting] = []
        for one in waiting:
            self._is_used = False
            isolated(one.go_on)
            if not self._is_used and self._waiting and self._waiting[-1] is one:
                # another connection of its owner has used this turn: behind that one it would wait for ever
                passed_over.append(self._waiting.pop())
        self._waiting.extendleft(reversed(passed_over))
