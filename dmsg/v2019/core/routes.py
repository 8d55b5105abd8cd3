"""Tables of a server's connections, and of the routes between them. No I/O.

A :class:`~dmsg.v2019.core.peers.RelayPeer` is the record of one connection, whose frames are sent through its
:class:`~dmsg.v2019.core.peers.ConnectionPort`. :class:`~dmsg.v2019.core.relay.Relay` adds the processing of frames.

Invariants, checked by :meth:`RouteTable.check`:

* a transport has a route at both of its ends or at neither (the 2019 reference sometimes leaves one of the two routes
  in its table);
* ``newest`` names only connections that are in the table (in the 2019 reference it may name others).

:mod:`dmsg.v2019.core.congestion` limits the bytes queued for slow receivers.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from dmsg.base.connections import ConnectionTable
from dmsg.errors import CloseReason, DropReason
from dmsg.keys import PubKey
from dmsg.telemetry.transports import Observer, share_loss
from dmsg.v2019.core.congestion import Congestion
from dmsg.v2019.core.peers import ConnectionPort, RelayPeer, Route
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.wire import ID_COUNT, IDS_PER_SIDE, encode_close, encode_drain

MAX_CONNECTIONS_PER_KEY = 4
"""Maximum number of connections of one key. Above it, the oldest is closed. Up to it, older connections and their
transports stay open beside the newest."""
IN_FLIGHT = 16_384
"""Number of frames that a client may have in flight on an accepted transport when another client or the server ends it.
This is the size of a client's window."""
LATE_ANSWERS = 2
"""Number of control frames that a client may have in flight in addition to ``IN_FLIGHT``: an ACCEPT and a CLOSE."""


