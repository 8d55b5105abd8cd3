"""Time that another party takes, measured without the pauses of this process.

A process pauses while a callback computes for long, while the machine is busy with other processes, or when it is
stopped. After a pause, the reactor runs delayed calls before it reads what has arrived. So a plain measurement or a
plain delayed call would blame the other party for an answer that arrived in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import cancel_call

_T = TypeVar("_T")

FIRST_CHECK = 0.02
"""Minimum seconds between two checks for a pause."""
CHECK_FACTOR = 0.1
"""Seconds until the next check, per second that has passed. So undetected pauses are a small part of the measured time,
and a long measurement needs few checks.
"""
MIN_PAUSE = 0.01
"""Minimum delay of a check in seconds that counts as a pause."""
MIN_LEFT = 1e-6
"""Minimum seconds that are left for a further check, because sums of floating-point numbers are not exact."""


class PauseMeter:
    """Measurement of the time that another party takes, and of the pauses of this process meanwhile.

    The measurement begins at once, and ends with :meth:`stop`.

    :ivar paused: seconds for which this process was paused.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._began = reactor.seconds()
        self._paused = 0.0
        self._elapsed: float | None = None
        self._due = 0.0
        self._call: IDelayedCall | None = None
        self._check_later()

    @property
    def paused(self) -> float:
        return self._paused + (self._late if self._call is not None else 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, or from the beginning to the end, with all pauses."""
        return self._reactor.seconds() - self._began if self._elapsed is None else self._elapsed

    @property
    def measured(self) -> float | None:
        """Seconds that the other party has taken, without the pauses of this process.

        None if this process was paused for most of the time, because the rest then says little about the other party.
        """
        return self.elapsed - self.paused if self.paused <= self.elapsed / 2 else None

    def stop(self) -> None:
        """End the measurement."""
        if self._elapsed is None:
            self._paused, self._elapsed = self.paused, self.elapsed
        cancel_call(self._call)
        self._call = None

    @property
    def _passed(self) -> float:
        """Seconds since the beginning, without the pauses before the last check."""
        return self._reactor.seconds() - self._began - self._paused

    @property
    def _late(self) -> float:
        late = self._reactor.seconds() - self._due
        return late if late >= MIN_PAUSE else 0.0

    def _check_later(self, most: float = math.inf) -> None:
        step = min(most, max(FIRST_CHECK, CHECK_FACTOR * self._passed))
        self._due = self._reactor.seconds() + step
        self._call = self._reactor.callLater(step, self._check)

    def _check(self) -> None:
        self._count_check()
        self._check_later()

    def _count_check(self) -> float:
        """Return the seconds for which this process was paused since the last check, and add them to the pauses."""
        late = self._late
        self._paused += late
        return late


class FairTimeout(PauseMeter):
    """Timeout for an answer of another party, in which pauses of this process do not count.

    :param seconds: seconds that the other party may take.
    :param on_timeout: callback invoked once this time has passed, unless the timeout was stopped.
    """

    def __init__(self, reactor: IReactorTime, seconds: float, on_timeout: Callable[[], object]) -> None:
        self._seconds = seconds
        self._on_timeout = on_timeout
        self._is_extended = False
        super().__init__(reactor)

    def _check_later(self, most: float = math.inf) -> None:
        super()._check_later(min(most, self._seconds - self._passed))

    def _check(self) -> None:
        late = self._count_check()
        if self._passed > self._seconds - MIN_LEFT and late and not self._is_extended:
            # An answer that arrived during the pause is read before the next check. The timeout is extended only once,
            # because a process may be so busy that each of its checks is late.
            self._is_extended = True
            self._seconds = self._passed + FIRST_CHECK
        if self._passed < self._seconds - MIN_LEFT:
            self._check_later()
        else:
            self.stop()
            self._on_timeout()


def stop_meter(meter: PauseMeter | None) -> None:
    """End a measurement or a timeout, if there is one."""
    if meter is not None:
        meter.stop()


def add_fair_timeout(
    waiting: Deferred[_T],
    seconds: float,
    reactor: IReactorTime,
    on_timeout: Callable[[_T | Failure, float], _T] = no_answer,
) -> Deferred[_T]:
    """Cancel a Deferred after ``seconds`` in which this process was not paused.

    Apart from the pauses, the result is the same as with :meth:`~twisted.internet.defer.Deferred.addTimeout`.

    :param on_timeout: function that returns the result of the cancelled Deferred, or raises an error; its arguments are
        the Deferred's own result and ``seconds``.
    :returns: ``waiting``.
    """
    is_late = False

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        waiting.cancel()

    def ended(result: _T | Failure) -> _T | Failure:
        timeout.stop()
        return on_timeout(result, seconds) if is_late else result

    timeout = FairTimeout(reactor, seconds, cancel)
    waiting.addBoth(ended)
    return waiting
