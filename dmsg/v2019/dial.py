"""Endpoint that connects to a server: opens a connection, runs the handshake, and waits for the OK frame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime

from dmsg.errors import DropReason, HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.net.carriers.endpoint import carrier_endpoint
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import HANDSHAKE_TIMEOUT
from dmsg.net.links.race import CarrierMemory, CarrierRace
from dmsg.net.links.records import record_links
from dmsg.net.own_pauses import PauseMeter, add_fair_timeout
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams

HANDSHAKE_ROUND_TRIPS = 3
"""Number of round trips that TCP, the three handshake messages and the OK frame take together. The duration of
connecting, divided by this number, is the first estimate of the round trip."""


class SessionEndpoint:
    """Endpoint that connects to one server and waits for its OK frame."""

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        key: SecKey,
        server: PubKey,
        address: str,
        streams: TransportStreams,
        timeout: float = HANDSHAKE_TIMEOUT,
        *,
        pings: Callable[[], bool] = lambda: False,
        no_pings: Callable[[], None] = lambda: None,
        on_secure: Callable[[], object] = lambda: None,
        receipts: bool = False,
        aes_gcm: bool = False,
        carriers: Sequence[Carrier] = (PLAIN,),
        memory: CarrierMemory | None = None,
    ) -> None:
        """:param address: ``host:port`` of the server.
        :param carriers: carriers over which the server can be reached.
        :param memory: record of the carrier that last worked for each server.
        :param pings: returns whether the server is assumed to support PING and secure transports.
        :param no_pings: callback invoked if the connection shows that the server supports neither PING nor secure
            transports.
        :param on_secure: callback invoked whenever the connection has carried the handshake of a secure transport.
        :param receipts: whether the server gets receipts.
        :param aes_gcm: whether to offer AES-256-GCM: this client prefers it, and the server understands the offer.
        :raises DmsgError: the address is malformed.
        """
        self._reactor = reactor
        self._turn = turn
        self._key = key
        self._server = server
        self._memory = memory or CarrierMemory()
        self._endpoints = {
            carrier: carrier_endpoint(reactor, address, carrier, encrypted=True, timeout=timeout)
            for carrier in carriers
        }
        self._streams = streams
        self._pings = pings
        self._no_pings = no_pings
        self._on_secure = on_secure
        self._receipts = receipts
        self._aes_gcm = aes_gcm
        self._timeout = timeout

    def open(self) -> Deferred[ClientSession]:
        """Connect; the Deferred fires with a session once the server has sent OK."""
        return Deferred.fromCoroutine(self._open())

    async def _open(self) -> ClientSession:
        meter = PauseMeter(self._reactor)
        try:
            session = await self._connect()
        finally:
            meter.stop()
        session.pings.round_trip = None if meter.measured is None else meter.measured / HANDSHAKE_ROUND_TRIPS
        session.on_secure = partial(self._supports_extensions, session)
        if self._pings():
            session.lost.addCallback(lambda _: self._no_pings() if session.refused_extension else None)
            session.pings.watch()
        return session

    async def _connect(self) -> ClientSession:
        carriers = self._memory.order(self._server, list(self._endpoints))
        make_link = record_links(
            self._reactor, self._turn, self._key, self._server, timeout=self._timeout, aes_gcm=self._aes_gcm
        )
        race = CarrierRace(self._reactor, carriers, self._endpoints.__getitem__, make_link)
        session = await race.connect(
            lambda remote: ClientSession(
                self._reactor,
                self._turn,
                self._key.public,
                remote,
                streams=self._streams,
                receipts=self._receipts,
                carries_secure=self._pings,
            )
        )
        try:
            await add_fair_timeout(session.established, self._timeout, self._reactor)
        except TimeoutError:
            session.close()
            raise HandshakeError(
                "the server did not accept the connection: it sent no OK frame", DropReason.NO_OK_FRAME
            ) from None
        except BaseException:
            session.close()
            raise
        if not session.connected:  # The connection was lost before this coroutine began to wait for OK.
            raise HandshakeError(session.why_lost, DropReason.NO_OK_FRAME)
        assert race.used is not None
        session.carrier = race.used
        session.carriers_failed = self._memory.record_success(self._server, race.used, race.failed)
        return session

    def _supports_extensions(self, session: ClientSession) -> None:
        """Send PINGs to the server, although it may have been assumed that the server does not support them."""
        self._on_secure()
        session.pings.watch()
