"""Type of the reactor, and the monotonic clock that drives the reactor's timers.

Code that needs only timers takes :class:`~twisted.internet.interfaces.IReactorTime`, so tests can pass a
:class:`~twisted.internet.task.Clock`. Code that also needs sockets or processes takes ``Reactor``.
``reactor.seconds()`` only measures durations. Code that needs dates takes the system's clock as a separate parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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
    # ``_IReactorCommon`` is the type that Twisted's annotations give to ``twisted.internet.reactor``.
    from twisted.internet import _IReactorCommon

    Reactor = _IReactorCommon
else:

    class Reactor(IReactorCore, IReactorTime, IReactorFDSet, IReactorTCP, IReactorProcess):
        """Reactor with sockets, processes and timers, which can be started and stopped."""


# A server reads the clock ten times for each message. A call of this partial object takes half as long as a call of a
# Python function.
monotonic: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Return the seconds since this machine started.

Nobody can set this clock. Unlike ``time.monotonic``, it includes the time for which the machine was suspended. So
timers that expired during a suspension fire right after it: entries, for example, are posted again at once.
"""


def use_monotonic_clock(reactor: object) -> None:
    """Make all timers of ``reactor`` use the monotonic clock.

    By default, Twisted uses the system's clock. If that clock is set back by an hour, each timer fires an hour late:
    entries are not refreshed, and dead peers are not detected. Call this function before the program starts anything.
    Calls that are already scheduled keep their remaining delay. After this call, ``reactor.seconds()`` is not a date.

    :param reactor: one of Twisted's reactors. Any other object, such as a :class:`~twisted.internet.task.Clock`, is not
        changed.
    """
    from twisted.internet.base import ReactorBase

    if not isinstance(reactor, ReactorBase) or reactor.seconds is monotonic:
        return
    gained = monotonic() - reactor.seconds()
    reactor.seconds = monotonic
    # Cancelled calls, which getDelayedCalls omits, are shifted too: the heap stays ordered only if all calls are
    # shifted by the same time.
    for call in (*reactor._pendingTimedCalls, *reactor._newTimedCalls):  # noqa: SLF001
        call.time += gained
        call.seconds = monotonic


def the_reactor(given: Reactor | None = None) -> Reactor:
    """Return ``given``. If it is None, return the reactor of this process, and make its timers use the monotonic
    clock."""
    if given is not None:
        return given
    from twisted.internet import reactor

    use_monotonic_clock(reactor)
    return reactor


def cancel_call(call: IDelayedCall | None) -> None:
    """Cancel a delayed call. Do nothing if the call has run, was cancelled, or is None."""
    if call is not None and call.active():
        call.cancel()
