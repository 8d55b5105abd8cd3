"""Clocks for dates: one that no step of the system's clock moves, and a watch that notices steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.base.units import human_time
from dmsg.net.isolate import isolated

LOOK_INTERVAL = 5.0
"""Seconds between looks at the system's clock."""
LEAST_STEP = 2.0
"""Seconds by which the system's clock has to be off between two looks to count as set.  NTP corrects less than that
slowly, without a step."""

_log = Logger()


class SteadyClock:
    """Seconds since 1970 as the system said them once, counted on by the reactor's clock.

    Two times that it told are as far apart as they were in truth, whatever was done to the system's clock between
    them.  For what is kept in one process, or in a file that one process writes.
    """

    def __init__(self, reactor: IReactorTime, wall_clock: Callable[[], float] = time.time) -> None:
        self._reactor = reactor
        self._offset = wall_clock() - reactor.seconds()

    def __call__(self) -> float:
        """Return the seconds since 1970."""
        return self._offset + self._reactor.seconds()


class ClockWatch(Service):
    """Notices that the system's clock was set, and names it in the log.

    :param told: called with the seconds by which it was set, negative when it was set back.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        told: Callable[[float], object] | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._reactor = reactor
        self._told = told or name_step
        self._wall_clock = wall_clock
        self._offset = 0.0
        self._call: IDelayedCall | None = None

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._offset = self._wall_clock() - self._reactor.seconds()
        self._call = self._reactor.callLater(LOOK_INTERVAL, self._look)

    def stopService(self) -> None:
        super().stopService()  # type: ignore[no-untyped-call]
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _look(self) -> None:
        self._call = self._reactor.callLater(LOOK_INTERVAL, self._look)
        offset = self._wall_clock() - self._reactor.seconds()
        step, self._offset = offset - self._offset, offset
        if abs(step) >= LEAST_STEP:
            isolated(self._told, step)


def name_step(step: float) -> None:
    """Say in the log that the system's clock was set."""
    way = "back" if step < 0 else "forward"
    _log.warn(
        "the clock of this machine was set {way} by {much}: timers go on as they were, dates are the new ones",
        way=way,
        much=human_time(round(abs(step))),
    )
