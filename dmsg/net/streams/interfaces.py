"""Interface of a carrier, as a stream uses it."""

from __future__ import annotations

from typing import Protocol

from dmsg.keys import PubKey
from dmsg.net.streams.outbox import Ticket


class StreamCarrier(Protocol):
    """Interface of a carrier, with everything that a stream needs from its connection."""

    @property
    def server(self) -> PubKey | None:
        """Server that carries the stream now, or the last server that carried it."""

    @property
    def confirms(self) -> bool:
        """Whether a frame counts as acknowledged only when the remote has acknowledged it. If False, it counts as soon
        as the link to the server has accepted it."""

    def may_send(self) -> bool:
        """Whether another frame may be sent now."""

    def send(self, data: bytes | memoryview, ticket: Ticket | None) -> None:
        """Send one frame of at most ``max_frame`` bytes. When it is acknowledged, the stream's ``acknowledged`` is
        called with ``ticket``."""

    def flush(self) -> None:
        """Write the frames that were passed to ``send`` to the connection."""

    def in_flight(self) -> int:
        """Return the number of frames that are not acknowledged."""

    def consumed(self, size: int) -> None:
        """Record that the application has read ``size`` bytes, so that the remote may send as many more."""

    def close(self, reason: int) -> None:
        """Close the stream, and send ``reason`` to the remote as the close reason."""

    def schedule(self) -> None:
        """Call the stream's ``flush()`` at the end of the reactor turn."""
