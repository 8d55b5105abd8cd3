"""A stream over transports of any family: what it keeps for life, and its place on the transport that carries it."""

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
    """An application's transport.

    :ivar end: what outlives any one transport: bytes acknowledged and received, their hashes, what is not
        acknowledged yet.  None on a plain stream, which ends with its transport, and on a secure one that is not
        open yet.
    """

    end: SecureEnd | None = None

    @property
    def kept(self) -> SecureEnd:
        """The ``end`` of a secure stream that is open."""
        assert self.end is not None
        return self.end

    @property
    def binding(self) -> bytes | None:
        return None if self.end is None else self.end.binding

    @property
    def can_half_close(self) -> bool:  # type: ignore[override]
        return self.end is not None and self.end.half_close

    @property
    def _leaves_closing_to_remote(self) -> bool:
        # a CLOSE that is lost with its connection: the initiator looks for another way and is told of the end then,
        # whereas a responder would wait in vain to be found
        return self.end is not None and self.end.initiator

    @property
    def acknowledged_bytes(self) -> int | None:  # type: ignore[override]
        return None if self.end is None else self.end.acknowledged - int(self._end_acknowledged)

    def _unacknowledged(self) -> int:
        # not asked of what stands for a transport that is lost: it says more than that, for the sake of closing
        return super()._unacknowledged() if self.end is None else self.end.in_flight_bytes

    def _end(self, why: Failure, reason: int) -> None:
        super()._end(why, reason)
        if not isinstance(self._carrier, EndedCarrier):
            self._carrier = EndedCarrier(self._carrier)

    def _may_have_all(self) -> bool:
        # a reader that has stopped holds back the ACKs of a plain stream; of a secure one they come as it arrives
        return self.end is None and super()._may_have_all()


class Transport(resumption.Transport, Protocol):
    """What one stream of a connection lies in, as its family keeps it."""

    @property
    def window_open(self) -> bool:
        """Whether this stream may send another frame now, whatever the others of the connection may."""

    @property
    def in_flight(self) -> Sized:
        """Frames of a plain transport that are not acknowledged."""


TransportT = TypeVar("TransportT", bound=Transport)
TransportT_contra = TypeVar("TransportT_contra", bound=Transport, contravariant=True)


class TransportTable(Protocol[TransportT_contra]):
    """The core of a connection, as a carrier needs it."""

    def send(self, transport: TransportT_contra, data: bytes | memoryview, ticket: object = None) -> None:
        """Send one frame of a stream."""

    def send_end(self, transport: TransportT_contra, ticket: object = None) -> None:
        """Send the end of a stream's data."""


class CarryingSession(carrier.CarryingSession, Protocol[TransportT]):
    """The connection to a server, as a carrier needs it."""

    @property
    def core(self) -> TransportTable[TransportT]:
        """The transports of the connection."""

    def consumed(self, carrier: TransportCarrier[TransportT], size: int) -> None:
        """The application has read ``size`` bytes."""

    def closed(self, carrier: TransportCarrier[TransportT], reason: int) -> None:
        """The application, or this end in its name, has ended the stream."""

    def left(self, transport: TransportT, reason: int) -> None:
        """The stream has another transport, or none: this one is closed."""


class TransportCarrier(SessionCarrier[CarryingSession[TransportT], ClientStream], Generic[TransportT]):
    """A stream's place on one transport: the only object that knows the stream, the transport and the session.

    ``transport.carrier`` is how the session finds a stream by an event; the stream holds the carrier that it
    sends over.  While a stream moves, the transport that it moves to has a carrier already.
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

    def in_flight(self) -> int:
        end = self.stream.end
        return len(self.transport.in_flight) if end is None else len(end.in_flight)

    def consumed(self, size: int) -> None:
        self.session.consumed(self, size)

    def close(self, reason: int) -> None:
        self.session.closed(self, reason)

    def leave(self, reason: int) -> None:
        """The stream goes on elsewhere, or is over: close the transport."""
        self.session.left(self.transport, reason)


class Suspending(Protocol):
    """Who looks after streams without a transport, as :class:`NoCarrier` needs it."""

    def closed(self, stream: ClientStream, reason: int) -> None:
        """A stream is over at this end."""

    def schedule(self, stream: StreamTransport) -> None:
        """Flush it at the end of the reactor turn."""


class NoCarrier:
    """Stands for a transport while a stream has none: it takes nothing and loses nothing."""

    __slots__ = ("_end", "_stream", "_streams", "server")

    confirms = True

    def __init__(self, streams: Suspending, stream: ClientStream) -> None:
        self._streams = streams
        self._stream = stream
        self._end = stream.kept
        self.server = stream.server

    def may_send(self) -> bool:
        return False

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        raise AssertionError("not reached")  # pragma: no cover

    def flush(self) -> None:
        pass

    def in_flight(self) -> int:
        # the end that looks for another way closes when it has one: the other would wait in vain
        return len(self._end.in_flight) or int(self._end.initiator)

    def consumed(self, size: int) -> None:
        self._end.consume(size)

    def close(self, reason: int) -> None:
        self._streams.closed(self._stream, reason)

    def schedule(self) -> None:
        self._streams.schedule(self._stream)
