"""Transports that a client requests over one session, for new streams and for streams that are resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.session import start_opened, wait_for_answer
from dmsg.errors import (
    CloseReason,
    DmsgTimeout,
    EncryptionUnavailable,
    LocalProtocolError,
    TransportClosed,
    TransportRefused,
    not_listening,
)
from dmsg.keys import PubKey
from dmsg.net.pending import Pending
from dmsg.net.streams.address import DmsgAddress
from dmsg.streams.carrier import CarryingSession, ClientStream, TransportCarrier
from dmsg.streams.core.agreement import PREFACE_FRAMES, TOKEN_SIZE, Hello, Proposal
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.events import Accepted
from dmsg.v2019.core.state import ClientTransport
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.pings import Pings
from dmsg.v2019.transport_streams import TransportStreams

REQUEST_TIMEOUT = 10.0
"""Default number of seconds to wait for the answer to a REQUEST."""
PLAIN_ONLY = "carry no secure transports"
"""Part of the message of an error about servers of 2019. Other code recognises such errors by this text."""
STALE_ENTRY = (
    "though its entry offers secure transports: another program used its key before; run `dmsg discovery delete` "
    "with that key, or see --encryption"
)
"""End of error messages about a peer that answers like a program of 2019, although its entry has features of a newer
program."""


T = TypeVar("T")


class OutgoingSession(CarryingSession[ClientTransport], Protocol):
    """Interface of a session, as :class:`Outgoing` uses it."""

    connected: bool
    pings: Pings

    @property
    def core(self) -> ClientConnection:
        """Table of the connection's transports."""

    @property
    def carries_secure(self) -> Callable[[], bool]:
        """Function that returns whether the server is assumed to carry secure transports."""

    def make_stream(self, transport: ClientTransport, host: DmsgAddress, peer: DmsgAddress) -> ClientStream:
        """Return a new stream over a transport that is not open yet."""

    def flush(self) -> None:
        """Send the output of the core."""

    def begin(self, stream: ClientStream, transport: ClientTransport, round_trip: float) -> None:
        """Register a secure stream that has opened."""

    def carry(self, stream: ClientStream, transport: ClientTransport) -> None:
        """Move a resumed stream to ``transport``."""


