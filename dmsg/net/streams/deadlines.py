"""The timers of a stream's deadlines; whether one that has passed still matters is asked of the stream."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime

READ, WRITE, IDLE = "read", "write", "idle"


class Deadlines:
    """The deadlines of one stream: to read, to write, and to be idle.

    :param passed: told which one has passed.
    :ivar idle: seconds without traffic that are too many; None: nobody minds.
    """

    __slots__ = ("_last_traffic", "_passed", "_reactor", "_timers", "idle")

    def __init__(self, reactor: IReactorTime, passed: Callable[[str], None]) -> None:
        self._reactor = reactor
        self._passed = passed
        self._timers: dict[str, IDelayedCall] = {}
        self.idle: float | None = None
        self._last_traffic = 0.0

    def set(self, name: str, seconds: float | None, matters: Callable[[], bool]) -> None:
        """So many seconds from now; None takes it back.

        :param matters: asked when they are over.
        """
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if seconds is None:
            return

        def late() -> None:
            del self._timers[name]
            if matters():
                self._passed(name)

        self._timers[name] = self._reactor.callLater(seconds, late)

    def set_idle(self, seconds: float | None) -> None:
        """After so many seconds without traffic; None takes it back."""
        self.idle = seconds
        self.traffic()
        self._watch_idle()

    def traffic(self) -> None:
        """Something came, or was acknowledged."""
        if self.idle is not None:
            self._last_traffic = self._reactor.seconds()

    def _watch_idle(self) -> None:
        if self.idle is None:
            self.set(IDLE, None, lambda: False)
            return
        left = self._last_traffic + self.idle - self._reactor.seconds()
        self.set(IDLE, max(left, 0.001), self._is_idle)

    def _is_idle(self) -> bool:
        assert self.idle is not None
        if self._reactor.seconds() - self._last_traffic >= self.idle:
            return True
        self._watch_idle()
        return False

    def cancel(self) -> None:
        """The stream has ended: none of them matters any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._passed = lambda name: None  # what was told refers to the stream: that is not to wait for the collector


class Deadlined:
    """What an application sets of a stream's deadlines."""

    _deadlines: Deadlines | None = None
    """None on a stream on which none was set: most have none."""
    _deadlines_over = False
    _reactor: IReactorTime

    def _deadline_passed(self, name: str) -> None:
        raise NotImplementedError

    def _has_unacknowledged(self) -> bool:
        """Something was written that the other end does not have."""
        raise NotImplementedError

    def _need_deadlines(self) -> Deadlines | None:
        """Return the deadlines, also if none was set so far; None once the stream has ended."""
        if self._deadlines is None and not self._deadlines_over:
            self._deadlines = Deadlines(self._reactor, self._deadline_passed)
        return self._deadlines

    def _end_deadlines(self) -> None:
        """The stream has ended: no deadline matters any more."""
        self._deadlines_over = True
        if self._deadlines is not None:
            self._deadlines.cancel()
            self._deadlines = None

    def setReadDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now, unless the deadline is moved or, with None, taken back before.

        An application that waits for something moves it in ``dataReceived``.  ``connectionLost``
        gets :class:`~dmsg.net.streams.address.StreamTimeout`, pending sends fail with
        :class:`~dmsg.errors.DmsgTimeout`.
        """
        if deadlines := self._need_deadlines():
            deadlines.set(READ, seconds, lambda: True)

    def setWriteDeadline(self, seconds: float | None) -> None:
        """End the stream ``seconds`` from now if something is written and not acknowledged then; None takes it back."""
        if deadlines := self._need_deadlines():
            deadlines.set(WRITE, seconds, self._has_unacknowledged)

    def setDeadline(self, seconds: float | None) -> None:
        """Both, as ``SetDeadline`` of Go's ``net.Conn``."""
        self.setReadDeadline(seconds)
        self.setWriteDeadline(seconds)

    def setIdleTimeout(self, seconds: float | None) -> None:
        """End the stream when nothing came and nothing was acknowledged for ``seconds``; None takes it back."""
        if deadlines := self._need_deadlines():
            deadlines.set_idle(seconds)
