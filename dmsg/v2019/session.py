"""A client's connection to one server: it carries streams.

Rules are in :mod:`dmsg.v2019.core.table`; here are Deferreds, timers and
producers.  Streams that can go on over another session are looked after by
:class:`~dmsg.v2019.streams.Streams`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.printable import printable
from dmsg.errors import (
    CloseReason,
    DmsgTimeout,
    DropReason,
    EncryptionUnavailable,
    LocalProtocolError,
    RemoteProtocolError,
    TransportClosed,
    TransportRefused,
)
from dmsg.keys import PubKey
from dmsg.net.isolate import dispatched, isolated
from dmsg.net.links.link import Link
from dmsg.net.pending import Pending
from dmsg.net.share import FRAMES
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.stream import StreamTransport
from dmsg.net.turn import TurnFlush
from dmsg.v2019.core.agreement import TOKEN_SIZE, Hello, Proposal
from dmsg.v2019.core.events import (
    Accepted,
    Acknowledged,
    AcknowledgedAll,
    Closed,
    Confirmed,
    DataReceived,
    Draining,
    Established,
    Event,
    Noticed,
    Ponged,
    Requested,
)
from dmsg.v2019.core.secure import INITIAL_WINDOW, MAX_SECURE_DATA, SecureEnd
from dmsg.v2019.core.state import ClientTransport, State
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.wire import MAX_FWD_DATA, SAME_KEY
from dmsg.v2019.incoming import Incoming
from dmsg.v2019.pings import PING_TIMEOUT, Pings
from dmsg.v2019.streams import Streams

REQUEST_TIMEOUT = 10.0
"""Seconds for the answer to a REQUEST, by default."""
PLAIN_ONLY = "carry no secure transports"
"""Said of servers of 2019."""
EXTENSION_TIME = 5.0
"""Seconds after the first PING in which an end of the connection says that the server does not know PING."""
CLIENT_QUEUE_LIMIT = 16 * 1024 * 1024
"""Bytes of answers that a client holds for a server that does not read."""


_log = Logger()


class ClientSession:
    """A client's connection to one server.

    :param accept: the factory for transports that others open, asked for each
        time; None refuses them.  Not used when there are ``streams``.
    :param streams: what makes transports secure and lets them be resumed.
    :param receipts: the server takes RECEIPT, and is to have them.
    :ivar server: the server's key.
    :ivar established: fires with this session when the server said OK.
    :ivar lost: fires with None when the connection is gone.
    :ivar draining: told (seconds, servers) when the server says that it leaves.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        local: PubKey,
        server: PubKey,
        *,
        accept: Callable[[], IProtocolFactory | None] = lambda: None,
        streams: Streams | None = None,
        receipts: bool = False,
        random: Random | None = None,
    ) -> None:
        self._reactor = reactor
        self._turn = turn
        self._local = local
        self._streams = streams
        self._receipts = receipts
        key = streams.secure_key if streams is not None else None
        budget = streams.budget if streams is not None else None
        self._core = ClientConnection(
            local, key=key, random=random, budget=budget, receipts_to=server if receipts else None
        )
        if streams is not None:
            self._core.refusal = streams.doorman.at(server)
        self._link: Link | None = None
        self._accept = accept
        self._opening: Pending[ClientTransport, Accepted] = Pending()
        self._incoming = Incoming(reactor, self, self._core, accept, streams)
        self._writable = True
        self._receiving = False
        instance = streams.instance if streams is not None else b""
        self.pings = Pings(reactor, self._send_ping, self._stalled, instance)
        self.server = server
        self.established: Deferred[ClientSession] = Deferred()
        self.lost: Deferred[None] = Deferred()
        self.draining: Callable[[int, list[PubKey]], None] = lambda seconds, servers: None
        self.key_shared: Callable[[str], None] = lambda address: None
        """Told when the server says that another program, at that address, is connected with this key."""
        self.leaving = False
        """The server said that it leaves."""
        self.connected = False
        self.why_lost = "connection to the server was lost"
        """Says, once it is lost, why."""
        self.refused_extension = False
        """The server ended the connection at the first PING, as programs of 2019 do."""

    # --- what the application does ---

    def open(
        self,
        remote: PubKey,
        factory: IProtocolFactory,
        timeout: float = REQUEST_TIMEOUT,
        *,
        port: int = 0,
        secure: bool = False,
        resumable: bool = True,
        probe: int | None = None,
    ) -> Deferred[IProtocol]:
        """Open a transport to ``remote`` through this server.

        Fires with the factory's protocol, connected.  Fails with
        :class:`~dmsg.errors.TransportRefused`, :class:`~dmsg.errors.DmsgTimeout`,
        :class:`~dmsg.errors.TransportClosed`, or, when ``secure``,
        :class:`~dmsg.errors.EncryptionUnavailable`.  Cancelling closes the transport.

        :param probe: see :class:`~dmsg.v2019.core.agreement.Hello`; only with ``secure``.
        """
        proposal = None
        if secure:
            assert self._streams is not None
            goes_on = resumable and self._streams.resume_timeout > 0 and probe is None
            token = os.urandom(TOKEN_SIZE) if goes_on else None
            proposal = Proposal(self._streams.key, remote, Hello(port, INITIAL_WINDOW, token, probe=probe))
        waiting, transport = self._request(remote, proposal, None, INITIAL_WINDOW, timeout)
        if transport is None:
            return waiting  # type: ignore[return-value]  # it failed
        stream = self.make_stream(transport, DmsgAddress(self._local), DmsgAddress(remote, port))
        started = self._reactor.seconds()

        def opened(_: Accepted) -> IProtocol:
            if secure:
                self.begin(stream, self._reactor.seconds() - started)
            try:
                protocol = factory.buildProtocol(stream.getPeer())
                if protocol is None:
                    raise TransportClosed(CloseReason.REFUSED, "the factory built no protocol")
            except Exception:
                self.stream_close(stream, CloseReason.REFUSED)
                stream.carrier_closed(CloseReason.REFUSED)
                raise
            stream.start(protocol)
            return protocol

        def refused(failure: Failure) -> Failure:
            return self._why_refused(failure, remote) if secure else failure

        return waiting.addCallbacks(opened, refused)

    def _why_refused(self, failure: Failure, remote: PubKey) -> Failure:
        """Programs of 2019 refuse a secure transport without a reason: which of them it was."""
        error = failure.value
        if not (isinstance(error, TransportRefused) and error.reason == CloseReason.UNSPECIFIED):
            return failure
        if self.pings.answered:  # so the server is none of 2019, and it was the remote
            raise EncryptionUnavailable(
                f"{remote.short} refuses a secure transport without a reason, as programs of 2019 do, though "
                "its entry offers them: another program used its key before; run `dmsg discovery delete` with "
                "that key, or see --encryption"
            ) from None
        raise EncryptionUnavailable(
            f"server {self.server.short} gives no reason, as those of 2019 do, which {PLAIN_ONLY}"
        ) from None

    def reopen(self, stream: StreamTransport, timeout: float = REQUEST_TIMEOUT) -> Deferred[None]:
        """Let a stream, which this client opened, go on through this server.

        What carries it now carries nothing more.  Fails as :meth:`open`; when
        the stream is over at the other end, with a TransportRefused whose
        ``final`` is true.
        """
        streams = self._streams
        end: SecureEnd = stream.end
        peer = stream.getPeer()
        assert streams is not None and isinstance(peer, DmsgAddress)
        # what carries the stream is given up only for a way that can be tried
        if not self.connected or not self._core.has_free_id:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        before = end.transport
        streams.suspend(stream, CloseReason.MOVED)
        if before is not None:
            before.user_session.close_moved(before)
        end.generation += 1
        window = end.offer_window()
        proposal = Proposal(streams.key, peer.public_key, Hello(0, window, resume=end.position()))
        waiting, transport = self._request(peer.public_key, proposal, end, window, timeout)
        if transport is None:
            return waiting  # type: ignore[return-value]  # it failed
        transport.user = stream
        started = self._reactor.seconds()

        def opened(event: Accepted) -> None:
            end.round_trip = self._reactor.seconds() - started
            stream.requeue(event.unsent)
            self.carry(stream, transport)
            # last: who is told may do anything, also end the stream
            stream.acknowledged_all(event.tokens)

        return waiting.addCallback(opened)

    def _request(
        self, remote: PubKey, proposal: Proposal | None, end: SecureEnd | None, told: int, timeout: float
    ) -> tuple[Deferred[Accepted], ClientTransport | None]:
        if not self.connected:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server")), None
        try:
            transport = self._core.request(remote, proposal, end, told)
        except LocalProtocolError:
            return fail(), None
        transport.user_session = self

        def gave_up(failure: Failure) -> Failure:
            # refused ones are closed already, lost ones too; this is for a timeout or a cancel
            if self.connected:
                self._core.close(transport, CloseReason.TIMEOUT)
                self.flush()
            return failure

        waiting = self._opening.add(transport)
        waiting.addTimeout(timeout, self._reactor, _no_answer)
        waiting.addErrback(gave_up)
        self.flush()
        return waiting, transport

    def close(self) -> None:
        """End the connection; the streams end with it."""
        self.connected = False
        if self._link is not None:
            for transport in list(self._core.transports.values()):
                end = transport.secure
                if transport.state is not State.OPEN or (end is None and transport.is_secure):
                    self._core.close(transport, CloseReason.UNSPECIFIED)
                    continue
                stream = transport.user
                # what was not sent yet never will be: that is no clean end
                reason = CloseReason.ABORTED if stream.unsent else CloseReason.UNSPECIFIED
                self._core.close(transport, reason)
                if end is not None and self._streams is not None:
                    self._streams.closed(stream, reason)
                stream.carrier_closed(reason)
            self.flush()
            self._link.close()

    @property
    def transports(self) -> int:
        """Transports that are open or being opened."""
        return len(self._core.transports)

    @property
    def streams(self) -> list[StreamTransport]:
        """The streams that it carries."""
        return [
            transport.user
            for transport in self._core.transports.values()
            if transport.state is State.OPEN and (transport.secure is not None or not transport.is_secure)
        ]

    # --- is the server there, and how far ---

    @property
    def round_trip(self) -> float | None:
        """Seconds to the server and back, smoothed; None while not measured."""
        return self.pings.round_trip

    def ping(self, timeout: float = PING_TIMEOUT) -> Deferred[float]:
        """Seconds to the server and back; the server must know of PING.  Fails with DmsgTimeout."""
        if self._link is None:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        return self.pings.ping(timeout)

    def _send_ping(self, name: bytes) -> None:
        self._core.ping(name)
        self.flush()

    def _stalled(self) -> None:
        if self._link is not None:
            _log.info("server {server} does not answer", server=self.server.short)
            self._link.abort(DropReason.STALLED)

    def _on_pong(self, event: Ponged) -> None:
        self.pings.pong(event.payload)

    def _on_draining(self, event: Draining) -> None:
        if self.leaving:
            return  # once is enough: each would have clients look for others
        self.leaving = True
        self.draining(event.seconds, event.servers)

    # --- the link's side ---

    def link_up(self, link: Link) -> None:
        self._link = link

    def frames_received(self, buffer: bytearray, end: int) -> int:
        self._core.accepting = self._streams is not None or self._accept() is not None
        taken, events = self._core.receive_frames(buffer, end, FRAMES)
        self._receiving = True
        dispatched(events, self._handle, self, self._event_lost)
        self._receiving = False
        self.flush()
        if self._core.left and self._link is not None:
            self._link.left()
        if self._core.broken is not None:
            self.why_lost = str(self._core.broken)
            raise self._core.broken
        if self._link is not None and self._link.congested and self._link.queued() > CLIENT_QUEUE_LIMIT:
            raise RemoteProtocolError(DropReason.SEND_BUFFER_FULL, "server provokes answers and reads none")
        return taken

    def _event_lost(self, event: Event) -> None:
        """What it was about cannot go on as if it had been told."""
        transport: ClientTransport | None = getattr(event, "transport", None)
        if transport is not None and transport.state is not State.CLOSED:
            was_open = transport.state is State.OPEN
            self._core.close(transport, CloseReason.ABORTED)
            if was_open:
                self.transport_lost(transport, transport.secure, CloseReason.ABORTED, final=True)

    def link_congested(self) -> None:
        self._writable = False

    def link_relieved(self) -> None:
        self._writable = True
        for stream in self.streams:
            isolated(stream.window_opened)

    def link_lost(self, reason: Failure) -> None:
        self._look_at_loss()
        self._link = None
        self.connected = False
        gone = TransportClosed(CloseReason.PEER_DISCONNECTED, self.why_lost)
        self.pings.stop(Failure(gone))
        open_ones = [one for one in self._core.transports.values() if one.state is State.OPEN]
        self._incoming.link_lost()
        self._core.transports.clear()
        self._core.lost = True
        if not self.established.called:
            self.established.errback(Failure(gone))
            # who gave up connecting waits no longer; who comes later looks at `connected`
            self.established.addErrback(lambda _: None)
        # first the news that this server is gone: who looks for another must not find this one
        self.lost.callback(None)
        self._opening.fail_all(Failure(gone))
        for transport in open_ones:
            isolated(self._link_gone, transport)
            self._keep_receipt(transport)

    def _link_gone(self, transport: ClientTransport) -> None:
        self.transport_lost(transport, transport.secure, CloseReason.PEER_DISCONNECTED, final=False)

    def _keep_receipt(self, transport: ClientTransport) -> None:
        """For the next connection to this server."""
        receipt = self._core.receipt(transport)
        if receipt is not None and self._streams is not None:
            self._streams.kept_receipts.keep(self.server, receipt, sum(transport.says_delivered))

    def _look_at_loss(self) -> None:
        """A server that ends the connection at the first PING does not know it, whatever its entry says."""
        pings, link = self.pings, self._link
        ours = not self.connected or link is None or link.ended_for is not None
        if ours or not pings.known or pings.answered:
            return
        if self._reactor.seconds() - pings.since < EXTENSION_TIME:
            self.refused_extension = True
            self.why_lost = "the server ended the connection at PING, which its entry says it knows"

    # --- events of the core ---

    def _on_noticed(self, event: Noticed) -> None:
        if event.what == SAME_KEY:
            self.key_shared(printable(event.text))

    def _on_established(self, event: Established) -> None:
        self.connected = True
        if self._receipts and self._streams is not None:
            self._core.hand_in(self._streams.kept_receipts.take(self.server))
        self.established.callback(self)

    def close_moved(self, transport: ClientTransport) -> None:
        """What a stream leaves behind."""
        self._incoming.forget(transport)
        self._core.close(transport, CloseReason.MOVED)
        self.flush()

    def close_ended(self, transport: ClientTransport, reason: int) -> None:
        """A stream has ended whose transport was not closed yet."""
        self._incoming.forget(transport)
        self._core.close(transport, reason)
        self.flush()

    def begin(self, stream: StreamTransport, round_trip: float) -> None:
        """A secure stream is open."""
        assert self._streams is not None
        stream.end = stream.token.secure
        stream.end.round_trip = round_trip
        self._streams.add(stream)

    def carry(self, stream: StreamTransport, transport: ClientTransport) -> None:
        """A stream goes on here."""
        assert self._streams is not None
        stream.server = self.server
        self._streams.moved(stream)
        stream.move(self, transport)

    def _on_accepted(self, event: Accepted) -> None:
        if self._streams is not None and event.transport.is_secure:
            self._streams.doorman.met(event.transport.remote)
        self._opening.succeed(event.transport, event)

    def _on_data(self, event: DataReceived) -> None:
        event.transport.user.data_received(event.data)

    def _on_acknowledged(self, event: Acknowledged) -> None:
        event.transport.user.acknowledged(event.token)

    def _on_acknowledged_all(self, event: AcknowledgedAll) -> None:
        event.transport.user.acknowledged_all(event.tokens, event.count)

    def _on_closed(self, event: Closed) -> None:
        transport = event.transport
        if not event.refused:
            self.transport_lost(transport, event.end, event.reason, final=event.final)
            return
        if self._incoming.forget(transport) and event.end is not None:
            event.end.detach()
        error = TransportRefused(event.reason)
        error.final = event.final
        self._opening.fail(transport, Failure(error))

    def transport_lost(self, transport: ClientTransport, end: SecureEnd | None, reason: int, *, final: bool) -> None:
        """A transport is over: its stream ends with it, or looks for another."""
        if not transport.is_secure:
            transport.user.carrier_closed(reason)
        elif end is not None and end.transport is transport:  # else its stream has moved on
            assert self._streams is not None
            self._streams.lost(transport.user, reason, final=final)

    def _on_requested(self, event: Requested) -> None:
        self._incoming.requested(event.transport)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._incoming.confirmed(event.transport)

    _handle: dict[type[Event], Callable[[ClientSession, Any], None]] = {
        Established: _on_established,
        Requested: _on_requested,
        Accepted: _on_accepted,
        Confirmed: _on_confirmed,
        DataReceived: _on_data,
        Acknowledged: _on_acknowledged,
        AcknowledgedAll: _on_acknowledged_all,
        Closed: _on_closed,
        Ponged: _on_pong,
        Draining: _on_draining,
        Noticed: _on_noticed,
    }

    # --- the streams' side (StreamCarrier) ---

    def stream_may_send(self, stream: StreamTransport) -> bool:
        return self._writable and stream.token.window_open

    def stream_send(self, stream: StreamTransport, data: bytes | memoryview, token: Any) -> None:
        self._core.send(stream.token, data, token)

    def stream_confirms(self, stream: StreamTransport) -> bool:
        return True

    def stream_flush(self) -> None:
        self.flush()

    def stream_in_flight(self, stream: StreamTransport) -> int:
        return len(stream.token.in_flight) if stream.end is None else len(stream.end.in_flight)

    def stream_consumed(self, stream: StreamTransport, size: int) -> None:
        self._core.consumed(stream.token, size)
        end: SecureEnd | None = stream.end
        if end is not None and end.consumed >= end.measure_at:
            end.measure(self._reactor.seconds())
        self.flush()

    def give_up(self, stream: StreamTransport, reason: int) -> None:
        """The stream's transport here is no good: the other end is told, and looks for another."""
        self._core.close(stream.token, reason)
        self.flush()

    def stream_close(self, stream: StreamTransport, reason: int) -> None:
        self._core.close(stream.token, reason)
        if stream.end is not None and self._streams is not None:
            self._streams.closed(stream, reason)
        self.flush()

    def stream_schedule(self, stream: StreamTransport) -> None:
        self._turn.add_stream(stream)

    @property
    def linked(self) -> bool:
        """Its connection is there."""
        return self._link is not None

    def make_stream(self, transport: ClientTransport, host: DmsgAddress, peer: DmsgAddress) -> StreamTransport:
        """A stream over a transport that is not open yet."""
        largest = MAX_SECURE_DATA if transport.is_secure else MAX_FWD_DATA
        stream = StreamTransport(self._reactor, self, host, peer, largest)
        stream.token = transport
        stream.server = self.server
        stream.secure = transport.is_secure
        transport.user = stream
        transport.user_session = self
        return stream

    def flush(self) -> None:
        """Send what the core has to send, unless that is done at the end of this read."""
        if self._receiving:
            return  # frames_received() does it once for all its events
        data = self._core.data_to_send()
        if data and self._link is not None:
            self._link.send(data)


def _no_answer(result: object, seconds: float) -> Any:
    raise DmsgTimeout(f"no answer within {seconds:.3g} s")
