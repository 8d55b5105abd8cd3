"""Time that another party takes, measured without the pauses of this process.

A process pauses while a callback computes for long, while the machine is busy with other processes, or when it is
stopped. After a pause, the reactor runs delayed calls before it reads what has arrived. So a plain measurement or a
plain delayed call would blame the other party for an answer that arrived in time.

Each reactor has one record of its pauses. A single delayed call detects them, however many measurements and timeouts
run, because strangers can cause many of these. While none runs, there is no delayed call. A timeout joins the record
only after ``MIN_PAUSE_SHARE`` of its time, because most answers arrive before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.net.deadlines import no_answer
from dmsg.net.reactor import cancel_call

_T = TypeVar("_T")

FIRST_CHECK = 0.02
"""Minimum seconds between two checks for a pause."""
CHECK_FACTOR = 0.1
"""Seconds until the next check, per second since the newest measurement or timeout began. So undetected pauses are a
small part of each measured time, and a long wait needs few checks.
"""
MIN_PAUSES = (0.01, 0.1, 1.0)
"""Minimum delays of a check in seconds that count as a pause. The first one applies to measurements."""
MIN_PAUSE_SHARE = 0.02
"""Share of a timeout that the shortest pause may have that counts in it. The timeout uses the largest of ``MIN_PAUSES``
up to this share. Otherwise the short delays of a busy process, in which it still reads what arrives, would add up and
make each timeout several times longer. The first delayed call of a timeout is made after this share of its time.
"""
MAX_EXTENSIONS = 5
"""Maximum number of times that an expired timeout waits once more because its own delayed call was late. A process may
be so busy that each of its delayed calls is late.
"""
MIN_ATTEMPT = 0.01
"""Minimum seconds for one of several attempts."""
MIN_LEFT = 1e-6
"""Minimum seconds that are left for a further wait, because sums of floating-point numbers are not exact."""


def _can_pause(reactor: IReactorTime) -> bool:
    """Return whether a late call shows that the reactor's process was paused.

    A ``Clock`` stands still between the steps by which a test advances it, so a large step is not a pause. A clock that
    simulates pauses has the attribute ``can_pause``.
    """
    return not isinstance(reactor, Clock) or bool(getattr(reactor, "can_pause", False))


def _kind_of(seconds: float) -> int:
    """Return which of ``MIN_PAUSES`` applies to a timeout of so many seconds."""
    shortest = MIN_PAUSE_SHARE * seconds
    return max((kind for kind, least in enumerate(MIN_PAUSES) if least <= shortest), default=0)


class _PauseRecord:
    """Pauses of the process that runs one reactor, while measurements or timeouts run."""

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._sums = [0.0] * len(MIN_PAUSES)
        self._users = 0
        self._newest = 0.0
        self._max_step = math.inf
        self._due = 0.0
        self._call: IDelayedCall | None = None

    def begin(self, age: float = 0.0) -> None:
        """Record pauses from now on, until :meth:`end` is called as often as this method.

        :param age: seconds since the measurement or timeout began.
        """
        self._users += 1
        if not _can_pause(self._reactor):
            return
        now = self._reactor.seconds()
        self._newest = max(self._newest, now - age)
        step = self._step(now)
        # A call that is overdue is not replaced, because its delay shows a pause.
        if self._call is None or self._due > now + step:
            cancel_call(self._call)
            self._check_later(step)

    def end(self) -> None:
        """Stop the checks for pauses, unless another measurement or timeout runs."""
        self._users -= 1
        if not self._users:
            cancel_call(self._call)
            self._call = None
            self._max_step = math.inf

    def limit_step(self, seconds: float) -> None:
        """Check for pauses at least this often from now on, because a timeout of ten times this length began again."""
        if seconds < self._max_step:
            self._max_step = seconds
            if self._call is not None and self._due > self._reactor.seconds() + seconds:
                cancel_call(self._call)
                self._check_later(seconds)

    def total(self, kind: int = 0) -> float:
        """Return the sum in seconds of all recorded pauses that are at least ``MIN_PAUSES[kind]`` long.

        Only differences of two sums have a meaning.
        """
        late = self._reactor.seconds() - self._due if self._call is not None else 0.0
        return self._sums[kind] + (late if late >= MIN_PAUSES[kind] else 0.0)

    def _step(self, now: float) -> float:
        return max(FIRST_CHECK, min(CHECK_FACTOR * (now - self._newest), self._max_step))

    def _check_later(self, step: float) -> None:
        self._due = self._reactor.seconds() + step
        self._call = self._reactor.callLater(step, self._check)

    def _check(self) -> None:
        now = self._reactor.seconds()
        late = now - self._due
        if late >= MIN_PAUSES[0]:
            self._sums = [
                total + (late if late >= least else 0.0) for total, least in zip(self._sums, MIN_PAUSES, strict=True)
            ]
        if late >= MIN_PAUSES[0] or late < 0:  # It is negative if the clock was set back together with the calls.
            self._newest += late
        self._check_later(self._step(now))


_records: WeakValueDictionary[int, _PauseRecord] = WeakValueDictionary()
"""Records by the identity of their reactor, to which each record refers."""


def _record_of(reactor: IReactorTime) -> _PauseRecord:
    record = _records.get(id(reactor))
    if record is None:
        record = _records[id(reactor)] = _PauseRecord(reactor)
    return record


def forget_pauses(reactor: IReactorTime) -> None:
    """Drop the record of a reactor whose delayed calls are gone, because the lab has killed its simulated process."""
    _records.pop(id(reactor), None)


class PauseMeter:
    """Measurement of the time that another party takes, and of the pauses of this process meanwhile.

    The measurement begins at once, and ends with :meth:`stop`.

    :param limit: seconds after which other parties are judged by this measurement, which may itself last for longer;
        None if they are not judged by a limit.
    """

    def __init__(self, reactor: IReactorTime, limit: float | None = None) -> None:
        self._reactor = reactor
        self._began = reactor.seconds()
        self._kind = 0 if limit is None else _kind_of(limit)
        self._record: _PauseRecord | None = _record_of(reactor)
        self._record.begin()
        if limit is not None:
            self._record.limit_step(CHECK_FACTOR * limit)
        self._paused_before = self._record.total(self._kind)
        self._elapsed = self._paused = 0.0

    @property
    def paused(self) -> float:
        """Seconds for which this process was paused."""
        return self._paused if self._record is None else self._record.total(self._kind) - self._paused_before

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning, or from the beginning to the end, with all pauses."""
        return self._elapsed if self._record is None else self._reactor.seconds() - self._began

    @property
    def awake(self) -> float:
        """Seconds of :attr:`elapsed` in which this process was not paused."""
        return self.elapsed - self.paused

    @property
    def measured(self) -> float | None:
        """Seconds that the other party has taken, without the pauses of this process.

        None if this process was paused for most of the time, because the rest then says little about the other party.
        """
        return self.awake if self.paused <= self.elapsed / 2 else None

    def stop(self) -> None:
        """End the measurement."""
        if self._record is not None:
            self._paused, self._elapsed = self.paused, self.elapsed
            record, self._record = self._record, None
            record.end()


