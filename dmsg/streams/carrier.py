"""Streams of clients over transports of any protocol family, and the carriers that bind a stream to a transport."""

from __future__ import annotations

from collections.abc import Sized
from typing import Generic, Protocol, TypeVar

from twisted.python.failure import Failure

from dmsg.net.streams import carrier
from dmsg.net.streams.carrier import EndedCarrier, SessionCarrier
from dmsg.net.streams.outbox import EndOfData, Ticket
from dmsg.net.streams.stream import StreamTransport
from dmsg.streams.core import resumption
from dmsg.streams.core.secure import SecureEnd


class ClientStream(StreamTransport):
    """Stream of a client, which an application's protocol has as its ``transport``.

    :ivar end: end of the secure stream. It outlives the transports, and has the positions, rolling hashes and
        unacknowledged data of the stream. None on a plain stream, which ends with its transport, and on a secure stream
        that is not open yet.
    """

    end: SecureEnd | None = None

    @property
    def secure_end(self) -> SecureEnd:
        """End of the secure stream. Only for secure streams that are open, whose ``end`` is not None."""
        assert self.end is not None
        return self.end

    @property
    def binding(self) -> bytes | None:
        return None if self.end is None else self.end.binding

    @property
    def cipher(self) -> str | None:
        return None if self.end is None else self.end.cipher.value

    @property
    def can_half_close(self) -> bool:  # type: ignore[override]
        return self.end is not None and self.end.half_close

    def probe(self) -> None:
        carrier = self._carrier
        if not (self._outbox.waiting and isinstance(carrier, TransportCarrier)):
            super().probe()
        elif self._loss is None and not self.secure_end.in_flight:
            # Data wait because the window is closed. The ACK that opens it may never arrive: a server may have dropped
            # it, or the other end may have lost its transport without this end being told. TCP sends window probes for
            # the same reason.
            self._probing = True
            carrier.probe(Ticket(None))

    @property
    def _leaves_closing_to_remote(self) -> bool:
        # A CLOSE can be lost together with its connection. If the responder's CLOSE is lost, the initiator tries to
        # resume the stream and learns that it is closed. If the initiator's CLOSE were lost, the responder would wait
        # in vain to be resumed. So the initiator lets the responder close the stream.
        return self.end is not None and self.end.initiator

    @property
    def acknowledged_bytes(self) -> int | None:  # type: ignore[override]
        return None if self.end is None else self.end.acknowledged - int(self._end_acknowledged)

    def _count_unacknowledged(self) -> int:
        # The carrier of a suspended stream is a NoCarrier, whose in_flight() counts one frame that does not exist, to
        # delay closing. So the data in flight is counted without the carrier.
        return super()._count_unacknowledged() if self.end is None else self.end.in_flight_bytes

    def _end(self, failure: Failure, reason: int) -> None:
        super()._end(failure, reason)
        if not isinstance(self._carrier, EndedCarrier):
            self._carrier = EndedCarrier(self._carrier)

    def _may_have_all(self) -> bool:
        # On a plain stream, ACKs may be missing because the reader has paused. On a secure stream, data are
        # acknowledged when they arrive, even if nobody reads them.
        return self.end is None and super()._may_have_all()


class Transport(resumption.Transport, Protocol):
    """Interface of a transport, of any protocol family, that carries one stream."""

    @property
    def window_open(self) -> bool:
        """Whether the window of this transport has room for another frame."""

    @property
    def in_flight(self) -> Sized:
        """Unacknowledged frames of a plain transport."""


TransportT = TypeVar("TransportT", bound=Transport)
TransportT_contra = TypeVar("TransportT_contra", bound=Transport, contravariant=True)


class TransportTable(Protocol[TransportT_contra]):
    """Methods of the core of a connection (its part without I/O) that a carrier calls."""

    def send(self, transport: TransportT_contra, data: bytes | memoryview, ticket: object = None) -> None:
        """Send one frame of a stream."""

    def probe(self, transport: TransportT_contra, ticket: object = None) -> None:
        """Send a frame without data, even while the window is closed."""

    def send_end(self, transport: TransportT_contra, ticket: object = None) -> None:
        """Send the half-close of a stream."""


