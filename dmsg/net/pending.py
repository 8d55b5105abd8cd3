"""Table of Deferreds that wait for answers of a peer. The id of a request is the key of its Deferred.

Each Deferred fires exactly once. When the connection is lost, all pending Deferreds fail. Deferreds that are added
later fail at once for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.python.failure import Failure

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class Pending(Generic[K, V]):
    """Table of Deferreds that wait for an answer, by id."""

    def __init__(self) -> None:
        self._waiting: dict[K, Deferred[V]] | None = {}
        self._reason: Failure | None = None

    def __len__(self) -> int:
        return len(self._waiting or ())

    def add(self, key: K) -> Deferred[V]:
        """Return a Deferred for the answer to the request with id ``key``. If the Deferred is cancelled, a later answer
        is ignored."""
        if self._waiting is None:
            assert self._reason is not None
            return fail(self._reason)
        waiting = self._waiting

        def forget(_: Deferred[V]) -> None:
            waiting.pop(key, None)

        deferred: Deferred[V] = Deferred(forget)
        waiting[key] = deferred
        return deferred

    def succeed(self, key: K, value: V) -> None:
        """Fire the Deferred of ``key`` with the answer. Ignore an answer that no Deferred waits for."""
        if self._waiting is not None and (deferred := self._waiting.pop(key, None)) is not None:
            deferred.callback(value)

    def fail(self, key: K, reason: Failure) -> None:
        """Fail the Deferred of ``key``."""
        if self._waiting is not None and (deferred := self._waiting.pop(key, None)) is not None:
            deferred.errback(reason)

    def fail_all(self, reason: Failure) -> None:
        """Fail all pending Deferreds, and from now on every Deferred that is added."""
        # The table is replaced before the Deferreds fail, because callbacks may add Deferreds.
        waiting, self._waiting = self._waiting, None
        self._reason = reason
        for deferred in list((waiting or {}).values()):
            if not deferred.called:
                # The Deferred may have fired already, because a callback of an earlier Deferred may have cancelled it.
                deferred.errback(reason)


def cancellable(asking: Deferred[T]) -> Deferred[T]:
    """Return a Deferred with the result of ``asking`` that fails with CancelledError as soon as it is cancelled.

    A cancelled HTTP request itself fails with various errors, such as ConnectingCancelledError. A caller that tries
    several servers would mistake such an error for a failure of the server, and try the next one.
    """
    return _until_cancelled(asking, asking.cancel)


def detached(going: Deferred[T]) -> Deferred[T]:
    """Return a Deferred with the result of ``going``. If it is cancelled, ``going`` and its callbacks go on, and the
    result is dropped.

    A client that disconnects cancels its request. What the request has changed must be counted nevertheless.
    """
    return _until_cancelled(going, lambda: None)


def _until_cancelled(inner: Deferred[T], on_cancelled: Callable[[], None]) -> Deferred[T]:
    """Return a Deferred with the result of ``inner``. After it is cancelled, the result of ``inner`` is dropped."""
    wanted = True

    def cancel(_: Deferred[T]) -> None:
        nonlocal wanted
        wanted = False
        on_cancelled()

    answer: Deferred[T] = Deferred(cancel)

    def ended(result: T | Failure) -> None:
        if wanted:
            answer.callback(result)

    inner.addBoth(ended)
    return answer