class Outgoing:
    """Outgoing transports of one session.

    :ivar opening: transports that wait for the answer to their REQUEST.
    """

    def __init__(self, reactor: IReactorTime, session: OutgoingSession, streams: TransportStreams | None) -> None:
        self._reactor = reactor
        self._session = session
        self._core = session.core
        self._streams = streams
        self.opening: Pending[ClientTransport, Accepted] = Pending()
        self.requests_to_self = 0
        """Number of unanswered REQUESTs to this client's own key."""

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
        upgrade: bool = False,
    ) -> Deferred[IProtocol]:
        """Open a transport to ``remote`` through this server; the Deferred fires with the factory's connected protocol.

        The Deferred fails with :class:`~dmsg.errors.TransportRefused`, :class:`~dmsg.errors.DmsgTimeout`,
        :class:`~dmsg.errors.TransportClosed` or, if ``secure``, :class:`~dmsg.errors.EncryptionUnavailable`. Cancelling
        the Deferred closes the transport.

        :param probe: kind of probe, see :class:`~dmsg.streams.core.agreement.Hello`; None for a stream of an
            application. Only with ``secure``.
        :param upgrade: whether the remote accepts upgrades of plain transports. An upgrade is requested only if this
            server carries no secure transports.
        """
        proposal = None
        if secure:
            assert self._streams is not None
            goes_on = resumable and self._streams.resume_timeout > 0 and probe is None
            token = os.urandom(TOKEN_SIZE) if goes_on else None
            hello = Hello(
                port, INITIAL_WINDOW, token, probe=probe, tags=True, half_close=True, aes_gcm=self._streams.prefers_aes
            )
            proposal = Proposal(self._streams.key, remote, hello, upgrade=upgrade and self._is_plain)
        waiting, transport = self._request(remote, proposal, None, INITIAL_WINDOW, timeout)
        if transport is None:
            return waiting  # type: ignore[return-value]  # This Deferred has failed, so its type is irrelevant.
        address = DmsgAddress(remote, port)
        stream = self._session.make_stream(transport, DmsgAddress(self._core.local), address)
        started = self._reactor.seconds()

        def opened(_: Accepted) -> IProtocol:
            if secure:
                self._session.begin(stream, transport, self._round_trip(transport, started))
            return start_opened(stream, factory, transport.carrier.close)

        def refused(failure: Failure) -> Failure:
            if isinstance(failure.value, TransportRefused) and failure.value.reason == CloseReason.REFUSED:
                raise TransportRefused(CloseReason.REFUSED, not_listening(address.short)) from None
            return self._why_refused(failure, remote, transport) if secure else failure

        return waiting.addCallbacks(opened, refused)

    @property
    def _is_plain(self) -> bool:
        """Whether the server is assumed to carry plain transports only."""
        return not (self._session.pings.answered or self._session.carries_secure())

    def _why_refused(self, failure: Failure, remote: PubKey, transport: ClientTransport) -> Failure:
        """Return the failure of a request. If the remote or the server seems to be a program of 2019, raise an error
        that says so.

        Programs of 2019 refuse a secure transport without a reason.
        """
        error = failure.value
        if transport.prefaced is not None and transport.prefaced < PREFACE_FRAMES:
            if isinstance(error, (TransportRefused, DmsgTimeout)):
                raise EncryptionUnavailable(f"{remote.short} answers as programs of 2019 do, {STALE_ENTRY}") from None
            return failure
        if not (isinstance(error, TransportRefused) and error.reason == CloseReason.UNSPECIFIED):
            return failure
        if self._session.pings.answered:
            # This server answers PING, so it is not of 2019, and the refusal came from the remote.
            raise EncryptionUnavailable(
                f"{remote.short} refuses a secure transport without a reason, as programs of 2019 do, {STALE_ENTRY}"
            ) from None
        server = self._session.server.short
        if transport.upgrade:
            raise TransportRefused(
                error.reason,
                f"server {server} refuses the transport without a reason, like servers of 2019: "
                f"perhaps {remote.short} is not connected to it",
            ) from None
        raise EncryptionUnavailable(
            f"server {server} refuses the secure transport without a reason, like servers of 2019, which {PLAIN_ONLY}"
        ) from None

    def reopen(
        self, stream: ClientStream, timeout: float = REQUEST_TIMEOUT, *, upgrade: bool = False
    ) -> Deferred[None]:
        """Resume a stream that this client opened, over a new transport through this server.

        The stream's present transport, if any, is closed first. The Deferred fails with the errors of :meth:`open`. If
        the remote has closed the stream, it fails with a TransportRefused whose ``final`` is true.
        """
        streams = self._streams
        end = stream.secure_end
        peer = stream.getPeer()
        assert streams is not None and isinstance(peer, DmsgAddress)
        # The present transport is only closed if a REQUEST can be sent over this session.
        if not self._session.connected or not self._core.has_free_id:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server"))
        # The stream is suspended before its old transport is closed. Otherwise the end of that transport would count as
        # a loss of the stream's transport.
        before = end.transport
        streams.suspend(stream, CloseReason.MOVED)
        if before is not None:
            before.carrier.leave(CloseReason.MOVED)
        # The higher generation makes earlier attempts outdated. Their REQUESTs may still arrive through slower servers.
        end.generation += 1
        window = end.offer_window()
        hello = Hello(0, window, resume=end.position(), aes_gcm=streams.prefers_aes)
        proposal = Proposal(streams.key, peer.public_key, hello, upgrade=upgrade and self._is_plain)
        waiting, transport = self._request(peer.public_key, proposal, end, window, timeout)
        if transport is None:
            return waiting  # type: ignore[return-value]  # This Deferred has failed, so its type is irrelevant.
        TransportCarrier(self._session, transport, stream)
        started = self._reactor.seconds()

        def opened(_: Accepted) -> None:
            end.round_trip = self._round_trip(transport, started)
            self._session.carry(stream, transport)

        return waiting.addCallback(opened)

    def request_self(self, timeout: float) -> Deferred[object]:
        """Send a plain REQUEST to this client's own key, and close its transport if it opens. The Deferred fires or
        fails like that of :meth:`open`."""
        waiting, transport = self._request(self._core.local, None, None, INITIAL_WINDOW, timeout)
        if transport is None:
            return waiting  # type: ignore[return-value]  # This Deferred has failed, so its type is irrelevant.
        # The read that contains the ACCEPT may contain further frames of this transport. Their events need a stream.
        own = DmsgAddress(self._core.local)
        stream = self._session.make_stream(transport, own, own)

        def opened(_: Accepted) -> None:
            transport.carrier.close(CloseReason.UNSPECIFIED)
            stream.carrier_closed(CloseReason.UNSPECIFIED)

        return waiting.addCallback(opened)

    def _round_trip(self, transport: ClientTransport, started: float) -> float:
        """Return the duration in seconds of a round trip to the remote, if a request was sent at ``started`` and
        answered now. A request with an upgrade takes two round trips."""
        return (self._reactor.seconds() - started) / (2 if transport.upgrade else 1)

    def _request(
        self, remote: PubKey, proposal: Proposal | None, end: SecureEnd | None, told_window: int, timeout: float
    ) -> tuple[Deferred[Accepted], ClientTransport | None]:
        if not self._session.connected:
            return fail(TransportClosed(CloseReason.PEER_DISCONNECTED, "not connected to the server")), None
        try:
            transport = self._core.request(remote, proposal, end, told_window)
        except LocalProtocolError:
            return fail(), None

        give_up = partial(self._core.close, transport, CloseReason.TIMEOUT)
        waiting = wait_for_answer(self._session, self._reactor, self.opening.add(transport), timeout, give_up)
        if remote == self._core.local:
            self.requests_to_self += 1
            waiting.addBoth(self._answered_by_self)
        return waiting, transport

    def _answered_by_self(self, result: T) -> T:
        self.requests_to_self -= 1
        return result
