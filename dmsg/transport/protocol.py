"""Protocol and factory classes of server and client, over noise links.

``ServerSession`` gives one link to the relay; ``ClientSession`` carries the
streams of one link.  Rules are in :mod:`dmsg.transport.relay` and
:mod:`dmsg.transport.client`; here are Deferreds, timers and producers.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IAddress, IDelayedCall, IProtocol, IProtocolFactory, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.errors import (
    CloseReason,
    DmsgTimeout,
    DropReason,
    LocalProtocolError,
    RemoteProtocolError,
    TransportClosed,
    TransportRefused,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.noise import HANDSHAKE_TIMEOUT, NoiseLink, TurnFlush
from dmsg.net.stream import DmsgAddress, StreamTransport
from dmsg.pending import Pending
from dmsg.transport.client import (
    Accepted,
    Acknowledged,
    ClientConnection,
    ClientTransport,
    Closed,
    DataReceived,
    Established,
    Event,
    Requested,
    State,
)
from dmsg.transport.relay import MAX_TRANSPORTS, Relay, RelayPeer
from dmsg.transport.wire import MAX_FWD_DATA, OK_FRAME

MAX_CONNECTIONS = 10_000
"""Connections of a server, by default."""
MAX_HANDSHAKES = 512
"""Handshakes under way; one more evicts the oldest."""
STALL_GRACE = 0.5
"""Seconds that sources are paused for a receiver that takes nothing."""
REQUEST_TIMEOUT = 10.0
"""Seconds for the answer to a REQUEST, by default."""
CLIENT_QUEUE_LIMIT = 16 * 1024 * 1024
"""Bytes of answers that a client holds for a server that does not read."""

_log = Logger()


# --- server -----------------------------------------------------------------


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


# --- client -----------------------------------------------------------------


class ClientSession:
    """A client's connection to one server: it carries streams.

    :param accept: the factory for transports that others open, asked for each
        time; None refuses them.
    :ivar server: the server's key.
    :ivar established: fires with this session when the server said OK.
    :ivar lost: fires with None when the connection is gone.
    """

    max_frame = MAX_FWD_DATA

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        local: PubKey,
        server: PubKey,
        *,
        accept: Callable[[], IProtocolFactory | None] = lambda: None,
        random: Random | None = None,
    ) -> None:
        self._reactor = reactor
        self._turn = turn
        self._core = ClientConnection(local, random=random)
        self._link: NoiseLink | None = None
        self._accept = accept
        self._host = DmsgAddress(local)
        self._opening: Pending[ClientTransport, ClientTransport] = Pending()
        self._writable = True
        self._receiving = False
        self.server = server
        self.established: Deferred[ClientSession] = Deferred()
        self.lost: Deferred[None] = Deferred()
        self.connected = False
        self.round_trip: float | None = None
        """Seconds that the last answered REQUEST took."""

    # --- what the application does ---

    def open(self, remote: PubKey, factory: IProtocolFactory, timeout: float = REQUEST_TIMEOUT) -> Deferred[IProtocol]:
        """Open a transport to ``remote`` through this server.

        Fires with the factory's protocol, connected.  Fails with
        :class:`~dmsg.errors.TransportRefused`, :class:`~dmsg.errors.DmsgTimeout`
        or :class:`~dmsg.errors.TransportClosed`.  Cancelling closes the transport.
        """
        if not self.connected:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        try:
            transport = self._core.request(remote)
        except LocalProtocolError:
            return fail()
        stream = self._make_stream(transport)
        started = self._reactor.seconds()

        def opened(_: ClientTransport) -> IProtocol:
            self.round_trip = self._reactor.seconds() - started
            protocol = factory.buildProtocol(stream.getPeer())
            if protocol is None:
                self.stream_close(stream, CloseReason.REFUSED)
                raise TransportClosed(CloseReason.REFUSED, "the factory built no protocol")
            stream.start(protocol)
            return protocol

        def gave_up(failure: Failure) -> Failure:
            # refused ones are closed already; this is for a timeout or a cancel
            self.stream_close(stream, CloseReason.TIMEOUT)
            return failure

        waiting = self._opening.add(transport)
        waiting.addTimeout(timeout, self._reactor, _no_answer)
        waiting.addErrback(gave_up)
        self._flush()
        return waiting.addCallback(opened)

    def close(self) -> None:
        """End the connection; the streams end with it."""
        if self._link is not None:
            for transport in list(self._core.transports.values()):
                is_open = transport.state is State.OPEN
                self._core.close(transport, CloseReason.UNSPECIFIED)
                if is_open:
                    transport.user.carrier_closed(CloseReason.UNSPECIFIED)
            self._flush()
            self._link.close()

    @property
    def transports(self) -> int:
        """Transports that are open or being opened."""
        return len(self._core.transports)

    # --- the link's side ---

    def link_up(self, link: NoiseLink) -> None:
        self._link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        self._core.accepting = self._accept() is not None
        taken, events = self._core.receive_frames(buffer, end)
        self._receiving = True
        for event in events:
            self._handle[type(event)](self, event)
        self._receiving = False
        self._flush()
        if self._link is not None and self._link.congested and self._link.queued() > CLIENT_QUEUE_LIMIT:
            raise RemoteProtocolError(DropReason.SEND_BUFFER_FULL, "server provokes answers and reads none")
        return taken

    def link_congested(self) -> None:
        self._writable = False

    def link_relieved(self) -> None:
        self._writable = True
        for transport in list(self._core.transports.values()):
            if transport.user is not None:
                transport.user.window_opened()

    def link_lost(self, reason: Failure) -> None:
        self._link = None
        self.connected = False
        transports = [one for one in self._core.transports.values() if one.state is State.OPEN]
        gone = TransportClosed(CloseReason.PEER_DISCONNECTED, "connection to the server was lost")
        self._opening.fail_all(Failure(gone))
        for transport in transports:
            transport.user.carrier_closed(CloseReason.PEER_DISCONNECTED)
        self._core.transports.clear()
        if not self.established.called:
            self.established.errback(Failure(gone))
        self.lost.callback(None)

    # --- events of the core ---

    def _on_established(self, event: Established) -> None:
        self.connected = True
        self.established.callback(self)

    def _on_requested(self, event: Requested) -> None:
        transport = event.transport
        if transport.state is State.CLOSED:
            return  # a CLOSE came with the REQUEST
        stream = self._make_stream(transport)
        factory = self._accept()
        protocol = None
        try:
            protocol = factory.buildProtocol(stream.getPeer()) if factory is not None else None
        except Exception:
            # the application's bug ends its transport, not the connection of all
            _log.failure("unhandled error in buildProtocol of {factory!r}", factory=factory)
        if protocol is None:
            self._core.close(transport, CloseReason.REFUSED)
        else:
            self._core.accept(transport)
            stream.start(protocol)

    def _on_accepted(self, event: Accepted) -> None:
        self._opening.succeed(event.transport, event.transport)

    def _on_data(self, event: DataReceived) -> None:
        event.transport.user.data_received(event.data)

    def _on_acknowledged(self, event: Acknowledged) -> None:
        event.transport.user.acknowledged(event.token)

    def _on_closed(self, event: Closed) -> None:
        if event.refused:
            self._opening.fail(event.transport, Failure(TransportRefused(event.reason)))
        else:
            event.transport.user.carrier_closed(event.reason)

    _handle: dict[type[Event], Callable[[ClientSession, Any], None]] = {
        Established: _on_established,
        Requested: _on_requested,
        Accepted: _on_accepted,
        DataReceived: _on_data,
        Acknowledged: _on_acknowledged,
        Closed: _on_closed,
    }

    # --- the streams' side (StreamCarrier) ---

    def stream_may_send(self, stream: StreamTransport) -> bool:
        return self._writable and stream.token.window_open

    def stream_send(self, stream: StreamTransport, data: bytes | memoryview, token: Any) -> None:
        self._core.send(stream.token, data, token)

    def stream_flush(self) -> None:
        self._flush()

    def stream_in_flight(self, stream: StreamTransport) -> int:
        return len(stream.token.in_flight)

    def stream_consumed(self, stream: StreamTransport, size: int) -> None:
        self._core.consumed(stream.token, size)
        self._flush()

    def stream_close(self, stream: StreamTransport, reason: int) -> None:
        self._core.close(stream.token, reason)
        self._flush()

    def stream_schedule(self, stream: StreamTransport) -> None:
        self._turn.add_stream(stream)

    def _make_stream(self, transport: ClientTransport) -> StreamTransport:
        stream = StreamTransport(self._reactor, self, self._host, DmsgAddress(transport.remote))
        stream.token = transport
        transport.user = stream
        return stream

    def _flush(self) -> None:
        if self._receiving:
            return  # frames_received() does it once for all its events
        data = self._core.data_to_send()
        if data and self._link is not None:
            self._link.send(data)


def _no_answer(result: object, seconds: float) -> None:
    raise DmsgTimeout(f"no answer to the REQUEST within {seconds:g} s")
