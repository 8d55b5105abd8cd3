"""Listening side of a server: accepts connections, runs their handshakes, and limits their number in all and per
address.

Handshakes are independent of each other. A handshake that fails, stalls or exceeds a limit is closed and counted. If
the server has its maximum number of clients, a newcomer evicts an idle client of a block with more clients than its
own. So nobody can fill a server from a few addresses.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IProtocolNegotiationFactory, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from dmsg.base.buckets import RateLimit
from dmsg.base.policing import ClientLimits
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.blocks import blocks_of
from dmsg.net.carriers.names import ALPN
from dmsg.net.carriers.requests import is_http
from dmsg.net.isolate import call_isolated
from dmsg.net.links.http_first import HTTPFirst
from dmsg.net.links.link import Link
from dmsg.net.links.link_counts import MAX_HANDSHAKES, LinkCounts
from dmsg.net.links.places import Places
from dmsg.net.links.proxy_first import ProxyFirst
from dmsg.net.links.refusal_log import RefusalLog
from dmsg.net.links.trusted_proxies import TrustedProxies
from dmsg.net.turn_share import TurnShare

MAX_NOTIFIED = 32
"""Maximum number of refused clients whose handshake is completed, so that they learn the reason. Above it, the
connections of refused clients are closed at once."""
NOTIFIED_PER_BLOCK = 4
"""Maximum number of refused clients of one address block whose handshake is completed, so that they learn the
reason."""
FLOOD_BURST = 2.0
"""Number of connections of one key that may end for flooding before new connections of the key are refused. Other keys
at the same address are not affected: many people may share an address, and flooding ends only the flooder's own
connections."""
FLOOD_RATE = 0.05
"""Rate, per second, at which a key's floods are forgotten."""
FAILED_BURST = 256.0
"""Number of failed handshakes of one address before its connections are refused. The address is charged, because a
failed handshake proves no key."""
FAILED_RATE = 8.0
"""Rate, per second, at which an address's failed handshakes are forgotten."""
ROOM_AGAIN = 0.9
"""Fraction of the maximum number of clients below which a server that was full logs that it accepts clients again."""
_SILENT = frozenset(
    {
        DropReason.HANDSHAKE_ABANDONED,
        DropReason.HTTP_REQUEST,
        DropReason.DRAINING,
        DropReason.TOO_MANY_CONNECTIONS,
    }
)
"""Reasons of refusals that are counted and not logged one by one. For example, a port scan would fill the log."""

_FAILURE_COSTS = {DropReason.HANDSHAKE_FAILED: 1.0, DropReason.SMALL_PIECES: 32.0}
"""Cost of a link that ends before its handshake is complete, by the reason of its end. The unit is one failed
handshake; links that end for other reasons cost nothing."""

_log = Logger()


class AcceptedSession(Protocol):
    """Interface of a session over an accepted link."""

    link: Link | None

    @property
    def idle(self) -> bool:
        """Whether the client has no transport or channel open."""

    def refuse(self, reason: DropReason = ..., /) -> None:
        """Send the peer the reason for the refusal, if the protocol has a message for it, and end the link."""

    def crowd_out(self) -> None:
        """End the link, because the server needs the place for another client, and advise this client to use another
        server."""


