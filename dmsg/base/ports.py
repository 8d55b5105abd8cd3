"""Interface by which a relay without I/O reaches the other end of a connection."""

from __future__ import annotations

from typing import Protocol

from dmsg.errors import DropReason


class Port(Protocol):
    """Output of a connection to a client, with the means to pause and close the connection."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames; the data is copied or used before this returns."""

    def queued(self) -> int:
        """Bytes that wait to be sent."""

    def pause_reading(self) -> None:
        """Read no more from this client for now; may be repeated."""

    def resume_reading(self) -> None:
        """Read again."""

    def close(self, reason: DropReason) -> None:
        """End this connection; the relay's ``remove`` follows, never before this returns."""
