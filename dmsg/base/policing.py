"""Limits on what one client may ask of a server: token buckets for each kind of frame.

A frame above its rate is refused with a reason.  A client that continues nevertheless loses its connection.  Frames
that other clients provoke are not counted against it (:class:`ProvokedFrames`).
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
"""Number of seconds whose rate a client may use in a burst."""
ANSWER_FACTOR = 4.0
"""Factor between the allowed rate of answers and that of requests."""
FLOOD_FACTOR = 4.0
"""Factor between the bucket of refused frames and the rate of requests; a client that empties the bucket is
disconnected."""
PROVOKED_LASTS = 30.0
"""Seconds for which a frame that others provoked is expected; it is accepted without charge for at most twice as
long."""
DESTINATION_FACTOR = 1.6
"""Requests per second to one destination from all sources, as a multiple of those that one connection may send.  The
default is 800, less than a client accepts from unknown initiators, so that the server's limit takes effect first."""
DESTINATION_BURST = 4.0
"""Requests to one destination in a burst, as a multiple of those that one connection may send per second."""
HEEDLESS = 64.0
"""Number of refused frames after which a connection counts as flooding.  If connections of one address flood together,
only these are closed, and not another connection of the address whose frames were refused because of them."""
HEEDED = 8.0
"""Number of refused frames of one connection that are forgotten per second."""


class ProvokedFrames:
    """Allowance of a client for late frames that other clients may have provoked.

    When another client ends a transport, frames of this client are still on their way.  So are its answers to frames
    that were on their way to it.
    """

    __slots__ = ("_before", "_recent", "_since")

    def __init__(self) -> None:
        self._recent = self._before = 0
        self._since = 0.0

    def add(self, number: int, now: float) -> None:
        """Allow ``number`` more late frames of the client without charge."""
        self._forget_old(now)
        self._recent += number

    def take(self, now: float) -> bool:
        """Use up one expected frame; return False if none is expected."""
        self._forget_old(now)
        if self._before:
            self._before -= 1
        elif self._recent:
            self._recent -= 1
        else:
            return False
        return True

    def _forget_old(self, now: float) -> None:
        if (passed := now - self._since) >= PROVOKED_LASTS:
            self._before = self._recent if passed < 2 * PROVOKED_LASTS else 0
            self._recent = 0
            self._since = now


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits that servers of all protocol families have, and rates that are computed from the request rate of one
    connection."""

    max_connections: int = option(
        10_000,
        "Maximum number of clients that are connected at the same time",
        Number(1, 10**6, "clients"),
        reloads=True,
        group=LIMITS,
    )
    max_per_address: int = option(
        1024,
        "Maximum number of connections from one address; 0 disables the limit",
        Number(0, 10**6, "connections"),
        reloads=True,
        group=LIMITS,
    )

    @property
    def basic_rate(self) -> float:
        """Requests per second that one connection may send; 0 means no limit on control frames."""
        raise NotImplementedError

    def rate(self, kind: IntEnum) -> float:
        """Return the frames of one kind per second that one connection may send."""
        raise NotImplementedError

    @property
    def flood(self) -> float:
        """Refused frames of all kinds per second above which a connection is closed."""
        return self.basic_rate * FLOOD_FACTOR

    @property
    def destination_rate(self) -> float:
        """Requests per second to one destination from all other clients together."""
        return self.basic_rate * DESTINATION_FACTOR

    @property
    def destination_burst(self) -> float:
        """Requests in a burst to one destination from all other clients together."""
        return self.basic_rate * DESTINATION_BURST


class Policer:
    """Token buckets of one client.

    :cvar kinds: kinds of frames that are counted separately.
    :cvar forgiven: kinds of frames that never close a connection, because the client may not be to blame for them.
    """

    __slots__ = ("_buckets", "_excess", "_patience")
    kinds: ClassVar[type[IntEnum]]
    forgiven: ClassVar[Container[IntEnum]] = ()

    def __init__(self) -> None:
        self._buckets: list[Bucket | None] = [None] * len(self.kinds)
        self._excess: Bucket | None = None
        self._patience: Bucket | None = None

    def allows(self, kind: IntEnum, limits: ClientLimits, now: float) -> bool:
        """Count a frame and return whether it is within the rate of its kind.

        :raises RemoteProtocolError: too many frames were refused, so the connection must end.
        """
        if not limits.basic_rate or self.within(kind, limits.rate(kind), now):
            return True
        if kind not in self.forgiven:
            self.refuse(kind, limits.flood, now)
        return False

    def within(self, kind: IntEnum, rate: float, now: float) -> bool:
        """Count a frame and return whether it is within the rate of its kind, without ending the connection if not."""
        burst = rate * BURST_SECONDS
        bucket = self._buckets[kind]
        if bucket is None:
            bucket = self._buckets[kind] = Bucket(burst, now)
        return bucket.take(1, rate, burst, now)

    def refuse(self, kind: IntEnum, flood: float, now: float) -> None:
        """Count a refused frame, for any of the rates.

        :raises RemoteProtocolError: too many frames were refused, so the connection must end.
        """
        burst = flood * BURST_SECONDS
        if self._excess is None or self._patience is None:
            self._excess, self._patience = Bucket(burst, now), Bucket(HEEDLESS, now)
        self._patience.take(1, HEEDED, HEEDLESS, now)
        if not self._excess.take(1, flood, burst, now):
            raise RemoteProtocolError(DropReason.FLOOD, f"too many {kind.name} frames")

    def ignores_refusals(self, now: float) -> bool:
        """Whether more than :data:`HEEDLESS` frames of the client were refused recently."""
        if self._patience is None:
            return False
        self._patience.fill(HEEDED, HEEDLESS, now)
        return self._patience.level < 1.0