class TimeLeft:
    """Rest of the time for several attempts in turn, in which pauses of this process do not count.

    :param seconds: seconds for all attempts.
    """

    def __init__(self, reactor: IReactorTime, seconds: float) -> None:
        self._seconds = seconds
        self._meter = PauseMeter(reactor, seconds)

    @property
    def seconds(self) -> float:
        """Seconds that are left. The number is negative if the time is over."""
        return self._seconds - self._meter.awake

    def share(self, parts: int) -> float:
        """Return one of so many equal parts of the rest, but at least ``MIN_ATTEMPT``."""
        return max(self.seconds / parts, MIN_ATTEMPT)

    def stop(self, result: _T) -> _T:
        """End the measurement, and return ``result``; to be added to the Deferred of the attempts."""
        self._meter.stop()
        return result


class FairTimeout:
    """Timeout for an answer of another party, in which pauses of this process do not count.

    :param seconds: seconds that the other party may take.
    :param on_timeout: callback invoked once this time has passed, unless the timeout was stopped.
    """

    __slots__ = (
        "_began",
        "_call",
        "_due",
        "_extensions",
        "_kind",
        "_on_timeout",
        "_paused_before",
        "_reactor",
        "_record",
        "_seconds",
    )

    def __init__(self, reactor: IReactorTime, seconds: float, on_timeout: Callable[[], object]) -> None:
        self._reactor = reactor
        self._seconds = seconds
        self._on_timeout: Callable[[], object] | None = on_timeout
        self._extensions = self._kind = 0
        self._record: _PauseRecord | None = None
        self._paused_before = 0.0
        self._began = reactor.seconds()
        self._wait(MIN_PAUSE_SHARE * seconds if _can_pause(reactor) else seconds)

    def active(self) -> bool:
        """Return whether the timeout has neither passed nor been stopped."""
        return self._on_timeout is not None

    def restart(self) -> None:
        """Begin the time again, because the other party has done something.

        The delayed call stays as it is, so this method may be called for each frame.
        """
        self._began = self._reactor.seconds()
        self._extensions = 0
        if self._record is not None:
            self._record.limit_step(CHECK_FACTOR * self._seconds)
            self._paused_before = self._record.total(self._kind)

    def stop(self) -> None:
        """End the timeout."""
        # The callback may refer to the owner of this timeout. Without it, the garbage collector is not needed.
        self._on_timeout = None
        cancel_call(self._call)
        if self._record is not None:
            record, self._record = self._record, None
            record.end()

    def _wait(self, seconds: float) -> None:
        self._due = self._reactor.seconds() + seconds
        self._call = self._reactor.callLater(seconds, self._check)

    def _check(self) -> None:
        if (on_timeout := self._on_timeout) is None:
            return
        if (left := self._left()) > MIN_LEFT:
            self._wait(left)
        else:
            self.stop()
            on_timeout()

    def _left(self) -> float:
        """Return the seconds that the other party still has."""
        now = self._reactor.seconds()
        if not _can_pause(self._reactor):
            return self._seconds - (now - self._began)
        late = now - self._due
        if late < 0:
            # The clock was set back together with the calls. All times move with it.
            self._began += late
        if self._record is None:
            self._kind = _kind_of(self._seconds)
            if late >= MIN_PAUSES[self._kind]:
                self._began = min(self._began + late, now)
            self._record = _record_of(self._reactor)
            self._record.begin(now - self._began)
            self._paused_before = self._record.total(self._kind)
        left = self._seconds - (now - self._began - (self._record.total(self._kind) - self._paused_before))
        if left < FIRST_CHECK and late >= MIN_PAUSES[0] and self._extensions < MAX_EXTENSIONS:
            # An answer that arrived during the pause is read before the next check.
            self._extensions += 1
            left = FIRST_CHECK
        return left


