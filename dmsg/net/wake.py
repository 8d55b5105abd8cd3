"""Detection of suspensions of this machine, such as a laptop whose lid was closed."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from dmsg.net.isolate import call_isolated
from dmsg.net.reactor import cancel_call

CHECK_INTERVAL = 1.0
"""Seconds between checks. A process that sleeps when the machine is suspended continues to sleep afterwards, for the
rest of its time. The checks limit each sleep to this number of seconds, and so the delay of all timers after a
suspension."""
MIN_SLEEP = 10.0
"""Minimum delay of a check in seconds which shows that the machine was suspended. Smaller delays also occur if the
process is busy."""


class WakeWatch:
    """Watch that calls a function after each suspension of the machine.

    The reactor's clock must include the time of the suspension, as it does after
    :func:`~dmsg.net.reactor.use_monotonic_clock`.

    :param on_wake: called with the seconds by which the check was late.
    """

    def __init__(self, reactor: IReactorTime, on_wake: Callable[[float], object]) -> None:
        self._reactor = reactor
        self._on_wake = on_wake
        self._due = 0.0
        self._call: IDelayedCall | None = None

    def start(self) -> None:
        """Start the checks. Do not call this while they are running."""
        self._due = self._reactor.seconds() + CHECK_INTERVAL
        self._call = self._reactor.callLater(CHECK_INTERVAL, self._check)

    def stop(self) -> None:
        """Stop the checks."""
        cancel_call(self._call)
        self._call = None

    def _check(self) -> None:
        late = self._reactor.seconds() - self._due
        self.start()
        if late >= MIN_SLEEP:
            call_isolated(self._on_wake, late)
