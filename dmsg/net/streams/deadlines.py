"""Timers for the deadlines of a stream. When a timer fires, a callback decides whether the deadline still applies.

Pauses of this process do not count, because meanwhile it reads nothing that the other end sends.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

from dmsg.net.own_pauses import FairTimeout, stop_timeout

READ, WRITE, IDLE = "read", "write", "idle"


class Deadlines:
    """Timers of one stream, for its read, write and idle deadlines.

    :param on_timeout: called with the name of a deadline that has passed.
    :ivar idle: maximum number of seconds without traffic; None for no limit.
    """

    __slots__ = ("_on_timeout", "_reactor", "_timers", "idle")

    def __init__(self, reactor: IReactorTime, on_timeout: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._on_timeout = on_timeout
        self._timers: dict[str, FairTimeout] = {}
        self.idle: float | None = None

    def set(self, name: str, seconds: float | None, is_relevant: Callable[[], bool]) -> None:
        """Set a deadline ``seconds`` from now, or cancel the deadline if ``seconds`` is None.

        :param is_relevant: called when the deadline has passed. If it returns False, the deadline is ignored.
        """
        stop_timeout(self._timers.pop(name, None))
        if seconds is None:
            return

        def late() -> None:
            del self._timers[name]
            if is_relevant():
                self._on_timeout(name)

        self._timers[name] = FairTimeout(self._reactor, seconds, late)

    def set_idle(self, seconds: float | None) -> None:
        """Set the maximum number of seconds without traffic; None disables the limit."""
        self.idle = seconds
        self.set(IDLE, seconds, lambda: True)

    def traffic(self) -> None:
        """Record that data have arrived or were acknowledged."""
        if timer := self._timers.get(IDLE):
            timer.restart()

    def cancel(self) -> None:
        """Cancel all timers, because the stream has ended."""
        for timer in self._timers.values():
            timer.stop()
        self._timers.clear()
        # The callback refers to the stream. It is deleted, so that the memory of the stream is freed without the
        # garbage collector.
        self._on_timeout = lambda name: None


class DeadlineMixin:
    """Methods of a stream by which an application sets deadlines."""

    _deadlines: Deadlines | None = None
    """Timers of the stream. None until the first deadline is set, because most streams have none."""
    _deadlines_over = False
    _reactor: IReactorTime

    def _deadline_passed(self, name: str) -> None:
        raise NotImplementedError

    def _has_unacknowledged(self) -> bool:
        """Whether written data exist that the other end has not acknowledged."""
        raise NotImplementedError

    def _need_deadlines(self) -> Deadlines | None:
        """Return the timers, which are created on the first call. Return None if the stream has ended."""
        if self._deadlines is None and not self._deadlines_over:
            self._deadlines = Deadlines(self._reactor, self._deadline_passed)
        return self._deadlines

    def _end_deadlines(self) -> None:
        """Cancel all deadlines and refuse new ones, because the stream has ended."""
        self._deadlines_over = True
        if self._deadlines is not None:
            self._deadlines.cancel()
            self._deadlines = None

    def setReadDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now, unless the deadline is changed before. None cancels the deadline.

        An application that waits for data sets a new deadline in ``dataReceived``. When the deadline passes,
        ``connectionLost`` receives :class:`~dmsg.net.streams.address.StreamTimeout`, and pending calls of ``send`` fail
        with :class:`~dmsg.errors.DmsgTimeout`.
        """
        if deadlines := self._need_deadlines():
            deadlines.set(READ, seconds, lambda: True)

    def setWriteDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now if written data are unacknowledged at that time. None cancels the
        deadline."""
        if deadlines := self._need_deadlines():
            deadlines.set(WRITE, seconds, self._has_unacknowledged)

    def setDeadline(self, seconds: float | None) -> None:
        """Set the read and the write deadline, like ``SetDeadline`` of Go's ``net.Conn``."""
        self.setReadDeadline(seconds)
        self.setWriteDeadline(seconds)

    def setIdleTimeout(self, seconds: float | None) -> None:
        """End the stream when no data have arrived or were acknowledged for ``seconds``. None cancels this timeout."""
        if deadlines := self._need_deadlines():
            deadlines.set_idle(seconds)