@implementer(IProtocolNegotiationFactory)
class Acceptor(Factory):
    """Factory that accepts the connections of one server.

    A client that counts towards the maximum number of clients has a *place*.

    :param drops: counter of refusals by reason.
    :param counted: reasons for the end of a session that the caller counts. The acceptor counts all others in
        ``drops``.
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
        self._counts = LinkCounts(max_handshakes)
        self._places: Places[AcceptedSession] = Places(reactor)
        self._unnamed: set[Link] = set()
        """Connections from proxies that have not named the client yet. The limits per address are applied once the
        client is named."""
        self._refused_links: dict[Link, DropReason] = {}
        self._said_full = False
        self.strangers = RefusalLog(reactor)
        self.share = TurnShare(reactor)
        self._floods = RateLimit(FLOOD_RATE, FLOOD_BURST)
        self._failures = RateLimit(FAILED_RATE, FAILED_BURST, blocks_of)
        # These are dictionaries instead of sets, because the order of a set depends on addresses in memory. A run of
        # the lab could then not be repeated from its seed.
        self.sessions: dict[AcceptedSession, None] = {}
        self.active_links: dict[Link, None] = {}
        """Links that have read or written since the last memory check, and so may have buffered data. The check removes
        links without buffered data."""
        self.connections_opened = 0
        self.tuned = False
        """Whether accepted sockets inherit the options of their listening sockets."""
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
        """Log a failed handshake, which the caller has already counted."""

    def _sessions_changed(self) -> None:
        """Hook that is called after the number of sessions has changed."""

    @property
    def draining(self) -> bool:
        """Whether the server drains: it stops soon, and accepts no new clients."""
        raise NotImplementedError

    # --- numbers of clients and handshakes ---

    @property
    def available_connections(self) -> int:
        """Number of clients that can still connect without an eviction."""
        return max(0, self.limits.max_connections - len(self._places))

    @property
    def places(self) -> int:
        """Number of free places that this server announces in discovery.

        A full server evicts a client of the block with most clients when a newcomer arrives. Such a server announces
        the number of clients that it could evict in this way, because clients choose only servers with free places.
        """
        free = self.available_connections
        return free if free or not self._by_block else self._places.evictable

    @property
    def is_full(self) -> bool:
        """Whether all places are taken, so that a new client needs an eviction."""
        return len(self._places) >= self.limits.max_connections

    @property
    def _by_block(self) -> bool:
        """Whether limits per address apply. An operator disables them if all clients connect through one proxy."""
        return self.limits.max_per_address > 0

    def by_connections(self) -> dict[str, int]:
        """Return the number of addresses with 1, 2 to 9, 10 to 99, and 100 or more connections."""
        return self._counts.by_connections()

    @property
    def handshaking_links(self) -> list[Link]:
        """Links whose handshake is in progress."""
        return list(self._counts.handshakes)

    @property
    def handshakes(self) -> int:
        """Number of handshakes in progress."""
        return len(self._counts.handshakes)

    # --- connections ---

    def acceptableProtocols(self) -> list[bytes]:
        """Return the ALPN names that the server knows. Clients that offer only other names are accepted as well."""
        return list(ALPN.values())

    def _refusal(self, block: str | None) -> DropReason | None:
        # These checks run before the handshake, because the handshakes of an attacker could exhaust the processor. The
        # checks store no data about the client.
        if self.draining:
            return DropReason.DRAINING
        if self.is_full and (block is None or not (self._by_block and self._places.may_come(block))):
            return DropReason.TOO_MANY_CONNECTIONS
        if block is not None and self._failures.is_exhausted(block, self._reactor.seconds()):
            return DropReason.FAILED_BEFORE
        if block is not None and self._by_block and self._counts.is_crowded(block, self.limits.max_per_address):
            return DropReason.TOO_MANY_FROM_ADDRESS
        return None

    def _may_be_notified(self, refusal: DropReason, block: str | None) -> bool:
        """Return whether to complete the handshake of a refused client, so that the client learns the reason. Without
        the handshake, the client could not know that the refusal is the server's."""
        if refusal in (DropReason.DRAINING, DropReason.FAILED_BEFORE) or len(self._refused_links) >= MAX_NOTIFIED:
            return False
        if not self._counts.has_room:
            # The maximum number of handshakes is reached. The handshake of a refused client would evict another
            # handshake.
            return False
        same = sum(self._counts.is_of_block(link, block) for link in self._refused_links)
        return block is None or same < NOTIFIED_PER_BLOCK

    def _count_refusal(self, refusal: DropReason, host: str | None, detail: str = "") -> None:
        """Count a refusal and log it.

        :param host: address of the client for the log; None to write no line about the client.
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
        # The limits are applied later, when the proxy has named the client, because the address of the proxy is not the
        # client's.
        named_later = host is not None and self.proxies.is_trusted(host)
        block = None if host is None or named_later else blocks_of(host)[0].name
        refusal = None if named_later else self._refusal(block)
        if refusal is not None:
            self._count_refusal(refusal, host)
            if not self._may_be_notified(refusal, block):
                return None
        if not self._counts.has_room:
            self._counts.make_room()
        link = self._make_link()
        link.is_server_side = True
        link.share = self.share
        link.active_links = self.active_links
        link.first_bytes = self._first_bytes
        if named_later and host is not None and self.proxies.speak_proxy_protocol(host):
            link.first_bytes = ProxyFirst(self._named, self._first_bytes).received
        if named_later:
            self._unnamed.add(link)
        if refusal is not None:
            self._refused_links[link] = refusal
        self._counts.add(link, block, by_block=self._by_block)
        return link

    def counted_as(self, link: Link) -> str:
        """Return the name under which a link is counted: its address block, or a unique name."""
        return self._counts.name_of(link)

    # --- clients behind a proxy ---

    def _first_bytes(self, link: Link, data: bytes) -> bool:
        if is_http(data):
            link.first_bytes = HTTPFirst(self._reactor, self._requested).received
            return link.first_bytes(link, data)
        refusal = self._check_client(link, "")
        if refusal is not None:
            link.abort(refusal)
        return refusal is not None

    def _named(self, link: Link, client: str) -> DropReason | None:
        """Check the client that a PROXY protocol header names. If the header names another trusted proxy, wait until
        that proxy names the client."""
        if client and self.proxies.is_trusted(client):
            link.address = client
        elif client:
            return self._check_client(link, client)
        return None

    def _requested(self, link: Link, header: bytes | None) -> DropReason | None:
        """Check the client of a websocket request.

        :param header: the request's X-Forwarded-For, or None.
        """
        return self._check_client(link, self.proxies.client_of(link.address, header))

    def _check_client(self, link: Link, client: str) -> DropReason | None:
        """Apply the limits to a client once its proxy has named it. A client without a proxy is checked when it
        connects.

        :param client: address of the client; empty if it is unknown.
        :returns: reason for which to end the connection, or None.
        """
        if link not in self._unnamed:
            return None
        self._unnamed.remove(link)
        block = None
        if client:
            block = blocks_of(client)[0].name
            link.address = client
        refusal = self._refusal(block)
        if refusal is not None and not self._may_be_notified(refusal, block):
            return refusal
        if refusal is not None:
            self._count_refusal(refusal, self._address_for_log(link))
            self._refused_links[link] = refusal
        if block is not None:
            self._counts.move(link, block, by_block=self._by_block)
        return None

    def _address_for_log(self, link: Link) -> str:
        """Return the address of a client for the log. The address of a proxy is marked, so that no program bans it."""
        address = link.address
        return f"behind the proxy {address}" if address and self.proxies.is_trusted(address) else address

    def _handshake_failed(self, link: Link, failure: Failure) -> None:
        self._counts.remove(link)
        self._unnamed.discard(link)
        self._refused_links.pop(link, None)
        error = failure.value
        reason = error.reason if isinstance(error, RemoteProtocolError) else link.ended_for
        reason = reason or DropReason.HANDSHAKE_FAILED
        # An address is charged only for failures that cost the server time.  An invalid message costs a Diffie-Hellman
        # operation, and many small pieces cost up to 50 ms.  Lost or slow connections happen to honest clients, too.
        cost = _FAILURE_COSTS.get(reason, 0.0)
        if cost and isinstance(link.owner, str):
            self._failures.charge(link.owner, cost, self._reactor.seconds())
        self._count_refusal(reason, self._address_for_log(link), link.erred)
        self._failed(reason, None if self.proxies.is_trusted(link.address) else link.address or None)

    def session_up(self, session: AcceptedSession) -> None:
        """Add the session of a link whose handshake is complete. Refuse the session if its key has flooded or the
        server is full."""
        assert session.link is not None
        self._counts.end_handshake(session.link)
        self._unnamed.discard(session.link)
        refusal = self._refused_links.pop(session.link, None)
        self.sessions[session] = None
        self.connections_opened += 1
        # The handshake has proved the client's key. Floods are charged to the key, because many people may share the
        # address.
        if refusal is None and self._floods.is_exhausted(str(session.link.remote), self._reactor.seconds()):
            refusal = DropReason.FLOODED_BEFORE
            self._count_refusal(refusal, self._address_for_log(session.link))
        if refusal is None:
            self._places.give(session, self.counted_as(session.link))
            # A new client above the maximum stays connected until admission has decided about it (keep_place), because
            # no client should be evicted for one that is not admitted. At most MAX_NOTIFIED such clients are connected
            # at a time.
            beyond = len(self._places) - self.limits.max_connections
            if beyond > 0 and (beyond > MAX_NOTIFIED or not (self._by_block and self._places.may_stay(session))):
                self._places.take(session)
                refusal = DropReason.TOO_MANY_CONNECTIONS
                self._count_refusal(refusal, self._address_for_log(session.link))
        if refusal is not None:
            session.refuse(refusal)
        self._sessions_changed()

    def keep_place(self, session: AcceptedSession) -> bool:
        """Keep an admitted client connected. If the server is above its maximum, evict another client for it.

        :returns: False if no other client could be evicted, so that this client was refused.
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
        """Evict a client of a block whose load is higher than that of the block of ``session``. Return False if there
        is no such client."""
        victim = self._places.victim_for(session, self.limits.max_connections) if self._by_block else None
        if victim is None:
            return False
        assert victim.link is not None
        # The place is freed before the victim is notified, because the victim's handler may run code that counts
        # places.
        self._count_refusal(DropReason.CROWDED_OUT, self._address_for_log(victim.link))
        self._places.take(victim)
        call_isolated(victim.crowd_out)
        return True

    def session_down(self, session: AcceptedSession) -> None:
        """Remove the session of a client whose link has ended, and count the reason."""
        self.sessions.pop(session, None)
        self._places.take(session)
        assert session.link is not None
        self._counts.remove(session.link)
        reason = session.link.ended_for
        if reason in (DropReason.FLOOD, DropReason.SMALL_PIECES):
            self._floods.charge(str(session.link.remote), 1.0, self._reactor.seconds())
        if reason is not None and reason not in self._counted:
            self._drops[reason] += 1
            remote = session.link.remote
            who = "" if remote is None else f"key {remote.short}"
            detail = ": ".join(one for one in (who, session.link.erred) if one)
            self.strangers.log_refusal(self._address_for_log(session.link), reason.value, detail)
        # This is logged only when the number of clients is well below the maximum. Otherwise a server near its maximum
        # would log two lines for each client that connects and leaves.
        if self._said_full and len(self._places) < ROOM_AGAIN * self.limits.max_connections:
            self._said_full = False
            _log.info("the server accepts clients again: {count} are connected", count=len(self._places))
        if self._drained is not None and not self.sessions:
            drained, self._drained = self._drained, None
            drained.callback(None)
        self._sessions_changed()

    def close_all(self) -> Deferred[None]:
        """Close all connections and handshakes. Return a Deferred that fires when all sessions have ended."""
        self.strangers.stop()
        for link in list(self._counts.handshakes):
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
