"""Interface between a stream and its carrier."""

from __future__ import annotations

from typing import Protocol

from dmsg.keys import PubKey
from dmsg.net.streams.outbox import Ticket


class StreamCarrier(Protocol):
    """Interface of a carrier, with all that a stream needs from its connection."""

    @property
    def server(self) -> PubKey | None:
        """Server that carries the stream now, or the last one that did."""

    @property
    def confirms(self) -> bool:
        """Whether a frame counts as acknowledged only when the remote has received it.  If not, it counts when the link
        has accepted it.
        """

    def may_send(self) -> bool:
        """Whether another frame may be sent now."""

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        """Send one frame of at most ``max_frame`` bytes. The stream's ``acknowledged`` is called later."""

    def flush(self) -> None:
        """Write sent frames to the connection."""

    def in_flight(self) -> int:
        """Return the number of frames that are not acknowledged."""

    def consumed(self, size: int) -> None:
        """Record that the application has read ``size`` bytes, so that the remote may send more."""

    def close(self, reason: int) -> None:
        """Tell the remote that the stream has ended, with ``reason`` as close reason."""

    def schedule(self) -> None:
        """Call the stream's ``flush()`` at the end of the reactor turn."""
