"""Rate limits on the frames of one client at a server: a token bucket for each kind of frame.

A frame above its rate is refused with a reason.  A client that continues to send too many loses its connection.  Frames
that other clients provoke do not count against it (:class:`ProvokedFrames`).
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
"""Burst of a client: as many frames as its rate allows in this number of seconds."""
ANSWER_FACTOR = 4.0
"""Allowed rate of answers, as a multiple of the allowed rate of requests."""
FLOOD_FACTOR = 4.0
"""Allowed rate of refused frames, as a multiple of the allowed rate of requests. A client above it is disconnected."""
PROVOKED_LIFETIME = 30.0
"""Minimum lifetime in seconds of the permission to send late frames (:class:`ProvokedFrames`). The permission expires
after at most twice this time."""
DESTINATION_FACTOR = 1.6
"""Requests per second to one destination from all clients, as a multiple of the requests that one connection may send.
By default these are 800 per second. That is fewer than a client accepts from unknown initiators, so the server's limit
takes effect before the client's."""
DESTINATION_BURST = 4.0
"""Requests to one destination in a burst, as a multiple of the requests per second that one connection may send."""
FLOODING_REFUSALS = 64.0
"""Minimum number of recently refused frames of a connection that counts as flooding. When the connections of one
address together have too many refused frames, only the flooding ones are closed. The others may have been refused only
because of the flood."""
FORGOTTEN_REFUSALS = 8.0
"""Number by which a connection's count of recently refused frames decreases per second."""


class ProvokedFrames:
    """Number of late frames that a client may send without charge, because other clients may have caused them.

    When another client ends a transport, frames that this client has sent on that transport may still be in flight. Its
    answers to the other client's last frames may be in flight, too.
    """

    __slots__ = ("_before", "_recent", "_since")

    def __init__(self) -> None:
        self._recent = self._before = 0
        self._since = 0.0

    def add(self, number: int, now: float) -> None:
        """Allow the client to send ``number`` more late frames without charge."""
        self._forget_old(now)
        self._recent += number

    def take(self, now: float) -> bool:
        """Use up one allowed late frame and return True; return False if none is allowed."""
        self._forget_old(now)
        if self._before:
            self._before -= 1
        elif self._recent:
            self._recent -= 1
        else:
            return False
        return True

    def _forget_old(self, now: float) -> None:
        if (passed := now - self._since) >= PROVOKED_LIFETIME:
            self._before = self._recent if passed < 2 * PROVOKED_LIFETIME else 0
            self._recent = 0
            self._since = now


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits that servers of all protocol families have, and rates that are derived from the request rate of one
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
        """Requests per second that one connection may send. 0 means that control frames are not limited."""
        raise NotImplementedError

    def rate(self, kind: IntEnum) -> float:
        """Return how many frames of one kind one connection may send per second.

        :param kind: 0 for requests; the other kinds are answers to requests.
        """
        return self.basic_rate * ANSWER_FACTOR if kind else self.basic_rate

    @property
    def flood(self) -> float:
        """Number of refused frames per second, of all kinds, above which a connection is closed."""
        return self.basic_rate * FLOOD_FACTOR

    @property
    def destination_rate(self) -> float:
        """Requests per second that all clients together may send to one destination."""
        return self.basic_rate * DESTINATION_FACTOR

    @property
    def destination_burst(self) -> float:
        """Number of requests that all clients together may send to one destination in a burst."""
        return self.basic_rate * DESTINATION_BURST


class Policer:
    """Rate limits of one client, with a token bucket for each kind of frame.

    :cvar kinds: kinds of frames that are counted separately.
    :cvar forgiven: kinds of frames that never close a connection when they are refused, because other clients may have
        caused them.
    """

    __slots__ = ("_buckets", "_flood", "_refusals")
    kinds: ClassVar[type[IntEnum]]
    forgiven: ClassVar[Container[IntEnum]] = ()

    def __init__(self) -> None:
        self._buckets: list[Bucket | None] = [None] * len(self.kinds)
        self._flood: Bucket | None = None
        self._refusals: Bucket | None = None

    def allows(self, kind: IntEnum, limits: ClientLimits, now: float) -> bool:
        """Count a frame and return whether it is within the rate of its kind.

        :raises RemoteProtocolError: too many frames were refused, so the connection must be closed.
        """
        if not limits.basic_rate or self.within(kind, limits.rate(kind), now):
            return True
        if kind not in self.forgiven:
            self.refuse(kind, limits.flood, now)
        return False

    def within(self, kind: IntEnum, rate: float, now: float) -> bool:
        """Count a frame and return whether it is within ``rate``. In contrast to :meth:`allows`, do not count refused
        frames."""
        burst = rate * BURST_SECONDS
        bucket = self._buckets[kind]
        if bucket is None:
            bucket = self._buckets[kind] = Bucket(burst, now)
        return bucket.take(1, rate, burst, now)

    def refuse(self, kind: IntEnum, flood: float, now: float) -> None:
        """Count a frame that was refused because of any rate.

        :param flood: number of refused frames per second above which the connection must be closed.
        :raises RemoteProtocolError: too many frames were refused, so the connection must be closed.
        """
        burst = flood * BURST_SECONDS
        if self._flood is None or self._refusals is None:
            self._flood, self._refusals = Bucket(burst, now), Bucket(FLOODING_REFUSALS, now)
        self._refusals.take(1, FORGOTTEN_REFUSALS, FLOODING_REFUSALS, now)
        if not self._flood.take(1, flood, burst, now):
            raise RemoteProtocolError(DropReason.FLOOD, f"the remote sent too many {kind.name} frames")

    def ignores_refusals(self, now: float) -> bool:
        """Whether the client continues to send despite refusals: about :data:`FLOODING_REFUSALS` of its frames were
        refused recently."""
        if self._refusals is None:
            return False
        self._refusals.fill(FORGOTTEN_REFUSALS, FLOODING_REFUSALS, now)
        return self._refusals.level < 1.0
