"""Listening side of a server: accepts connections, runs their handshakes, and limits their number in all and per
address.

Handshakes are independent of each other. Handshakes that fail, stall or exceed a limit are closed and counted.  When
the server has its maximum number of clients, the address block with most clients loses its newest idle one.  So nobody
can fill a server from a few addresses.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.base.policing import ClientLimits
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.blocks import BlockCounts, blocks_of
from dmsg.net.carriers.requests import is_http
from dmsg.net.isolate import call_isolated
from dmsg.net.links.http_first import HTTPFirst
from dmsg.net.links.link import Link
from dmsg.net.links.places import Places
from dmsg.net.links.proxy_first import ProxyFirst
from dmsg.net.links.refusal_log import RefusalLog
from dmsg.net.links.trusted_proxies import TrustedProxies
from dmsg.net.turn_share import TurnShare

MAX_HANDSHAKES = 512
"""Maximum number of handshakes under way. A further one evicts a handshake of the block with most handshakes: the
oldest that has sent no valid message, otherwise the oldest.
"""
MAX_TOLD = 32
"""Maximum number of handshakes completed only to tell the client that there is no room. Further clients are cut off."""
TOLD_PER_ADDRESS = 4
"""Maximum number of handshakes for one address that are completed only to tell the client that there is no room."""
FLOOD_BURST = 2.0
"""Number of connections of one key that may end for flooding before its further connections are refused. Other keys
behind its address are not affected: many people may share an address, and a flooder only ends his own connections.
"""
FLOOD_RATE = 0.05
"""Rate, per second, at which the floods of one key are forgotten."""
FAILED_BURST = 256.0
"""Number of failed handshakes of one address before its connections are refused. A failed handshake shows no key, so
only the address can be charged.
"""
FAILED_RATE = 8.0
"""Rate, per second, at which the failed handshakes of one address are forgotten."""
ROOM_AGAIN = 0.9
"""Fraction of the limit of clients below which a server that was full logs that it accepts clients again."""
_SILENT = frozenset(
    {
        DropReason.HANDSHAKE_ABANDONED,
        DropReason.HTTP_REQUEST,
        DropReason.DRAINING,
        DropReason.TOO_MANY_CONNECTIONS,
    }
)
"""Reasons that are not logged each time: for example, a port scan would fill the log."""

_log = Logger()


class AcceptedSession(Protocol):
    """Interface of the session that uses an accepted link."""

    link: Link | None

    @property
    def idle(self) -> bool:
        """Whether the client has no transport or channel open."""

    def refuse(self, reason: DropReason = ..., /) -> None:
        """Tell the peer why it is refused, if the protocol can, and end the link."""

    def crowd_out(self) -> None:
        """End the link to give its place to another client, and tell this client to use another server."""


class Acceptor(Factory):
    """Factory that accepts the connections of one server.

    :param drops: counter of refusals by reason.
    :param counted: reasons that are counted elsewhere when a session ends.
    :ivar sessions: sessions of connected clients.
    """

    noisy = False

    def __init__(
        self,
        reactor: IReactorTime,
        drops: Counter[DropReason],
        *,
        max_handshakes: int = MAX_HANDSHAKES,
        counted: frozenset[DropReason] = frozenset(),
    ) -> None:
        self._reactor = reactor
        self._drops = drops
        self._counted = counted
        self._max_handshakes = max_handshakes
        self._handshakes: dict[Link, None] = {}
        self._of_address = BlockCounts()
        self._shaking_of = BlockCounts()
        self._places: Places[AcceptedSession] = Places(reactor)
        self._counted_as: dict[Link, str] = {}
        """Block for which each link is counted: an address block, or a name of its own if the client's address is
        unknown."""
        self._unnamed: set[Link] = set()
        """Connections from proxies that have not named the client yet, so that the limits of its address are not
        checked yet."""
        self._owners = 0
        """Number of connections so far that were counted under a name of their own."""
        self._refused_links: dict[Link, DropReason] = {}
        self._said_full = False
        self.strangers = RefusalLog(reactor)
        self.share = TurnShare(reactor)
        self._floods = RateLimit(FLOOD_RATE, FLOOD_BURST)
        self._failures = RateLimit(FAILED_RATE, FAILED_BURST, blocks_of)
        # These are dictionaries and no sets: the order of a set depends on addresses in memory, so a run of the lab
        # could not be repeated from its seed.
        self.sessions: dict[AcceptedSession, None] = {}
        self.active_links: dict[Link, None] = {}
        """Links that have read or written since the last check of held memory, and so may have buffered data.  The
        check removes those that have none.
        """
        self.connections_opened = 0
        self.tuned = False
        """Whether accepted sockets inherit the options of the listening ones."""
        self.proxies = TrustedProxies()
        self._drained: Deferred[None] | None = None

    # --- hooks for the server of a protocol family ---

    @property
    def limits(self) -> ClientLimits:
        """Return the limits for clients, such as how many may connect."""
        raise NotImplementedError

    def _make_link(self) -> Link:
        """Return a new link whose failed handshake is reported to :meth:`_handshake_failed`."""
        raise NotImplementedError

    def _failed(self, reason: DropReason, host: str | None) -> None:
        """Log a failed handshake; the caller has already counted it."""

    def _sessions_changed(self) -> None:
        """Handle a change of the number of sessions."""

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down (draining) and accepts no new clients."""
        raise NotImplementedError

    # --- numbers of clients and handshakes ---

    @property
    def available_connections(self) -> int:
        """Number of clients that can still connect."""
        return max(0, self.limits.max_connections - len(self._places))

    @property
    def places(self) -> int:
        """Number of free places that this server announces in discovery.

        A full server evicts a client of the block with most clients when a newcomer arrives. Such a server therefore
        announces as many places as it can free in this way, because clients choose only servers with free places.
        """
        free = self.available_connections
        return free if free or not self._by_block else self._places.evictable

    @property
    def is_full(self) -> bool:
        """Whether all places are taken, so that another client must leave first."""
        return len(self._places) >= self.limits.max_connections

    @property
    def _by_block(self) -> bool:
        """Whether limits by address apply.  They do not if all clients connect through one proxy."""
        return self.limits.max_per_address > 0

    def by_connections(self) -> dict[str, int]:
        """Return how many addresses have 1, 2 to 9, 10 to 99, and 100 or more connections."""
        found = {"1": 0, "2-9": 0, "10-99": 0, "100-": 0}
        for _, count in self._of_address.narrow_blocks():
            found["1" if count < 2 else "2-9" if count < 10 else "10-99" if count < 100 else "100-"] += 1
        return found

    @property
    def handshaking_links(self) -> list[Link]:
        """Links whose handshake is under way."""
        return list(self._handshakes)

    @property
    def handshakes(self) -> int:
        """Number of handshakes under way."""
        return len(self._handshakes)

    # --- connections ---

    def _refusal(self, block: str | None) -> DropReason | None:
        # These checks run before the handshake, because an attacker could exhaust the processor with handshakes.  These
        # checks store no data about the client.
        if self.draining:
            return DropReason.DRAINING
        if self.is_full and (block is None or not (self._by_block and self._places.may_come(block))):
            return DropReason.TOO_MANY_CONNECTIONS
        if block is not None and self._failures.is_exhausted(block, self._reactor.seconds()):
            return DropReason.FAILED_BEFORE
        if block is not None and self._by_block and self._of_address.crowded_block(block, self.limits.max_per_address):
            return DropReason.TOO_MANY_FROM_ADDRESS
        return None

    def _may_be_told(self, refusal: DropReason, block: str | None) -> bool:
        """Whether to complete the handshake and then refuse the client. Before the handshake a refusal has no
        authenticity.
        """
        if refusal in (DropReason.DRAINING, DropReason.FAILED_BEFORE) or len(self._refused_links) >= MAX_TOLD:
            return False
        if len(self._handshakes) >= self._max_handshakes:
            # Handshakes that only end in a refusal are limited, because others need to be able to do theirs.
            return False
        same = sum(self._counted_as.get(link) == block for link in self._refused_links)
        return block is None or same < TOLD_PER_ADDRESS

    def _count_refusal(self, refusal: DropReason, host: str | None, detail: str = "") -> None:
        """Count a refusal and log it.

        :param host: address of the client as the log shows it.
        :param detail: explanation in words.
        """
        self._drops[refusal] += 1
        if host is not None and refusal not in _SILENT:
            self.strangers.log_refusal(host, refusal.value, detail)
        if refusal is DropReason.TOO_MANY_CONNECTIONS and not self._said_full:
            self._said_full = True
            _log.warn(
                "the server is full and refuses more clients: {count} are connected (--max-connections)",
                count=len(self._places),
            )

    def buildProtocol(self, addr: IAddress | None) -> Link | None:
        host = getattr(addr, "host", None)
        # Limits by address are checked later, when the proxy has named the client: the address of the proxy says
        # nothing about it.
        named_later = host is not None and self.proxies.name_clients(host)
        block = None if host is None or named_later else blocks_of(host)[0].name
        refusal = None if named_later else self._refusal(block)
        if refusal is not None:
            self._count_refusal(refusal, host)
            if not self._may_be_told(refusal, block):
                return None
        # A newcomer evicts an older handshake instead of being refused. Otherwise an attacker with silent connections
        # would lock everybody out until they time out.
        if len(self._handshakes) >= self._max_handshakes:
            self._make_room()
        link = self._make_link()
        link.is_server_side = True
        link.share = self.share
        link.active_links = self.active_links
        link.first_bytes = self._first_bytes
        if named_later and host is not None and self.proxies.speak_proxy_protocol(host):
            link.first_bytes = ProxyFirst(self._named, self._first_bytes).received
        self._handshakes[link] = None
        if named_later:
            self._unnamed.add(link)
        if refusal is not None:
            self._refused_links[link] = refusal
        self._count(link, block)
        return link

    def _count(self, link: Link, block: str | None) -> None:
        """Count a link at its block of addresses, or alone if the client's address is unknown."""
        if block is not None and self._by_block:
            link.owner = block
            link.places = tuple(one.name for one in reversed(blocks_of(block)))
        else:
            # Behind a proxy all clients come from one address, so each connection is counted under a name of its own.
            self._owners += 1
            link.owner = self._owners
            link.places = (link.owner,)
        name = self._counted_as[link] = block or str(link.owner)
        self._of_address.add(name)
        self._shaking_of.add(name)

    def counted_as(self, link: Link) -> str:
        """Return the block for which a link is counted: an address block, or a name of its own."""
        return self._counted_as.get(link, str(link.owner))

    # --- clients that a proxy names ---

    def _first_bytes(self, link: Link, data: bytes) -> bool:
        if is_http(data):
            link.first_bytes = HTTPFirst(self._reactor, self._requested).received
            return link.first_bytes(link, data)
        refusal = self._check_client(link, "")
        if refusal is not None:
            link.abort(refusal)
        return refusal is not None

    def _named(self, link: Link, client: str) -> DropReason | None:
        """Check the client that a header of the PROXY protocol names, unless a further proxy names it later."""
        if client and self.proxies.name_clients(client):
            link.address = client
        elif client:
            return self._check_client(link, client)
        return None

    def _requested(self, link: Link, header: bytes | None) -> DropReason | None:
        """Check the client of a request for a websocket; ``header`` is its X-Forwarded-For."""
        return self._check_client(link, self.proxies.client_of(link.address, header))

    def _check_client(self, link: Link, client: str) -> DropReason | None:
        """Check a client by the address that its proxy named, as clients without a proxy are checked when they connect.

        :param client: address, empty if it is unknown.
        :returns: why the connection has to end now, or None.
        """
        if link not in self._unnamed:
            return None
        self._unnamed.remove(link)
        block = None
        if client:
            block = blocks_of(client)[0].name
            link.address = client
        refusal = self._refusal(block)
        if refusal is not None and not self._may_be_told(refusal, block):
            return refusal
        if refusal is not None:
            self._count_refusal(refusal, self._address_for_log(link))
            self._refused_links[link] = refusal
        if block is not None:
            self._uncount(link)
            self._count(link, block)
        return None

    def _address_for_log(self, link: Link) -> str:
        """Return the address of a client for the log; that of a proxy is marked, so that nobody bans it."""
        address = link.address
        return f"behind the proxy {address}" if address and self.proxies.name_clients(address) else address

    def _uncount(self, link: Link) -> None:
        name = self._counted_as.pop(link, None)
        if name is not None:
            self._of_address.remove(name)
            if link in self._handshakes:
                self._shaking_of.remove(name)

    def _make_room(self) -> None:
        """Evict one handshake, so that silent connections cannot keep honest clients out.

        The victim is a handshake of the block with most handshakes: the oldest that has sent no valid message,
        otherwise the oldest.
        """
        heaviest = self._shaking_of.heaviest()
        silent = (link for link in self._handshakes if not link.spoken)
        victim = next((link for link in silent if self._counted_as[link] == heaviest), None)
        if victim is None:
            most = self._shaking_of.load(heaviest)
            of_most = [one for one in self._handshakes if self._shaking_of.load(self._counted_as[one]) >= most]
            victim = next((link for link in of_most if not link.spoken), next(iter(of_most), None))
        (victim or next(iter(self._handshakes))).evict()

    def _handshake_ended(self, link: Link) -> None:
        """Remove a link from the handshakes under way, whether it succeeded or failed."""
        if link not in self._handshakes:
            return
        name = self._counted_as.get(link)
        if name is not None:
            self._shaking_of.remove(name)
        del self._handshakes[link]
        self._unnamed.discard(link)

    def _handshake_failed(self, link: Link, failure: Failure) -> None:
        self._handshake_ended(link)
        self._refused_links.pop(link, None)
        self._uncount(link)
        error = failure.value
        reason = error.reason if isinstance(error, RemoteProtocolError) else link.ended_for
        reason = reason or DropReason.HANDSHAKE_FAILED
        # Only an invalid message is charged to the address, because it costs a Diffie-Hellman operation.  Lost or slow
        # connections happen to honest clients, too.
        if reason is DropReason.HANDSHAKE_FAILED and isinstance(link.owner, str):
            self._failures.charge(link.owner, 1.0, self._reactor.seconds())
        self._count_refusal(reason, self._address_for_log(link), link.erred)
        self._failed(reason, None if self.proxies.name_clients(link.address) else link.address or None)

    def session_up(self, session: AcceptedSession) -> None:
        """Add the session of a link whose handshake is done, and refuse the session if there is no place."""
        assert session.link is not None
        self._handshake_ended(session.link)
        refusal = self._refused_links.pop(session.link, None)
        self.sessions[session] = None
        self.connections_opened += 1
        # The client has proved its key now.  Floods are charged to the key, and not to an address that many people may
        # share.
        if refusal is None and self._floods.is_exhausted(str(session.link.remote), self._reactor.seconds()):
            refusal = DropReason.FLOODED_BEFORE
            self._count_refusal(refusal, self._address_for_log(session.link))
        if refusal is None:
            self._places.give(session, self.counted_as(session.link))
            # A new client above the limit is accepted until admission has decided (keep_place), because no other client
            # should be ended for one that is not admitted.  At most MAX_TOLD new clients are above the limit at a time.
            beyond = len(self._places) - self.limits.max_connections
            if beyond > 0 and (beyond > MAX_TOLD or not (self._by_block and self._places.may_stay(session))):
                self._places.take(session)
                refusal = DropReason.TOO_MANY_CONNECTIONS
                self._count_refusal(refusal, self._address_for_log(session.link))
        if refusal is not None:
            session.refuse(refusal)
        self._sessions_changed()

    def keep_place(self, session: AcceptedSession) -> bool:
        """Let an admitted client stay.  If the server is full, another client is ended for it.

        :returns: False if no other client could be ended, and this one was refused.
        """
        if session not in self._places:
            return False
        if len(self._places) <= self.limits.max_connections or self._make_place(session):
            return True
        assert session.link is not None
        self._places.take(session)
        self._count_refusal(DropReason.TOO_MANY_CONNECTIONS, self._address_for_log(session.link))
        session.refuse(DropReason.TOO_MANY_CONNECTIONS)
        return False

    def _make_place(self, session: AcceptedSession) -> bool:
        """End a client of a block with more load than that of ``session``. Return False if there is none."""
        victim = self._places.victim_for(session, self.limits.max_connections) if self._by_block else None
        if victim is None:
            return False
        assert victim.link is not None
        # The place is freed before the victim is notified, because its handler may run code that counts places.
        self._count_refusal(DropReason.CROWDED_OUT, self._address_for_log(victim.link))
        self._places.take(victim)
        call_isolated(victim.crowd_out)
        return True

    def session_down(self, session: AcceptedSession) -> None:
        """Remove the session of a client that has left, and count the reason."""
        self.sessions.pop(session, None)
        self._places.take(session)
        assert session.link is not None
        self._uncount(session.link)
        reason = session.link.ended_for
        if reason is DropReason.FLOOD:
            self._floods.charge(str(session.link.remote), 1.0, self._reactor.seconds())
        if reason is not None and reason not in self._counted:
            self._drops[reason] += 1
            remote = session.link.remote
            who = "" if remote is None else f"key {remote.short}"
            detail = ": ".join(one for one in (who, session.link.erred) if one)
            self.strangers.log_refusal(self._address_for_log(session.link), reason.value, detail)
        # This threshold is below the limit, so that a server at its limit does not log two lines for each client.
        if self._said_full and len(self._places) < ROOM_AGAIN * self.limits.max_connections:
            self._said_full = False
            _log.info("the server accepts clients again: {count} are connected", count=len(self._places))
        if self._drained is not None and not self.sessions:
            drained, self._drained = self._drained, None
            drained.callback(None)
        self._sessions_changed()

    def close_all(self) -> Deferred[None]:
        """End all connections and handshakes. Return a Deferred that fires when all connections have ended."""
        self.strangers.stop()
        for link in list(self._handshakes):
            call_isolated(link.close, DropReason.DRAINING)
        drained: Deferred[None] = Deferred()
        if not self.sessions:
            drained.callback(None)
            return drained
        self._drained = drained
        for session in list(self.sessions):
            if session.link is not None:
                call_isolated(session.link.close, DropReason.DRAINING)
        return drained
