"""Interface through which a relay core, which does no I/O, sends frames to a connection."""

from __future__ import annotations

from typing import Protocol

from dmsg.errors import DropReason


class Port(Protocol):
    """Output of a connection to a client, with the means to pause and close the connection."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue whole frames; the data is copied or used before this returns."""

    def queued(self) -> int:
        """Return the number of bytes that wait to be sent."""

    def pause_reading(self) -> None:
        """Pause reading from the client; may be repeated."""

    def resume_reading(self) -> None:
        """Resume reading from the client."""

    def close(self, reason: DropReason) -> None:
        """Close the connection.  The relay's ``remove`` is called later, never before this returns."""
