"""Multiplexed stream as a Twisted transport, consumer and push producer.

This module is independent of the protocol family. A :class:`StreamCarrier` sends the written data in frames, and
reports their acknowledgement. Data written in one reactor turn are sent at its end, in frames of the maximum size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import (
    IAddress,
    IConsumer,
    IProducer,
    IProtocol,
    IPushProducer,
    IReactorTime,
    ITransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.buffers import NO_QUEUE
from dmsg.errors import CloseReason, DmsgTimeout, SendBufferFull, TransportClosed
from dmsg.keys import PubKey
from dmsg.net.own_pauses import FairTimeout, add_fair_timeout, stop_timeout
from dmsg.net.streams.address import StreamLost, StreamTimeout
from dmsg.net.streams.deadlines import DeadlineMixin
from dmsg.net.streams.interfaces import StreamCarrier
from dmsg.net.streams.outbox import Outbox, Ticket, tickets_among
from dmsg.net.streams.producers import ProducerHolder
from dmsg.net.streams.receiving import Receiving

SEND_LIMIT = 64 * 1024 * 1024
"""Maximum number of unsent bytes of a stream. If an application writes more, the stream is aborted. Only an application
that ignores back-pressure reaches this limit."""
LINGER = 10.0
"""Seconds without an ACK after which a closing stream no longer waits for acknowledgements."""

_log = Logger()


UNREAD_STREAMS: WeakSet[StreamTransport] = WeakSet()
"""Ended streams of this process with received data that their applications have not read yet."""


@implementer(ITransport, IConsumer, IPushProducer)
class StreamTransport(Receiving, DeadlineMixin):
    """Transport that an application's protocol finds as ``self.transport``."""

    disconnecting = False
    disconnected = False
    unacknowledged = 0
    """Number of bytes that were not acknowledged when the other end closed the stream. If the carrier does not count
    bytes, each frame in flight counts as one byte."""
    _probing = False
    secure = False
    """Whether the stream is encrypted end to end."""
    acknowledged_bytes: int | None = None
    """Number of bytes that the other end has acknowledged; None if the carrier does not count bytes."""

    def __init__(
        self, reactor: IReactorTime, carrier: StreamCarrier, host: IAddress, peer: IAddress, max_frame: int
    ) -> None:
        super().__init__()
        self._reactor = reactor
        self.max_frame = max_frame
        self._carrier: StreamCarrier = carrier
        self._host = host
        self._peer = peer
        self._outbox = Outbox()
        self._scheduled = False
        self._linger: FairTimeout | None = None
        self._producing = ProducerHolder()
        self._suspended = False
        self.away_since: float | None = None
        """Time, by the reactor's clock, since which the stream has been suspended; None while a transport carries it.
        """
        self._loss: Failure | None = None
        self._reason: int = CloseReason.UNSPECIFIED

    # --- called by the carrier ---

    def start(self, protocol: IProtocol) -> None:
        """Connect ``protocol`` to the open stream."""
        self._protocol = protocol
        self._call_protocol(protocol.makeConnection, self)
        if self._unread or self._remote_ended:
            self.resume_if_unpaused()

    def acknowledged(self, ticket: Ticket | None) -> None:
        """Count one frame that was acknowledged."""
        self.acknowledged_all((ticket,))

    def acknowledged_all(self, tickets: Iterable[Ticket | None], count: int = 1) -> None:
        """Count acknowledged frames, and complete each call of ``send`` whose frames are all acknowledged.

        :param count: number of frames; 0 if the remote repeated an acknowledgement only to announce a larger window.
        """
        self._outbox.acknowledged(tickets)
        probed, self._probing = self._probing, False
        if self._deadlines is not None and not probed and count:
            self._deadlines.traffic()
        if self._linger is not None and count:
            self._linger.restart()
        if self._outbox.waiting or self.disconnecting:
            self._schedule()

    def suspend(self, carrier: StreamCarrier) -> None:
        """Suspend the stream, because its connection is lost. ``carrier`` replaces the lost one until the stream is
        resumed."""
        self._carrier = carrier
        self._suspended = True
        self._outbox.free_if_empty()
        if self.away_since is None:
            self.away_since = self._reactor.seconds()
        stop_timeout(self._linger)
        self._linger = None

    def requeue(self, frames: Sequence[tuple[bytes | memoryview, object]]) -> None:
        """Put frames that did not arrive back at the front of the send queue."""
        tickets = tickets_among(ticket for _, ticket in frames)
        self._outbox.put_back(zip((data for data, _ in frames), tickets, strict=True))

    def move(self, carrier: StreamCarrier) -> None:
        """Continue the stream over ``carrier``."""
        self._carrier = carrier
        self._suspended = False
        self.away_since = None
        if self.disconnecting and self._loss is None and self._linger is None:
            self._linger = FairTimeout(self._reactor, LINGER, self._lingered)
        self._schedule()

    def window_opened(self) -> None:
        """Send queued data, because the carrier accepts more."""
        if self._outbox.waiting:
            self._schedule()

    def carrier_closed(self, reason: int) -> None:
        """End the stream, because the remote or the carrier has closed it."""
        if self._loss is None:
            self.unacknowledged = max(0, self._outbox.size + self._count_unacknowledged() - self._unconfirmed_end)
        self._end(Failure(ConnectionDone() if reason == CloseReason.UNSPECIFIED else StreamLost(reason)), reason)

    def client_stopped(self, reason: int) -> None:
        """End the stream, because the client stops. The client has already sent ``reason`` to the remote."""
        self._end(Failure(ConnectionDone() if reason == CloseReason.UNSPECIFIED else ConnectionAborted()), reason)

    def _count_unacknowledged(self) -> int:
        """Return the number of unacknowledged bytes in flight, or of frames if the carrier does not count bytes."""
        return self._carrier.in_flight()

    def _may_have_all(self) -> bool:
        """Whether the other end may have received all data, although no ACK has arrived for ``LINGER`` seconds."""
        # If all data were sent, the ACKs may be missing only because the application at the other end has paused.
        return not self._outbox.waiting

    @property
    def cipher(self) -> str | None:
        """Name of the cipher between the two clients, such as ``aes-256-gcm``. None on a plain stream, and if this end
        does not know the cipher."""
        return None

    @property
    def binding(self) -> bytes | None:
        """Channel binding (RFC 5056): the 32-byte hash of the end-to-end handshake, which covers both keys. None on a
        plain stream."""
        return None

    @property
    def server(self) -> PubKey | None:
        """Server that carries the stream now, or the last server that carried it."""
        return self._carrier.server

    @property
    def held(self) -> int:
        """Number of buffered bytes: unsent ones, and received ones that the application has not read."""
        return self._outbox.size + sum(map(len, self._unread))

    @property
    def unsent(self) -> bool:
        """Whether the send queue contains data that are not yet in a frame."""
        return bool(self._outbox.waiting)

    @property
    def reason_of_stop(self) -> int:
        """Close reason to send to the remote when the client stops."""
        # If the application has not closed the stream, or if data are unsent, the reason must tell the remote that the
        # data are incomplete.
        return CloseReason.UNSPECIFIED if self.disconnecting and not self.unsent else CloseReason.ABORTED

    @property
    def has_ended(self) -> bool:
        """Whether the stream has ended. The application may not have been notified yet."""
        return self._loss is not None

    # --- sending ---

    def write(self, data: bytes) -> None:
        """Queue ``data`` to be sent in order. The application is not told when the data arrive."""
        self._enqueue(data, None)

    def writeSequence(self, iovec: Iterable[bytes]) -> None:
        """Queue all items of ``iovec`` to be sent in order."""
        self.write(b"".join(iovec))

    @property
    def confirms(self) -> bool:
        """Whether the Deferred of :meth:`send` waits for an acknowledgement of the remote.

        The Deferred waits in protocols that acknowledge data: dmsg, and the Messaging System with programs of March and
        April 2019. In other protocols, it fires when the data are queued on the connection to the server, and says
        nothing about the remote.
        """
        return self._carrier.confirms

    def send(self, data: bytes, timeout: float | None = None) -> Deferred[None]:
        """Queue ``data`` to be sent in order. Return a Deferred that fires when the remote has acknowledged all of
        ``data``, if :attr:`confirms` is true.

        The data are sent in frames of at most ``max_frame`` bytes; the remote application does not see frame
        boundaries. If ``data`` is empty, an empty frame is sent. It is acknowledged and not delivered, so it measures
        the round trip.

        The Deferred fails with :class:`~dmsg.errors.TransportClosed` if the stream ends first, and with
        :class:`~dmsg.errors.SendBufferFull` if too much is queued.

        :param timeout: seconds after which the Deferred fails with :class:`~dmsg.errors.DmsgTimeout`. The data are sent
            nevertheless.
        """
        if self.disconnecting or self._loss is not None or self.writing_ended:
            return fail(TransportClosed(self._reason, "" if self._reason else "transport is closed"))
        if self._outbox.size + len(data) > SEND_LIMIT:
            return fail(SendBufferFull(f"more than {SEND_LIMIT} bytes wait to be sent"))
        deferred: Deferred[None] = Deferred()
        ticket = Ticket(deferred)
        self._outbox.wait(ticket)
        self._enqueue(data, ticket)
        if timeout is not None:
            add_fair_timeout(deferred, timeout, self._reactor, _timed_out)
        return deferred

    def probe(self) -> None:
        """Send an empty frame to check the path to the other end. Its ACK does not count as traffic for the idle
        timeout."""
        if not (self.disconnecting or self._outbox.waiting or self._loss is not None):
            self._probing = True
            self._enqueue(b"", Ticket(None))

    def _enqueue(self, data: bytes, ticket: Ticket | None) -> None:
        if not isinstance(data, bytes):
            raise TypeError("data must be bytes")
        # As over TCP, a registered producer may write even while the stream is closing.
        closed = (self.disconnecting or self._end_waits) and self._producing.producer is None
        closed = closed or (self._end_ticket is not None and bool(data))
        if closed or self._loss is not None or not (data or ticket):
            return
        if self._outbox.size + len(data) > SEND_LIMIT:
            _log.error(
                "stream to {peer} aborted: more than {limit} bytes wait to be sent",
                peer=str(self._peer)[:13],
                limit=SEND_LIMIT,
            )
            self.abortConnection()
            return
        self._outbox.add(data, ticket)
        self._schedule()
        self._tell_producer()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._carrier.schedule()

    def flush(self) -> None:
        """Send queued data in frames, as far as the carrier permits."""
        self._scheduled = False
        if self._loss is not None:
            return
        carrier = self._carrier
        outbox = self._outbox
        while outbox.waiting and carrier.may_send():
            piece, ticket = outbox.take(self.max_frame)
            carrier.send(piece, ticket)
        carrier.flush()
        # As over TCP, the stream stays open until its producer has finished.
        closes = self.disconnecting and not outbox.waiting and not self._producing.is_waited_for
        if closes and not carrier.in_flight():
            self._close_now()
        else:
            self._tell_producer()

    # --- IConsumer ---

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Register a producer (:class:`twisted.internet.interfaces.IConsumer`)."""
        if self._loss is not None and self._producing.producer is None:
            producer.stopProducing()
        else:
            self._producing.register(producer, streaming)

    def unregisterProducer(self) -> None:
        """Remove the producer (:class:`twisted.internet.interfaces.IConsumer`)."""
        self._producing.take_out()
        self._producer_finished()
        if self.disconnecting:
            self._schedule()

    def _tell_producer(self) -> None:
        if self._producing.control(self._outbox.size, not self._outbox.waiting) and self.disconnecting:
            self._schedule()

    # --- end of the stream ---

    def loseConnection(self) -> None:
        """Close the stream once all written data are acknowledged, or once no ACK has arrived for ``LINGER`` seconds.

        While the stream is suspended, ``LINGER`` does not apply, and the resume timeout ends the stream.
        """
        if self.disconnecting or self._loss is not None:
            return
        self.disconnecting = True
        if not self._suspended:
            self._linger = FairTimeout(self._reactor, LINGER, self._lingered)
        self._schedule()

    def abortConnection(self) -> None:
        """Close the stream now. Unsent data are lost."""
        self.abort(CloseReason.ABORTED)

    def abort(self, reason: int) -> None:
        """Close the stream now, and send ``reason`` to the remote (:class:`~dmsg.errors.CloseReason`). Unsent data are
        lost."""
        if self._loss is not None:
            self._unread = NO_QUEUE
            self._paused = False
            self._finish()
            return
        self.disconnecting = True
        self._carrier.close(reason)
        self._unread = NO_QUEUE
        self._end(Failure(ConnectionAborted()), reason)

    def _lingered(self) -> None:
        """Close the stream, because no ACK has arrived for ``LINGER`` seconds. If data are surely missing at the other
        end, report a timeout to the application."""
        self._linger = None
        if self._may_have_all():
            self._close_now()
        elif self._loss is None:
            self._give_up_lingering()

    def _give_up_lingering(self) -> None:
        self._carrier.close(CloseReason.TIMEOUT)
        self._unread = NO_QUEUE
        self._end(
            Failure(StreamTimeout(f"closed with data that was not acknowledged for {LINGER:g} s")),
            CloseReason.TIMEOUT,
        )

    def _close_now(self) -> None:
        if self._loss is not None:
            return
        self._carrier.close(CloseReason.UNSPECIFIED)
        self._unread = NO_QUEUE
        self._end(Failure(self._reason_of_close() or ConnectionDone()), CloseReason.UNSPECIFIED)

    def _end(self, failure: Failure, reason: int) -> None:
        if self._loss is not None:
            return
        self._loss = failure
        self._reason = reason
        self.disconnecting = True
        stop_timeout(self._linger)
        self._linger = None
        stop_timeout(self._last_wait)
        self._end_deadlines()
        # Pending calls of ``send`` fail first, then the producer is stopped. connectionLost comes last, after all
        # received data.
        tickets = self._outbox.clear()
        producer = self._producing.take_out()
        if producer is self:
            # The application has registered the stream as its own producer, so the stream may have paused its own
            # reading. Nobody else would resume it.
            self._paused = False
        if self._unread:
            UNREAD_STREAMS.add(self)
        for ticket in tickets:
            late = reason == CloseReason.TIMEOUT
            ticket.fire(Failure(DmsgTimeout(str(failure.value)) if late else TransportClosed(reason)))
        if producer is not None:
            try:
                producer.stopProducing()
            except Exception:
                _log.failure("unhandled error in {producer!r}", producer=producer)
        # Data received before the CLOSE are delivered first.
        if not self._unread:
            if self._delivering:
                # connectionLost is called in the next turn, because the application is inside dataReceived and does not
                # expect connectionLost there.
                self._reactor.callLater(0, self._finish)
            else:
                self._finish()
        elif self._delivering:
            self._reactor.callLater(0, self.resume_if_unpaused)
        else:
            self.resume_if_unpaused()

    def _finish(self) -> None:
        UNREAD_STREAMS.discard(self)
        protocol, self._protocol = self._protocol, None
        if protocol is not None and self._loss is not None:
            self.disconnected = True
            try:
                protocol.connectionLost(self._loss)
            except Exception:
                _log.failure("unhandled error in {protocol!r}", protocol=protocol)

    # --- deadlines ---

    def _has_unacknowledged(self) -> bool:
        """Whether written data exist that the other end has not acknowledged."""
        if self._outbox.waiting or self._outbox.tickets:
            return True
        return bool(self._count_unacknowledged())

    def _deadline_passed(self, name: str) -> None:
        self._carrier.close(CloseReason.TIMEOUT)
        self._unread = NO_QUEUE
        self._end(Failure(StreamTimeout(f"{name} deadline passed")), CloseReason.TIMEOUT)

    def getPeer(self) -> IAddress:
        """Return the address of the other client."""
        return self._peer

    def getHost(self) -> IAddress:
        """Return the address of this client."""
        return self._host


def _timed_out(result: object, seconds: float) -> None:
    raise DmsgTimeout(f"the peer did not acknowledge the data within {seconds} s")
