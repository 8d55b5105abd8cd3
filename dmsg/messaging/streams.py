"""Stream over a channel, as the Twisted transport of an application's protocol."""

from __future__ import annotations

from collections.abc import Callable

from twisted.python.failure import Failure

from dmsg.base.buffers import NO_QUEUE
from dmsg.errors import CloseReason
from dmsg.messaging.ack_timers import AckedEnd
from dmsg.messaging.core.acks import OVERHEAD
from dmsg.messaging.core.state import ClientChannel
from dmsg.net.streams.stream import StreamTransport


class ChannelStream(StreamTransport):
    """Stream that one channel carries, as the transport of an application's protocol.

    ``loseConnection`` sends CloseChannel once all data are written.  Data that the remote sends before it sees the
    CloseChannel are still received.  The stream waits for them for one second, or for as long as its own last data may
    take to arrive (``CLOSE_TIMEOUT`` and ``CLOSE_LIMIT`` of :mod:`dmsg.messaging.session`).
    """

    channel: ClientChannel
    has_received = False
    """Whether data of the remote have arrived."""
    unread = 0
    """Number of received bytes that the application has not read, while the channel is open."""
    _half_closed = False
    sent_bytes = 0
    """Number of bytes that were sent to the server."""
    acks: AckedEnd | None = None
    """Acknowledgement layer; None if the remote is known not to use acknowledgements."""

    def expect_acks(self, known: bool, send: Callable[[bytes], None], on_undecided: Callable[[], None]) -> None:
        """Add the acknowledgement layer.

        :param known: whether the remote certainly uses acknowledgements; otherwise its first message decides.
        """
        # Room for acknowledgements is reserved in every frame, even before the remote has shown that it needs them.
        self.max_frame -= OVERHEAD
        self.acks = AckedEnd(self._reactor, known, send, self.acknowledged, self.window_opened, on_undecided)

    def understand(self, message: bytes) -> bytes | None:
        """Return the data in a message, or None if the message has none.

        :raises HandshakeError: the remote does not use acknowledgements as agreed.
        :raises TransportClosed: the remote acknowledges other data than this side sent.
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
        """Acknowledge the received data if the application has read all of them."""
        if self.acks is not None and not self.unread and self._loss is None:
            self.acks.consumed()

    def _lingered(self) -> None:
        if self._loss is None and self.acks is not None and self.acks.in_flight:
            self._linger = None
            self._give_up_lingering()
        else:
            super()._lingered()

    def reason_of_end(self, reason: int) -> int:
        """Return the reason of the end for the application; if unsent data are left, it is not that of a clean end."""
        if reason != CloseReason.UNSPECIFIED or self.acks is None or self._half_closed:
            return reason
        if self.unsent:
            return CloseReason.ABORTED
        return CloseReason.UNCONFIRMED if self.acks.in_flight else reason

    @property
    def waiting(self) -> int:
        """Number of received bytes that the application has not read, even after the channel's end."""
        return sum(map(len, self._unread))

    def _end(self, failure: Failure, reason: int) -> None:
        if self.acks is not None:
            self.acks.stop()
        if self._half_closed:
            # Unread data are dropped, because an application that closes without reading them does not want them.
            self._unread = NO_QUEUE
        super()._end(failure, reason)

    def _close_now(self) -> None:
        if self._loss is None and not self._half_closed:
            self._half_closed = True
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
            self._carrier.close(CloseReason.UNSPECIFIED)

    def flush(self) -> None:
        if self._half_closed:
            self._scheduled = False
        else:
            super().flush()
