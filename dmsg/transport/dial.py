"""Connecting to a server: TCP, handshake, OK frame; and trying again.

:class:`SessionEndpoint` connects only when all three are done, so that
``ClientService`` sees a connection or a failure and nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from twisted.application.internet import ClientService
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.interfaces import IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.errors import DmsgError, DropReason, HandshakeError
from dmsg.keys import PubKey, SecKey
from dmsg.net.link import HANDSHAKE_TIMEOUT, TurnFlush
from dmsg.net.noise import NoiseClientEndpoint
from dmsg.transport.session import ClientSession
from dmsg.transport.streams import Streams

FIRST_DELAY = 0.5
"""Seconds before the first new try."""
DELAY_FACTOR = 1.7
MAX_DELAY = 60.0
"""Seconds between tries at most."""
JITTER = 0.3
"""Share of a delay that is drawn by chance, so that clients do not come back in step."""

HANDSHAKE_ROUND_TRIPS = 3
"""Of TCP, the three handshake messages and the OK frame: a first guess of the round trip."""

_log = Logger()


def retry_delay(failures: int, random: Random) -> float:
    """Seconds to wait after that many failed tries in a row; grows, with jitter."""
    delay = min(MAX_DELAY, FIRST_DELAY * DELAY_FACTOR ** min(failures, 30))
    return delay * (1 - JITTER + 2 * JITTER * random.random())


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of a server entry's address, as in ``host:1``, ``1.2.3.4:1``, ``[::1]:1``.

    :raises DmsgError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise DmsgError(f"{address[:80]!r} is not HOST:PORT")
    return host, int(port)


class SessionEndpoint:
    """Connects to one server and waits for its OK frame."""

    def __init__(
        self,
        reactor: Any,
        turn: TurnFlush,
        key: SecKey,
        server: PubKey,
        address: str,
        streams: Streams,
        timeout: float = HANDSHAKE_TIMEOUT,
        *,
        pings: bool = False,
        receipts: bool = False,
    ) -> None:
        """:param address: ``host:port``.  :param pings: the server knows of PING.
        :param receipts: it is to have receipts.

        :raises DmsgError: the address is malformed.
        """
        host, port = parse_address(address)
        self._reactor = reactor
        self._turn = turn
        self._key = key
        self._server = server
        # a literal address needs no resolver, and its refusal is known at once
        if isIPAddress(host):
            self._endpoint: Any = TCP4ClientEndpoint(reactor, host, port, timeout=timeout)
        elif isIPv6Address(host):
            self._endpoint = TCP6ClientEndpoint(reactor, host, port, timeout=timeout)
        else:
            self._endpoint = HostnameEndpoint(reactor, host, port, timeout=timeout)
        self._streams = streams
        self._pings = pings
        self._receipts = receipts
        self._timeout = timeout

    def open(self) -> Deferred[ClientSession]:
        """A session that the server has confirmed."""
        return Deferred.fromCoroutine(self._open())

    async def _open(self) -> ClientSession:
        started = self._reactor.seconds()
        noise = NoiseClientEndpoint(
            self._reactor, self._endpoint, self._turn, self._key, self._server, timeout=self._timeout
        )
        session: ClientSession = await noise.connect(
            lambda remote: ClientSession(
                self._reactor,
                self._turn,
                self._key.public,
                remote,
                streams=self._streams,
                receipts=self._receipts,
            )
        )
        try:
            await session.established.addTimeout(self._timeout, self._reactor)
        except TimeoutError:
            session.close()
            raise HandshakeError("server sent no OK frame", DropReason.NO_OK_FRAME) from None
        except BaseException:
            session.close()
            raise
        session.pings.round_trip = (self._reactor.seconds() - started) / HANDSHAKE_ROUND_TRIPS
        if self._pings:
            session.pings.watch()
        return session


class _SessionTransport:
    """What ClientService uses of a transport."""

    def __init__(self, session: ClientSession) -> None:
        self.loseConnection = session.close
        self.abortConnection = session.close


class _Watched(Protocol):
    """Stands for a session in ClientService."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link

    def connectionLost(self, reason: Failure = Failure(DmsgError("lost"))) -> None:
        self._link._down()


@implementer(IStreamClientEndpoint)
class _ServiceEndpoint:
    def __init__(self, link: ServerLink, endpoint: SessionEndpoint) -> None:
        self._link = link
        self._endpoint = endpoint

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:
        def opened(session: ClientSession) -> Any:
            protocol = protocolFactory.buildProtocol(None)  # type: ignore[arg-type]  # has no address
            assert protocol is not None
            protocol.makeConnection(_SessionTransport(session))  # type: ignore[arg-type]
            session.lost.addCallback(lambda _: protocol.connectionLost(Failure(DmsgError("session ended"))))
            # not before ClientService knows of it: who is told may stop the service at once
            self._link.up_soon(session)
            return protocol

        def failed(failure: Failure) -> Failure:
            self._link.last_error = " ".join(str(failure.value).split())[:200] or type(failure.value).__name__
            return failure

        return self._endpoint.open().addCallbacks(opened, failed)


class ServerLink:
    """A connection to one server that is made again when it is lost.

    :param changed: told when the session came or went.
    :param away: told when ``failures`` tries in a row have failed.
    :ivar session: the present session, or None.
    """

    def __init__(
        self,
        reactor: Any,
        server: PubKey,
        endpoint: SessionEndpoint,
        random: Random,
        *,
        changed: Callable[[ServerLink], None],
        away: Callable[[ServerLink, int], None],
    ) -> None:
        self.server = server
        self.session: ClientSession | None = None
        self.failures = 0
        self.last_error = ""
        self.slow = False
        self.leaving = False
        """The server said that it leaves."""
        self._reactor = reactor
        self._random = random
        self._changed = changed
        self._away = away
        self._service = ClientService(
            _ServiceEndpoint(self, endpoint),
            Factory.forProtocol(lambda: _Watched(self)),
            retryPolicy=self._delay,
            clock=reactor,
        )

    def start(self) -> None:
        """Connect, and keep connected."""
        self._service.startService()

    def stop(self) -> Deferred[Any]:
        """Disconnect."""
        if self.session is not None:
            self.session.close()
        stopped: Deferred[Any] = self._service.stopService()
        return stopped

    def _delay(self, failures: int) -> float:
        self.failures = failures
        self._away(self, failures)
        return retry_delay(failures - 1, self._random)

    def up_soon(self, session: ClientSession) -> None:
        """The session is there, in the next turn."""
        self._reactor.callLater(0, lambda: None if session.lost.called else self._up(session))

    def _up(self, session: ClientSession) -> None:
        self.session = session
        self.failures = 0
        self.leaving = False
        self._changed(self)

    def _down(self) -> None:
        self.session = None
        self._changed(self)
