"""A server's listening side: handshakes under way, connections in all and per address.

Handshakes are independent of each other; those that fail, stall or are too
many are closed and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.python.failure import Failure

from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.link import Link

MAX_HANDSHAKES = 512
"""Handshakes under way; one more evicts the oldest."""


class AcceptLimits(Protocol):
    """:ivar max_per_address: 0 means no limit."""

    @property
    def max_connections(self) -> int:
        """Connections in all."""

    @property
    def max_per_address(self) -> int:
        """Connections of one address."""


class AcceptedSession(Protocol):
    """What lies above an accepted link."""

    link: Link | None


class Acceptor(Factory):
    """Accepts connections of one server.

    :param drops: where refusals are counted.
    :param counted: reasons of an end that are counted elsewhere.
    :ivar sessions: the connected clients.
    :ivar on_change: called when the number of sessions changed.
    """

    noisy = False

    def __init__(
        self,
        reactor: IReactorTime,
        drops: Counter[DropReason],
        *,
        max_handshakes: int = MAX_HANDSHAKES,
        counted: frozenset[DropReason] = frozenset(),
    ) -> None:
        self._reactor = reactor
        self._drops = drops
        self._counted = counted
        self._max_handshakes = max_handshakes
        self._handshakes: dict[Link, None] = {}
        self._of_address: Counter[str] = Counter()
        self._addresses: dict[Link, str] = {}
        self.sessions: set[Any] = set()
        self.connections_opened = 0
        self.tuned = False
        """The listening sockets hand their options down."""
        self.on_change: Callable[[], None] = lambda: None
        self._drained: Deferred[None] | None = None

    # --- for a family ---

    @property
    def limits(self) -> AcceptLimits:
        """How many may connect."""
        raise NotImplementedError

    def _make_link(self) -> Link:
        """A link whose failure goes to :meth:`_handshake_failed`."""
        raise NotImplementedError

    def _failed(self, reason: DropReason, host: str | None) -> None:
        """A handshake failed and is counted."""

    @property
    def draining(self) -> bool:
        """Nobody new is taken."""
        raise NotImplementedError

    # --- what there is ---

    @property
    def available_connections(self) -> int:
        """How many more clients may connect."""
        return max(0, self.limits.max_connections - len(self.sessions))

    @property
    def handshakes(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    # --- connections ---

    def _refusal(self, host: str | None) -> DropReason | None:
        if self.draining:
            return DropReason.DRAINING
        if len(self.sessions) >= self.limits.max_connections:
            return DropReason.TOO_MANY_CONNECTIONS
        if host is not None and 0 < self.limits.max_per_address <= self._of_address[host]:
            return DropReason.TOO_MANY_FROM_ADDRESS
        return None

    def buildProtocol(self, addr: IAddress | None) -> Link | None:
        host = getattr(addr, "host", None)
        refusal = self._refusal(host)
        if refusal is not None:
            self._drops[refusal] += 1
            return None
        if len(self._handshakes) >= self._max_handshakes:
            # silent connections must not keep honest ones out: the oldest goes
            next(iter(self._handshakes)).evict()
        link = self._make_link()
        self._handshakes[link] = None
        if host is not None:
            self._of_address[host] += 1
            self._addresses[link] = host
        return link

    def _gone(self, link: Link) -> str | None:
        host = self._addresses.pop(link, None)
        if host is not None:
            self._of_address[host] -= 1
            if not self._of_address[host]:
                del self._of_address[host]
        return host

    def _handshake_failed(self, link: Link, failure: Failure) -> None:
        self._handshakes.pop(link, None)
        host = self._gone(link)
        error = failure.value
        reason = error.reason if isinstance(error, RemoteProtocolError) else link.ended_for
        reason = reason or DropReason.HANDSHAKE_FAILED
        self._drops[reason] += 1
        self._failed(reason, host)

    def session_up(self, session: AcceptedSession) -> None:
        """A handshake is done."""
        assert session.link is not None
        self._handshakes.pop(session.link, None)
        self.sessions.add(session)
        self.connections_opened += 1
        if len(self.sessions) > self.limits.max_connections:
            # handshakes that were under way when the last place was taken
            self._drops[DropReason.TOO_MANY_CONNECTIONS] += 1
            session.link.close(DropReason.TOO_MANY_CONNECTIONS)
        self.on_change()

    def session_down(self, session: AcceptedSession) -> None:
        """A client is gone."""
        self.sessions.discard(session)
        assert session.link is not None
        self._gone(session.link)
        if (reason := session.link.ended_for) is not None and reason not in self._counted:
            self._drops[reason] += 1
        if self._drained is not None and not self.sessions:
            drained, self._drained = self._drained, None
            drained.callback(None)
        self.on_change()

    def close_all(self) -> Deferred[None]:
        """End every connection and every handshake; fires when all are gone."""
        for link in list(self._handshakes):
            link.close(DropReason.DRAINING)
        drained: Deferred[None] = Deferred()
        if not self.sessions:
            drained.callback(None)
            return drained
        self._drained = drained
        for session in list(self.sessions):
            if session.link is not None:
                session.link.close(DropReason.DRAINING)
        return drained
