"""Limits on what one client may ask of a server: token buckets for each kind of frame.

A frame over its rate is refused with a reason; a client that goes on regardless loses its connection.  Frames that
others provoke from a client are not counted against it: see :class:`ProvokedFrames`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

from dmsg.base.buckets import Bucket
from dmsg.base.options import LIMITS, Number, option
from dmsg.errors import DropReason, RemoteProtocolError

BURST_SECONDS = 2.0
"""Seconds of its rate that a client may use at once."""
ANSWER_FACTOR = 4.0
"""Factor between the allowed rate of answers and that of requests."""
FLOOD_FACTOR = 4.0
"""Refused frames have a bucket of their own, so many times as large: who empties it is disconnected."""
PROVOKED_LASTS = 30.0
"""Seconds that a frame may be late which somebody else provoked; it is forgiven for at most twice as long."""
DESTINATION_FACTOR = 1.6
"""Requests a second to one destination, from all sources, as a multiple of those that one connection may send.
By default 800: less than a client lets in of initiators that it has not met, so that its own limit is not reached."""
DESTINATION_BURST = 4.0
"""Requests to one destination at once, as a multiple of those that one connection may send in a second."""
HEEDLESS = 64.0
"""Refused frames of one connection after which it counts as going on regardless: where the connections of an address
flood together, those end that do, and not the one beside them that was refused as well."""
HEEDED = 8.0
"""Refused frames of one connection that are forgotten in a second."""


class ProvokedFrames:
    """Number of frames that others may have provoked from a client and that have not come yet.

    A transport that others end leaves frames on their way, and answers to what was on its way to the client.
    """

    __slots__ = ("_before", "_lately", "_since")

    def __init__(self) -> None:
        self._lately = self._before = 0
        self._since = 0.0

    def add(self, number: int, now: float) -> None:
        """Expect so many frames more."""
        self._lapse(now)
        self._lately += number

    def take(self, now: float) -> bool:
        """Return whether a frame may be one of those that were provoked; it is expected no longer then."""
        self._lapse(now)
        if self._before:
            self._before -= 1
        elif self._lately:
            self._lately -= 1
        else:
            return False
        return True

    def _lapse(self, now: float) -> None:
        if (passed := now - self._since) >= PROVOKED_LASTS:
            self._before = self._lately if passed < 2 * PROVOKED_LASTS else 0
            self._lately = 0
            self._since = now


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits that servers of all families have, and rates that follow from the requests of one connection."""

    max_connections: int = option(
        10_000,
        "Number of clients that may be connected at the same time",
        Number(1, 10**6, "clients"),
        reloads=True,
        group=LIMITS,
    )
    max_per_address: int = option(
        1024,
        "Number of connections from one address; 0 disables the limit",
        Number(0, 10**6, "connections"),
        reloads=True,
        group=LIMITS,
    )

    @property
    def basic_rate(self) -> float:
        """Requests a second that one connection may send; 0 means no limit on control frames."""
        raise NotImplementedError

    def rate(self, kind: IntEnum) -> float:
        """Frames of that kind a second."""
        raise NotImplementedError

    @property
    def flood(self) -> float:
        """Refused frames a second, of all kinds, with which a connection ends."""
        return self.basic_rate * FLOOD_FACTOR

    @property
    def destination_rate(self) -> float:
        """Requests a second to one destination, from all others."""
        return self.basic_rate * DESTINATION_FACTOR

    @property
    def destination_burst(self) -> float:
        """Requests to one destination at once."""
        return self.basic_rate * DESTINATION_BURST


class Policer:
    """The buckets of one client.

    :cvar kinds: kinds of frames that are counted apart.
    :cvar forgiven: kinds of frames that are not the client's doing when they are over their rate, and end nothing.
    """

    __slots__ = ("_buckets", "_excess", "_patience")
    kinds: ClassVar[type[IntEnum]]
    forgiven: ClassVar[Container[IntEnum]] = ()

    def __init__(self) -> None:
        self._buckets: list[Bucket | None] = [None] * len(self.kinds)
        self._excess: Bucket | None = None
        self._patience: Bucket | None = None

    def allows(self, kind: IntEnum, limits: ClientLimits, now: float) -> bool:
        """Whether a frame of that kind is within its rate.

        :raises RemoteProtocolError: so many were not that the connection ends.
        """
        if not limits.basic_rate or self.within(kind, limits.rate(kind), now):
            return True
        if kind not in self.forgiven:
            self.refuse(kind, limits.flood, now)
        return False

    def within(self, kind: IntEnum, rate: float, now: float) -> bool:
        """Whether a frame of that kind is within its rate; nothing follows if it is not."""
        burst = rate * BURST_SECONDS
        bucket = self._buckets[kind]
        if bucket is None:
            bucket = self._buckets[kind] = Bucket(burst, now)
        return bucket.take(1, rate, burst, now)

    def refuse(self, kind: IntEnum, flood: float, now: float) -> None:
        """Count a frame that is refused, whichever rate it was over.

        :raises RemoteProtocolError: so many were that the connection ends.
        """
        burst = flood * BURST_SECONDS
        if self._excess is None or self._patience is None:
            self._excess, self._patience = Bucket(burst, now), Bucket(HEEDLESS, now)
        self._patience.take(1, HEEDED, HEEDLESS, now)
        if not self._excess.take(1, flood, burst, now):
            raise RemoteProtocolError(DropReason.FLOOD, f"flood of {kind.name} frames")

    def goes_on(self, now: float) -> bool:
        """Return whether more than :data:`HEEDLESS` of its frames were refused lately."""
        if self._patience is None:
            return False
        self._patience.fill(HEEDED, HEEDLESS, now)
        return self._patience.level < 1.0