class RouteTable(ConnectionTable[RelayPeer]):
    """Table of a server's connections and routes."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        random: Random | None = None,
        on_congested: Callable[[RelayPeer], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """:param now: returns seconds of a monotonic clock.
        :param on_congested: callback invoked with a congested peer when its first source is paused. The caller then
            starts a timer that calls :meth:`stall`.
        :param observer: object that is notified of transports that open and close.
        """
        super().__init__(MAX_CONNECTIONS_PER_KEY)
        self.observer = observer
        self.limits = limits or Limits()
        self._now = now
        self.transports_opened = 0
        self.route_count = 0
        """Number of routes, which is twice the number of transports."""
        self.leaving: dict[RelayPeer, None] = {}
        """Connections that have ended, and whose transports are not all closed yet."""
        self.draining = False
        self._random = random or Random()
        self.congestion = Congestion(on_congested or (lambda peer: None))

    # --- connections ---

    def add(self, key: PubKey, port: ConnectionPort) -> RelayPeer:
        """Add a connection of ``key``, and return its record. From now on, it is the newest connection of that key."""
        peer = RelayPeer(key, port, self._random.randrange(IDS_PER_SIDE) * 2 + 1, self._now())
        self._add_peer(peer)
        return peer

    def remove(self, peer: RelayPeer, limit: int = sys.maxsize) -> bool:
        """Remove a connection that has ended, and close its transports at their other ends.

        :param limit: maximum number of transports to close in this call.
        :returns: whether all transports are closed. If not, call the method again in a later reactor turn.
        """
        if peer in self.peers:
            self._forget(peer)
        # A connection may have thousands of transports. Closing all of them at once would delay every other client.
        for own_id in list(itertools.islice(peer.routes, limit)):
            route = peer.routes.get(own_id)
            if route is not None:
                # The route may already be missing: a transport of a client to itself has both of its routes in this
                # table.
                self._drop_route(peer, own_id, route, CloseReason.PEER_DISCONNECTED)
                if route.peer is not peer:
                    self.drops[DropReason.PEER_DISCONNECTED] += 1
                    self._answer(route.peer, encode_close(route.to_id, CloseReason.PEER_DISCONNECTED))
        if not peer.routes:
            self.leaving.pop(peer, None)
        return not peer.routes

    def _forget(self, peer: RelayPeer) -> None:
        """Remove a disconnected peer from the table of connections, and report its unsent bytes to the observer."""
        if self.observer is not None and peer.port.left_behind:
            share_loss([route.back for route in peer.routes.values()], peer.port.left_behind, peer.congested)
        self.connections.remove(peer)
        self.leaving[peer] = None
        self.congestion.forget(peer)

    # --- ends of transports ---

    def _drop_route(self, peer: RelayPeer, own_id: int, route: Route, reason: int, by_server: bool = False) -> None:
        """Remove both routes of a transport."""
        other = route.peer
        if (carried := route.carried) is not None and self.observer is not None:
            by = "server" if by_server else "src" if carried.forward is route else "dst"
            self.observer.ended(carried, reason, by)
        now = self._now()
        # A client is not charged for stray frames of this transport that it cannot avoid: frames that it has sent
        # before it learns of the end, and answers to frames that reach it late. A client that closed the transport
        # itself can only send such answers, because its CLOSE was its last frame.
        peer.provoked.add(route.back.frames + (_on_their_way(route) if by_server else 0), now)
        other.provoked.add(route.frames + _on_their_way(route), now)
        del peer.routes[own_id]
        del other.routes[route.to_id]
        self.route_count -= 2
        for one, two in ((peer, other), (other, peer)):
            count = one.destinations[two] - 1
            if count:
                one.destinations[two] = count
            else:
                del one.destinations[two]
                self.congestion.route_removed(one, two)

    def _close_both(self, peer: RelayPeer, own_id: int, route: Route, reason: CloseReason) -> None:
        self._drop_route(peer, own_id, route, reason, by_server=True)
        self._answer(peer, encode_close(own_id, reason))
        self._answer(route.peer, encode_close(route.to_id, reason))

    def close_all(self, reason: CloseReason) -> None:
        """Close every transport at both ends, and refuse new ones, because the server stops."""
        self.draining = True
        for peer in list(self.peers):
            for own_id, route in list(peer.routes.items()):
                if peer.routes.get(own_id) is route:
                    self._close_both(peer, own_id, route, reason)

    def announce_drain(self, seconds: int, servers: Sequence[PubKey]) -> int:
        """Refuse new transports, and send a DRAIN that names other servers to each client that understands it.

        :returns: number of clients to which DRAIN was sent.
        """
        self.draining = True
        frame = encode_drain(seconds, servers)
        told = [peer for peer in self.peers if peer.speaks_drain]
        for peer in told:
            self._answer(peer, frame)
        return len(told)

    # --- congestion ---

    def congest(self, peer: RelayPeer) -> None:
        """Mark a peer as congested, because its queue is above the high-water mark."""
        if peer in self.peers:
            self.congestion.begin(peer)

    def relieve(self, peer: RelayPeer) -> None:
        """Mark a peer as no longer congested, because its queue is empty, and resume reading from its sources."""
        self.congestion.relieve(peer)

    def stall(self, peer: RelayPeer) -> None:
        """Mark a peer as stalled, because it has been congested for too long. Reading from its sources is resumed.
        From now on, only the queue limits apply to what they send to the peer."""
        self.congestion.stall(peer)

    # --- frames that the table itself sends ---

    def _answer(self, peer: RelayPeer, frame: bytes) -> None:
        """Send a control frame. If the peer is congested and too many control frames are queued for it, disconnect the
        peer."""
        if peer not in self.peers:
            return
        # An attacker that provokes answers and never reads them would otherwise fill the server's memory.
        if not peer.congested or self.congestion.reserve_answer(peer, len(frame)):
            peer.port.send(frame)
        else:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)

    def _new_id(self, peer: RelayPeer) -> int:
        """Return the next free odd id of ``peer``. Ids count upwards, so that an id is reused as late as possible."""
        to_id = peer.next_id
        # The loop ends, because there is always a free odd id: max_transports is at most the number of odd ids.
        while to_id in peer.routes:
            to_id = (to_id + 2) % ID_COUNT
        peer.next_id = (to_id + 2) % ID_COUNT
        return to_id

    # --- self-check ---

    def check(self) -> None:
        """Check the invariants of the tables, for tests.

        :raises AssertionError: the tables disagree, which only an error in this package can cause.
        """
        ends = 0
        present = self.peers | self.leaving
        for peer in present:
            counted: Counter[RelayPeer] = Counter()
            for own_id, route in peer.routes.items():
                ends += 1
                counted[route.peer] += 1
                assert route.peer in present
                assert route.back.to_id == own_id and route.back.peer is peer
                assert route.peer.routes[route.to_id] is route.back
            assert counted == Counter(peer.destinations)
            assert (peer in self.peers) is not (peer in self.leaving)
            assert peer in self.leaving or peer in self.connections.of_key(peer.key)
            assert peer.paused_by is None or peer in peer.paused_by.pausing
        assert ends == self.route_count
        self.connections.check()


def _on_their_way(route: Route) -> int:
    return LATE_ANSWERS + (IN_FLIGHT if route.accepted else 0)
