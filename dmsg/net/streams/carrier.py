"""What carries a stream: the connection that it lies in now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dmsg.net.streams.stream import StreamTransport


class StreamCarrier(Protocol):
    """What a stream needs from the connection that it lies in."""

    def stream_may_send(self, stream: StreamTransport) -> bool:
        """Another frame may be sent now."""

    def stream_send(self, stream: StreamTransport, data: bytes | memoryview, token: Any) -> None:
        """Send one frame of at most ``stream.max_frame`` bytes; ``StreamTransport.acknowledged`` follows."""

    def stream_confirms(self, stream: StreamTransport) -> bool:
        """Whether a frame counts as acknowledged when the remote has it; else when the link has it."""

    def stream_flush(self) -> None:
        """Let what was sent go."""

    def stream_in_flight(self, stream: StreamTransport) -> int:
        """Frames that are not acknowledged."""

    def stream_consumed(self, stream: StreamTransport, size: int) -> None:
        """The application has read ``size`` bytes."""

    def stream_close(self, stream: StreamTransport, reason: int) -> None:
        """Tell the remote that the stream is over."""

    def stream_schedule(self, stream: StreamTransport) -> None:
        """Call ``stream.flush()`` at the end of the reactor turn."""
