"""Account of the small pieces in which a connection's bytes arrive.

A sender decides how many bytes are in a websocket frame, a TLS record or a TCP segment. Each of these pieces costs the
receiver some microseconds, whatever its size. So a sender of one byte per piece causes hundreds of times the work of
other senders.

Honest programs send larger pieces. The smallest record of the 2019 protocol has 27 bytes. If a program writes the
record's length as a separate piece, the two pieces have 13 bytes on average. The smallest message of the Messaging
System has 22 bytes.
"""

from __future__ import annotations

SMALL_SIZE = 12
"""Size in bytes below which a piece of received data (TCP segment, TLS record, websocket frame) counts as small."""
BURST = 1024
"""Maximum count of a connection's small pieces (:attr:`SmallPieces.level`). Above it, there are too many."""
RATE = 100.0
"""Number by which the count of a connection's small pieces decreases per second."""
MAX_COMPENSATED = 4
"""Maximum number of small pieces that a larger piece compensates. Without a maximum, a sender could send one large
piece and then a flood of small ones."""


class SmallPieces:
    """Account of the small pieces of one connection.

    :ivar level: count of small pieces. Larger pieces compensate some of them, and the count decreases with time.
    """

    __slots__ = ("_at", "level")

    def __init__(self, now: float) -> None:
        self._at = now
        self.level = 0.0

    def are_too_many(self, pieces: int, size: int, now: float) -> bool:
        """Count pieces, and return whether there were too many small ones.

        :param pieces: number of pieces.
        :param size: number of bytes of all these pieces together.
        :param now: seconds of a monotonic clock.
        """
        level = max(0.0, self.level - (now - self._at) * RATE)
        self._at = now
        self.level = max(0.0, level + max(pieces - size // SMALL_SIZE, -MAX_COMPENSATED))
        return self.level > BURST
