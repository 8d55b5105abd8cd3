"""Lasting connection to one server, which is re-established with growing delays after it is lost.

Twisted's ``ClientService`` does the reconnecting. Each of its "connections" here is a whole session: a
:class:`SessionOpener` reports success only when the session is ready for use.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Generic, Protocol, TypeVar

from twisted.application.internet import ClientService
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol as TwistedProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.printable import shorten
from dmsg.clients.session import Session
from dmsg.discovery.entries.entry import Entry
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.retry import retry_delay

SHORT_SESSION = 5.0
"""Minimum seconds of a session. If a session ends earlier, the attempt to open it counts as failed."""


SessionT = TypeVar("SessionT", bound=Session)


class SessionOpener(Protocol[SessionT]):
    """Interface of objects that open sessions with one server."""

    def open(self) -> Deferred[SessionT]:
        """Return a Deferred that fires with a :class:`Session` that is ready for use."""


class _SessionTransport:
    """Stand-in for a transport, with only the two methods that ClientService calls."""

    def __init__(self, session: Session) -> None:
        self.loseConnection = session.close
        self.abortConnection = session.close


class _SessionMarker(TwistedProtocol):
    """Protocol through which ClientService is notified of the end of a session."""

    def __init__(self, on_down: Callable[[], None]) -> None:
        self._down = on_down

    def connectionLost(self, reason: Failure = Failure(DmsgError("lost"))) -> None:
        self._down()


@implementer(IStreamClientEndpoint)
class _ServiceEndpoint(Generic[SessionT]):
    def __init__(self, link: ServerLink[SessionT], endpoint: SessionOpener[SessionT]) -> None:
        self._link = link
        self._endpoint = endpoint

    def __repr__(self) -> str:
        # ClientService logs the endpoint to which it connects again.
        return f"server {self._link.server.short}"

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        def opened(session: SessionT) -> IProtocol:
            protocol = protocolFactory.buildProtocol(None)  # type: ignore[arg-type]  # has no address
            assert protocol is not None
            protocol.makeConnection(_SessionTransport(session))  # type: ignore[arg-type]
            opened_at = self._link.now()

            def ended(_: None) -> None:
                self._link.ended(session, self._link.now() - opened_at)
                protocol.connectionLost(Failure(DmsgError("session ended")))

            session.lost.addCallback(ended)
            # The session is announced in the next turn, after ClientService knows of it, because a callback may stop
            # the service.
            self._link.up_soon(session)
            return protocol

        def failed(failure: Failure) -> Failure:
            self._link.last_error = shorten(str(failure.value)) or type(failure.value).__name__
            return failure

        return self._endpoint.open().addCallbacks(opened, failed)


class ServerLink(Generic[SessionT]):
    """Lasting connection to one server, which is re-established when it is lost.

    :param on_change: called when the session starts or ends.
    :param on_lost: called after each loss or failed attempt, with the link and the number of consecutive failures.
    :ivar session: current session, or None.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        server: PubKey,
        endpoint: SessionOpener[SessionT],
        random: Random,
        *,
        on_change: Callable[[ServerLink[SessionT]], None],
        on_lost: Callable[[ServerLink[SessionT], int], None],
    ) -> None:
        self.server = server
        self.session: SessionT | None = None
        self.failures = 0
        self.short = 0
        """Number of consecutive sessions that ended within ``SHORT_SESSION`` seconds, or over which no requests of
        others arrived."""
        self.carries = True
        """Whether the server can carry every kind of stream that this client opens, according to its entry."""
        self.entry: Entry | None = None
        """Entry of the server, with the address to which this link connects."""
        self._at_once = False
        self.last_error = ""
        self.unreachable = ""
        """Reason why the requests of other clients did not reach this client over the last session; empty if they
        did."""
        self.slow = False
        self.leaving = False
        """Whether the server announced that it shuts down."""
        self._reactor = reactor
        self._random = random
        self._on_change = on_change
        self._on_lost = on_lost
        self._service = ClientService(
            _ServiceEndpoint(self, endpoint),
            Factory.forProtocol(lambda: _SessionMarker(self.down)),
            retryPolicy=self._delay,
            clock=reactor,
        )

    def start(self) -> None:
        """Connect to the server, and reconnect whenever the connection is lost."""
        self._service.startService()

    def stop(self) -> Deferred[None]:
        """Disconnect from the server for good."""
        if self.session is not None:
            self.session.close()
        stopped: Deferred[None] = self._service.stopService()
        return stopped

    def now(self) -> float:
        """Return the time of the reactor's clock in seconds."""
        return float(self._reactor.seconds())

    def ended(self, session: SessionT, seconds: float) -> None:
        """Handle the end of a session that lasted ``seconds``."""
        self.last_error = session.why_lost
        self.unreachable = session.unreachable
        if session.refused_extension:
            # The next attempt is made at once, because it does not use the extension that the server has refused, such
            # as PING.
            self._at_once = True
        elif session.is_doubtful:
            # The next attempt is made at once, because this machine was suspended: the server probably runs, and only a
            # router has dropped the connection.
            self._at_once = True
        else:
            is_failure = seconds < SHORT_SESSION or (session.unreachable and not session.was_reached)
            self.short = self.short + 1 if is_failure else 0

    def _delay(self, failures: int) -> float:
        if self._at_once:
            self._at_once = False
            return 0.0
        # A short session counts as a failure, because a server that accepts connections and drops them is no better
        # than one that accepts none. ClientService resets its own count of failures with each connection, so ``short``
        # is counted here.
        self.failures = max(failures, self.short)
        self._on_lost(self, self.failures)
        return retry_delay(self.failures - 1, self._random)

    def up_soon(self, session: SessionT) -> None:
        """Announce the session in the next reactor turn."""
        # If the session is lost before the next turn, it is not announced.
        self._reactor.callLater(0, lambda: None if session.lost.called else self._session_up(session))

    def _session_up(self, session: SessionT) -> None:
        self.session = session
        # If the last session was not reachable, this one is only believed to be after a check.
        session.unreachable = self.unreachable
        self.failures = 0
        self.leaving = False
        self._on_change(self)

    def down(self) -> None:
        """Handle the end of the session."""
        self.session = None
        self._on_change(self)
