"""A store as the API asks it: timed, and its failures are said once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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
    """The store failed; the client may try again."""


class Fallible(Protocol):
    """What a store of entries and one of nameplates say of their failures."""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exceptions by which the store fails that are not a fault of this program."""

    def is_full(self, error: BaseException | None) -> bool:
        """Whether a write failed with this because nothing can be written, though it can be read."""


class MeasuredStore:
    """Questions to a store: times them, and says once that the store fails.

    :ivar full: it was read and not written when an entry came last.
    """

    def __init__(self, reactor: IReactorTime, store: Fallible, metrics: Metrics) -> None:
        self._reactor = reactor
        self._store = store
        self._failing: set[str] = set()
        # a label is looked up anew each time, which costs more than counting
        self._seconds = cache(metrics.store_seconds.labels)
        self.full = False

    def ask(
        self, method: Callable[_Arguments, Deferred[_Answer]], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Deferred[_Answer]:
        """Call a method of the store; its name is that of the question in metrics and log.

        Fails with :class:`StoreUnavailable`, or with what an entry is refused for.
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
                _log.info("the store answers again ({operation})", operation=operation)
            return answer

        def failed(failure: Failure) -> _Answer:
            seconds.observe(self._reactor.seconds() - began)
            return self._failed(failure, operation)

        return maybeDeferred(method, *args, **kwargs).addCallbacks(answered, failed)

    def _failed(self, failure: Failure, operation: str) -> NoReturn:
        # cancelled: who asked is gone
        if failure.check(EntryNotFound, EntryInvalid, StoreContended, CancelledError):
            failure.raiseException()
        # one line for all requests of a time in which it is away
        if operation not in self._failing:
            self._failing.add(operation)
            if operation == "post":
                self.full = self._store.is_full(failure.value)
            if failure.check(*self._store.failures):
                error = f"{type(failure.value).__name__}: {failure.value}"
                _log.error("the store fails ({operation}): {error}", operation=operation, error=error)
            else:
                _log.failure("the store fails", failure)
        raise StoreUnavailable from None