class CarryingSession(carrier.CarryingSession, Protocol[TransportT]):
    """Methods of a session with a server that a carrier calls."""

    @property
    def core(self) -> TransportTable[TransportT]:
        """Table of the connection's transports."""

    def consumed(self, carrier: TransportCarrier[TransportT], size: int) -> None:
        """Record that the application has read ``size`` bytes of a stream."""

    def closed(self, carrier: TransportCarrier[TransportT], reason: int) -> None:
        """Close the transport of a stream, because this end has closed the stream."""

    def close_left(self, transport: TransportT, reason: int) -> None:
        """Close a transport that does not carry its stream any more."""


class TransportCarrier(SessionCarrier[CarryingSession[TransportT], ClientStream], Generic[TransportT]):
    """Carrier that binds a stream to a transport of a session. It is the only object that refers to stream, transport
    and session.

    The session finds the stream of an event through ``transport.carrier``. The stream refers to the carrier through
    which it sends. While a stream moves, its next transport already has a carrier as well.
    """

    __slots__ = ("_core", "transport")

    confirms = True

    def __init__(
        self, session: CarryingSession[TransportT], transport: TransportT, stream: ClientStream | None = None
    ) -> None:
        super().__init__(session)
        self.transport = transport
        self._core = session.core
        if stream is not None:
            self.stream = stream
        transport.carrier = self

    def may_send(self) -> bool:
        return self.session.writable and self.writable and self.transport.window_open

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        if ticket.__class__ is EndOfData:
            self._core.send_end(self.transport, ticket)
        else:
            self._core.send(self.transport, data, ticket)

    def probe(self, ticket: Ticket) -> None:
        """Send a frame without data, even while the window is closed. Only allowed while nothing is in flight."""
        self._core.probe(self.transport, ticket)
        self.session.flush()

    def in_flight(self) -> int:
        end = self.stream.end
        return len(self.transport.in_flight) if end is None else len(end.in_flight)

    def consumed(self, size: int) -> None:
        self.session.consumed(self, size)

    def close(self, reason: int) -> None:
        self.session.closed(self, reason)

    def leave(self, reason: int) -> None:
        """Close the transport, because its stream has moved to another one or is closed."""
        self.session.close_left(self.transport, reason)


class SuspendedStreams(Protocol):
    """Interface of the manager of suspended streams, as :class:`NoCarrier` uses it."""

    def closed(self, stream: ClientStream, reason: int) -> None:
        """Remove a stream, because this end has closed it."""

    def schedule(self, stream: StreamTransport) -> None:
        """Flush the stream at the end of the reactor turn."""


class NoCarrier:
    """Carrier of a suspended stream, which has no transport. It sends nothing, so all data stay in the stream's
    queue."""

    __slots__ = ("_end", "_stream", "_streams", "server")

    confirms = True

    def __init__(self, streams: SuspendedStreams, stream: ClientStream) -> None:
        self._streams = streams
        self._stream = stream
        self._end = stream.secure_end
        self.server = stream.server

    def may_send(self) -> bool:
        return False

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        raise AssertionError("unreachable")  # pragma: no cover

    def flush(self) -> None:
        pass

    def in_flight(self) -> int:
        # A stream that the application has closed ends once no frame is in flight. So the initiator of a stream without
        # a transport reports at least one frame, and resumes the stream first. Otherwise the responder would wait for a
        # resumption that never comes.
        return len(self._end.in_flight) or int(self._end.initiator)

    def consumed(self, size: int) -> None:
        self._end.consume(size)

    def close(self, reason: int) -> None:
        self._streams.closed(self._stream, reason)

    def schedule(self) -> None:
        self._streams.schedule(self._stream)
