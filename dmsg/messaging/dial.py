"""Endpoint that connects to a messaging server, by TCP and the link handshake."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocolFactory, IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.handshake_limits import HandshakeLimits
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.dialect import Dialect
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.protocol import HANDSHAKE_TIMEOUT
from dmsg.messaging.session import ClientSession
from dmsg.net.carriers.endpoint import carrier_endpoint
from dmsg.net.carriers.names import PLAIN, Carrier
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import MakeUser, OnFailure
from dmsg.net.links.plain import PlainLink
from dmsg.net.links.race import CarrierMemory, CarrierRace
from dmsg.net.own_pauses import PauseMeter

HANDSHAKE_ROUND_TRIPS = 3
"""Number of round trips that the TCP handshake and the four handshake frames take together. Dividing their duration by
this number gives an estimate of one round trip."""


class SessionEndpoint:
    """Endpoint that opens sessions with one server."""

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        key: SecKey,
        server: PubKey,
        address: str,
        dialect: Dialect,
        accept: Callable[[], IProtocolFactory | None],
        *,
        handshake_limits: HandshakeLimits | None = None,
        timeout: float = HANDSHAKE_TIMEOUT,
        carriers: Sequence[Carrier] = (PLAIN,),
        memory: CarrierMemory | None = None,
    ) -> None:
        """:param address: address of the server as ``host:port``.

        :param carriers: carriers over which the server can be reached.
        :param memory: record of the carrier that last worked for each server.
        :param handshake_limits: rate limits; see :class:`~dmsg.messaging.session.ClientSession`.
        :param timeout: seconds for the TCP connection, and again for the handshake.
        :raises DmsgError: the address is malformed.
        """
        self._reactor = reactor
        self._turn = turn
        self._key = key
        self._server = server
        self._dialect = dialect
        self._accept = accept
        self._handshake_limits = handshake_limits
        self._timeout = timeout
        self._memory = memory or CarrierMemory()
        # The link does not encrypt its frames, so a websocket has to mask them.
        self._endpoints = {
            carrier: carrier_endpoint(reactor, address, carrier, encrypted=False, timeout=timeout)
            for carrier in carriers
        }

    def open(self) -> Deferred[ClientSession]:
        """Connect to the server. The Deferred fires with a session when the server has proved its key and accepted the
        client's."""
        meter = PauseMeter(self._reactor)

        def make_link(make_user: MakeUser, on_failure: OnFailure) -> PlainLink:
            return PlainLink(
                self._reactor,
                self._turn,
                JSONHandshake(self._key, self._server, profile=self._dialect.profile),
                make_user,
                on_failure=on_failure,
                timeout=self._timeout,
            )

        def make_session(remote: PubKey) -> ClientSession:
            session = ClientSession(
                self._reactor,
                self._turn,
                self._key,
                remote,
                self._dialect,
                accept=self._accept,
                handshake_limits=self._handshake_limits,
            )
            meter.stop()
            session.round_trip = None if meter.measured is None else meter.measured / HANDSHAKE_ROUND_TRIPS
            return session

        carriers = self._memory.order(self._server, list(self._endpoints))
        race = CarrierRace(self._reactor, carriers, self._endpoints.__getitem__, make_link)

        def connected(session: ClientSession) -> ClientSession:
            assert race.used is not None
            session.carrier = race.used
            session.carriers_failed = self._memory.record_success(self._server, race.used, race.failed)
            return session

        def failed(failure: Failure) -> Failure:
            meter.stop()
            return failure

        return race.connect(make_session).addCallbacks(connected, failed)
