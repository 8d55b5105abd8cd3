"""Looks again and again at what is held for others, and knows for how long it is: for :mod:`dmsg.base.memory`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from itertools import takewhile
from typing import Generic, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from dmsg.base.log_throttle import LogThrottle
from dmsg.base.memory import LOOK_INTERVAL, Holding, Memory, resident

MARKS = 240
"""Looks that are remembered of a holder."""
WORTH_GIVING_BACK = 8 * 1024 * 1024
"""Bytes that a process has to have beyond what it had and holds, before the allocator is asked to give to the system
what it keeps; or a tenth of what it had, if that is more."""
TRIM_PAUSE, LONGEST_TRIM_PAUSE = 5.0, 300.0
"""Seconds between two such requests; twice as many after each that was in vain, until something changes."""
TRIM_COST = 1000.0
"""A pause is so many times as long as the last request took, at least."""

_log = Logger()


def _trim() -> None:
    """What was freed stays with glibc, in pieces below what is in use, until it is asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Allocator:
    """Gives memory that was freed back to the system.

    :param trim: makes the allocator give back what it keeps; ``resident``: bytes that the process has.
    :ivar asked: how often the allocator was asked.
    """

    def __init__(
        self,
        now: Callable[[], float],
        trim: Callable[[], None] = _trim,
        resident: Callable[[], int] = resident,
    ) -> None:
        self._now = now
        self._trim = trim
        self._resident = resident
        self._least = resident()
        """Bytes of the process beyond what is held, at the least."""
        self._known = (0, 0)
        self._pause = TRIM_PAUSE
        self._next = now() + TRIM_PAUSE
        self.asked = 0

    def look(self, held: int) -> None:
        """Give back, if it is time and there may be something.  :param held: bytes that are known to be held."""
        now = self._now()
        if now < self._next and held >= self._known[1] // 2:
            return
        have = self._resident()
        beyond = have - held
        self._least = max(0, min(self._least, beyond))
        worth = max(WORTH_GIVING_BACK, self._least // 10)
        if have > self._known[0] + worth or held < self._known[1] - worth:
            self._pause = TRIM_PAUSE  # it is another situation than that in which it was in vain
        self._next = now + self._pause
        self._known = have, held
        if beyond <= self._least + worth:
            return
        self._trim()
        self.asked += 1
        left = self._resident()
        self._known = left, held
        self._pause = TRIM_PAUSE if have - left > worth // 4 else min(LONGEST_TRIM_PAUSE, 2 * self._pause)
        self._next = now + max(self._pause, TRIM_COST * (self._now() - now))


Holder = TypeVar("Holder", bound=Hashable)


class Looks(Generic[Holder]):
    """What a source of holdings is built on.

    A source calls :meth:`next_look` before it goes through its holders, then :meth:`age` for each.

    :cvar interval: seconds between looks.
    :cvar what: for whom is held, as a line of the log names them.
    :ivar now: when the look under way began.
    """

    interval = LOOK_INTERVAL
    what = "others"

    def __init__(self, reactor: IReactorTime, memory: Memory) -> None:
        self._reactor = reactor
        self._memory = memory
        self.now = 0.0
        self._before: dict[Holder, list[tuple[int, float]]] = {}
        self._marks: dict[Holder, list[tuple[int, float]]] = {}
        self._allocator = Allocator(reactor.seconds)
        self._seldom = LogThrottle(reactor.seconds)
        self._call = LoopingCall(self._look)
        self._call.clock = reactor

    def start(self) -> None:
        """Look from time to time."""
        running = self._call.start(self.interval, now=False)
        running.addErrback(lambda failure: _log.failure("the memory watch stopped", failure))

    def stop(self) -> None:
        """Look no more."""
        if self._call.running:
            self._call.stop()

    def given_up(self, count: int) -> None:
        """A look gave up so many holdings, one or more."""

    def tell(self, holding: Holding) -> None:
        """Say in the log who gives, one line in a while; for :meth:`dmsg.base.memory.Memory.add`."""
        more = self._seldom.suffix()
        if more is None:
            return
        _log.warn(
            "{held} MiB are buffered for {what}, more than {limit}: {kind} of {owner} ({size} KiB) is dropped{more}",
            held=self._memory.total >> 20,
            what=self.what,
            limit=self._memory.limit >> 20,
            kind=holding.kind,
            owner=holding.owner[0],
            size=holding.size >> 10,
            more=more,
        )

    def _look(self) -> None:
        try:
            given = self._memory.look()
        except Exception:
            _log.failure("the held memory could not be measured")
            return
        if given:
            self.given_up(given)
        # not all that takes memory is booked, as what a request needs for a moment
        self._allocator.look(self._memory.total)

    def next_look(self) -> None:
        """Who is not asked about until the next one is forgotten."""
        self.now = self._reactor.seconds()
        self._before, self._marks = self._marks, {}

    def age(self, holder: Holder, gone: int, come: int) -> float:
        """Seconds for which the oldest of what is held has been, as far as looks have seen it.

        :param gone: bytes that have gone so far; ``come``: that have come.
        """
        if come == gone:
            return 0.0
        # A list: an empty deque takes 760 bytes, and there is one of these for each holder.
        marks = self._before.get(holder, [])
        if not marks or marks[-1][0] != come:
            marks.append((come, self.now))
        passed = sum(1 for _ in takewhile(lambda mark: mark[0] <= gone, marks))
        del marks[: max(passed, len(marks) - MARKS)]
        self._marks[holder] = marks
        return self.now - marks[0][1]
