"""Carriers, each of which binds a stream to the transport that carries the stream now.

A stream has one carrier at a time, and uses connections only through its carrier. A received frame goes to the carrier
first, because only the carrier refers to the stream, to its transport or channel, and to the connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dmsg.keys import PubKey
from dmsg.net.streams.interfaces import StreamCarrier

if TYPE_CHECKING:
    from dmsg.net.streams.outbox import Ticket
    from dmsg.net.streams.stream import StreamTransport


class CarryingSession(Protocol):
    """Interface of a session with a server that carriers use.

    :ivar writable: whether the link accepts more data.
    """

    server: PubKey
    writable: bool

    def flush(self) -> None:
        """Send the frames that the streams have queued."""

    def schedule(self, stream: StreamTransport) -> None:
        """Flush ``stream`` at the end of the reactor turn."""


SessionT = TypeVar("SessionT", bound=CarryingSession)
StreamT = TypeVar("StreamT", bound="StreamTransport")


class SessionCarrier(Generic[SessionT, StreamT]):
    """Base of carriers that bind a stream to a session with a server.

    Back-pressure has two levels: ``session.writable`` is False while all streams of the link must pause, and
    ``writable`` while this stream alone must pause. ``may_send`` of each protocol family checks both.

    :ivar writable: False while this stream alone must pause.
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
        """Pause sending on this stream. Other streams of the connection continue."""
        self.writable = False

    def relieved(self) -> None:
        """Resume sending on this stream."""
        self.writable = True
        self.stream.window_opened()


class EndedCarrier:
    """Carrier of a stream that has ended.

    This carrier does not refer to the stream or the session, so that their memory can be freed at once.

    :ivar server: last server of the stream.
    :ivar confirms: whether the remote acknowledged frames of the last carrier.
    """

    __slots__ = ("confirms", "server")

    def __init__(self, last: StreamCarrier) -> None:
        self.server = last.server
        self.confirms = last.confirms

    def may_send(self) -> bool:
        return False

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        raise AssertionError("a stream that has ended sends nothing")  # pragma: no cover

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
