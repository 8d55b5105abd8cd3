"""A channel as an application's transport."""

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
    """A channel, as an application's transport.

    ``loseConnection`` sends CloseChannel when all is written; what the remote
    has sent until it sees that is still received: for a second, or as long as what was sent
    before may take to arrive (``CLOSE_TIMEOUT``, ``CLOSE_LIMIT`` of :mod:`dmsg.messaging.session`).
    """

    channel: ClientChannel
    heard = False
    """Something has come from the remote."""
    unread = 0
    """Bytes that the application has not taken."""
    _half_closed = False
    sent = 0
    """Bytes that went to the server."""
    acks: AckedEnd | None = None
    """The layer of acknowledgements, where there is one or may be."""

    def expect_acks(self, known: bool, send: Callable[[bytes], None], undecided: Callable[[], None]) -> None:
        """The remote acknowledges, or, if that is not ``known``, may; its first word then says."""
        self.max_frame -= OVERHEAD
        self.acks = AckedEnd(self._reactor, known, send, self.acknowledged, self.window_opened, undecided)

    def understand(self, message: bytes) -> bytes | None:
        """The data in a message, None if it has none.

        :raises HandshakeError: the remote does not acknowledge as it should.
        :raises TransportClosed: it has other data than was sent.
        """
        if self.acks is None:
            return message or None
        if self.acks.is_raw(message):
            self.acks.stop()
            self.acks = None
            self.max_frame += OVERHEAD
            self.channel.whole = False
            self.window_opened()
            return message or None
        data = self.acks.receive(message)
        if data == b"":
            self.acks_consumed()
        return data or None

    def acks_consumed(self) -> None:
        """The application has taken what came: if it is all, that is acknowledged."""
        if self.acks is not None and not self.unread and self._lost is None:
            self.acks.consumed()

    def _lingered(self) -> None:
        if self._lost is None and self.acks is not None and self.acks.in_flight:
            self._linger = None
            self._give_up_lingering()
        else:
            super()._lingered()

    def reason_of_end(self, reason: int) -> int:
        """What the application hears when a channel that was closed cleanly had something left."""
        if reason != CloseReason.UNSPECIFIED or self.acks is None or self._half_closed:
            return reason
        if self.unsent:
            return CloseReason.ABORTED
        return CloseReason.UNCONFIRMED if self.acks.in_flight else reason

    @property
    def waiting(self) -> int:
        """Bytes that the application has not taken, whether the channel is open or not."""
        return sum(map(len, self._unread))

    def _end(self, why: Failure, reason: int) -> None:
        if self.acks is not None:
            self.acks.stop()
        if self._half_closed:
            self._unread = NO_QUEUE  # who closes and does not read wants no more
        super()._end(why, reason)

    def _close_now(self) -> None:
        if self._lost is None and not self._half_closed:
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
