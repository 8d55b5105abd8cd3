"""Interface between a stream and its carrier."""

from __future__ import annotations

from typing import Protocol

from dmsg.keys import PubKey
from dmsg.net.streams.outbox import Ticket


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

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
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
