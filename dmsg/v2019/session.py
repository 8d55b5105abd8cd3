"""Session of a client with one server, which carries streams.

The rules of the protocol are in :mod:`dmsg.v2019.core.table`; this module adds Deferreds, timers and producers.
:class:`~dmsg.streams.streams.Streams` manages the streams that can move to another session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IDelayedCall, IProtocolFactory, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.printable import printable
from dmsg.clients.session import Session
from dmsg.errors import (
    CloseReason,
    DropReason,
    TransportClosed,
    TransportRefused,
)
from dmsg.keys import PubKey
from dmsg.net.flush import TurnFlush
from dmsg.net.isolate import call_isolated
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.outbox import tickets_among
from dmsg.streams.carrier import ClientStream, TransportCarrier
from dmsg.streams.core.secure import MAX_SECURE_DATA, SecureEnd
from dmsg.v2019.core.events import (
    Accepted,
    Acknowledged,
    AcknowledgedAll,
    Closed,
    Confirmed,
    DataEnded,
    DataReceived,
    Draining,
    Established,
    Event,
    Noticed,
    Ponged,
    Requested,
    Resumed,
)
from dmsg.v2019.core.state import ClientTransport, State
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import Side, TableSettings
from dmsg.v2019.core.wire import MAX_FWD_DATA, SAME_KEY
from dmsg.v2019.incoming import Incoming
from dmsg.v2019.outgoing import Outgoing
from dmsg.v2019.pings import PING_TIMEOUT, WAKE_ROUND_TRIPS, WAKE_TIMEOUT, Pings
from dmsg.v2019.reachability import ReachabilityCheck
from dmsg.v2019.transport_streams import TransportStreams

EXTENSION_TIME = 5.0
"""Seconds after the first PING within which a lost connection counts as the server's refusal of PING. The server is
then assumed not to support PING."""


_log = Logger()


class ClientSession(Session):
    """Session of a client with one server.

    :param accept: returns the factory for a transport that another client opens, or None to refuse it. Used only if
        ``streams`` is None.
    :param streams: state shared with the client's other sessions; None to use plain transports only.
    :param receipts: whether the server gets receipts.
    :param carries_secure: returns whether the server is assumed to carry secure transports.
    :param side: side of the connection. On a direct link, the other client takes the place of the server.
    :ivar open: opens a transport to a remote, see :meth:`dmsg.v2019.outgoing.Outgoing.open`; ``reopen`` resumes a
        stream.
    :ivar on_secure: callback invoked whenever the server has carried the handshake of a secure transport. Servers of
        2019 do not carry it.
    :ivar established: Deferred that fires with this session once the server has sent OK.
    """

    core: ClientConnection

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        local: PubKey,
        server: PubKey,
        *,
        accept: Callable[[], IProtocolFactory | None] = lambda: None,
        streams: TransportStreams | None = None,
        receipts: bool = False,
        random: Random | None = None,
        carries_secure: Callable[[], bool] = lambda: True,
        side: Side = Side.CLIENT,
    ) -> None:
        self._reactor = reactor
        self._streams = streams
        self._receipts = receipts
        settings = TableSettings(
            random=random,
            receipts_to=server if receipts else None,
            make_room=self._make_room,
            is_own_check=self._is_own_check,
            side=side,
        )
        if streams is not None:
            refusal = streams.handshake_limits.at(server)
            settings = replace(settings, key=streams.secure_key, budget=streams.budget, refusal=refusal)
        core = ClientConnection(local, settings)
        super().__init__(turn, server, core, accept)
        self._incoming = Incoming(reactor, self, core, accept, streams)
        instance = streams.instance if streams is not None else b""
        self.pings = Pings(reactor, self._send_ping, self._server_stalled, instance)
        self._outgoing = Outgoing(reactor, self, streams)
        self.open, self.reopen = self._outgoing.open, self._outgoing.reopen
        self._reads = 0
        self._reachability = ReachabilityCheck(
            reactor,
            server.short,
            request=self._outgoing.request_self,
            is_needed=lambda: not self.pings.known,
            is_requesting=lambda: self._outgoing.requests_to_self > 0,
            received=lambda: self._reads,
            on_result=self._reachability_known,
            on_dead=self._server_unusable,
            on_shared=self._key_is_shared,
        )
        self._reading_requests: IDelayedCall | None = None
        self.established: Deferred[ClientSession] = Deferred()
        self.carries_secure = carries_secure
        self.on_secure: Callable[[], object] = lambda: None

    def _make_room(self, initiator: PubKey | None) -> bool:
        return self._incoming.make_room(initiator)

    def _close_streams(self) -> None:
        # The loop runs over a copy, because callbacks of the streams may open and close transports.
        for transport in list(self.core.transports.values()):
            end = transport.secure
            if transport.state is not State.OPEN or (end is None and transport.is_secure):
                self.core.close(transport, CloseReason.UNSPECIFIED)
                continue
            stream: ClientStream = transport.carrier.stream
            reason = stream.reason_of_stop
            self.core.close(transport, reason)
            if end is not None and self._streams is not None:
                self._streams.closed(stream, reason)
            stream.client_stopped(reason)

    @property
    def transports(self) -> int:
        """Number of transports that are open or being opened."""
        return len(self.core.transports)

    @property
    def streams(self) -> list[ClientStream]:
        """Streams that this session carries."""
        return [
            transport.carrier.stream
            for transport in self.core.transports.values()
            if transport.state is State.OPEN and (transport.secure is not None or not transport.is_secure)
        ]

    # --- keepalive and round trip ---

    @property
    def round_trip(self) -> float | None:
        """Smoothed round trip to the server in seconds; None until the first measurement."""
        return self.pings.round_trip

    def ping(self, timeout: float = PING_TIMEOUT) -> Deferred[float]:
        """Measure the round trip to the server, which must support PING, in seconds. The Deferred fails with
        DmsgTimeout if there is no answer in time."""
        if self._link is None:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        return self.pings.ping(timeout)

    def check_after_wake(self) -> None:
        if not self.pings.known:
            # A server of 2019 does not answer PING, but returns a REQUEST to the client's own key.
            self.is_doubtful = self._reachability.check_now()
            return

        def answered(_: float) -> None:
            self.is_doubtful = False

        self.is_doubtful = True
        timeout = max(WAKE_TIMEOUT, WAKE_ROUND_TRIPS * (self.round_trip or 0.0))
        self.ping(timeout).addCallbacks(answered, lambda _: self._server_stalled())

    def _send_ping(self, name: bytes) -> None:
        self.core.ping(name)
        self.flush()

    def _server_stalled(self) -> None:
        if self._link is not None:
            _log.info("server {server} does not answer pings: the connection is closed", server=self.server.short)
            self._link.abort(DropReason.STALLED)

    def _on_pong(self, event: Ponged) -> None:
        self.pings.pong(event.payload)

    def _on_draining(self, event: Draining) -> None:
        self._server_leaves(event.seconds, event.servers)

    # --- reachability through servers of 2019 ---

    def check_reachability(self) -> None:
        if self.pings.known:
            self.unreachable = ""
        elif self._streams is not None:
            self._streams.reachability[self.server] = self._reachability
            self._reachability.check_soon()

    @property
    def was_reached(self) -> bool:
        return self._reachability.was_reached

    def _is_own_check(self) -> bool:
        # The REQUEST of a check may arrive over another connection of this client to the same server, which the client
        # has opened to connect to a peer. Then the client is reachable over that connection.
        check = self._streams.reachability.get(self.server) if self._streams is not None else None
        return check is not None and check.arrived()

    def _reachability_known(self, reason: str) -> None:
        if not reason:
            self.is_doubtful = False
        if reason != self.unreachable:
            self.unreachable = reason
            if reason:
                _log.warn("{reason}", reason=reason)
            if self.keeper is not None:
                self.keeper.reachability_changed(self)

    def _server_unusable(self, reason: str) -> None:
        if self._link is not None:
            _log.warn("{reason}", reason=reason)
            self.unreachable = self.why_lost = reason
            self._link.abort(DropReason.STALLED)

    def _key_is_shared(self) -> None:
        if self.keeper is not None:
            self.keeper.key_shared("")

    # --- methods that the link calls ---

    @property
    def _accepts(self) -> bool:
        return self._streams is not None or super()._accepts

    def _event_lost(self, event: Event) -> None:
        transport: ClientTransport | None = getattr(event, "transport", None)
        if transport is not None and transport.state is not State.CLOSED:
            was_open = transport.state is State.OPEN
            self.core.close(transport, CloseReason.ABORTED)
            if was_open:
                self.transport_lost(transport, transport.secure, CloseReason.ABORTED, final=True)

    def frames_received(self, buffer: bytearray, end: int) -> int:
        self._reads += 1
        taken = super().frames_received(buffer, end)
        self._read_requests_later()
        return taken

    def _read_requests_later(self) -> None:
        if self.core.unread_requests and self._reading_requests is None:
            self._reading_requests = self._reactor.callLater(0, self._read_requests)

    def _read_requests(self) -> None:
        self._reading_requests = None
        self._deliver(self.core.read_requests())
        self._read_requests_later()

    def link_lost(self, reason: Failure) -> None:
        self._check_loss()
        super().link_lost(reason)

    def _forget_streams(self, reason: Failure) -> Callable[[], None]:
        self.pings.stop(reason)
        self._reachability.stop()
        if self._streams is not None and self._streams.reachability.get(self.server) is self._reachability:
            del self._streams.reachability[self.server]
        all_of_them = list(self.core.transports.values())
        open_ones = [one for one in all_of_them if one.state is State.OPEN]
        self._incoming.link_lost()
        self.core.transports.clear()
        self.core.unread_requests.clear()
        if self._reading_requests is not None:
            self._reading_requests.cancel()
            self._reading_requests = None
        self.core.is_lost = True
        if not self.established.called:
            self.established.errback(reason)
            # The errback prevents an "unhandled error" in the log if no caller waits for ``established`` any more.
            # Later callers check ``connected`` instead.
            self.established.addErrback(lambda _: None)

        def tell() -> None:
            self._outgoing.opening.fail_all(reason)
            for transport in open_ones:
                call_isolated(self._link_gone, transport)
                self._keep_receipt(transport)
            self.core.removed += all_of_them
            self._unlink_closed()

        return tell

    def _unlink_closed(self) -> None:
        """Delete the references from closed transports to their carriers. These references would form cycles that keep
        streams in memory."""
        if self._receiving:
            return  # Further events of the same read may name these transports. The flush after them deletes the rest.
        removed = self.core.removed
        while removed:
            removed.pop().carrier = None

    def _link_gone(self, transport: ClientTransport) -> None:
        self.transport_lost(transport, transport.secure, CloseReason.PEER_DISCONNECTED, final=False)

    def _keep_receipt(self, transport: ClientTransport) -> None:
        """Store the receipt of a lost transport until the next connection to this server."""
        receipt = self.core.receipt(transport)
        if receipt is not None and self._streams is not None:
            self._streams.kept_receipts.keep(self.server, receipt, sum(transport.says_delivered))

    def _check_loss(self) -> None:
        """Check whether the server closed the connection soon after the first PING. If so, assume that it does not
        support PING."""
        pings, link = self.pings, self._link
        ours = not self.connected or link is None or link.ended_for is not None
        if ours or not pings.known or pings.answered:
            return
        if self._reactor.seconds() - pings.since < EXTENSION_TIME:
            self.refused_extension = True
            self.why_lost = "the server ended the connection at PING, which its entry says it knows"

    # --- events of the core ---

    def _on_noticed(self, event: Noticed) -> None:
        if event.code == SAME_KEY and self.keeper is not None:
            self.keeper.key_shared(printable(event.text))

    def _on_established(self, event: Established) -> None:
        self.connected = True
        # Receipts of the previous connection are sent before anything else, because this connection may be lost soon,
        # too.
        if self._receipts and self._streams is not None:
            self.core.hand_in(self._streams.kept_receipts.take(self.server))
        self.established.callback(self)

    def begin(self, stream: ClientStream, transport: ClientTransport, round_trip: float) -> None:
        """Register a secure stream that has opened."""
        assert self._streams is not None
        stream.end = transport.secure
        stream.secure_end.round_trip = round_trip
        self._streams.add(stream)
        self._handshake_carried(transport)

    def carry(self, stream: ClientStream, transport: ClientTransport) -> None:
        """Move a resumed stream to ``transport``."""
        assert self._streams is not None
        self._streams.note_resumed(stream)
        stream.move(transport.carrier)
        self._handshake_carried(transport)

    def _handshake_carried(self, transport: ClientTransport) -> None:
        # A server of 2019, too, carries the handshake of an upgrade.
        if not transport.upgrade:
            self.on_secure()

    def _on_accepted(self, event: Accepted) -> None:
        if self._streams is not None and event.transport.is_secure:
            self._streams.handshake_limits.remember_contacted(event.transport.remote)
        self._outgoing.opening.succeed(event.transport, event)

    def _on_data(self, event: DataReceived) -> None:
        event.transport.carrier.stream.data_received(event.data)

    def _on_data_ended(self, event: DataEnded) -> None:
        event.transport.carrier.stream.data_ended()

    def _on_acknowledged(self, event: Acknowledged) -> None:
        event.transport.carrier.stream.acknowledged(event.ticket)

    def _on_acknowledged_all(self, event: AcknowledgedAll) -> None:
        event.transport.carrier.stream.acknowledged_all(event.tickets, event.count)

    def _on_closed(self, event: Closed) -> None:
        transport = event.transport
        if not event.refused:
            self.transport_lost(transport, event.end, event.reason, final=event.final)
            return
        if self._incoming.forget(transport) and event.end is not None:
            event.end.detach()
        error = TransportRefused(event.reason)
        error.final = event.final
        self._outgoing.opening.fail(transport, Failure(error))

    def transport_lost(self, transport: ClientTransport, end: SecureEnd | None, reason: int, *, final: bool) -> None:
        """Handle the end of a transport: end its stream, or suspend the stream so that it can be resumed over another
        transport."""
        if not transport.is_secure:
            transport.carrier.stream.carrier_closed(reason)
        elif end is not None and end.transport is transport:
            # The stream is still on this transport.
            assert self._streams is not None
            self._streams.lost(transport.carrier.stream, reason, final=final)

    def _on_requested(self, event: Requested) -> None:
        self._incoming.requested(event.transport)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._incoming.confirmed(event)

    def _on_resumed(self, event: Resumed) -> None:
        stream: ClientStream = event.transport.carrier.stream
        if not stream.has_ended:
            stream.requeue(event.unsent)
            # The application is called last, because its callbacks may do anything, even close the stream.
            stream.acknowledged_all(tickets_among(event.tickets), len(event.tickets))
            stream.window_opened()

    _handle: dict[type[Event], Callable[..., None]] = {
        Established: _on_established,
        Requested: _on_requested,
        Accepted: _on_accepted,
        Confirmed: _on_confirmed,
        Resumed: _on_resumed,
        DataReceived: _on_data,
        DataEnded: _on_data_ended,
        Acknowledged: _on_acknowledged,
        AcknowledgedAll: _on_acknowledged_all,
        Closed: _on_closed,
        Ponged: _on_pong,
        Draining: _on_draining,
        Noticed: _on_noticed,
    }

    # --- interface CarryingSession for the carriers of streams ---

    def consumed(self, carrier: TransportCarrier[ClientTransport], size: int) -> None:
        self.core.consumed(carrier.transport, size)
        end = carrier.stream.end
        # The window is measured once per window's worth of bytes, because reading the clock for each frame would take
        # too long.
        if end is not None and end.consumed >= end.measure_at:
            end.measure(self._reactor.seconds())
        self.flush()

    def closed(self, carrier: TransportCarrier[ClientTransport], reason: int) -> None:
        self.core.close(carrier.transport, reason)
        if carrier.stream.end is not None and self._streams is not None:
            self._streams.closed(carrier.stream, reason)
        self.flush()

    def close_left(self, transport: ClientTransport, reason: int) -> None:
        self._incoming.forget(transport)
        self.core.close(transport, reason)
        self.flush()

    @property
    def is_linked(self) -> bool:
        """Whether the session has a connection."""
        return self._link is not None

    def make_stream(self, transport: ClientTransport, host: DmsgAddress, peer: DmsgAddress) -> ClientStream:
        """Return a new stream over a transport that is not open yet."""
        largest = MAX_SECURE_DATA if transport.is_secure else MAX_FWD_DATA
        carrier = TransportCarrier(self, transport)
        carrier.stream = ClientStream(self._reactor, carrier, host, peer, largest)
        carrier.stream.secure = transport.is_secure
        return carrier.stream

    def _send_all(self) -> None:
        self._unlink_closed()
        self.core.send_through(self._link.send if self._link is not None else lambda frames: None)
