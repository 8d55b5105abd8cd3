"""Guard of an HTTP server: limits connections in all and per address, and sets a deadline for each request.

Without limits, a client that opens connections and sends nothing would use up all file descriptors of the process. If
there are too many connections, one of the address block with most connections is closed: the oldest that is not waiting
for a response. So other clients can still connect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack

from twisted.internet.interfaces import IProtocol, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.python.failure import Failure
from twisted.web.server import Site
from zope.interface import implementer

from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.descriptors import max_connections
from dmsg.net.own_pauses import FairTimeout, stop_timeout
from dmsg.net.tls_overhead import ITLSOverhead

MAX_CONNECTIONS = 4096
"""Maximum number of connections in all. The limit is lower if the process may open fewer file descriptors."""
MAX_OF_BLOCK = 512
"""Maximum number of connections of one address, which may serve a whole company. Wider blocks may have more
(:mod:`dmsg.net.blocks`)."""
TIME_TO_ASK = 1.0
"""Seconds within which a new connection behind a proxy should send its request. Until then, it is not closed in favour
of another one."""
WHOLE_WITHIN = 20.0
"""Maximum number of seconds from the first byte of a request to its last byte. Pauses of this process do not count."""

GuardReason = Literal["too_many_connections", "slow_request", "unreadable_request", "small_pieces"]
"""Reason for which a guard closes a connection."""


@implementer(ITLSOverhead)
class GuardedConnection:
    """Connection, with the state that the guard needs.

    :ivar block: block of the client's address.
    :ivar answering: whether a complete request is still unanswered.
    :ivar since: time when the connection was made.
    """

    guard: Guard
    transport: Any
    block = ""
    answering = False
    since = 0.0
    _deadline: FairTimeout | None = None
    _is_incomplete = False
    _has_deadline = False
    """Whether there is an incomplete request. Otherwise, the timeout has no effect."""

    def deliver(self, data: bytes, receiver: IProtocol) -> None:
        """Pass received bytes to the protocol that parses requests. Start the deadline of a request that is incomplete
        afterwards.

        Most requests arrive as a whole, and need no timeout. When an incomplete request becomes complete, its timeout
        continues, and serves the next one. So a connection has at most one timeout in :data:`WHOLE_WITHIN` seconds.
        """
        self._is_incomplete = not self.answering
        try:
            receiver.dataReceived(data)
        except Exception:
            self.refuse_unreadable()
        if self._is_incomplete and not self._has_deadline:
            self._has_deadline = True
            if self._deadline is None:
                self._deadline = FairTimeout(self.guard.clock, WHOLE_WITHIN, self._on_deadline)
            else:
                self._deadline.restart()

    def request_is_whole(self) -> None:
        """Record that a request is complete, and stop its deadline. From now on, the client waits for the server."""
        self.answering = True
        self._is_incomplete = self._has_deadline = False

    def request_is_answered(self) -> None:
        """Record that the request was answered. The connection now waits for the next request."""
        self.answering = False

    def stop_waiting(self) -> None:
        """Stop the deadline, because the connection is not guarded any more."""
        self._is_incomplete = self._has_deadline = False
        deadline, self._deadline = self._deadline, None
        stop_timeout(deadline)

    def _on_deadline(self) -> None:
        """Close the connection if its request is still incomplete."""
        self._deadline = None
        if not self._has_deadline:
            return
        # The connection is closed first, so that it ends even if the callback fails.
        self.drop()
        self.guard.on_refused("slow_request")

    def drop(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abortConnection()

    def tls_overhead_exceeded(self) -> None:
        """Count a connection whose peer sends messages of TLS that carry no data, and close the connection."""
        self.guard.on_refused("small_pieces")
        self.drop()

    def refuse_unreadable(self) -> None:
        """Count a request for which Twisted's parser raised an exception, and close the connection."""
        self.drop()
        self.guard.on_refused("unreadable_request")


class GuardOptions(TypedDict, total=False):
    """Optional arguments of :class:`Guard`."""

    limit: int | None
    most_of_block: int
    by_place: bool
    on_refused: Callable[[GuardReason], None]


class Guard:
    """Table of the open connections of one site, which limits their number.

    :param limit: maximum number of connections in all; None to derive it from the limit of file descriptors.
    :param by_place: whether connections are also limited per address; False behind a proxy, from which all connections
        come.
    :param on_refused: callback invoked when the guard closes a connection, with the reason for the close.
    """

    def __init__(
        self,
        clock: IReactorTime,
        *,
        limit: int | None = None,
        most_of_block: int = MAX_OF_BLOCK,
        by_place: bool = True,
        on_refused: Callable[[GuardReason], None] = lambda reason: None,
    ) -> None:
        self.clock = clock
        self.on_refused = on_refused
        self._most = min(MAX_CONNECTIONS, max_connections()) if limit is None else limit
        self._most_of_block = most_of_block
        self._by_place = by_place
        self._open: dict[GuardedConnection, None] = {}
        self._of = BlockCounts()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: GuardedConnection) -> None:
        """Add a connection. If there are too many now, close one of them."""
        connection.guard = self
        connection.since = self.clock.seconds()
        if self._by_place:
            connection.block = blocks_of(str(getattr(connection.transport.getPeer(), "host", "")))[0].name
        crowded = self._of.crowded_block(connection.block, self._most_of_block) if self._by_place else ""
        self._open[connection] = None
        self._of.add(connection.block)
        if not crowded and len(self._open) > self._most:
            crowded = self._of.heaviest()
        if crowded or len(self._open) > self._most:
            # The victim is chosen from the narrow block with most connections inside the crowded block, because one
            # address may have all connections of a wide block.
            victim = self._victim(self._of.heaviest(crowded) if crowded else connection.block, connection)
            self.remove(victim)
            victim.drop()
            self.on_refused("too_many_connections")

    def _victim(self, block: str, new: GuardedConnection) -> GuardedConnection:
        """Choose the connection of ``block`` to close: the oldest that is not waiting for a response.

        Behind a proxy, where all connections are in one block, connections younger than ``TIME_TO_ASK`` are not chosen
        either. If no connection qualifies, the oldest of the block is chosen.
        """
        of_block = [other for other in self._open if other.block == block]
        young = self.clock.seconds() - (0.0 if self._by_place else TIME_TO_ASK)
        silent = (other for other in of_block if not other.answering and other is not new and other.since <= young)
        return next(silent, of_block[0])

    def drop_all(self) -> None:
        """Close every connection, because the site stops. Over an open connection, a client could continue to send
        requests to the site."""
        for one in list(self._open):
            one.drop()

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a connection that has ended, or that the site no longer handles."""
        if connection in self._open:
            del self._open[connection]
            self._of.remove(connection.block)


class _GuardedProtocol(GuardedConnection, ProtocolWrapper):
    factory: GuardedFactory

    def connectionMade(self) -> None:
        self.factory.guard.add(self)
        super().connectionMade()  # type: ignore[no-untyped-call]

    def dataReceived(self, data: bytes) -> None:
        self.deliver(data, self.wrappedProtocol)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.stop_waiting()
        self.guard.remove(self)
        super().connectionLost(reason)  # type: ignore[no-untyped-call]


class GuardedFactory(WrappingFactory):
    """Factory that adds a :class:`Guard` to a site, and takes the arguments of the guard."""

    protocol = _GuardedProtocol
    noisy = False

    def __init__(self, site: Site, clock: IReactorTime, **of_guard: Unpack[GuardOptions]) -> None:
        super().__init__(site)  # type: ignore[no-untyped-call]
        self.guard = Guard(clock, **of_guard)

    def __len__(self) -> int:
        return len(self.guard)
