"""Clock of the lab, on which all simulated hosts run."""

from __future__ import annotations

from bisect import bisect_left, insort_right
from collections.abc import Callable
from operator import attrgetter

from twisted.internet.base import DelayedCall
from twisted.internet.task import Clock


class _LabCall(DelayedCall):
    """Delayed call that keeps its place in the order of its clock when its time changes.

    :ivar due: time at which the call is made. It is the same as that of :meth:`getTime`, but quicker to read.
    """

    clock: LabClock
    due: float

    def reset(self, secondsFromNow: float) -> None:
        super().reset(secondsFromNow)
        self.clock.move(self)

    def delay(self, secondsLater: float) -> None:
        super().delay(secondsLater)
        self.clock.move(self)


_due: Callable[[DelayedCall], float] = attrgetter("due")


def _do_nothing(call: DelayedCall) -> None:
    """Do nothing when the time of a call changes, because the call itself then changes its place."""


class LabClock(Clock):
    """Clock for many calls. :class:`~twisted.internet.task.Clock` sorts all calls whenever one is added or made, which
    takes more than half of the time of a walk. This class inserts each call in order."""

    def callLater(self, delay: float, callable: Callable[..., object], *args: object, **kw: object) -> DelayedCall:
        call = _LabCall(self.seconds() + delay, callable, args, kw, self._remove, _do_nothing, self.seconds)
        call.clock = self
        call.due = call.time
        insort_right(self.calls, call, key=_due)
        return call

    def _remove(self, call: DelayedCall) -> None:
        place = bisect_left(self.calls, _due(call), key=_due)
        while self.calls[place] is not call:
            place += 1
        del self.calls[place]

    def move(self, call: _LabCall) -> None:
        """Put a call whose time has changed into its place."""
        self._remove(call)
        call.due = call.getTime()
        insort_right(self.calls, call, key=_due)

    def _sortCalls(self) -> None:
        """Do nothing, because the calls are always in order."""
