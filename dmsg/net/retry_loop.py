"""Repeated work that depends on other machines. The next run is scheduled even if the last one raised."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

_log = Logger()


class RetryLoop:
    """Repeater of one piece of work, which never runs twice at a time.

    :param work: returns the seconds until the next run; None to run only after :meth:`soon`.
    :param retry: returns the seconds until the next try, given the number of failures in a row.
    :param task: the work in words for the log, as in "looking for servers".
    :ivar busy: whether the work is running.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        work: Callable[[], Coroutine[Deferred[object], object, float | None]],
        retry: Callable[[int], float],
        task: str,
    ) -> None:
        self._reactor = reactor
        self._work = work
        self._retry = retry
        self._task = task
        self._call: IDelayedCall | None = None
        self._next = math.inf
        self._raised = 0
        self._running = False
        self.busy = False

    @property
    def is_planned(self) -> bool:
        """Whether the next run is scheduled."""
        return self._call is not None

    def start(self) -> None:
        """Enable :meth:`soon`, which has no effect before."""
        self._running = True

    def stop(self) -> None:
        """Schedule no further run. A running one continues to its end."""
        self._running = False
        self._cancel()

    def _cancel(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def soon(self, delay: float) -> None:
        """Run within ``delay`` seconds. If the work is running, wait ``delay`` seconds after its end."""
        if not self._running:
            return
        if self.busy:
            self._next = min(self._next, delay)
            return
        if self._call is not None:
            if self._call.getTime() <= self._reactor.seconds() + delay:
                return
            self._cancel()
        self._call = self._reactor.callLater(delay, self._run_due)

    def _run_due(self) -> None:
        self._call = None
        self.now()

    def now(self) -> None:
        """Run now, or right after the current run."""
        if self.busy:
            self._next = 0.0
            return
        self._cancel()
        self.busy = True
        self._next = math.inf
        Deferred.fromCoroutine(self._work()).addBoth(self._on_done)

    def _on_done(self, result: float | Failure | None) -> None:
        self.busy = False
        if isinstance(result, Failure):
            self._raised += 1
            if not result.check(CancelledError):
                _log.failure("unhandled error: {what} failed and will be retried", result, what=self._task)
            delay: float | None = self._retry(self._raised)
        else:
            self._raised = 0
            delay = result
        after = min(math.inf if delay is None else delay, self._next)
        if after < math.inf:
            self.soon(after)