class PausesBetweenChecks:
    """Pauses of this process between the periodic checks of others, which need no further delayed calls.

    :param interval: seconds between two checks.
    """

    def __init__(self, reactor: IReactorTime, interval: float) -> None:
        self._reactor = reactor
        self._interval = interval
        self._was_late = False
        self._last: float | None = None

    def begin(self) -> None:
        """Begin an interval now. Without this call, the first check begins it."""
        self._last = self._reactor.seconds()

    def measure(self) -> float:
        """Return by how many seconds to delay all deadlines of the others, in each check."""
        now = self._reactor.seconds()
        passed = 0.0 if self._last is None else now - self._last
        self._last = now
        late = passed - self._interval
        if not _can_pause(self._reactor) or late < CHECK_FACTOR * self._interval:
            self._was_late = False
            return 0.0
        # A check after a pause counts no time at all, because this process has not read yet what arrived meanwhile. If
        # each check is late, every second one counts.
        self._was_late = not self._was_late
        return passed if self._was_late else late


def stop_timeout(timeout: FairTimeout | None) -> None:
    """End a timeout, if there is one."""
    if timeout is not None:
        timeout.stop()


def add_fair_timeout(
    waiting: Deferred[_T],
    seconds: float,
    reactor: IReactorTime,
    on_timeout: Callable[[_T | Failure, float], _T] = no_answer,
) -> Deferred[_T]:
    """Cancel a Deferred after ``seconds`` in which this process was not paused.

    Apart from the pauses, the result is the same as with :meth:`~twisted.internet.defer.Deferred.addTimeout`.

    :param on_timeout: function that returns the result of the cancelled Deferred, or raises an error; its arguments are
        the Deferred's own result and ``seconds``.
    :returns: ``waiting``.
    """
    is_late = False

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        waiting.cancel()

    def ended(result: _T | Failure) -> _T | Failure:
        timeout.stop()
        return on_timeout(result, seconds) if is_late else result

    timeout = FairTimeout(reactor, seconds, cancel)
    waiting.addBoth(ended)
    return waiting
