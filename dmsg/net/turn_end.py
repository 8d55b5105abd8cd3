"""Calls at the end of a reactor turn, without a timer.

A turn is one iteration of the event loop: due timers, then one poll, then everything that became readable or writable.
Data that connections queue during a turn are sent together at its end. ``callLater(0)`` would do that, too, but a timer
costs an object, two heap operations and a log context for every turn. So the calls are kept in a list, which the
reactor's iteration runs before and after its poll:

* before the poll, for data that timers have queued;
* after the poll, for data that readable connections have queued.

Calls that are scheduled while a batch runs belong to the next batch, and while calls are left the poll does not wait.
So calls that schedule further calls never keep the reactor from reading.

The hook wraps ``doIteration``, which Twisted's main loop calls with epoll, poll, select and kqueue. On asyncio's event
loop the calls use ``call_soon``. Every other reactor, and a clock of a test, gets ``callLater(0)``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from twisted.internet.base import ReactorBase
from twisted.internet.interfaces import IReactorTime

from dmsg.net.isolate import call_isolated

AtTurnEnd = Callable[[Callable[[], object]], object]
"""Function that schedules a call for the end of the reactor turn."""


class _Iteration:
    """Hook that runs the scheduled calls in each iteration of one reactor."""

    def __init__(self, reactor: ReactorBase) -> None:
        self._calls: list[Callable[[], object]] = []
        self._reactor = reactor
        self._iterate = reactor.doIteration
        self.add = self._calls.append
        reactor.doIteration = self._with_calls  # type: ignore[method-assign]

    def _run(self) -> None:
        batch = self._calls[:]
        # The list is emptied in place, because ``add`` is bound to this list object.
        del self._calls[: len(batch)]
        for call in batch:
            call_isolated(call)

    def _with_calls(self, delay: float | None) -> None:
        if self._calls:
            self._run()
            delay = 0 if self._calls else self._shorten(delay)
        self._iterate(delay)
        if self._calls:
            self._run()

    def _shorten(self, delay: float | None) -> float | None:
        """Return the maximum number of seconds that the reactor may wait for events. ``delay`` may be too long by now,
        because the calls at the end of the turn may have set timers or stopped the reactor."""
        reactor = self._reactor
        if not reactor.running or reactor._stopped:  # noqa: SLF001
            # The reactor is stopping. The poll must return at once, because the shutdown triggers run only in the next
            # iteration.
            return 0
        due = reactor.timeout()
        if due is None or delay is None:
            return due if delay is None else delay
        return min(due, delay)


_schedulers: WeakKeyDictionary[object, AtTurnEnd] = WeakKeyDictionary()


def at_turn_end(reactor: IReactorTime) -> AtTurnEnd:
    """Return the function that schedules a call for the end of the reactor's turn.

    Calls run in the order in which they were scheduled. If a call raises an exception, it is logged, and the other
    calls run. A call that is scheduled while the reactor is not running a turn is made in the next turn.
    """
    if not isinstance(reactor, ReactorBase):
        return partial(reactor.callLater, 0)
    scheduler = _schedulers.get(reactor)
    if scheduler is None:
        scheduler = _schedulers[reactor] = _make(reactor)
    return scheduler


def _make(reactor: Any) -> AtTurnEnd:
    kind = type(reactor)
    if (
        kind.run is ReactorBase.run
        and kind.mainLoop is ReactorBase.mainLoop
        and kind.doIteration is not ReactorBase.doIteration
    ):
        return _Iteration(reactor).add
    loop = getattr(reactor, "_asyncioEventloop", None)
    if loop is not None:
        return partial(loop.call_soon, call_isolated)
    return partial(reactor.callLater, 0)
