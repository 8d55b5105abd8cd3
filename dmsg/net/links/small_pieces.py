"""Account of the small pieces in which a connection's bytes arrive.

A sender decides how many bytes are in a frame of a websocket, in a record of TLS, or in a segment of TCP. Each piece
costs a receiver some microseconds, whatever its size, so a sender of one byte each causes hundreds of times the work of
others. No program needs such pieces. The smallest record of the 2019 protocol has 27 bytes, so 13 in each piece even if
a program writes the length of a record apart; the smallest message of the Messaging System has 22.
"""

from __future__ import annotations

SMALL = 12
"""Number of bytes below which a piece is small."""
BURST = 1024
"""Number of small pieces that may arrive at once."""
RATE = 100.0
"""Small pieces per second that are forgotten."""
REPAID = 4
"""Maximum number of small pieces for which one larger piece pays, so that a sender cannot save up for a flood."""


class SmallPieces:
    """Account of one connection.

    :ivar level: number of small pieces that were not paid for.
    """

    __slots__ = ("_at", "level")

    def __init__(self, now: float) -> None:
        self._at = now
        self.level = 0.0

    def are_too_many(self, pieces: int, size: int, now: float) -> bool:
        """Count pieces, and return whether there were too many small ones.

        :param size: number of bytes in the pieces together.
        :param now: seconds of a monotonic clock.
        """
        level = max(0.0, self.level - (now - self._at) * RATE)
        self._at = now
        self.level = max(0.0, level + max(pieces - size // SMALL, -REPAID))
        return self.level > BURST
