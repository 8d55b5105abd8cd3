"""Secure transports for which this client has answered a REQUEST, and whose initiators have not confirmed them yet.

An attacker who replays a recorded REQUEST gets this far, so no frame is trusted before the confirmation. Each transport
must be confirmed within ``CONFIRM_TIMEOUT`` seconds. When the table is full, the initiator with most unconfirmed
transports loses its oldest; among equals, the initiator that was first to reach this number. An honest initiator
confirms within a round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from twisted.internet.interfaces import IProtocolFactory, IReactorTime

from dmsg.base.priority_queue import PriorityQueue
from dmsg.keys import PubKey
from dmsg.net.own_pauses import FairTimeout
from dmsg.v2019.core.state import ClientTransport, State

CONFIRM_TIMEOUT = 10.0
"""Seconds to wait for an initiator's proof that it holds the keys. After that, its transport is closed."""


class Unconfirmed(NamedTuple):
    """Record of one unconfirmed transport.

    :ivar asked_at: time of the answer to the REQUEST, in seconds of the reactor's clock.
    :ivar factory: factory for the new stream. None if the transport resumes a stream, or is to be upgraded first.
    """

    timer: FairTimeout
    asked_at: float
    factory: IProtocolFactory | None


class Confirmations:
    """Table of one session's unconfirmed transports.

    :param on_timeout: callback invoked with a transport that was not confirmed in time.
    """

    def __init__(self, reactor: IReactorTime, on_timeout: Callable[[ClientTransport], None]) -> None:
        self._reactor = reactor
        self._on_timeout = on_timeout
        self._waiting: dict[ClientTransport, Unconfirmed] = {}
        self._of: dict[PubKey, dict[ClientTransport, None]] = {}
        self._counts: PriorityQueue[PubKey] = PriorityQueue()
        self._decided: dict[ClientTransport, Unconfirmed] = {}
        """Transports that a frame of the present read has confirmed or closed, and whose event is not processed yet."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._decided)

    def __iter__(self) -> Iterator[ClientTransport]:
        return iter([*self._waiting, *self._decided])

    def add(self, transport: ClientTransport, factory: IProtocolFactory | None) -> None:
        """Add a transport whose REQUEST was just answered, and start its timeout."""
        timer = FairTimeout(self._reactor, CONFIRM_TIMEOUT, partial(self._on_timeout, transport))
        self._waiting[transport] = Unconfirmed(timer, self._reactor.seconds(), factory)
        self._of.setdefault(transport.remote, {})[transport] = None
        self._rank(transport.remote)

    def pop(self, transport: ClientTransport) -> Unconfirmed | None:
        """Remove a transport and return its record; None if the transport is not in the table."""
        decided = self._decided.pop(transport, None)
        if decided is not None:
            return decided
        found = self._waiting.pop(transport, None)
        if found is None:
            return None
        found.timer.stop()
        del self._of[transport.remote][transport]
        self._rank(transport.remote)
        return found

    def first_to_evict(self) -> ClientTransport | None:
        """Return the transport to evict if the table is full; None if no transport is unconfirmed."""
        while (initiator := self._counts.first()) is not None:
            transport = next(iter(self._of[initiator]))
            if transport.state in (State.ANSWERED, State.INVITED):
                return transport
            # A frame of the same read has confirmed or closed this transport. The session processes the event for it
            # after the whole read, and needs the record then.
            decided = self.pop(transport)
            assert decided is not None
            self._decided[transport] = decided
        return None

    def _rank(self, initiator: PubKey) -> None:
        if own := self._of[initiator]:
            self._counts.put(initiator, -len(own))
        else:
            del self._of[initiator]
            self._counts.remove(initiator)
