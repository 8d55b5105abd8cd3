"""Type of the reactor, for code that needs more than timers, and the monotonic clock that drives its timers.

Code that only waits takes :class:`~twisted.internet.interfaces.IReactorTime`, so tests can pass a
:class:`~twisted.internet.task.Clock`. ``reactor.seconds()`` only measures durations. Code that needs dates takes the
system's clock as a separate parameter.
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
    # The type that Twisted's annotations give to ``twisted.internet.reactor``.
    from twisted.internet import _IReactorCommon

    Reactor = _IReactorCommon
else:

    class Reactor(IReactorCore, IReactorTime, IReactorFDSet, IReactorTCP, IReactorProcess):
        """Reactor with sockets, processes, timers, and a start and stop."""


if hasattr(time, "CLOCK_BOOTTIME"):

    def monotonic() -> float:
        """Return the seconds since this machine started.

        Nobody can set this clock. Unlike ``time.monotonic`` it includes the time for which the machine was suspended.
        After a suspension, entries must be posted again at once.
        """
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    monotonic = time.monotonic


def use_monotonic_clock(reactor: object) -> None:
    """Make all timers of ``reactor`` use a clock that nobody can set.

    By default Twisted uses the system's clock. When that is set back by an hour, each timer fires an hour late:
    entries are not refreshed, and dead peers are not noticed. Call this function before anything is started. Calls
    that are already scheduled keep their remaining delay. From then on ``reactor.seconds()`` is not a date.

    :param reactor: a reactor of Twisted; others, such as a :class:`~twisted.internet.task.Clock`, are not changed.
    """
    from twisted.internet.base import ReactorBase

    if not isinstance(reactor, ReactorBase) or reactor.seconds is monotonic:
        return
    gained = monotonic() - reactor.seconds()
    reactor.seconds = monotonic
    # Cancelled calls are moved too, which getDelayedCalls leaves out: the heap stays ordered only if all calls move by
    # the same time.
    for call in (*reactor._pendingTimedCalls, *reactor._newTimedCalls):  # noqa: SLF001
        call.time += gained
        call.seconds = monotonic


def the_reactor(given: Reactor | None = None) -> Reactor:
    """Return the given reactor or, without one, the reactor of this process, after switching its timers to the
    monotonic clock.
    """
    if given is not None:
        return given
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    return reactor


def cancel_call(call: IDelayedCall | None) -> None:
    """Cancel a delayed call, unless it has run, was cancelled, or is None."""
    if call is not None and call.active():
        call.cancel()
