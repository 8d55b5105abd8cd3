"""The two ends of a direct link: a port that admits peers with a ticket, and a function that connects to such a port.

A direct link is a TCP connection that begins with the tags of :mod:`dmsg.v2019.direct.tickets`. Frames follow, as on a
connection to a server. The link itself is not encrypted, because only secure transports use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IAddress, IReactorTime, IStreamClientEndpoint
from twisted.python.failure import Failure

from dmsg.base.policing import ClientLimits
from dmsg.errors import DropReason, HandshakeError
from dmsg.keys import PubKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.acceptor import Acceptor
from dmsg.net.links.connect import LinkClientEndpoint
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.links.plain import PlainLink
from dmsg.net.own_pauses import add_fair_timeout
from dmsg.v2019.core.transports import Side
from dmsg.v2019.direct.tickets import DiallerHandshake, ListenerHandshake, Tickets
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams

TAG_TIMEOUT = 3.0
"""Maximum seconds from the TCP connection of a direct link to the arrival of the other end's tag."""
OK_TIMEOUT = 5.0
"""Maximum seconds from the exchange of the tags of a direct link to the arrival of the other end's OK frame."""
MAX_LINKS = 32
"""Maximum number of direct links at one port, and also of handshakes in progress at that port."""
LINKS_PER_ADDRESS = 4
"""Maximum number of direct links of one address at one port."""
_LIMITS = ClientLimits(max_connections=MAX_LINKS, max_per_address=LINKS_PER_ADDRESS)


class AcceptedSession(ClientSession):
    """Session over a direct link that this client accepted; implements
    :class:`~dmsg.net.links.acceptor.AcceptedSession`."""

    def __init__(self, port: DirectPort, remote: PubKey, turn: TurnFlush, streams: TransportStreams) -> None:
        super().__init__(port.reactor, turn, streams.key.public, remote, streams=streams, side=Side.CALLED)
        self._port = port
        self.link: Link | None = None

    def link_up(self, link: Link) -> None:
        self.link = link
        super().link_up(link)
        self._port.session_up(self)
        if link.ended_for is None and self._port.keep_place(self):
            add_fair_timeout(self.established, OK_TIMEOUT, self._port.reactor)
            self.established.addCallbacks(lambda _: self.pings.watch(), lambda _: self._no_ok(link))

    @staticmethod
    def _no_ok(link: Link) -> None:
        link.abort(DropReason.NO_OK_FRAME)

    def link_lost(self, reason: Failure) -> None:
        super().link_lost(reason)
        self._port.session_down(self)
        self.link = None

    @property
    def idle(self) -> bool:
        return not self.transports

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        assert self.link is not None
        self.link.close(reason)

    def crowd_out(self) -> None:
        self.refuse(DropReason.CROWDED_OUT)


class DirectPort(Acceptor):
    """Factory of a port for direct links. It sends nothing to a peer without a valid ticket.

    :param streams: streams of this client.
    :param tickets: tickets that are accepted.
    :param is_admitted: returns whether connections from an address are accepted at all.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        turn: TurnFlush,
        streams: TransportStreams,
        tickets: Tickets,
        drops: Counter[DropReason],
        is_admitted: Callable[[str], bool] = lambda host: True,
    ) -> None:
        super().__init__(reactor, drops, max_handshakes=MAX_LINKS)
        self.reactor = reactor
        self._turn = turn
        self._streams = streams
        self._tickets = tickets
        self._is_admitted = is_admitted

    @property
    def limits(self) -> ClientLimits:
        return _LIMITS

    @property
    def draining(self) -> bool:
        return False

    def buildProtocol(self, addr: IAddress | None) -> Link | None:
        host = str(getattr(addr, "host", ""))
        if not self._is_admitted(host):
            self._drops[DropReason.NOT_ADMITTED] += 1
            return None
        link = super().buildProtocol(addr)
        if link is not None:
            # The acceptor of a server answers HTTP requests in this callback. This port must send nothing to strangers.
            link.first_bytes = None
        return link

    def _make_link(self) -> Link:
        return PlainLink(
            self._reactor,
            self._turn,
            ListenerHandshake(self._tickets, self._reactor.seconds()),
            lambda remote: AcceptedSession(self, remote, self._turn, self._streams),
            on_failure=self._handshake_failed,
            timeout=TAG_TIMEOUT,
        )


def dial(
    reactor: IReactorTime,
    turn: TurnFlush,
    endpoint: IStreamClientEndpoint,
    streams: TransportStreams,
    peer: PubKey,
    secret: bytes,
) -> Deferred[ClientSession]:
    """Open a direct link; the Deferred fires with a session once the other end has sent OK.

    The Deferred fails with :class:`~dmsg.errors.HandshakeError` or an error of Twisted. Cancelling it ends the
    connection.

    :param endpoint: endpoint at which the peer listens.
    :param peer: key of the other end.
    :param secret: 32 bytes that both ends know, see :mod:`dmsg.v2019.direct.tickets`.
    """

    def make_link(make_user: MakeUser, failed: OnFailure) -> PlainLink:
        handshake = DiallerHandshake(secret, peer)
        return PlainLink(reactor, turn, handshake, make_user, on_failure=failed, timeout=TAG_TIMEOUT)

    def make_session(remote: PubKey) -> _DialledSession:
        return _DialledSession(reactor, turn, streams.key.public, remote, streams=streams, side=Side.CALLER)

    async def connect() -> ClientSession:
        session = await LinkClientEndpoint(reactor, endpoint, make_link).connect(make_session)
        try:
            await add_fair_timeout(session.established, OK_TIMEOUT, reactor)
        except TimeoutError:
            session.close()
            raise HandshakeError("the other end sent no OK frame", DropReason.NO_OK_FRAME) from None
        except BaseException:
            session.close()
            raise
        if not session.connected:  # The link was lost before this coroutine began to wait for OK.
            raise HandshakeError(session.why_lost, DropReason.NO_OK_FRAME)
        session.pings.watch()
        return session

    return Deferred.fromCoroutine(connect())


class _DialledSession(ClientSession):
    """Session over a direct link that this client opened."""

    def link_up(self, link: Link) -> None:
        super().link_up(link)
        self.flush()  # This end has opened the link, so it sends OK first.
