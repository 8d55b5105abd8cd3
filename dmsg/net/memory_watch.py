"""Periodic measurement of the memory buffered for peers, and of its age, for :mod:`dmsg.base.memory`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import takewhile
from typing import Generic, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from dmsg.base.interpreter import return_freed_memory
from dmsg.base.log_throttle import LogThrottle
from dmsg.base.memory import CHECK_INTERVAL, Holding, Memory, resident

REMEMBERED_CHECKS = 240
"""Number of memory checks for which the byte count of each peer is remembered."""
TRIM_THRESHOLD = 8 * 1024 * 1024
"""Number of bytes by which the process may exceed its expected size before the allocator is told to return memory to
the system. The expected size is the smallest size of the process so far, plus the memory buffered for peers. A
tenth of that smallest size replaces this number if it is larger."""
TRIM_PAUSE, MAX_TRIM_PAUSE = 5.0, 300.0
"""Shortest and longest pause, in seconds, between two requests to the allocator to return memory. The pause doubles
after each request without effect. It is reset when the amount of memory changes much."""
TRIM_COST = 1000.0
"""Minimum pause between two requests to the allocator to return memory, as a multiple of the time that the last request
took."""

_log = Logger()


class Allocator:
    """Periodic caller of ``malloc_trim``, which makes the allocator return freed memory to the system.

    :param trim: makes the allocator return memory.
    :param resident: returns the resident size of the process in bytes.
    :ivar releases: number of requests to the allocator.
    """

    def __init__(
        self,
        now: Callable[[], float],
        trim: Callable[[], None] = return_freed_memory,
        resident: Callable[[], int] = resident,
    ) -> None:
        self._now = now
        self._trim = trim
        self._resident = resident
        self._smallest_size = resident()
        """Smallest size of the process so far, in bytes, without the memory buffered for peers."""
        self._known = (0, 0)
        self._pause = TRIM_PAUSE
        self._next = now() + TRIM_PAUSE
        self.releases = 0

    def trim(self, held: int) -> None:
        """Make the allocator return freed memory, if the pause is over and the process is larger than expected.

        :param held: number of bytes known to be buffered for peers.
        """
        now = self._now()
        if now < self._next and held >= self._known[1] // 2:
            return
        have = self._resident()
        beyond = have - held
        self._smallest_size = max(0, min(self._smallest_size, beyond))
        threshold = max(TRIM_THRESHOLD, self._smallest_size // 10)
        if have > self._known[0] + threshold or held < self._known[1] - threshold:
            # The pause is reset, because much memory was allocated or released since the last attempt. The pause may
            # have grown after attempts without effect.
            self._pause = TRIM_PAUSE
        self._next = now + self._pause
        self._known = have, held
        if beyond <= self._smallest_size + threshold:
            return
        self._trim()
        self.releases += 1
        left = self._resident()
        self._known = left, held
        self._pause = TRIM_PAUSE if have - left > threshold // 4 else min(MAX_TRIM_PAUSE, 2 * self._pause)
        self._next = now + max(self._pause, TRIM_COST * (self._now() - now))


Holder = TypeVar("Holder", bound=Hashable)


class MemoryWatch(Generic[Holder]):
    """Base class of sources that report the memory buffered for peers.

    In each check, a subclass calls :meth:`next_check` once, and then :meth:`age` for each peer.

    :cvar interval: seconds between checks.
    :cvar holders: name in log lines for the kind of peers, such as ``sessions``.
    :ivar now: time when the current check began.
    """

    interval = CHECK_INTERVAL
    holders = "others"

    def __init__(self, reactor: IReactorTime, memory: Memory) -> None:
        self._reactor = reactor
        self._memory = memory
        self.now = 0.0
        self._before: dict[Holder, list[tuple[int, float]]] = {}
        self._marks: dict[Holder, list[tuple[int, float]]] = {}
        self._allocator = Allocator(reactor.seconds)
        self._log_throttle = LogThrottle(reactor.seconds)
        self._call = LoopingCall(self._check)
        self._call.clock = reactor

    def start(self) -> None:
        """Start the periodic checks."""
        running = self._call.start(self.interval, now=False)
        running.addErrback(
            lambda failure: _log.failure("unhandled error: buffered memory is not limited any more", failure)
        )

    def stop(self) -> None:
        """Stop the periodic checks."""
        if self._call.running:
            self._call.stop()

    def note_dropped(self, count: int) -> None:
        """Record that a check has dropped the buffered data of ``count`` peers. Subclasses may override this hook."""

    def log_dropped(self, holding: Holding) -> None:
        """Log that a peer's buffered data was dropped, at most one line per interval. Used as a callback for
        :meth:`dmsg.base.memory.Memory.add`."""
        more = self._log_throttle.suffix()
        if more is None:
            return
        _log.warn(
            "{held} MiB are buffered for {what}, more than the limit of {limit} MiB: "
            "{kind} of {owner} ({size} KiB) is dropped{more}",
            held=self._memory.total >> 20,
            what=self.holders,
            limit=self._memory.limit >> 20,
            kind=holding.kind,
            owner=holding.owner[0],
            size=holding.size >> 10,
            more=more,
        )

    def _check(self) -> None:
        try:
            given = self._memory.check()
        except Exception:
            _log.failure("unhandled error while buffered memory was measured")
            return
        if given:
            self.note_dropped(given)
        # The process may use more memory than the account counts: for example, requests under way are not counted.
        self._allocator.trim(self._memory.total)

    def next_check(self) -> None:
        """Begin a check.  Peers for which :meth:`age` is not called before the next check are forgotten."""
        self.now = self._reactor.seconds()
        self._before, self._marks = self._marks, {}

    def age(self, holder: Holder, departed: int, arrived: int) -> float:
        """Return the age in seconds of the oldest byte buffered for a peer, with the precision of the check interval.

        :param holder: peer, or another key that identifies the buffer.
        :param departed: total number of bytes that have left the buffer so far.
        :param arrived: total number of bytes that have entered the buffer so far.
        """
        if arrived == departed:
            return 0.0
        # The marks (bytes arrived, time of the check) of a peer are a list and not a deque, because there are many
        # peers and an empty deque takes 760 bytes.
        marks = self._before.get(holder, [])
        if not marks or marks[-1][0] != arrived:
            marks.append((arrived, self.now))
        passed = sum(1 for _ in takewhile(lambda mark: mark[0] <= departed, marks))
        del marks[: max(passed, len(marks) - REMEMBERED_CHECKS)]
        self._marks[holder] = marks
        return self.now - marks[0][1]
