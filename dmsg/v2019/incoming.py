"""Transports that others open to a client. This module passes them to listeners, authenticates initiators, and evicts
transports when the table is full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from twisted.internet.interfaces import IProtocolFactory, IReactorTime
from twisted.python.failure import Failure

from dmsg.base.eviction import pick_loser
from dmsg.clients.session import build_accepted
from dmsg.errors import CloseReason
from dmsg.keys import PubKey
from dmsg.net.isolate import call_isolated
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.outbox import tickets_among
from dmsg.streams.carrier import CarryingSession, ClientStream, TransportCarrier
from dmsg.streams.core.agreement import FEATURE, UPGRADE_FEATURE, Hello
from dmsg.streams.core.resumption import INITIAL_WINDOW
from dmsg.streams.core.secure import SecureEnd
from dmsg.v2019.core.events import Confirmed
from dmsg.v2019.core.state import ClientTransport, State
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.pings import Pings
from dmsg.v2019.transport_streams import Encryption, TransportStreams
from dmsg.v2019.unconfirmed import Confirmations

MAX_LOOKUPS = 16
"""Maximum number of concurrent look-ups in discovery for plain REQUESTs. Each finds the entry of one initiator."""
MAX_ANSWERS = 4
"""Maximum number of unconfirmed RESUMEs of one stream through one server. Above it, the oldest is closed. An honest
initiator sends one RESUME after another, so all but the newest have failed or are forged."""
ADDRESSES = 64
"""Number of recently used address objects that are cached. Streams with equal addresses share an object, which saves
memory."""


@lru_cache(maxsize=ADDRESSES)
def _address(key: PubKey, port: int) -> DmsgAddress:
    return DmsgAddress(key, port)


class IncomingSession(CarryingSession[ClientTransport], Protocol):
    """Interface of a session, as :class:`Incoming` uses it."""

    pings: Pings

    @property
    def is_linked(self) -> bool:
        """Whether the session has a connection."""

    def make_stream(self, transport: ClientTransport, host: DmsgAddress, peer: DmsgAddress) -> ClientStream:
        """Return a new stream over a transport that is not open yet."""

    def begin(self, stream: ClientStream, transport: ClientTransport, round_trip: float) -> None:
        """Register a secure stream that has opened."""

    def carry(self, stream: ClientStream, transport: ClientTransport) -> None:
        """Move a resumed stream to ``transport``."""

    def transport_lost(self, transport: ClientTransport, end: SecureEnd | None, reason: int, *, final: bool) -> None:
        """Handle the end of a transport."""


class Incoming:
    """Incoming transports of one session.

    :param accept: returns the factory for all incoming transports, or None to refuse them; used only if ``streams`` is
        None.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        session: IncomingSession,
        core: ClientConnection,
        accept: Callable[[], IProtocolFactory | None],
        streams: TransportStreams | None,
    ) -> None:
        self._reactor = reactor
        self._session = session
        self._core = core
        self._accept = accept
        self._streams = streams
        self._local = core.local
        self._unconfirmed = Confirmations(reactor, self._not_confirmed)

    def forget(self, transport: ClientTransport) -> bool:
        """Remove a closed transport from the table of unconfirmed transports. Return whether the table contained it."""
        return self._unconfirmed.pop(transport) is not None

    def link_lost(self) -> None:
        """Discard all unconfirmed transports, because the connection is lost."""
        # Iterating over ``Confirmations`` uses a copy of its entries, so the loop may remove entries.
        for transport in self._unconfirmed:
            self._unconfirmed.pop(transport)
            self._core.withdraw(transport)
            if transport.secure is not None:
                call_isolated(transport.secure.detach)

    def _refuse(self, transport: ClientTransport, reason: CloseReason) -> None:
        if self._streams is not None:
            self._streams.refused[reason] += 1
        self._core.close(transport, reason)

    def requested(self, transport: ClientTransport) -> None:
        """Answer another client's REQUEST for a transport, or its handshake message in an upgrade."""
        if transport.state is State.CLOSED:
            return  # A CLOSE in the same read as the REQUEST has closed the transport.
        streams = self._streams
        if transport.offer is not None:
            self._unconfirmed.pop(transport)
            self._on_offer(transport)
        elif streams is None or streams.encryption is Encryption.OFF:
            self._accept_plain(transport, self._accept() if streams is None else streams.factory(0))
        elif streams.features_of is None or (streams.encryption is Encryption.REQUIRE and self._session.pings.answered):
            self._refuse(transport, CloseReason.ENCRYPTION_REQUIRED)
        elif streams.asking >= MAX_LOOKUPS or not streams.may_look_up(self._session.server, transport.remote):
            self._refuse(transport, CloseReason.RATE_LIMITED)
        else:
            streams.asking += 1

            # A plain REQUEST proves nothing: the server may have forged it in the name of a client that opens secure
            # transports only. So the signed entry of that client decides.
            def looked(offers: frozenset[str] | Failure) -> None:
                streams.asking -= 1
                if transport.state is not State.OFFERED or not self._session.is_linked:
                    return
                # A program of 2019 posts its entry before it sends REQUESTs. So an initiator without an entry is a
                # newer program that has just started.
                offered = None if isinstance(offers, Failure) else offers
                if (offered is None or UPGRADE_FEATURE in offered) and not self._session.pings.answered:
                    self._core.invite(transport)
                    self._unconfirmed.add(transport, None)
                elif offered is None or FEATURE in offered or streams.encryption is Encryption.REQUIRE:
                    self._refuse(transport, CloseReason.ENCRYPTION_REQUIRED)
                else:
                    self._accept_plain(transport, streams.factory(0))
                self._session.flush()

            streams.features_of(transport.remote).addBoth(looked)

    def _accept_plain(self, transport: ClientTransport, factory: IProtocolFactory | None) -> None:
        stream = self._session.make_stream(transport, DmsgAddress(self._local), DmsgAddress(transport.remote))
        protocol = build_accepted(factory, stream)
        if protocol is None:
            self._refuse(transport, CloseReason.REFUSED)
            stream.carrier_closed(CloseReason.REFUSED)
        else:
            self._core.accept(transport)
            stream.start(protocol)

    def _on_offer(self, transport: ClientTransport) -> None:
        """Answer the REQUEST for a secure transport, and wait for the initiator to prove that it has the keys."""
        streams = self._streams
        assert streams is not None and transport.offer is not None
        hello = transport.offer.hello
        if hello.resume is not None:
            stream = streams.find_offered(hello.resume, transport.remote)
            if isinstance(stream, int):
                self._core.answer_ended(transport, stream)
                return
            if stream is None:
                # The reason is inside the encrypted answer, so no server can forge it in this client's name.
                self._core.answer_ended(transport, CloseReason.NO_SUCH_STREAM)
                return
            self._proceed(stream, transport)
            return
        factory = streams.factory(hello.port)
        if hello.probe is not None:
            factory = None if hello.probe and factory is None else streams.probes
        if factory is None:
            self._refuse(transport, CloseReason.REFUSED)
            return
        token = hello.token if streams.resume_timeout > 0 else None
        answer = Hello(
            0,
            INITIAL_WINDOW,
            token,
            tags=hello.tags,
            half_close=hello.half_close,
            aes_gcm=hello.aes_gcm and streams.prefers_aes,
        )
        end = self._core.accept_secure(transport, answer)
        end.token = token
        stream = self._session.make_stream(transport, _address(self._local, hello.port), _address(transport.remote, 0))
        stream.end = end
        self._unconfirmed.add(transport, factory)

    def _proceed(self, stream: ClientStream, transport: ClientTransport) -> None:
        """Answer a RESUME with this end's position. The stream moves to ``transport`` once the initiator confirms the
        transport."""
        mine = [
            one
            for one in stream.secure_end.answers
            if isinstance(one, ClientTransport) and one.carrier.session is self._session
        ]
        if len(mine) >= MAX_ANSWERS:
            self._not_confirmed(mine[0], CloseReason.TOO_MANY_TRANSPORTS)
        TransportCarrier(self._session, transport, stream)
        assert self._streams is not None
        self._core.answer_resume(transport, stream.secure_end, aes_gcm=self._streams.prefers_aes)
        self._unconfirmed.add(transport, None)

    def _not_confirmed(self, transport: ClientTransport, reason: CloseReason = CloseReason.TIMEOUT) -> None:
        self._unconfirmed.pop(transport)
        end = transport.secure
        self._refuse(transport, reason)
        if end is not None:
            end.detach()
        self._session.flush()

    def make_room(self, initiator: PubKey | None) -> bool:
        """Evict one transport to make room for a new one, because the table is full. The requester is the initiator of
        the new transport.

        First choice is an unconfirmed transport. It is evicted if it is the requester's own, if the requester has not
        proved its key, or if its initiator has more transports than the requester. Second choice is the newest
        transport of the initiator with most transports, if that initiator has at least two more than the requester.

        :param initiator: key of the requester; None if it has not proved its key.
        :returns: False if no transport may be evicted, so that the new one must be refused.
        """
        unconfirmed = self._unconfirmed.first_to_evict()
        if unconfirmed is not None and initiator in (None, unconfirmed.remote):
            self._not_confirmed(unconfirmed, CloseReason.TOO_MANY_TRANSPORTS)
            return True
        if initiator is None:
            return False
        incoming = [one for one in self._core.transports.values() if not one.initiator]
        counts = Counter(one.remote for one in incoming)
        if unconfirmed is not None and counts[unconfirmed.remote] > counts[initiator]:
            self._not_confirmed(unconfirmed, CloseReason.TOO_MANY_TRANSPORTS)
            return True
        greediest = pick_loser(counts, initiator)
        if greediest is None:
            return False
        # A transport that was confirmed in the same read has no stream yet, and cannot be evicted.
        newest = (
            one
            for one in reversed(incoming)
            if one.remote == greediest
            and one.carrier is not None
            and (one.carrier.stream.end is not None or not one.is_secure)
        )
        transport = next(newest, None)
        if transport is None:
            return False
        was_open = transport.state is State.OPEN
        self._refuse(transport, CloseReason.TOO_MANY_TRANSPORTS)
        if was_open:
            self._session.transport_lost(transport, transport.secure, CloseReason.TOO_MANY_TRANSPORTS, final=True)
        return True

    def confirmed(self, event: Confirmed) -> None:
        """Start or resume the stream of a transport, because the initiator has proved that it holds the keys."""
        transport = event.transport
        stream: ClientStream = transport.carrier.stream
        unconfirmed = self._unconfirmed.pop(transport)
        if event.left is not None:
            event.left.carrier.leave(CloseReason.MOVED)
        if unconfirmed is None or stream.has_ended:
            # The stream was closed, or the transport evicted, before the confirmation was processed.
            self._core.close(transport, CloseReason.ABORTED)
            return
        factory = unconfirmed.factory
        if self._streams is not None:
            self._streams.handshake_limits.remember(transport.remote)
        if factory is None:
            self._continue_stream(stream, event, self._reactor.seconds() - unconfirmed.asked_at)
            return
        protocol = build_accepted(factory, stream)
        if protocol is None:
            self._refuse(transport, CloseReason.REFUSED)
            stream.secure_end.detach()
            stream.carrier_closed(CloseReason.REFUSED)
        else:
            self._session.begin(stream, transport, self._reactor.seconds() - unconfirmed.asked_at)
            stream.start(protocol)

    def _continue_stream(self, stream: ClientStream, event: Confirmed, round_trip: float) -> None:
        end = stream.secure_end
        end.round_trip = round_trip
        for transport, answer in list(end.answers.items()):
            if answer.is_late:
                transport.carrier.leave(CloseReason.NO_SUCH_STREAM)
        stream.requeue(event.unsent)
        self._session.carry(stream, event.transport)
        # The application is called last, because its callbacks may do anything, even close the stream.
        stream.acknowledged_all(tickets_among(event.tickets), len(event.tickets))
