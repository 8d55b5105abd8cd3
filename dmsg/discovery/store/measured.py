"""A store as the API asks it: timed, and its failures are said once."""

from __future__ import annotations

from functools import cache
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import EntryInvalid
from dmsg.discovery.store.base import StoreContended
from dmsg.errors import EntryNotFound
from dmsg.telemetry.metrics import Metrics

_log = Logger()


class StoreUnavailable(Exception):
    """The store failed; the client may try again."""


class MeasuredStore:
    """Questions to a store.

    :param store: provides :class:`~dmsg.discovery.store.IEntryStore`.
    :ivar full: it was read and not written when an entry came last.
    """

    def __init__(self, reactor: IReactorTime, store: Any, metrics: Metrics) -> None:
        self._reactor = reactor
        self._store = store
        self._failing: set[str] = set()
        # a label is looked up anew each time, which costs more than counting
        self._seconds = cache(metrics.store_seconds.labels)
        self.full = False

    def ask(self, operation: str, *arguments: Any) -> Deferred[Any]:
        """A question to the store, by the name of its method.

        Fails with :class:`StoreUnavailable`, or with what an entry is refused for.
        """
        seconds = self._seconds(operation)
        began = self._reactor.seconds()
        result: Deferred[Any] = maybeDeferred(getattr(self._store, operation), *arguments)

        def measured(value: Any) -> Any:
            seconds.observe(self._reactor.seconds() - began)
            return value

        result.addBoth(measured)
        return result.addCallbacks(self._answered, self._failed, callbackArgs=(operation,), errbackArgs=(operation,))

    def _answered(self, value: Any, operation: str) -> Any:
        if operation in self._failing:
            self._failing.discard(operation)
            if operation == "post":
                self.full = False
            _log.info("the store answers again ({operation})", operation=operation)
        return value

    def _failed(self, failure: Failure, operation: str) -> Failure:
        # cancelled: who asked is gone
        if failure.check(EntryNotFound, EntryInvalid, StoreContended, CancelledError):
            return failure
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
