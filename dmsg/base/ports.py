"""Interface through which a relay core sends frames to a connection. The core itself does no I/O."""

from __future__ import annotations

from typing import Protocol

from dmsg.errors import DropReason


class Port(Protocol):
    """Output of a connection to a client. The port can also pause reading from the client and close the connection."""

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Queue complete frames. The caller may change ``data`` after the call."""

    def queued(self) -> int:
        """Return the number of bytes that are queued and not sent yet."""

    def pause_reading(self) -> None:
        """Pause reading from the client. The method does nothing if reading is paused already."""

    def resume_reading(self) -> None:
        """Resume reading from the client."""

    def close(self, reason: DropReason) -> None:
        """Close the connection. The relay's method ``remove`` is called later, never before this method returns."""
