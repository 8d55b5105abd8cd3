"""This machine as a peer on its local networks: offers a code, or searches for the peer that offers it.

The peer has an ephemeral key of its own. So nobody can link its traffic on the network to the key that discovery and
servers see. Its streams end with the link that carries them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.interfaces import IDelayedCall, IListeningPort, IProtocol, IProtocolFactory, IReactorSocket
from twisted.internet.udp import Port
from twisted.logger import Logger

from dmsg.base.memory import CLIENTS, Memory
from dmsg.errors import DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.mdns.interfaces import Interface, list_interfaces
from dmsg.net.mdns.packets import PORT as MDNS_PORT
from dmsg.net.mdns.sockets import group_of, open_asker, open_responder
from dmsg.net.reactor import Reactor, cancel_call
from dmsg.net.socket_endpoints import TCPEndpoint
from dmsg.net.socketopts import tune_listening
from dmsg.streams.carrier import ClientStream
from dmsg.streams.holdings import StreamHoldings
from dmsg.v2019.direct.links import DirectPort, dial
from dmsg.v2019.direct.tickets import Tickets
from dmsg.v2019.lan.answers import CodeAnswers
from dmsg.v2019.lan.messages import LanDrop
from dmsg.v2019.lan.networks import Networks
from dmsg.v2019.lan.questions import Announcer, CodeQuestion
from dmsg.v2019.session import ClientSession
from dmsg.v2019.transport_streams import TransportStreams, let_close

DIAL_TIMEOUT = 3
"""Timeout in seconds of an attempt to open a TCP connection on the same network."""
QUESTION_INTERVAL, MAX_QUESTION_INTERVAL = 1.0, 4.0
"""Seconds between the first two multicast DNS questions of a search, and maximum seconds between two questions. The
interval doubles with each question."""

_log = Logger()


class LanPeer:
    """This machine as a peer on its local networks.

    :param interfaces: returns the addresses to use.
    :param on_warning: called with a sentence for the user if an address cannot be used.
    """

    def __init__(
        self,
        reactor: Reactor,
        *,
        interfaces: Callable[[], list[Interface]] = list_interfaces,
        memory: Memory | None = None,
        on_warning: Callable[[str], object] = lambda text: _log.warn("{text}", text=text),
    ) -> None:
        self._reactor = reactor
        self.on_warning = on_warning
        self._interfaces = interfaces
        self._turn = TurnFlush(reactor)
        self._key = SecKey.generate()
        self._factories: dict[int, IProtocolFactory] = {}
        self._streams = TransportStreams(
            reactor,
            self._key,
            self._factories.get,
            self._turn.add_stream,
            resume_timeout=0.0,
            factories=self._factories.values,
        )
        self._dialled: dict[ClientSession, None] = {}
        self._ports: list[DirectPort] = []
        self._running: list[LanOffer | LanSearch] = []
        self._holdings = StreamHoldings(reactor, memory or CLIENTS, self._all_streams)
        self._holdings.start()
        self._refused: Counter[DropReason] = Counter()
        """Number of refused connections at the ports of offers, by reason."""

    @property
    def public_key(self) -> PubKey:
        """Key of this machine on its local networks. It is drawn anew for each object of this class."""
        return self._key.public

    @property
    def drops(self) -> Counter[str]:
        """Number of connections that were refused and of packets that were ignored, by reason."""
        drops = Counter({reason.value: number for reason, number in self._refused.items()})
        for one in self._running:
            drops.update(one.drops)
        return drops

    def _sessions(self) -> list[ClientSession]:
        accepted = (cast("ClientSession", session) for port in self._ports for session in port.sessions)
        return [*self._dialled, *accepted]

    def _all_streams(self) -> list[ClientStream]:
        return [stream for session in self._sessions() for stream in session.streams]

    def offer(self, nameplate: int, factory: IProtocolFactory, port: int) -> LanOffer:
        """Answer questions for ``nameplate`` on the networks. Accept the streams of the receivers that have asked, with
        protocols from ``factory``.

        :param port: port of the streams.
        """
        assert port not in self._factories
        self._factories[port] = factory
        offer = LanOffer(self, nameplate, lambda: self._factories.pop(port, None))
        self._running.append(offer)
        return offer

    def search(self, nameplate: int, found: Callable[[FoundPeer], object]) -> LanSearch:
        """Ask on the networks who offers ``nameplate``, repeatedly until the search is stopped.

        :param found: called with each peer to which the caller should try to connect. Anybody on the network may have
            answered.
        """
        search = LanSearch(self, nameplate, found)
        self._running.append(search)
        return search

    async def stop(self) -> None:
        """End offers, searches and links. Closing streams get two seconds to send their data."""
        await DeferredList([one.stop() for one in self._running], consumeErrors=True)
        await let_close(self._reactor, self._all_streams)
        self._holdings.stop()
        self._streams.stop()
        ending = []
        for session in self._sessions():
            ending.append(session.lost)
            session.close()
        await DeferredList(ending)
        for port in self._ports:
            port.strangers.stop()
        if drops := self.drops:
            texts = ", ".join(f"{reason}: {number}" for reason, number in sorted(drops.items()))
            _log.info("packets were refused on the local networks: {drops}", drops=texts)
        self._running.clear()

    # --- methods that offers and searches call ---

    @property
    def reactor(self) -> Reactor:
        return self._reactor

    @property
    def key(self) -> SecKey:
        return self._key

    @property
    def networks(self) -> Callable[[], list[Interface]]:
        """Function that returns the network interfaces, with their addresses, on which to ask and answer."""
        return self._interfaces

    def make_port(self, tickets: Tickets, interface: Interface) -> DirectPort:
        """Return the factory of a port on one network."""
        port = DirectPort(
            self._reactor, self._turn, self._streams, tickets, self._refused, is_admitted=interface.has_on_link
        )
        # The port of a network that has disappeared stays in the list until the links that it accepted have ended.
        self._ports = [one for one in self._ports if one.numPorts or one.sessions]
        self._ports.append(port)
        return port

    async def dial(self, announcer: Announcer) -> ClientSession:
        """Open a direct link to a peer that has answered."""
        endpoint = TCPEndpoint(
            self._reactor, announcer.host, announcer.port, DIAL_TIMEOUT, bind_address=announcer.interface.host
        )
        session = await dial(self._reactor, self._turn, endpoint, self._streams, announcer.key, announcer.secret)
        self._dialled[session] = None
        session.lost.addCallback(lambda _: self._dialled.pop(session, None))
        return session


class FoundPeer:
    """Peer on the network that claims to offer the code.

    :ivar key: key that the peer announced. It is not proved before a stream is open.
    """

    def __init__(self, peer: LanPeer, announcer: Announcer) -> None:
        self._peer = peer
        self._announcer = announcer
        self.key = announcer.key

    def connect(self, factory: IProtocolFactory, port: int, *, timeout: float) -> Deferred[IProtocol]:
        """Open a stream to the peer; the Deferred fires with the factory's connected protocol.

        The Deferred fails with the errors of :func:`~dmsg.v2019.direct.links.dial` and
        :meth:`~dmsg.v2019.outgoing.Outgoing.open`.

        :param timeout: seconds to open the stream, after the link is up.
        """

        async def connect() -> IProtocol:
            session = await self._peer.dial(self._announcer)
            try:
                return await session.open(self.key, factory, timeout, port=port, secure=True, resumable=False)
            except BaseException:
                session.close()
                raise

        return Deferred.fromCoroutine(connect())


class LanOffer:
    """Offer of a code on all networks, made by :meth:`LanPeer.offer`."""

    def __init__(self, peer: LanPeer, nameplate: int, ended: Callable[[], object]) -> None:
        self._peer = peer
        self._ended = ended
        self._tickets = Tickets()
        self._answers = CodeAnswers(peer.key, nameplate, self._tickets, peer.reactor.seconds())
        self._networks = Networks(peer.reactor, peer.networks, self._open_on, peer.on_warning)

    def _open_on(self, interface: Interface) -> _OfferOnInterface:
        return _OfferOnInterface(self._peer, interface, self._answers, self._tickets)

    @property
    def interfaces(self) -> list[Interface]:
        """Addresses on which the code is offered."""
        return self._networks.interfaces

    @property
    def drops(self) -> Mapping[str, int]:
        """Number of packets that were not answered, by reason."""
        return _by_name(self._answers.drops)

    def stop(self) -> Deferred[None]:
        """End the offer. Open streams continue."""
        self._ended()
        return self._networks.stop()

    stopListening = stop


class _OfferOnInterface:
    """Offer on one address: a TCP port, and a UDP port that answers questions with the number of the TCP port."""

    def __init__(self, peer: LanPeer, interface: Interface, answers: CodeAnswers, tickets: Tickets) -> None:
        self._peer = peer
        self._interface = interface
        self._answers = answers
        self._factory = peer.make_port(tickets, interface)
        self._tcp: IListeningPort = peer.reactor.listenTCP(0, self._factory, interface=interface.host)  # type: ignore[arg-type]
        self._factory.tuned = tune_listening(self._tcp)
        try:
            self._udp = open_responder(cast("IReactorSocket", peer.reactor), interface, self._received)
        except BaseException:
            self._tcp.stopListening()
            raise

    def _received(self, data: bytes, source: str, port: int) -> None:
        listening = self._tcp.getHost().port  # type: ignore[attr-defined]  # An address of TCP has a port.
        now = self._peer.reactor.seconds()
        answer = self._answers.receive(data, source, self._interface, listening, now)
        if answer is not None:
            _send(self._udp, answer, self._interface.scoped(source), port)

    def stop(self) -> Deferred[None]:
        for session in [one for one in self._factory.sessions if one.idle]:
            session.refuse(DropReason.DRAINING)
        for link in self._factory.handshaking_links:
            link.close(DropReason.DRAINING)
        closing = [maybeDeferred(self._tcp.stopListening), maybeDeferred(self._udp.stopListening)]
        return DeferredList(closing, consumeErrors=True).addCallback(lambda _: None)


class LanSearch:
    """Search for a code on all networks, made by :meth:`LanPeer.search`."""

    def __init__(self, peer: LanPeer, nameplate: int, found: Callable[[FoundPeer], object]) -> None:
        self._peer = peer
        self._found = found
        self._question = CodeQuestion(peer.key, nameplate, peer.reactor.seconds())
        self._networks = Networks(peer.reactor, peer.networks, self._open_on, peer.on_warning)

    @property
    def interfaces(self) -> list[Interface]:
        """Addresses from which the question is sent."""
        return self._networks.interfaces

    @property
    def announcers(self) -> int:
        """Number of different keys, in the answers so far, to which the receiver may try to connect."""
        return self._question.announcers

    @property
    def drops(self) -> Mapping[str, int]:
        """Number of packets that were ignored, by reason."""
        return _by_name(self._question.drops)

    def _open_on(self, interface: Interface) -> _SearchOnInterface:
        return _SearchOnInterface(self._peer.reactor, interface, self._question.packet, self._received)

    def _received(self, data: bytes, source: str, port: int, interface: Interface) -> None:
        one = self._question.receive(data, source, port, interface, self._peer.reactor.seconds())
        if one is not None:
            self._found(FoundPeer(self._peer, one))

    def stop(self) -> Deferred[None]:
        """End the search. Links to peers that were found stay open."""
        return self._networks.stop()


class _SearchOnInterface:
    """Search on one address: sends the question repeatedly, and receives the answers."""

    def __init__(
        self,
        reactor: Reactor,
        interface: Interface,
        packet: bytes,
        received: Callable[[bytes, str, int, Interface], None],
    ) -> None:
        self._reactor = reactor
        self._interface = interface
        self._packet = packet
        self._udp = open_asker(
            cast("IReactorSocket", reactor),
            interface,
            lambda data, source, port: received(data, source, port, interface),
        )
        self._delay = QUESTION_INTERVAL
        self._timer: IDelayedCall | None = None
        self._ask()

    def _ask(self) -> None:
        self._timer = self._reactor.callLater(self._delay, self._ask)
        self._delay = min(MAX_QUESTION_INTERVAL, self._delay * 2)
        _send(self._udp, self._packet, group_of(self._interface), MDNS_PORT)

    def stop(self) -> Deferred[None]:
        cancel_call(self._timer)
        return maybeDeferred(self._udp.stopListening).addCallback(lambda _: None)


def _send(udp: Port, data: bytes, host: str, port: int) -> None:
    try:
        udp.write(data, (host, port))
    except OSError as error:
        # The error is ignored, because the question is repeated. The network may have gone, or the send buffer may be
        # full.
        _log.debug("a packet to {host} was not sent: {error}", host=host, error=str(error))


def _by_name(drops: Mapping[LanDrop, int]) -> dict[str, int]:
    return {reason.value: number for reason, number in drops.items()}
