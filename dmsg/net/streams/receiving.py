"""Receiving direction of a stream: delivery to the application, and the queue for an application that has paused.

The stream reports the delivered bytes to its carrier. So the other end can send as much as the application reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from twisted.internet.interfaces import IProtocol
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buffers import NO_QUEUE
from dmsg.errors import CloseReason
from dmsg.net.streams.deadlines import Deadlines
from dmsg.net.streams.half_close import HalfClosing
from dmsg.net.streams.interfaces import StreamCarrier

UNREAD_PIECES = 64
"""Number of received pieces that are queued unchanged for a paused application. Above it, small pieces are joined."""
UNREAD_PIECE = 4096
"""Maximum number of bytes of a piece into which small received pieces are joined."""

_T = TypeVar("_T")

_log = Logger()


class Receiving(HalfClosing):
    """Part of :class:`~dmsg.net.streams.stream.StreamTransport` that delivers received data to the application."""

    _carrier: StreamCarrier
    _deadlines: Deadlines | None

    def __init__(self) -> None:
        self._protocol: IProtocol | None = None
        self._paused = False
        self._delivering = False
        """Whether a method of the application's protocol is running."""
        self._unread: deque[bytes] = NO_QUEUE
        """Received data that are not delivered yet, oldest first."""

    # --- hooks that the stream overrides ---

    def _end(self, failure: Failure, reason: int) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError

    # --- called by the carrier ---

    def data_received(self, data: bytes) -> None:
        """Deliver or queue data from the remote."""
        if self._deadlines is not None:
            self._deadlines.traffic()
        if self._loss is not None:
            self._carrier.consumed(len(data))
            return
        if self._paused or self._unread or self._delivering:
            # Small pieces are joined, because many of them would use many times their size in memory.
            if len(self._unread) > UNREAD_PIECES and len(data) + len(self._unread[-1]) <= UNREAD_PIECE:
                self._unread[-1] += data
            elif self._unread is NO_QUEUE:
                self._unread = deque((data,))
            else:
                self._unread.append(data)
        else:
            self._deliver(data)
            if self._unread or self._remote_ended:  # More data arrived, or the remote half-closed, during the call.
                self.resume_if_unpaused()

    # --- IPushProducer ---

    def pauseProducing(self) -> None:
        """Pause delivery to the application. The remote can still send as much as its window allows (``UNREAD_LIMIT``
        on a plain stream)."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Resume delivery to the application, beginning with the queued data."""
        self._paused = False
        if self._delivering:
            return
        while self._unread and not self._paused:
            self._deliver(self._unread.popleft())
        self._tell_remote_end()
        if self._loss is not None and not self._unread:
            self._finish()

    def resume_if_unpaused(self) -> None:
        """Deliver the queued data, unless the application has paused."""
        if not self._paused:
            self.resumeProducing()

    def stopProducing(self) -> None:
        """Close the stream; the same as ``loseConnection``."""
        self.loseConnection()

    # --- delivery ---

    def _deliver(self, data: bytes) -> None:
        assert self._protocol is not None
        if self._call_protocol(self._protocol.dataReceived, data) and self._loss is None:
            self._carrier.consumed(len(data))

    def _call_protocol(self, method: Callable[[_T], object], argument: _T) -> bool:
        """Call a method of the application's protocol. An exception ends the stream, as on a TCP connection."""
        self._delivering = True
        try:
            method(argument)
        except Exception:
            _log.failure("unhandled error in {protocol!r}", protocol=self._protocol)
            self._unread = NO_QUEUE
            self._carrier.close(CloseReason.ABORTED)
            self._end(Failure(), CloseReason.ABORTED)
            return False
        finally:
            self._delivering = False
        return True
