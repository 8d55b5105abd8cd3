"""Protocol and factory classes of the server, over noise links.

``ServerSession`` gives one link to the relay.  Rules are in
:mod:`dmsg.transport.relay`; here are Deferreds, timers and producers.  The
client's are in :mod:`dmsg.transport.session`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import (
    CloseReason,
    DropReason,
    RemoteProtocolError,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.noise import HANDSHAKE_TIMEOUT, NoiseLink, TurnFlush
from dmsg.transport.relay import MAX_TRANSPORTS, Relay, RelayPeer
from dmsg.transport.wire import OK_FRAME

MAX_CONNECTIONS = 10_000
"""Connections of a server, by default."""
MAX_HANDSHAKES = 512
"""Handshakes under way; one more evicts the oldest."""
STALL_GRACE = 0.5
"""Seconds that sources are paused for a receiver that takes nothing."""

_log = Logger()


class ServerSession:
    """One connected client of a server."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: ServerFactory) -> None:
        self._factory = factory
        self._peer: RelayPeer | None = None
        self.link: NoiseLink | None = None

    def link_up(self, link: NoiseLink) -> None:
        self.link = link
        assert link.remote is not None
        link.send(OK_FRAME)
        self._peer = self._factory.relay.add(link.remote, link)
        self._factory.session_up(self)

    def frames_received(self, buffer: bytearray, end: int) -> int:
        assert self._peer is not None
        return self._factory.relay.receive_frames(self._peer, buffer, end)

    def link_congested(self) -> None:
        assert self._peer is not None
        self._factory.relay.congest(self._peer)

    def link_relieved(self) -> None:
        assert self._peer is not None
        self._factory.relay.relieve(self._peer)

    def link_lost(self, reason: Failure) -> None:
        assert self._peer is not None
        self._factory.relay.remove(self._peer)
        self._factory.session_down(self)


class ServerFactory(Factory):
    """Accepts connections and gives them to one relay.

    Handshakes are independent of each other; those that fail, stall or are too
    many are closed and counted.

    :ivar relay: the table, with the drop counters.
    :ivar sessions: the connected clients.
    :ivar on_change: called when the number of sessions changed.
    """

    noisy = False

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_transports: int = MAX_TRANSPORTS,
        max_handshakes: int = MAX_HANDSHAKES,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        random: Random | None = None,
        ephemeral: Callable[[], SecKey | None] = lambda: None,
    ) -> None:
        self._reactor = reactor
        self._key = key
        self._turn = TurnFlush(reactor)
        self._ephemeral = ephemeral
        self._handshake_timeout = handshake_timeout
        self._max_handshakes = max_handshakes
        self._handshakes: dict[NoiseLink, None] = {}
        self._stalls: dict[RelayPeer, IDelayedCall] = {}
        self.max_connections = max_connections
        self.sessions: set[ServerSession] = set()
        self.relay = Relay(max_transports=max_transports, random=random, on_congested=self._watch)
        self.connections_opened = 0
        self.tuned = False
        """The listening sockets hand their options down."""
        self.on_change: Callable[[], None] = lambda: None
        self._drained: Deferred[None] | None = None

    @property
    def available_connections(self) -> int:
        """How many more clients may connect."""
        return max(0, self.max_connections - len(self.sessions))

    @property
    def handshakes(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    def buildProtocol(self, addr: IAddress | None) -> NoiseLink | None:
        drops = self.relay.drops
        if self.relay.draining:
            drops[DropReason.DRAINING] += 1
            return None
        if len(self.sessions) >= self.max_connections:
            drops[DropReason.TOO_MANY_CONNECTIONS] += 1
            return None
        if len(self._handshakes) >= self._max_handshakes:
            # silent connections must not keep honest ones out: the oldest goes
            next(iter(self._handshakes)).evict()
        link = NoiseLink(
            self._reactor,
            self._turn,
            self._key,
            self._make_session,
            failed=self._handshake_failed,
            timeout=self._handshake_timeout,
            tuned=self.tuned,
            ephemeral=self._ephemeral(),
        )
        self._handshakes[link] = None
        return link

    def _make_session(self, remote: PubKey) -> ServerSession:
        return ServerSession(self)

    def _handshake_failed(self, link: NoiseLink, failure: Failure) -> None:
        self._handshakes.pop(link, None)
        error = failure.value
        reason = error.reason if isinstance(error, RemoteProtocolError) else link.ended_for
        self.relay.drops[reason or DropReason.HANDSHAKE_FAILED] += 1

    def session_up(self, session: ServerSession) -> None:
        """A handshake is done."""
        assert session.link is not None
        self._handshakes.pop(session.link, None)
        self.sessions.add(session)
        self.connections_opened += 1
        if len(self.sessions) > self.max_connections:
            # handshakes that were under way when the last place was taken
            self.relay.drops[DropReason.TOO_MANY_CONNECTIONS] += 1
            session.link.close(DropReason.TOO_MANY_CONNECTIONS)
        self.on_change()

    def session_down(self, session: ServerSession) -> None:
        """A client is gone."""
        self.sessions.discard(session)
        assert session.link is not None
        if (reason := session.link.ended_for) is not None and reason not in _COUNTED_BY_RELAY:
            self.relay.drops[reason] += 1
        if self._drained is not None and not self.sessions:
            drained, self._drained = self._drained, None
            drained.callback(None)
        self.on_change()

    def _watch(self, peer: RelayPeer) -> None:
        if peer in self._stalls:
            return

        def stalled() -> None:
            del self._stalls[peer]
            self.relay.stall(peer)

        self._stalls[peer] = self._reactor.callLater(STALL_GRACE, stalled)

    def drain(self) -> Deferred[None]:
        """Close every transport and connection, take no new ones; fires when all are gone."""
        self.relay.close_all(CloseReason.SHUTTING_DOWN)
        for link in list(self._handshakes):
            link.close(DropReason.DRAINING)
        for timer in self._stalls.values():
            timer.cancel()
        self._stalls.clear()
        drained: Deferred[None] = Deferred()
        if not self.sessions:
            drained.callback(None)
            return drained
        self._drained = drained
        for session in list(self.sessions):
            assert session.link is not None
            session.link.close(DropReason.DRAINING)
        return drained


_COUNTED_BY_RELAY = frozenset(
    {DropReason.REPLACED, DropReason.SEND_BUFFER_FULL, DropReason.TOO_MANY_CONNECTIONS, DropReason.DRAINING}
)
