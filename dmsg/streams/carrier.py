"""Client streams over transports of any protocol family, and the carriers that bind them to a transport."""

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
    """Stream of a client: the ``transport`` of an application's protocol.

    :ivar end: end of the secure stream, which outlives its transports: it has the positions, rolling hashes and
        unacknowledged data.  None on a plain stream, which ends with its transport, and on a secure stream that is not
        open yet.
    """

    end: SecureEnd | None = None

    @property
    def secure_end(self) -> SecureEnd:
        """End of the secure stream; only to be used after the stream is opened, when ``end`` is not None."""
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
            # Data wait because the window is closed. The frame that opens it may never come: a server may have dropped
            # it, or the news that the other end has lost its transport. TCP sends window probes for the same reason.
            self._probing = True
            carrier.probe(Ticket(None))

    @property
    def _leaves_closing_to_remote(self) -> bool:
        # A CLOSE can be lost with its connection. If that of the responder is lost, the initiator tries to resume and
        # learns that the stream is closed.  If that of the initiator is lost, the responder would wait in vain to be
        # resumed.  So the initiator lets the responder close the stream.
        return self.end is not None and self.end.initiator

    @property
    def acknowledged_bytes(self) -> int | None:  # type: ignore[override]
        return None if self.end is None else self.end.acknowledged - int(self._end_acknowledged)

    def _count_unacknowledged(self) -> int:
        # The carrier is not asked, because NoCarrier.in_flight counts one frame too many, to delay closing.
        return super()._count_unacknowledged() if self.end is None else self.end.in_flight_bytes

    def _end(self, failure: Failure, reason: int) -> None:
        super()._end(failure, reason)
        if not isinstance(self._carrier, EndedCarrier):
            self._carrier = EndedCarrier(self._carrier)

    def _may_have_all(self) -> bool:
        # On a plain stream, missing ACKs may come from a reader that has paused.  On a secure stream, data are
        # acknowledged as they arrive, even if nobody reads them.
        return self.end is None and super()._may_have_all()


class Transport(resumption.Transport, Protocol):
    """Interface of a protocol family's transport that carries one stream of a connection."""

    @property
    def window_open(self) -> bool:
        """Whether the window of this transport has room for another frame."""

    @property
    def in_flight(self) -> Sized:
        """Unacknowledged frames of a plain transport."""


TransportT = TypeVar("TransportT", bound=Transport)
TransportT_contra = TypeVar("TransportT_contra", bound=Transport, contravariant=True)


class TransportTable(Protocol[TransportT_contra]):
    """Interface of a connection's core that a carrier uses."""

    def send(self, transport: TransportT_contra, data: bytes | memoryview, ticket: object = None) -> None:
        """Send one frame of a stream."""

    def probe(self, transport: TransportT_contra, ticket: object = None) -> None:
        """Send a frame without data, although the window may be closed."""

    def send_end(self, transport: TransportT_contra, ticket: object = None) -> None:
        """Send the half-close of a stream."""


class CarryingSession(carrier.CarryingSession, Protocol[TransportT]):
    """Interface of a session with a server that a carrier uses."""

    @property
    def core(self) -> TransportTable[TransportT]:
        """Table of the connection's transports."""

    def consumed(self, carrier: TransportCarrier[TransportT], size: int) -> None:
        """Record that the application has read ``size`` bytes of a stream."""

    def closed(self, carrier: TransportCarrier[TransportT], reason: int) -> None:
        """Close the transport of a stream that the local end has closed."""

    def close_left(self, transport: TransportT, reason: int) -> None:
        """Close a transport that its stream has left."""


class TransportCarrier(SessionCarrier[CarryingSession[TransportT], ClientStream], Generic[TransportT]):
    """Carrier: binds a stream to a transport of a session, and is the only object that refers to stream, transport and
    session.

    The session finds the stream of an event by ``transport.carrier``.  The stream holds the carrier over which it
    sends.  While a stream moves, its next transport already has a carrier, too.
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
        """Send a frame without data, although the window may be closed; only while nothing is in flight."""
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
    """Interface of the manager of suspended streams that :class:`NoCarrier` uses."""

    def closed(self, stream: ClientStream, reason: int) -> None:
        """Remove a stream that the local end has closed."""

    def schedule(self, stream: StreamTransport) -> None:
        """Flush the stream at the end of the reactor turn."""


class NoCarrier:
    """Carrier of a suspended stream, which has no transport; it sends nothing, and the stream keeps all data."""

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
        raise AssertionError("not reached")  # pragma: no cover

    def flush(self) -> None:
        pass

    def in_flight(self) -> int:
        # For the initiator one frame more is counted as in flight, so that it closes only once the stream has a
        # transport again.  Otherwise the responder would wait in vain to be resumed.
        return len(self._end.in_flight) or int(self._end.initiator)

    def consumed(self, size: int) -> None:
        self._end.consume(size)

    def close(self, reason: int) -> None:
        self._streams.closed(self._stream, reason)

    def schedule(self) -> None:
        self._streams.schedule(self._stream)
