"""A server's listening side: handshakes under way, connections in all and per address.

Handshakes are independent of each other; those that fail, stall or are too
many are closed and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.base.tables import uncount
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.addresses import block_of, blocks_of
from dmsg.net.isolate import isolated
from dmsg.net.links.link import Link
from dmsg.net.links.strangers import Strangers
from dmsg.net.share import Share

MAX_HANDSHAKES = 512
"""Handshakes under way; one more evicts one of the addresses with most: the first that has said nothing
sensible, else their oldest."""
MAX_TOLD = 32
"""Handshakes under way of those for whom there is no room, so that they can be told; others are cut."""
TOLD_PER_ADDRESS = 4
"""Of one address."""
FLOOD_BURST = 2.0
"""Connections of one key that end because they flood, before others of that key are refused.  Others behind its address
are not: many people may share one, and whoever floods it has nothing but his own connections to lose."""
FLOOD_RATE = 0.05
"""Floods of one key that are forgotten in a second."""
FAILED_BURST = 256.0
"""Handshakes of one address that fail, before its connections are refused: no key says whose they were."""
FAILED_RATE = 8.0
"""Failed handshakes of one address that are forgotten in a second."""
ROOM_AGAIN = 0.9
"""Part of the clients that a server takes, below which it says that it is full no more."""
_SILENT = frozenset({DropReason.HANDSHAKE_ABANDONED, DropReason.DRAINING, DropReason.TOO_MANY_CONNECTIONS})
"""What the log does not say of each: who only looks whether the port is open is no news."""

_log = Logger()


class AcceptLimits(Protocol):
    """:ivar max_per_address: 0 means no limit."""

    @property
    def max_connections(self) -> int:
        """Connections in all."""

    @property
    def max_per_address(self) -> int:
        """Connections of one address."""


class AcceptedSession(Protocol):
    """What lies above an accepted link."""

    link: Link | None

    def refuse(self, reason: DropReason) -> None:
        """Tell the peer, if the protocol can, and end the link."""


class Acceptor(Factory):
    """Accepts connections of one server.

    :param drops: where refusals are counted.
    :param counted: reasons of an end that are counted elsewhere.
    :ivar sessions: the connected clients.
    :ivar on_change: called when the number of sessions changed.
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
        self._of_address: Counter[str] = Counter()
        self._shaking_of: Counter[str] = Counter()
        self._addresses: dict[Link, str] = {}
        self._told: dict[Link, DropReason] = {}
        self._said_full = False
        self.strangers = Strangers(reactor)
        self.share = Share(reactor)
        self._floods = RateLimit(FLOOD_RATE, FLOOD_BURST)
        self._failures = RateLimit(FAILED_RATE, FAILED_BURST)
        self.sessions: set[Any] = set()
        self.stirred: set[Link] = set()
        """Links that read or wrote, and may hold something; who looks at what they hold takes the others out."""
        self.connections_opened = 0
        self.tuned = False
        """The listening sockets hand their options down."""
        self.on_change: Callable[[], None] = lambda: None
        self._drained: Deferred[None] | None = None

    # --- for a family ---

    @property
    def limits(self) -> AcceptLimits:
        """How many may connect."""
        raise NotImplementedError

    def _make_link(self) -> Link:
        """A link whose failure goes to :meth:`_handshake_failed`."""
        raise NotImplementedError

    def _failed(self, reason: DropReason, host: str | None) -> None:
        """A handshake failed and is counted."""

    @property
    def draining(self) -> bool:
        """Nobody new is taken."""
        raise NotImplementedError

    # --- what there is ---

    @property
    def available_connections(self) -> int:
        """How many more clients may connect."""
        return max(0, self.limits.max_connections - len(self.sessions))

    @property
    def full(self) -> bool:
        """No more clients may connect."""
        return len(self.sessions) >= self.limits.max_connections

    def by_connections(self) -> dict[str, int]:
        """How many addresses have 1, 2 to 9, 10 to 99, 100 and more connections."""
        found = {"1": 0, "2-9": 0, "10-99": 0, "100-": 0}
        for count in self._of_address.values():
            found["1" if count < 2 else "2-9" if count < 10 else "10-99" if count < 100 else "100-"] += 1
        return found

    @property
    def shaking(self) -> list[Link]:
        """Links whose handshake is under way."""
        return list(self._handshakes)

    @property
    def handshakes(self) -> int:
        """Handshakes under way."""
        return len(self._handshakes)

    # --- connections ---

    def _refusal(self, block: str | None) -> DropReason | None:
        if self.draining:
            return DropReason.DRAINING
        if self.full:
            return DropReason.TOO_MANY_CONNECTIONS
        if block is not None and self._failures.owes(block, self._reactor.seconds()):
            return DropReason.FAILED_BEFORE
        if block is not None and 0 < self.limits.max_per_address <= self._of_address[block]:
            return DropReason.TOO_MANY_FROM_ADDRESS
        return None

    def _may_be_told(self, refusal: DropReason, block: str | None) -> bool:
        """After the handshake; before it nothing can be said that the peer could believe."""
        if refusal in (DropReason.DRAINING, DropReason.FAILED_BEFORE) or len(self._told) >= MAX_TOLD:
            return False
        if len(self._handshakes) >= self._max_handshakes:
            return False  # the places are for those who may come in
        same = sum(self._addresses.get(link) == block for link in self._told)
        return block is None or same < TOLD_PER_ADDRESS

    def _refused(self, refusal: DropReason, host: str | None) -> None:
        self._drops[refusal] += 1
        if host is not None and refusal not in _SILENT:
            self.strangers.tell(host, refusal.value)
        if refusal is DropReason.TOO_MANY_CONNECTIONS and not self._said_full:
            self._said_full = True
            _log.warn(
                "full: {count} clients are connected, more are refused (max-connections)", count=len(self.sessions)
            )

    def buildProtocol(self, addr: IAddress | None) -> Link | None:
        host = getattr(addr, "host", None)
        block = None if host is None else block_of(host)
        refusal = self._refusal(block)
        if refusal is not None:
            self._refused(refusal, host)
            if not self._may_be_told(refusal, block):
                return None
        if len(self._handshakes) >= self._max_handshakes:
            self._make_room()
        link = self._make_link()
        link.is_server_side = True
        link.share = self.share
        link.stirred = self.stirred
        # behind a proxy all come from one address: then each connection is on its own
        link.owner = block if block is not None and self.limits.max_per_address else id(link)
        link.places = blocks_of(host) if host is not None and self.limits.max_per_address else (id(link),)
        self._handshakes[link] = None
        if refusal is not None:
            self._told[link] = refusal
        if block is not None:
            self._of_address[block] += 1
            self._addresses[link] = block
            self._shaking_of[block] += 1
        return link

    def _make_room(self) -> None:
        """Silent connections must not keep honest ones out: of the addresses with most of them the oldest goes.

        First one that has said nothing that makes sense.
        """
        most = max(self._shaking_of.values(), default=0)
        of_most = [link for link in self._handshakes if self._shaking_of[self._addresses.get(link, "")] >= most]
        victim = next((link for link in of_most if not link.spoken), next(iter(of_most), None))
        (victim or next(iter(self._handshakes))).evict()

    def _shaken(self, link: Link) -> None:
        """A handshake is over, in whichever way."""
        if link not in self._handshakes:
            return
        del self._handshakes[link]
        block = self._addresses.get(link)
        if block is not None:
            uncount(self._shaking_of, block)

    def _gone(self, link: Link) -> str | None:
        host = self._addresses.pop(link, None)
        if host is not None:
            uncount(self._of_address, host)
        return host

    def _handshake_failed(self, link: Link, failure: Failure) -> None:
        self._shaken(link)
        self._told.pop(link, None)
        self._gone(link)
        host = link.address
        error = failure.value
        reason = error.reason if isinstance(error, RemoteProtocolError) else link.ended_for
        reason = reason or DropReason.HANDSHAKE_FAILED
        self._drops[reason] += 1
        if reason is DropReason.HANDSHAKE_FAILED and self.limits.max_per_address:
            self._failures.charge(str(link.owner), 1.0, self._reactor.seconds())
        if reason not in _SILENT:
            self.strangers.tell(host, reason.value, link.erred)
        self._failed(reason, host or None)

    def session_up(self, session: AcceptedSession) -> None:
        """A handshake is done."""
        assert session.link is not None
        self._shaken(session.link)
        refusal = self._told.pop(session.link, None)
        self.sessions.add(session)
        self.connections_opened += 1
        if refusal is None and len(self.sessions) > self.limits.max_connections:
            # a handshake that was under way when the last place was taken
            refusal = DropReason.TOO_MANY_CONNECTIONS
            self._refused(refusal, session.link.address)
        if refusal is None and self._floods.owes(str(session.link.remote), self._reactor.seconds()):
            refusal = DropReason.FLOODED_BEFORE
            self._refused(refusal, session.link.address)
        if refusal is not None:
            session.refuse(refusal)
        self.on_change()

    def session_down(self, session: AcceptedSession) -> None:
        """A client is gone."""
        self.sessions.discard(session)
        assert session.link is not None
        self._gone(session.link)
        reason = session.link.ended_for
        if reason is DropReason.FLOOD:
            self._floods.charge(str(session.link.remote), 1.0, self._reactor.seconds())
        if reason is not None and reason not in self._counted:
            self._drops[reason] += 1
            remote = session.link.remote
            who = "" if remote is None else f"key {remote.short}"
            detail = ": ".join(one for one in (who, session.link.erred) if one)
            self.strangers.tell(session.link.address, reason.value, detail)
        if self._said_full and len(self.sessions) < ROOM_AGAIN * self.limits.max_connections:
            self._said_full = False
            _log.info("no longer full: {count} clients are connected", count=len(self.sessions))
        if self._drained is not None and not self.sessions:
            drained, self._drained = self._drained, None
            drained.callback(None)
        self.on_change()

    def close_all(self) -> Deferred[None]:
        """End every connection and every handshake; fires when all are gone."""
        self.strangers.stop()
        for link in list(self._handshakes):
            isolated(link.close, DropReason.DRAINING)
        drained: Deferred[None] = Deferred()
        if not self.sessions:
            drained.callback(None)
            return drained
        self._drained = drained
        for session in list(self.sessions):
            if session.link is not None:
                isolated(session.link.close, DropReason.DRAINING)
        return drained
