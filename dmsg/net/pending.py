"""Deferreds that wait for answers of a peer, by id.

Each fires exactly once. When the connection is lost, all pending ones fail, and new ones fail at once with the same
reason.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.python.failure import Failure

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Pending(Generic[K, V]):
    """Table of pending answers: a Deferred by id."""

    def __init__(self) -> None:
        self._waiting: dict[K, Deferred[V]] | None = {}
        self._reason: Failure | None = None

    def __len__(self) -> int:
        return len(self._waiting or ())

    def add(self, key: K) -> Deferred[V]:
        """Return a Deferred for the answer to ``key``. Cancelling it drops the answer."""
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
        """Deliver the answer to ``key``. An answer that nobody waits for is ignored."""
        if self._waiting is not None and (deferred := self._waiting.pop(key, None)) is not None:
            deferred.callback(value)

    def fail(self, key: K, reason: Failure) -> None:
        """Fail the Deferred of ``key``."""
        if self._waiting is not None and (deferred := self._waiting.pop(key, None)) is not None:
            deferred.errback(reason)

    def fail_all(self, reason: Failure) -> None:
        """Fail all pending Deferreds, and from now on every Deferred that is added."""
        # The table is replaced by a new one first, because callbacks may add Deferreds.
        waiting, self._waiting = self._waiting, None
        self._reason = reason
        for deferred in list((waiting or {}).values()):
            if not deferred.called:
                # The Deferred may have fired already, because an earlier callback may have cancelled it.
                deferred.errback(reason)
