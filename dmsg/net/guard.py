"""Connections to an HTTP server: so many in all and from one place, and so long for a request to be whole.

Without it who opens connections and says nothing more has all descriptors of
the process.  Where there are too many, the place that has most of them loses the
one that has waited longest for the rest of a request, or for a next one: so
others get in all the same.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure

from dmsg.net.addresses import block_of

MAX_CONNECTIONS = 4096
"""Connections in all, or as many as there are descriptors for."""
RESERVE = 64
"""Descriptors that are not for clients."""
MAX_OF_BLOCK = 512
"""Connections of one address, or one block of IPv6: a company may be behind it."""
WHOLE_WITHIN = 20.0
"""Seconds from the first byte of a request to its last, however they drip in."""


def _possible() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, limit - RESERVE))


class _Guarded(ProtocolWrapper):
    """One connection.  :ivar answering: a whole request is there, and its answer is not."""

    factory: GuardedFactory
    block = ""
    answering = False
    _timer: IDelayedCall | None = None

    def connectionMade(self) -> None:
        self.factory.came(self)
        super().connectionMade()  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        if self._timer is None:
            self._timer = self.factory.clock.callLater(WHOLE_WITHIN, self._late)
        super().dataReceived(data)  # type: ignore[no-untyped-call]

    def request_is_whole(self) -> None:
        """All of it is there: the rest of the time is the server's own."""
        self.answering = True
        self._cancel()

    def request_is_answered(self) -> None:
        """The next one may come."""
        self.answering = False

    def _cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _late(self) -> None:
        self._timer = None
        self.factory.refused("slow_request")
        self.drop()

    def drop(self) -> None:
        """End it at once."""
        transport: Any = self.transport
        if transport is not None:
            transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._cancel()
        self.factory.went(self)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class GuardedFactory(WrappingFactory):
    """Around a site.

    :param most: connections in all; None: what the limit of descriptors leaves.
    :param by_place: connections of one address are counted; not behind a proxy, whose they all are.
    :param refused: told ``too_many_connections`` or ``slow_request``.
    """

    protocol = _Guarded
    noisy = False

    def __init__(
        self,
        site: Any,
        clock: IReactorTime,
        *,
        most: int | None = None,
        most_of_block: int = MAX_OF_BLOCK,
        by_place: bool = True,
        refused: Callable[[str], None] = lambda reason: None,
    ) -> None:
        super().__init__(site)  # type: ignore[no-untyped-call]
        self.clock = clock
        self.refused = refused
        self._most = _possible() if most is None else most
        self._most_of_block = most_of_block
        self._by_place = by_place
        self._open: dict[_Guarded, None] = {}
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, one: _Guarded) -> None:
        """A connection is there; another may have to go for it."""
        transport: Any = one.transport
        if self._by_place:
            one.block = block_of(str(getattr(transport.getPeer(), "host", "")))
        self._open[one] = None
        self._of[one.block] += 1
        block: str | None = None
        if self._by_place and self._of[one.block] > self._most_of_block:
            block = one.block
        elif len(self._open) > self._most:
            block = max(self._of, key=self._of.__getitem__)
        if block is not None:
            of_block = [other for other in self._open if other.block == block]
            # who waits for an answer of ours goes last
            victim = next((other for other in of_block if not other.answering), of_block[0])
            self.refused("too_many_connections")
            self.went(victim)
            victim.drop()

    def went(self, one: _Guarded) -> None:
        """It is gone."""
        if one in self._open:
            del self._open[one]
            self._of[one.block] -= 1
            if not self._of[one.block]:
                del self._of[one.block]
