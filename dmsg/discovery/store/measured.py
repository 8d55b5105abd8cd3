"""Wrapper of a store for the HTTP interface: measures the time of requests to the store, and logs each outage once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, ParamSpec, Protocol, TypeVar

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import EntryInvalid
from dmsg.discovery.store.base import StoreContended
from dmsg.errors import EntryNotFound
from dmsg.telemetry.metrics import Metrics

_log = Logger()
_Answer = TypeVar("_Answer")
_Arguments = ParamSpec("_Arguments")


class StoreUnavailable(Exception):
    """Error: the store failed; the client may try again."""


class Fallible(Protocol):
    """Interface that stores of entries and stores of nameplates have in common: it classifies the errors of a store."""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Types of the exceptions with which the store fails for reasons outside this program."""

    def is_full(self, error: BaseException | None) -> bool:
        """Whether this error of a write means that the store can be read but not written."""


class MeasuredStore:
    """Wrapper of a store that measures the time of each request to it, and logs each outage of the store once.

    :ivar full: whether the last POST failed because the store can be read but not written.
    """

    def __init__(self, reactor: IReactorTime, store: Fallible, metrics: Metrics) -> None:
        self._reactor = reactor
        self._store = store
        self._failing: set[str] = set()
        self._seconds = metrics.store_seconds.labels
        self.full = False

    def ask(
        self, method: Callable[_Arguments, Deferred[_Answer]], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Deferred[_Answer]:
        """Call a method of the store, measure its time, and return its result.

        The name of the method identifies the operation in metrics and in the log. Fails with :class:`StoreUnavailable`
        if the store failed. A refusal, such as EntryInvalid, is passed on unchanged.
        """
        operation = method.__name__
        seconds = self._seconds(operation)
        began = self._reactor.seconds()

        def answered(answer: _Answer) -> _Answer:
            seconds.observe(self._reactor.seconds() - began)
            if operation in self._failing:
                self._failing.discard(operation)
                if operation == "post":
                    self.full = False
                _log.info("the store can be used again ({operation})", operation=operation)
            return answer

        def failed(failure: Failure) -> _Answer:
            seconds.observe(self._reactor.seconds() - began)
            return self._failed(failure, operation)

        return maybeDeferred(method, *args, **kwargs).addCallbacks(answered, failed)

    def _failed(self, failure: Failure, operation: str) -> NoReturn:
        # The following exceptions do not mean that the store failed. With the first three, the store refuses the
        # request. CancelledError means that the client has disconnected.
        if failure.check(EntryNotFound, EntryInvalid, StoreContended, CancelledError):
            failure.raiseException()
        # Each outage is logged only once, because every request would otherwise write a line.
        if operation not in self._failing:
            self._failing.add(operation)
            if operation == "post":
                self.full = self._store.is_full(failure.value)
            if failure.check(*self._store.failures):
                error = f"{type(failure.value).__name__}: {failure.value}"
                _log.error("the store cannot be used ({operation}): {error}", operation=operation, error=error)
            else:
                _log.failure("unhandled error in the store", failure)
        raise StoreUnavailable from None
