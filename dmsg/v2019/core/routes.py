"""Who is connected to a server, and where each transport leads.

No I/O.  A :class:`~dmsg.v2019.core.peers.RelayPeer` is one connection; what goes to it is handed to its
:class:`~dmsg.v2019.core.peers.ConnectionPort`.  :class:`~dmsg.v2019.core.relay.Relay` adds what frames do.

Invariants, checked by :meth:`RouteTable.check`:

* a route exists at both ends or at neither (the 2019 reference leaves one end
  behind, its defect 5);
* ``newest`` names only connections that are here (its defect 12).

What a receiver does not take at once waits in :mod:`dmsg.v2019.core.congestion`.
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
"""Older connections of a key keep their transports, but no more than these in all."""
IN_FLIGHT = 16_384
"""Frames that one end of an accepted transport may have on their way when others end it: the window of a client."""
LATE_ANSWERS = 2
"""Control frames that may be on their way besides: ACCEPT and CLOSE."""


class RouteTable(ConnectionTable[RelayPeer]):
    """The table of a server."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        random: Random | None = None,
        on_congested: Callable[[RelayPeer], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """:param now: seconds of a monotonic clock.

        :param on_congested: told when a source was paused for that peer, so
            that :meth:`stall` can follow after a time.
        :param observer: told of transports that come and go.
        """
        super().__init__(MAX_CONNECTIONS_PER_KEY)
        self.observer = observer
        self.limits = limits or Limits()
        self._now = now
        self.transports_opened = 0
        self.route_count = 0
        """Ends of routes; twice the number of transports."""
        self.leaving: dict[RelayPeer, None] = {}
        """Connections that ended whose transports are not all closed yet."""
        self.draining = False
        self._random = random or Random()
        self.congestion = Congestion(on_congested or (lambda peer: None))

    # --- connections ---

    def add(self, key: PubKey, port: ConnectionPort) -> RelayPeer:
        """A connection of ``key`` is there; it is the newest of that key from now on."""
        peer = RelayPeer(key, port, self._random.randrange(IDS_PER_SIDE) * 2 + 1, self._now())
        self._add_peer(peer)
        return peer

    def remove(self, peer: RelayPeer, most: int = sys.maxsize) -> bool:
        """The connection ended: its transports are closed at their other ends.

        :param most: transports that are closed now.
        :returns: whether all are; else call it again, in another turn of the reactor.
        """
        if peer in self.peers:
            self._forget(peer)
        for own_id in list(itertools.islice(peer.routes, most)):
            route = peer.routes.get(own_id)
            if route is not None:  # a transport to oneself is in the table twice
                self._drop_route(peer, own_id, route, CloseReason.PEER_DISCONNECTED)
                if route.peer is not peer:
                    self.drops[DropReason.PEER_DISCONNECTED] += 1
                    self._answer(route.peer, encode_close(route.to_id, CloseReason.PEER_DISCONNECTED))
        if not peer.routes:
            self.leaving.pop(peer, None)
        return not peer.routes

    def _forget(self, peer: RelayPeer) -> None:
        """Nothing more is heard from it, and nothing can be sent to it."""
        if self.observer is not None and peer.port.left_behind:
            share_loss([route.back for route in peer.routes.values()], peer.port.left_behind, peer.congested)
        self.connections.remove(peer)
        self.leaving[peer] = None
        self.congestion.forget(peer)

    # --- ends of transports ---

    def _drop_route(self, peer: RelayPeer, own_id: int, route: Route, reason: int, by_server: bool = False) -> None:
        """Forget both directions of a transport."""
        other = route.peer
        if (carried := route.carried) is not None and self.observer is not None:
            by = "server" if by_server else "src" if carried.there is route else "dst"
            self.observer.ended(carried, reason, by)
        now = self._now()
        # each frame that went to an end may bring a CLOSE of no transport; who ended it sends nothing more of its own
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
                self.congestion.unrouted(one, two)

    def _close_both(self, peer: RelayPeer, own_id: int, route: Route, reason: CloseReason) -> None:
        self._drop_route(peer, own_id, route, reason, by_server=True)
        self._answer(peer, encode_close(own_id, reason))
        self._answer(route.peer, encode_close(route.to_id, reason))

    def close_all(self, reason: CloseReason) -> None:
        """Close every transport at both ends, and refuse new ones: the server leaves."""
        self.draining = True
        for peer in list(self.peers):
            for own_id, route in list(peer.routes.items()):
                if peer.routes.get(own_id) is route:
                    self._close_both(peer, own_id, route, reason)

    def announce_drain(self, seconds: int, servers: Sequence[PubKey]) -> int:
        """Refuse new transports, and tell the clients that understand it where else to go.

        :returns: how many were told.
        """
        self.draining = True
        frame = encode_drain(seconds, servers)
        told = [peer for peer in self.peers if peer.speaks_drain]
        for peer in told:
            self._answer(peer, frame)
        return len(told)

    # --- congestion ---

    def congest(self, peer: RelayPeer) -> None:
        """The peer's queue is longer than it should be."""
        if peer in self.peers:
            self.congestion.begin(peer)

    def relieve(self, peer: RelayPeer) -> None:
        """The peer's queue is empty again."""
        self.congestion.relieve(peer)

    def stall(self, peer: RelayPeer) -> None:
        """The peer stayed congested: its sources are read again, within the limits."""
        self.congestion.stall(peer)

    # --- what is sent by the table itself ---

    def _answer(self, peer: RelayPeer, frame: bytes) -> None:
        """Send a control frame; a peer that provokes many and reads none is ended."""
        if peer not in self.peers:
            return
        if not peer.congested or self.congestion.takes_answer(peer, len(frame)):
            peer.port.send(frame)
        else:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)

    def _new_id(self, peer: RelayPeer) -> int:
        """The next free odd id: upwards by two, so that none is used again early."""
        to_id = peer.next_id
        while to_id in peer.routes:  # ends: max_transports is below the number of ids
            to_id = (to_id + 2) % ID_COUNT
        peer.next_id = (to_id + 2) % ID_COUNT
        return to_id

    # --- self-check ---

    def check(self) -> None:
        """Compare the tables with each other.

        :raises AssertionError: they disagree; never seen unless this module is wrong.
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
