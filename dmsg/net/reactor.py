"""The type of a reactor that does more than tell the time, and the clock by which it waits.

What only waits takes :class:`~twisted.internet.interfaces.IReactorTime`, and so
a :class:`~twisted.internet.task.Clock` in tests.  ``reactor.seconds()`` measures durations only; where a date is
meant, the system's clock is a parameter of its own.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twisted.internet.interfaces import (
    IDelayedCall,
    IReactorCore,
    IReactorFDSet,
    IReactorProcess,
    IReactorTCP,
    IReactorTime,
)

if TYPE_CHECKING:
    # as Twisted types its global reactor
    from twisted.internet import _IReactorCommon

    Reactor = _IReactorCommon
else:

    class Reactor(IReactorCore, IReactorTime, IReactorFDSet, IReactorTCP, IReactorProcess):
        """Sockets, processes, time, and a start and stop."""


if hasattr(time, "CLOCK_BOOTTIME"):

    def monotonic() -> float:
        """Return the seconds since this machine started.

        Nobody can set this clock.  Unlike ``time.monotonic`` it counts the time for which the machine slept: after
        that, entries have to be posted again at once.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    monotonic = time.monotonic


def use_monotonic_clock(reactor: object) -> None:
    """Make every timer of ``reactor`` wait by a clock that nobody can set.

    Twisted waits by the system's clock.  When that is set back by an hour, each timer fires an hour late: entries are
    not refreshed, dead peers are not noticed.  Call this before anything is started; calls that are planned already
    keep the delay that they have left.  From then on ``reactor.seconds()`` is no date.

    :param reactor: one of Twisted's own kind; others, such as a :class:`~twisted.internet.task.Clock`, stay as they
        are.
    """
    from twisted.internet.base import ReactorBase

    if not isinstance(reactor, ReactorBase) or reactor.seconds is monotonic:
        return
    gained = monotonic() - reactor.seconds()
    reactor.seconds = monotonic
    # cancelled calls too, which getDelayedCalls leaves out: all move alike, so the heap stays a heap
    for call in (*reactor._pendingTimedCalls, *reactor._newTimedCalls):  # noqa: SLF001
        call.time += gained
        call.seconds = monotonic


def the_reactor(given: Reactor | None = None) -> Reactor:
    """Return the given reactor, or that of this process, which is made now and waits by a monotonic clock."""
    if given is not None:
        return given
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    return reactor


def cancel_call(call: IDelayedCall | None) -> None:
    """Cancel a delayed call, unless it has run, was cancelled, or is None."""
    if call is not None and call.active():
        call.cancel()
