"""Repeated work that depends on other machines. The next run is scheduled even if the last run raised an exception."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

_log = Logger()


class RetryLoop:
    """Loop that runs one piece of work repeatedly, and never twice at the same time.

    :param work: does the work, and returns the seconds until the next run. After None, the next run waits for
        :meth:`soon` or :meth:`now`.
    :param retry: returns the seconds until the next attempt after a failure, given the number of consecutive failures.
    :param task: description of the work for the log, such as "looking for servers".
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

    @property
    def is_started(self) -> bool:
        """Whether the loop is started, so that further runs may follow."""
        return self._running

    def start(self) -> None:
        """Start the loop without running the work. Before this call, :meth:`soon` has no effect."""
        self._running = True

    def stop(self) -> None:
        """Cancel the next run, and schedule no further one. A run that has begun is not interrupted."""
        self._running = False
        self._cancel()

    def _cancel(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def soon(self, delay: float) -> None:
        """Schedule a run ``delay`` seconds from now, unless one is scheduled earlier. If the work is running, the delay
        begins at its end."""
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
        """Run the work now. If it is already running, run it again right afterwards."""
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
