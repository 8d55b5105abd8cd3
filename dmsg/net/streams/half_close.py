"""Half-close: one direction of a stream ends while the other goes on, as with ``shutdown(SHUT_WR)`` over TCP.

The end of data is queued behind what was written, in the same queue, so that it is sent, acknowledged and sent
again as data are.  A stream on which both directions have ended closes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IDelayedCall, IHalfCloseableProtocol, IProtocol, IReactorTime
from twisted.python.failure import Failure

from dmsg.errors import TransportClosed
from dmsg.net.streams.outbox import EndOfData, Outbox
from dmsg.net.streams.producers import Producing

_T = TypeVar("_T")

CLOSE_WAIT = 10.0
"""Seconds to wait for the other end's CLOSE when both directions have ended and closing is left to the other end."""
END_SIZE = 1
"""Bytes that the end of data takes in the queue and among what is in flight."""


class HalfClosing:
    """The part of a :class:`~dmsg.net.streams.stream.StreamTransport` that knows the ends of its two directions."""

    can_half_close: bool = False
    """Whether the other end understands the end of data.  It does on secure streams between programs that both do."""
    disconnecting: bool
    _outbox: Outbox
    _producing: Producing
    _protocol: IProtocol | None
    _lost: Failure | None
    _paused: bool
    _delivering: bool
    _unread: Sized
    _end_waits = False
    _end_ticket: EndOfData | None = None
    _end_acknowledged = False
    _remote_ended = False
    _remote_end_told = False
    _half_close_failed = False
    _last_wait: IDelayedCall | None = None
    _reactor: IReactorTime

    # --- hooks of the stream ---

    @property
    def _leaves_closing_to_remote(self) -> bool:
        """Whether the other end closes the stream when both directions have ended."""
        return False

    def _schedule(self) -> None:
        raise NotImplementedError

    def _call_protocol(self, method: Callable[[_T], object], argument: _T) -> bool:
        raise NotImplementedError

    def loseConnection(self) -> None:
        raise NotImplementedError

    def _close_now(self) -> None:
        raise NotImplementedError

    # --- this end's data ---

    @property
    def writing_ended(self) -> bool:
        """Whether this end has said, or is about to say, that it sends no more."""
        return self._end_ticket is not None or self._end_waits

    @property
    def _unconfirmed_end(self) -> int:
        """Bytes of what is queued or in flight that are no data but their end."""
        return END_SIZE if self._end_ticket is not None and not self._end_acknowledged else 0

    def end_writing(self) -> Deferred[None]:
        """Send no more after what was written; what the other end sends still arrives.

        Fires when the other end has all of it and knows that it is all.  Fails with
        :class:`~dmsg.errors.TransportClosed` if the stream ends before, and at once if the other end does not
        understand it (:attr:`can_half_close`), in which case nothing happens.
        """
        if not self.can_half_close:
            return fail(TransportClosed(0, "the other end does not understand half-close"))
        if self._lost is not None or self.disconnecting or self.writing_ended:
            return fail(TransportClosed(0, "transport is closed, or its data have ended"))
        done: Deferred[None] = Deferred()
        self._end_ticket = EndOfData(done)
        done.addCallback(self._on_end_acknowledged)
        self._outbox.wait(self._end_ticket)
        self._outbox.add(b"\1", self._end_ticket)
        self._schedule()
        return done

    def loseWriteConnection(self) -> None:
        """As in :class:`twisted.internet.interfaces.ITCPTransport`: a registered producer may finish first.

        Where the other end does not understand half-close the whole stream is closed when all that was written has
        arrived.  Then ``connectionLost`` gets ``ConnectionLost``, not ``ConnectionDone``: an answer may be missing.
        """
        if self._lost is not None or self.disconnecting or self.writing_ended:
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

    # --- the other end's data ---

    def data_ended(self) -> None:
        """The other end sends no more data."""
        self._remote_ended = True
        if not self._delivering:
            self._tell_remote_end()

    @property
    def _remote_end_due(self) -> bool:
        """The application has all data and has not been told that no more follow."""
        return self._remote_ended and not (self._remote_end_told or self._unread or self._paused)

    def _tell_remote_end(self) -> None:
        if not self._remote_end_due or self._lost is not None or self._protocol is None:
            return
        self._remote_end_told = True
        protocol = self._protocol
        if IHalfCloseableProtocol.providedBy(protocol):
            self._call_protocol(lambda _: protocol.readConnectionLost(), None)
        else:
            self.loseConnection()  # as Twisted's TCP does; but what was written still leaves
        self._close_if_both_ended()

    def _close_if_both_ended(self) -> None:
        if not (self._end_acknowledged and self._remote_end_told) or self._lost is not None or self.disconnecting:
            return
        if not self._leaves_closing_to_remote:
            self._close_now()
        elif self._last_wait is None:
            self._last_wait = self._reactor.callLater(CLOSE_WAIT, self._close_now)
