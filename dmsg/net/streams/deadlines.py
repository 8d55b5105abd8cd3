"""Timers of the deadlines of a stream. When a timer fires, the stream decides whether the deadline still applies."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

READ, WRITE, IDLE = "read", "write", "idle"


class Deadlines:
    """Timers of one stream, for its read, write and idle deadlines.

    :param on_timeout: called with the name of a deadline that has passed.
    :ivar idle: maximum number of seconds without traffic; None for no limit.
    """

    __slots__ = ("_last_traffic", "_on_timeout", "_reactor", "_timers", "idle")

    def __init__(self, reactor: IReactorTime, on_timeout: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._on_timeout = on_timeout
        self._timers: dict[str, IDelayedCall] = {}
        self.idle: float | None = None
        self._last_traffic = 0.0

    def set(self, name: str, seconds: float | None, is_relevant: Callable[[], bool]) -> None:
        """Set a deadline ``seconds`` from now, or cancel it if ``seconds`` is None.

        :param is_relevant: called when the time is over; the deadline applies only if the callback returns True.
        """
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if seconds is None:
            return

        def late() -> None:
            del self._timers[name]
            if is_relevant():
                self._on_timeout(name)

        self._timers[name] = self._reactor.callLater(seconds, late)

    def set_idle(self, seconds: float | None) -> None:
        """Set the maximum number of seconds without traffic; None cancels it."""
        self.idle = seconds
        self.traffic()
        self._watch_idle()

    def traffic(self) -> None:
        """Record traffic: data arrived or were acknowledged."""
        if self.idle is not None:
            self._last_traffic = self._reactor.seconds()

    def _watch_idle(self) -> None:
        if self.idle is None:
            self.set(IDLE, None, lambda: False)
            return
        # Only the time is recorded here, and one timer checks it later, because moving a timer for each frame would
        # take longer than handling the frame.
        left = self._last_traffic + self.idle - self._reactor.seconds()
        # A remaining time below the clock's resolution counts as none; otherwise the timer would fire again and again
        # at the same moment.
        self.set(IDLE, max(left, 0.001), self._is_idle)

    def _is_idle(self) -> bool:
        assert self.idle is not None
        if self._reactor.seconds() - self._last_traffic >= self.idle:
            return True
        self._watch_idle()
        return False

    def cancel(self) -> None:
        """Cancel all timers, because the stream has ended."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        # The callback is deleted, because it refers to the stream, whose memory should be freed without the garbage
        # collector.
        self._on_timeout = lambda name: None


class DeadlineMixin:
    """Methods of a stream with which an application sets deadlines."""

    _deadlines: Deadlines | None = None
    """Timers of the stream; None until the first is set, because most streams have none."""
    _deadlines_over = False
    _reactor: IReactorTime

    def _deadline_passed(self, name: str) -> None:
        raise NotImplementedError

    def _has_unacknowledged(self) -> bool:
        """Whether data were written that the other end has not acknowledged."""
        raise NotImplementedError

    def _need_deadlines(self) -> Deadlines | None:
        """Return the timers, made on first use; None once the stream has ended."""
        if self._deadlines is None and not self._deadlines_over:
            self._deadlines = Deadlines(self._reactor, self._deadline_passed)
        return self._deadlines

    def _end_deadlines(self) -> None:
        """Cancel all deadlines for good, because the stream has ended."""
        self._deadlines_over = True
        if self._deadlines is not None:
            self._deadlines.cancel()
            self._deadlines = None

    def setReadDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now, unless the deadline is moved before. None cancels it.

        An application that waits for data moves the deadline in ``dataReceived``. When the deadline passes,
        ``connectionLost`` gets :class:`~dmsg.net.streams.address.StreamTimeout`, and pending sends fail with
        :class:`~dmsg.errors.DmsgTimeout`.
        """
        if deadlines := self._need_deadlines():
            deadlines.set(READ, seconds, lambda: True)

    def setWriteDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now if written data are not acknowledged then. None cancels the deadline."""
        if deadlines := self._need_deadlines():
            deadlines.set(WRITE, seconds, self._has_unacknowledged)

    def setDeadline(self, seconds: float | None) -> None:
        """Set the read and the write deadline, like ``SetDeadline`` of Go's ``net.Conn``."""
        self.setReadDeadline(seconds)
        self.setWriteDeadline(seconds)

    def setIdleTimeout(self, seconds: float | None) -> None:
        """End the stream when nothing has arrived or was acknowledged for ``seconds``. None cancels this timeout."""
        if deadlines := self._need_deadlines():
            deadlines.set_idle(seconds)
