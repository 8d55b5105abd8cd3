"""What carries a stream: its place on the connection that it lies in now.

A stream has one carrier at a time, and knows nothing else of connections.  Who finds a
stream by a frame finds the carrier first: it is the one object that knows the stream, what
it lies in (a transport, a channel), and the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dmsg.keys import PubKey
from dmsg.net.streams.interfaces import StreamCarrier

if TYPE_CHECKING:
    from dmsg.net.streams.outbox import Ticket
    from dmsg.net.streams.stream import StreamTransport


class CarryingSession(Protocol):
    """The connection to a server, as the carriers on it need it.

    :ivar writable: whether the link takes more.
    """

    server: PubKey
    writable: bool

    def flush(self) -> None:
        """Send what the streams have queued."""

    def schedule(self, stream: StreamTransport) -> None:
        """Flush ``stream`` at the end of the reactor turn."""


SessionT = TypeVar("SessionT", bound=CarryingSession)
StreamT = TypeVar("StreamT", bound="StreamTransport")


class SessionCarrier(Generic[SessionT, StreamT]):
    """Base of the carriers on one connection to a server: it knows the session and the stream.

    Back-pressure has two levels: ``session.writable`` holds back all streams of the link, ``writable`` this one alone.
    ``may_send`` of a family asks both.

    :ivar writable: False while something holds back this stream alone.
    """

    __slots__ = ("session", "stream", "writable")

    session: SessionT
    stream: StreamT

    def __init__(self, session: SessionT) -> None:
        self.session = session
        self.writable = True

    @property
    def server(self) -> PubKey:
        return self.session.server

    def flush(self) -> None:
        self.session.flush()

    def schedule(self) -> None:
        self.session.schedule(self.stream)

    def congested(self) -> None:
        """Hold back this stream; the others of the connection go on."""
        self.writable = False

    def relieved(self) -> None:
        """Let this stream go on."""
        self.writable = True
        self.stream.window_opened()


class EndedCarrier:
    """Carrier of a stream that is over: it refers to nothing, so that the stream's memory is free at once.

    :ivar server: the last server of the stream; ``confirms``: what its last carrier said.
    """

    __slots__ = ("confirms", "server")

    def __init__(self, last: StreamCarrier) -> None:
        self.server = last.server
        self.confirms = last.confirms

    def may_send(self) -> bool:
        return False

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        raise AssertionError("a stream that is over sends nothing")  # pragma: no cover

    def flush(self) -> None:
        pass

    def in_flight(self) -> int:
        return 0

    def consumed(self, size: int) -> None:
        pass

    def close(self, reason: int) -> None:
        pass

    def schedule(self) -> None:
        pass
