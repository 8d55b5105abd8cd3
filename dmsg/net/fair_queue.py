"""Fair queue for jobs that strangers cause. Address blocks take turns, even if one of them has queued many jobs.

The number of running jobs is limited, and further jobs wait. When a job ends, the next job is taken from the widest
block that was served longest ago. Inside that block it is taken from the narrower block that was served longest ago,
and there it is the oldest job.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Union

from twisted.internet.defer import Deferred

from dmsg.net.blocks import BlockCounts, blocks_of

_Waiters = deque[Deferred[None]]
_Level = OrderedDict[str, Union["_Level", _Waiters]]


class QueueCrowded(Exception):
    """Error: a job was refused or dropped, because its block has too many waiting jobs or other blocks need the
    room."""


class FairQueue:
    """Queue of jobs by blocks of addresses.

    :param limit: maximum number of running jobs.
    :param most_of_one: maximum number of running jobs of one narrow block.
    :param most_of_wide: maximum number of running jobs of one wide block.
    :param waiting: maximum number of waiting jobs.
    :param waiting_of_one: maximum number of waiting jobs of one narrow block; wide blocks may have this number times
        their factor.
    """

    def __init__(self, limit: int, most_of_one: int, most_of_wide: int, waiting: int, waiting_of_one: int) -> None:
        self._most = limit
        self._most_of_one, self._most_of_wide = most_of_one, most_of_wide
        self._most_waiting, self._waiting_of_one = waiting, waiting_of_one
        self._running = BlockCounts()
        self._waiting = BlockCounts()
        self._levels: _Level = OrderedDict()
        self.running = 0
        self.waiting = 0

    @property
    def is_scarce(self) -> bool:
        """Whether any job is waiting."""
        return self.waiting > 0

    def acquire(self, host: str) -> Deferred[None]:
        """Return a Deferred that fires when a job of ``host`` may run. The caller must call :meth:`release` when the
        job has ended.

        The Deferred fails with :class:`QueueCrowded` if too many jobs are waiting. The caller may cancel the Deferred
        while the job waits.
        """
        turn: Deferred[None] = Deferred(lambda cancelled: self._forget(host, cancelled))
        if self.running < self._most and self._may_run(host):
            self._start(host)
            turn.callback(None)
            return turn
        if self._waiting.crowded_block(host, self._waiting_of_one):
            turn.errback(QueueCrowded())
            return turn
        if self.waiting >= self._most_waiting and not self._make_room(host):
            turn.errback(QueueCrowded())
            return turn
        level = self._levels
        *wide, narrow = _path(host)
        for name in wide:
            below = level.setdefault(name, OrderedDict())
            assert isinstance(below, OrderedDict)
            level = below
        waiters = level.setdefault(narrow, deque())
        assert isinstance(waiters, deque)
        waiters.append(turn)
        self._waiting.add(host)
        self.waiting += 1
        return turn

    def release(self, host: str) -> None:
        """Record that a job of ``host`` has ended, and start waiting jobs."""
        self._running.remove(host)
        self.running -= 1
        while self.running < self._most and (found := self._next(self._levels)) is not None:
            name, turn = found
            self._waiting.remove(name)
            self.waiting -= 1
            self._start(name)
            turn.callback(None)

    def _may_run(self, host: str) -> bool:
        return not self._running.crowded_block(host, self._most_of_one, self._most_of_wide)

    def _start(self, host: str) -> None:
        self._running.add(host)
        self.running += 1

    def _next(self, level: _Level) -> tuple[str, Deferred[None]] | None:
        """Remove and return the next waiting job at or below ``level`` whose blocks are below their limits of running
        jobs."""
        for name, below in level.items():
            if not self._may_run(name):
                continue
            found = (name, below.popleft()) if isinstance(below, deque) else self._next(below)
            if found is not None:
                level.move_to_end(name)
                if not below:
                    del level[name]
                return found
        return None

    def _make_room(self, host: str) -> bool:
        """Drop the newest waiting job of the block with the highest load. If that load exceeds the load of ``host`` by
        at most 1, drop nothing and return False."""
        heaviest = self._waiting.heaviest()
        if self._waiting.load(heaviest) <= self._waiting.load(host) + 1:
            return False
        *wide, narrow = _path(heaviest)
        level = self._levels
        for name in wide:
            below = level[name]
            assert isinstance(below, OrderedDict)
            level = below
        waiters = level[narrow]
        assert isinstance(waiters, deque)
        newest = waiters[-1]
        self._forget(heaviest, newest)
        newest.errback(QueueCrowded())
        return True

    def _forget(self, host: str, turn: Deferred[None]) -> None:
        levels = [self._levels]
        *wide, narrow = _path(host)
        for name in wide:
            below = levels[-1].get(name)
            if not isinstance(below, OrderedDict):
                return
            levels.append(below)
        waiters = levels[-1].get(narrow)
        if not isinstance(waiters, deque) or turn not in waiters:
            return
        waiters.remove(turn)
        self._waiting.remove(host)
        self.waiting -= 1
        for name, level in zip((narrow, *reversed(wide)), reversed(levels), strict=True):
            if not level[name]:
                del level[name]


def _path(host: str) -> tuple[str, ...]:
    """Return the names of the blocks of ``host``, the widest first."""
    return tuple(block.name for block in reversed(blocks_of(host)))
