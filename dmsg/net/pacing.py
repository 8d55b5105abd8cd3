"""Rate limit with a fair queue: a caller with more requests than others waits longer."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime


class PacedQueue:
    """Queue that releases its waiters at an even rate. Requesters take turns (round-robin).

    :param rate: returns the number of releases per second.
    """

    def __init__(self, reactor: IReactorTime, rate: Callable[[], float]) -> None:
        self._reactor = reactor
        self._rate = rate
        self._next = 0.0
        self._lines: OrderedDict[Hashable, deque[Deferred[None]]] = OrderedDict()
        self._call: IDelayedCall | None = None

    def wait(self, requester: Hashable) -> Deferred[None]:
        """Return a Deferred that fires when ``requester`` may proceed. Cancelling the Deferred removes it from the
        queue."""
        now = self._reactor.seconds()
        if not self._lines and self._next <= now:
            self._next = now + 1 / self._rate()
            return succeed(None)
        place: Deferred[None] = Deferred(lambda place: self._leave(requester, place))
        self._lines.setdefault(requester, deque()).append(place)
        self._plan()
        return place

    def _leave(self, requester: Hashable, place: Deferred[None]) -> None:
        line = self._lines.get(requester)
        if line is not None and place in line:
            line.remove(place)
            if not line:
                del self._lines[requester]
            if not self._lines and self._call is not None:
                call, self._call = self._call, None
                call.cancel()

    def _plan(self) -> None:
        if self._lines and self._call is None:
            self._call = self._reactor.callLater(max(0.0, self._next - self._reactor.seconds()), self._run)

    def _run(self) -> None:
        self._call = None
        who, line = next(iter(self._lines.items()))
        place = line.popleft()
        if line:
            self._lines.move_to_end(who)
        else:
            del self._lines[who]
        # A busy reactor may delay releases. The delayed releases follow in a burst, which is limited to those of one
        # second.
        self._next = max(self._next, self._reactor.seconds() - 1.0) + 1 / self._rate()
        self._plan()
        place.callback(None)
