"""Connections to an HTTP server: so many in all and from one place, and so long for a request to be whole.

Without it who opens connections and says nothing more has all descriptors of
the process.  Where there are too many, the block of addresses that has most of them loses the
one that has waited longest for the rest of a request, or for a next one: so
others get in all the same.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.server import Site

from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.reactor import cancel_call

MAX_CONNECTIONS = 4096
"""Connections in all, or as many as there are descriptors for."""
RESERVE = 64
"""Descriptors that are not for clients."""
MAX_OF_BLOCK = 512
"""Connections of one address: a company may be behind it; of the blocks around it more (:mod:`dmsg.net.blocks`)."""
TIME_TO_ASK = 1.0
"""Seconds after which a connection that has not asked anything may have to go for another."""
WHOLE_WITHIN = 20.0
"""Seconds from the first byte of a request to its last, however they drip in."""


def _possible() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit - RESERVE))


class Guarded:
    """One connection, as the guard sees it.

    :ivar block: of the address that it comes from.
    :ivar answering: a whole request is there, and its answer is not.
    :ivar since: when it came.
    """

    guard: Guard
    transport: Any
    block = ""
    answering = False
    since = 0.0
    _timer: IDelayedCall | None = None

    def heard(self) -> None:
        """Something came: from now on there is not for ever for the rest of a request."""
        if self._timer is None and not self.answering:
            self._timer = self.guard.clock.callLater(WHOLE_WITHIN, self._late)

    def request_is_whole(self) -> None:
        """All of it is there: the rest of the time is the server's own."""
        self.answering = True
        self.wait_no_longer()

    def request_is_answered(self) -> None:
        """The next one may come."""
        self.answering = False

    def wait_no_longer(self) -> None:
        """The rest of a request is there, or is not wanted."""
        timer, self._timer = self._timer, None
        cancel_call(timer)

    def _late(self) -> None:
        self._timer = None
        self.guard.refused("slow_request")
        self.drop()

    def drop(self) -> None:
        """End it at once."""
        if self.transport is not None:
            self.transport.abortConnection()

    def failed(self) -> None:
        """Twisted could not read what came, and says so by an exception."""
        self.guard.refused("unreadable_request")
        self.drop()


class GuardOptions(TypedDict, total=False):
    """Arguments of :class:`Guard`, for what makes one."""

    most: int | None
    most_of_block: int
    by_place: bool
    refused: Callable[[str], None]


class Guard:
    """The connections of one site.

    :param most: connections in all; None: what the limit of descriptors leaves.
    :param by_place: connections of one address are counted; not behind a proxy, whose they all are.
    :param refused: told ``too_many_connections``, ``slow_request`` or ``unreadable_request``.
    """

    def __init__(
        self,
        clock: IReactorTime,
        *,
        most: int | None = None,
        most_of_block: int = MAX_OF_BLOCK,
        by_place: bool = True,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.clock = clock
        self.refused = refused
        self._most = _possible() if most is None else most
        self._most_of_block = most_of_block
        self._by_place = by_place
        self._open: dict[Guarded, None] = {}
        self._of = BlockCounts()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, one: Guarded) -> None:
        """A connection is there; another may have to go for it."""
        one.guard = self
        one.since = self.clock.seconds()
        if self._by_place:
            one.block = blocks_of(str(getattr(one.transport.getPeer(), "host", "")))[0].name
        crowded = self._of.crowded(one.block, self._most_of_block) if self._by_place else ""
        self._open[one] = None
        self._of.add(one.block)
        if not crowded and len(self._open) > self._most:
            crowded = self._of.heaviest()
        if crowded or len(self._open) > self._most:
            # of a wide block one address may have all
            victim = self._victim(self._of.heaviest(crowded) if crowded else one.block, one)
            self.refused("too_many_connections")
            self.went(victim)
            victim.drop()

    def _victim(self, block: str, new: Guarded) -> Guarded:
        """Who waits for an answer goes last; but behind a proxy, where all are one, before those who are new."""
        of_block = [other for other in self._open if other.block == block]
        young = self.clock.seconds() - (0.0 if self._by_place else TIME_TO_ASK)
        silent = (other for other in of_block if not other.answering and other is not new and other.since <= young)
        return next(silent, of_block[0])

    def drop_all(self) -> None:
        """End every connection: what answers is about to stop, and a client that keeps one would go on asking it."""
        for one in list(self._open):
            one.drop()

    def went(self, one: Guarded) -> None:
        """It is gone, or is no connection of the site any more."""
        if one in self._open:
            del self._open[one]
            self._of.remove(one.block)


class _Wrapped(Guarded, ProtocolWrapper):
    factory: GuardedFactory

    def connectionMade(self) -> None:
        self.factory.guard.came(self)
        super().connectionMade()  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        self.heard()
        try:
            super().dataReceived(data)  # type: ignore[no-untyped-call]
        except Exception:
            self.failed()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.wait_no_longer()
        self.guard.went(self)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class GuardedFactory(WrappingFactory):
    """Around a site; the arguments are those of :class:`Guard`."""

    protocol = _Wrapped
    noisy = False

    def __init__(self, site: Site, clock: IReactorTime, **of_guard: Unpack[GuardOptions]) -> None:
        super().__init__(site)  # type: ignore[no-untyped-call]
        self.guard = Guard(clock, **of_guard)

    def __len__(self) -> int:
        return len(self.guard)
