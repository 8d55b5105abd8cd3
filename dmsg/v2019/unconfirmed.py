"""Secure transports that were answered, or invited to be upgraded, and not confirmed.

Whoever recorded a REQUEST can have got so far.

Each has a while; where there is no place for another one, the initiator that has most of them
loses its oldest, and among equals the one that asked first: who is honest confirms within a
round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from twisted.internet.interfaces import IDelayedCall, IProtocolFactory, IReactorTime

from dmsg.base.priority_queue import PriorityQueue
from dmsg.keys import PubKey
from dmsg.net.reactor import cancel_call
from dmsg.v2019.core.state import ClientTransport, State

CONFIRM_TIMEOUT = 10.0
"""Seconds that an initiator has to show that it holds the keys."""


class Unconfirmed(NamedTuple):
    """One of them.

    :ivar asked: seconds, when it was answered.
    :ivar factory: who is to have its stream; None: it carries on one that is there.
    """

    timer: IDelayedCall
    asked: float
    factory: IProtocolFactory | None


class Confirmations:
    """Those of one session.

    :param late: called with one whose time is up.
    """

    def __init__(self, reactor: IReactorTime, late: Callable[[ClientTransport], None]) -> None:
        self._reactor = reactor
        self._late = late
        self._waiting: dict[ClientTransport, Unconfirmed] = {}
        self._of: dict[PubKey, dict[ClientTransport, None]] = {}
        self._most: PriorityQueue[PubKey] = PriorityQueue()
        self._decided: dict[ClientTransport, Unconfirmed] = {}
        """Those whose end or confirmation is on its way here."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decided)

    def __iter__(self) -> Iterator[ClientTransport]:
        return iter([*self._waiting, *self._decided])

    def add(self, transport: ClientTransport, factory: IProtocolFactory | None) -> None:
        """It was answered."""
        timer = self._reactor.callLater(CONFIRM_TIMEOUT, self._late, transport)
        self._waiting[transport] = Unconfirmed(timer, self._reactor.seconds(), factory)
        self._of.setdefault(transport.remote, {})[transport] = None
        self._rank(transport.remote)

    def pop(self, transport: ClientTransport) -> Unconfirmed | None:
        """It waits no longer; None: it did not."""
        decided = self._decided.pop(transport, None)
        if decided is not None:
            return decided
        found = self._waiting.pop(transport, None)
        if found is None:
            return None
        cancel_call(found.timer)
        del self._of[transport.remote][transport]
        self._rank(transport.remote)
        return found

    def first_to_go(self) -> ClientTransport | None:
        """Who makes room for another; None: nobody waits."""
        while (initiator := self._most.first()) is not None:
            transport = next(iter(self._of[initiator]))
            if transport.state in (State.ANSWERED, State.INVITED):
                return transport
            # confirmed or closed by a frame of the same read, of which the session is told after all of them
            decided = self.pop(transport)
            assert decided is not None
            self._decided[transport] = decided
        return None

    def _rank(self, initiator: PubKey) -> None:
        if own := self._of[initiator]:
            self._most.put(initiator, -len(own))
        else:
            del self._of[initiator]
            self._most.remove(initiator)
