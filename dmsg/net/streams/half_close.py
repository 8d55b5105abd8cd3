"""Half-close: one direction of a stream ends while the other continues, as after ``shutdown(SHUT_WR)`` on TCP.

The end of data is an item in the send queue, after the written data. So it is sent, acknowledged and sent again like
data. A stream closes automatically when both directions have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IHalfCloseableProtocol, IProtocol, IReactorTime
from twisted.python.failure import Failure

from dmsg.errors import TransportClosed
from dmsg.net.own_pauses import FairTimeout
from dmsg.net.streams.outbox import EndOfData, Outbox
from dmsg.net.streams.producers import ProducerHolder

_T = TypeVar("_T")

CLOSE_WAIT = 10.0
"""Seconds to wait for the other end's CLOSE, if both directions have ended and the other end has to close the
stream."""
END_SIZE = 1
"""Number of bytes for which an unacknowledged half-close counts in the queue and in flight."""


class HalfClosing:
    """Part of :class:`~dmsg.net.streams.stream.StreamTransport` that tracks the ends of its two directions."""

    can_half_close: bool = False
    """Whether the other end supports half-close. This is true on secure streams if both programs support it."""
    disconnecting: bool
    _outbox: Outbox
    _producing: ProducerHolder
    _protocol: IProtocol | None
    _loss: Failure | None
    _paused: bool
    _delivering: bool
    _unread: Sized
    _end_waits = False
    _end_ticket: EndOfData | None = None
    _end_acknowledged = False
    _remote_ended = False
    _remote_end_told = False
    _half_close_failed = False
    _last_wait: FairTimeout | None = None
    _reactor: IReactorTime

    # --- hooks that the stream overrides ---

    @property
    def _leaves_closing_to_remote(self) -> bool:
        """Whether the other end has to close the stream when both directions have ended."""
        return False

    def _schedule(self) -> None:
        raise NotImplementedError

    def _call_protocol(self, method: Callable[[_T], object], argument: _T) -> bool:
        raise NotImplementedError

    def loseConnection(self) -> None:
        raise NotImplementedError

    def _close_now(self) -> None:
        raise NotImplementedError

    # --- end of the data that this end sends ---

    @property
    def writing_ended(self) -> bool:
        """Whether this end has half-closed, or will do so when its producer has finished."""
        return self._end_ticket is not None or self._end_waits

    @property
    def _unconfirmed_end(self) -> int:
        """Number of bytes for which this end's half-close counts in the queue and in flight."""
        return END_SIZE if self._end_ticket is not None and not self._end_acknowledged else 0

    def end_writing(self) -> Deferred[None]:
        """Half-close: end this direction after the written data. The other direction continues.

        Returns a Deferred that fires when the other end has acknowledged all data and their end. The Deferred fails
        with :class:`~dmsg.errors.TransportClosed` if the stream ends before. If the other end does not support
        half-close (:attr:`can_half_close`), the Deferred fails at once and nothing else happens.
        """
        if not self.can_half_close:
            return fail(TransportClosed(0, "the other end does not understand half-close"))
        if self._loss is not None or self.disconnecting or self.writing_ended:
            return fail(TransportClosed(0, "transport is closed, or its data have ended"))
        done: Deferred[None] = Deferred()
        self._end_ticket = EndOfData(done)
        done.addCallback(self._on_end_acknowledged)
        self._outbox.wait(self._end_ticket)
        # One byte stands for the end of data in the queue and in flight. The carrier recognises this byte by its
        # ticket, an EndOfData, and sends a half-close instead of data.
        self._outbox.add(b"\1", self._end_ticket)
        self._schedule()
        return done

    def loseWriteConnection(self) -> None:
        """End this direction after the written data (:class:`twisted.internet.interfaces.ITCPTransport`). If a producer
        is registered, wait until it has finished.

        If the other end does not support half-close, close the whole stream once all written data are acknowledged. In
        this case, ``connectionLost`` receives ``ConnectionLost`` instead of ``ConnectionDone``, because an answer of
        the other end may be missing.
        """
        if self._loss is not None or self.disconnecting or self.writing_ended:
            return
        if not self.can_half_close:
            self._half_close_failed = True
            self.loseConnection()
        elif self._producing.producer is not None:
            self._end_waits = True
        else:
            self.end_writing().addErrback(lambda failure: failure.trap(TransportClosed) and None)

    def _producer_finished(self) -> None:
        if self._end_waits:
            self._end_waits = False
            self.loseWriteConnection()

    def _reason_of_close(self) -> BaseException | None:
        if self._half_close_failed:
            return ConnectionLost("the other end does not understand half-close: an answer of it may be missing")
        return None

    def _on_end_acknowledged(self, _: None) -> None:
        self._end_acknowledged = True
        protocol = self._protocol
        if IHalfCloseableProtocol.providedBy(protocol):
            self._call_protocol(lambda _: protocol.writeConnectionLost(), None)
        self._close_if_both_ended()

    # --- end of the data that the other end sends ---

    def data_ended(self) -> None:
        """Handle a half-close by the other end."""
        self._remote_ended = True
        # If the protocol is inside ``dataReceived``, the end is reported after that call.
        if not self._delivering:
            self._tell_remote_end()

    @property
    def _remote_end_due(self) -> bool:
        """Whether the application has read all data of the other end, but has not been notified of the end of data."""
        return self._remote_ended and not (self._remote_end_told or self._unread or self._paused)

    def _tell_remote_end(self) -> None:
        if not self._remote_end_due or self._loss is not None or self._protocol is None:
            return
        self._remote_end_told = True
        protocol = self._protocol
        if IHalfCloseableProtocol.providedBy(protocol):
            self._call_protocol(lambda _: protocol.readConnectionLost(), None)
        else:
            # This protocol does not support half-close, so the stream is closed, as Twisted does on TCP. Written data
            # are still sent.
            self.loseConnection()
        self._close_if_both_ended()

    def _close_if_both_ended(self) -> None:
        if not (self._end_acknowledged and self._remote_end_told) or self._loss is not None or self.disconnecting:
            return
        # If the other end has to send CLOSE, this end waits for the CLOSE, but not longer than CLOSE_WAIT.
        if not self._leaves_closing_to_remote:
            self._close_now()
        elif self._last_wait is None:
            self._last_wait = FairTimeout(self._reactor, CLOSE_WAIT, self._close_now)
