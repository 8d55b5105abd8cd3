"""Clock for dates that does not change when the system's clock is set, and a service that detects such a change."""

from __future__ import annotations

import time
from collections.abc import Callable

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from dmsg.base.units import human_time
from dmsg.net.isolate import call_isolated

CHECK_INTERVAL = 5.0
"""Seconds between comparisons of the system's clock with the reactor's."""
MIN_STEP = 2.0
"""Minimum jump of the system's clock in seconds, between two comparisons, which shows that the clock was set. NTP
corrects smaller errors gradually, without a jump."""

_log = Logger()


class SteadyClock:
    """Clock that reads the system's clock once, and then advances with the reactor's clock.

    The difference of two of its times is correct even if the system's clock was set in between. Use this clock for data
    that stay in one process, or in a file that only one process writes.

    :param wall_clock: function that returns seconds since 1970; None for the system's clock.
    """

    def __init__(self, reactor: IReactorTime, wall_clock: Callable[[], float] | None = None) -> None:
        self._reactor = reactor
        self._offset = (wall_clock or time.time)() - reactor.seconds()

    def __call__(self) -> float:
        """Return the seconds since 1970."""
        return self._offset + self._reactor.seconds()


class ClockWatch(Service):
    """Service that detects and logs that the system's clock was set.

    :param on_step: called with the number of seconds by which the clock was set, negative if it was set back; by
        default the change is logged.
    :param wall_clock: function that returns seconds since 1970; None for the system's clock.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        on_step: Callable[[float], object] | None = None,
        wall_clock: Callable[[], float] | None = None,
    ) -> None:
        self._reactor = reactor
        self._on_step = on_step or name_step
        self._wall_clock = wall_clock or time.time
        self._offset = 0.0
        self._call: IDelayedCall | None = None

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self._offset = self._wall_clock() - self._reactor.seconds()
        self._call = self._reactor.callLater(CHECK_INTERVAL, self._check_clock)

    def stopService(self) -> None:
        super().stopService()  # type: ignore[no-untyped-call]
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _check_clock(self) -> None:
        self._call = self._reactor.callLater(CHECK_INTERVAL, self._check_clock)
        offset = self._wall_clock() - self._reactor.seconds()
        step, self._offset = offset - self._offset, offset
        if abs(step) >= MIN_STEP:
            call_isolated(self._on_step, step)


def name_step(step: float) -> None:
    """Log that the system's clock was set."""
    way = "back" if step < 0 else "forward"
    _log.warn(
        "the clock of this machine was set {way} by {much}: "
        "timers are not affected; log lines and entries carry the new time",
        way=way,
        much=human_time(round(abs(step))),
    )
