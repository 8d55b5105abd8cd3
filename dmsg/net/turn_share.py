"""Fair division of the time of a reactor turn, so that no owner of connections keeps the others waiting.

The cost of a read depends on its content: 64 KiB may be one frame or thirteen thousand. So time is measured. Each
*owner*, such as an address block, has a share of the turn's time.  A wider block has a share that is its factor times
as large (:mod:`dmsg.net.blocks`). An owner that has used up its share waits for the next turn, with the data received
so far. In the next turn, the owners that have waited longest come first. When nobody else has work, the next turn
begins at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Protocol

from twisted.internet.interfaces import IReactorTime

from dmsg.net.blocks import LEAST_FACTOR, blocks_of
from dmsg.net.isolate import call_isolated

TURN = 0.008
"""Seconds that all owners together have in one turn."""
MOST = 0.002
"""Maximum seconds of one owner in a turn, even if there are few owners."""
LEAST = 0.0002
"""Minimum seconds of one owner in a turn, even if there are many owners.  A piece of work that has begun is finished
even if it takes longer."""
STEPS = 256
"""Maximum number of frames of one read that a server handles one by one; the rest is offered again in the next turn."""
FRAMES = 1024
"""Maximum number of frames of one read that a client handles; the rest is offered again in the next turn."""


class TurnWaiter(Protocol):
    """Interface of a receiver that waits for the next turn, because it has more data than it may handle in this one."""

    def proceed(self) -> None:
        """Continue; called in the next turn."""


class TurnShare:
    """Account of the time that each owner has used in the current turn.

    :ivar waited: number of times that a receiver had to wait for the next turn.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self.now = reactor.seconds
        self._began = self.now()
        self._used: dict[Hashable, float] = {}
        self._used_around: dict[str, float] = {}
        self._most_around = 0.0
        self._part = MOST
        self._waiting: deque[TurnWaiter] = deque()
        self._is_due = False
        self._is_used = False
        self.waited = 0

    def allows(self, owner: Hashable) -> bool:
        """Whether ``owner`` has time left in this turn."""
        if (
            self._most_around < self._part * LEAST_FACTOR
        ):  # No wide block has used as much as its smallest share, so only the owner's own time counts.
            return self._used.get(owner, 0.0) < self._part
        return self.seconds_left(owner) > 0.0

    def seconds_left(self, owner: Hashable) -> float:
        """Return the seconds left to ``owner`` in this turn. Receivers that work frame by frame check the clock after
        each frame.
        """
        left = self._part - self._used.get(owner, 0.0)
        if self._used_around and isinstance(owner, str):
            for name, factor in blocks_of(owner)[1:]:
                left = min(left, self._part * factor - self._used_around.get(name, 0.0))
        return left

    def used(self, owner: Hashable, seconds: float) -> None:
        """Add the seconds that a read of ``owner`` took."""
        self._is_used = True
        if not self._is_due:
            # Nobody waits for the next turn, which would reset the account, so the clock shows when a new turn has
            # begun.
            now = self.now()
            if not 0.0 <= now - self._began < TURN:
                self._next(now)
        self._used[owner] = self._used.get(owner, 0.0) + seconds
        # Other owners, such as single connections behind a proxy, belong to no wider block.
        if isinstance(owner, str):
            for name, _ in blocks_of(owner)[1:]:
                around = self._used_around[name] = self._used_around.get(name, 0.0) + seconds
                self._most_around = max(self._most_around, around)

    def wait(self, waiter: TurnWaiter) -> None:
        """Call ``waiter.proceed()`` in the next turn."""
        if not self._is_due:
            self._is_due = True
            self._reactor.callLater(0, self._run)
        self._waiting.append(waiter)
        self.waited += 1

    def _next(self, now: float) -> None:
        self._began = now
        self._part = min(MOST, max(LEAST, TURN / max(1, len(self._used))))
        self._used.clear()
        self._used_around.clear()
        self._most_around = 0.0

    def _run(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._is_due = False
        self._next(self.now())
        passed_over: list[TurnWaiter] = []
        for one in waiting:
            self._is_used = False
            call_isolated(one.proceed)
            if not self._is_used and self._waiting and self._waiting[-1] is one:
                # Another connection of the same owner has used up this turn. This one keeps its place at the front;
                # otherwise it could wait behind that connection for ever.
                passed_over.append(self._waiting.pop())
        self._waiting.extendleft(reversed(passed_over))
