"""What carries a stream: its place on the connection that it lies in now.

A stream has one carrier at a time, and knows nothing else of connections.  Who finds a
stream by a frame finds the carrier first: it is the one object that knows the stream, what
it lies in (a transport, a channel), and the connection.
"""

from __future__ import annotations

from typing import Any, Protocol

from dmsg.keys import PubKey


class StreamCarrier(Protocol):
    """What a stream needs from the connection that it lies in."""

    @property
    def server(self) -> PubKey | None:
        """The server that carries the stream now, or did last."""

    @property
    def confirms(self) -> bool:
        """Whether a frame counts as acknowledged when the remote has it; else when the link has it."""

    def may_send(self) -> bool:
        """Another frame may be sent now."""

    def send(self, data: bytes | memoryview, ticket: Any) -> None:
        """Send one frame of at most ``max_frame`` bytes of the stream; its ``acknowledged`` follows."""

    def flush(self) -> None:
        """Let what was sent go."""

    def in_flight(self) -> int:
        """Frames that are not acknowledged."""

    def consumed(self, size: int) -> None:
        """The application has read ``size`` bytes."""

    def close(self, reason: int) -> None:
        """Tell the remote that the stream is over."""

    def schedule(self) -> None:
        """Call ``flush()`` of the stream at the end of the reactor turn."""


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

    def send(self, data: bytes | memoryview, ticket: Any) -> None:
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
