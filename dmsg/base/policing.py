"""How much one client may ask of a server: token buckets for each kind of frame.

What comes over its rate is refused with a reason; who goes on as if nothing had
been said loses the connection.
"""

from __future__ import annotations

from enum import IntEnum

from dmsg.base.buckets import Bucket
from dmsg.errors import DropReason, RemoteProtocolError

BURST_SECONDS = 2.0
"""Seconds of its rate that a client may use at once."""
ANSWER_FACTOR = 4.0
"""What answers others has this many times the rate of what asks them."""
FLOOD_FACTOR = 4.0
"""Refused frames have a bucket of their own, so many times as large: who empties it is disconnected."""


class Police:
    """The buckets of one client.

    :param kinds: how many kinds of frames are counted apart.
    """

    __slots__ = ("_buckets", "_excess")

    def __init__(self, kinds: int) -> None:
        self._buckets: list[Bucket | None] = [None] * kinds
        self._excess: Bucket | None = None

    def take(self, kind: IntEnum, rate: float, flood: float, now: float, *, forgiven: bool = False) -> bool:
        """Whether a frame of that kind is within its rate.

        :param rate: frames of that kind a second.
        :param flood: refused frames a second, of all kinds, that end the connection.
        :param forgiven: what is over the rate is not this client's doing, and ends nothing.
        :raises RemoteProtocolError: so many were not that the connection ends.
        """
        burst = rate * BURST_SECONDS
        bucket = self._buckets[kind]
        if bucket is None:
            bucket = self._buckets[kind] = Bucket(burst, now)
        if bucket.take(1, rate, burst, now):
            return True
        if forgiven:
            return False
        burst = flood * BURST_SECONDS
        if self._excess is None:
            self._excess = Bucket(burst, now)
        if not self._excess.take(1, flood, burst, now):
            raise RemoteProtocolError(DropReason.FLOOD, f"flood of {kind.name} frames")
        return False
