"""Stream over a channel: the Twisted transport of an application's protocol."""

from __future__ import annotations

from collections.abc import Callable

from twisted.python.failure import Failure

from dmsg.base.buffers import NO_QUEUE
from dmsg.errors import CloseReason
from dmsg.messaging.ack_timers import AckedEnd
from dmsg.messaging.core.acks import OVERHEAD
from dmsg.messaging.core.state import ClientChannel
from dmsg.net.own_pauses import stop_timeout
from dmsg.net.streams.stream import StreamTransport


class ChannelStream(StreamTransport):
    """Stream that one channel carries. It is the transport of an application's protocol.

    ``loseConnection`` sends CloseChannel once all data are written.  Data that the remote sends before it receives the
    CloseChannel are still delivered.  The stream waits for them for one second, or as long as its own last data may
    need to arrive (``CLOSE_TIMEOUT`` and ``CLOSE_LIMIT`` of :mod:`dmsg.messaging.session`).
    """

    channel: ClientChannel
    has_received = False
    """Whether any data of the remote have arrived."""
    unread = 0
    """Number of received bytes that the application has not read, while the channel is open."""
    _half_closed = False
    sent_bytes = 0
    """Number of bytes sent to the server."""
    acks: AckedEnd | None = None
    """Acknowledgement layer; None if the remote is known to use no acknowledgements."""

    def expect_acks(self, known: bool, send: Callable[[bytes], None], on_undecided: Callable[[], None]) -> None:
        """Add the acknowledgement layer.

        :param known: whether the remote is known to use acknowledgements; otherwise its first message decides.
        """
        # Every frame reserves room for acknowledgements, even before the remote has shown that it uses them.
        self.max_frame -= OVERHEAD
        self.acks = AckedEnd(self._reactor, known, send, self.acknowledged, self.window_opened, on_undecided)

    def understand(self, message: bytes) -> bytes | None:
        """Process a message, and return the application's data in it, or None if there are none.

        :raises HandshakeError: the message does not have the format of the acknowledgement layer.
        :raises TransportClosed: the remote acknowledges data that this side did not send.
        """
        if self.acks is None:
            return message or None
        if self.acks.is_raw(message):
            self.acks.stop()
            self.acks = None
            self.max_frame += OVERHEAD
            self.channel.reports_messages = False
            self.window_opened()
            return message or None
        data = self.acks.receive(message)
        if data == b"":
            self.acks_consumed()
        return data or None

    def acks_consumed(self) -> None:
        """Acknowledge the received data, if the application has read all of them."""
        if self.acks is not None and not self.unread and self._loss is None:
            self.acks.consumed()

    def _lingered(self) -> None:
        if self._loss is None and self.acks is not None and self.acks.in_flight:
            self._linger = None
            self._give_up_lingering()
        else:
            super()._lingered()

    def reason_of_end(self, reason: int) -> int:
        """Return the reason that the application gets for the end of the stream. If the remote ends a channel with
        acknowledgements cleanly, but data are unsent or unacknowledged, the reason is not that of a clean end."""
        if reason != CloseReason.UNSPECIFIED or self.acks is None or self._half_closed:
            return reason
        if self.unsent:
            return CloseReason.ABORTED
        return CloseReason.UNCONFIRMED if self.acks.in_flight else reason

    @property
    def waiting(self) -> int:
        """Number of received bytes that the application has not read, counted also after the channel's end."""
        return sum(map(len, self._unread))

    def _end(self, failure: Failure, reason: int) -> None:
        if self.acks is not None:
            self.acks.stop()
        if self._half_closed:
            # Unread data are dropped, because the application has closed the stream without reading them.
            self._unread = NO_QUEUE
        super()._end(failure, reason)

    def _close_now(self) -> None:
        if self._loss is None and not self._half_closed:
            self._half_closed = True
            stop_timeout(self._linger)
            self._linger = None
            self._carrier.close(CloseReason.UNSPECIFIED)

    def flush(self) -> None:
        if self._half_closed:
            self._scheduled = False
        else:
            super().flush()
