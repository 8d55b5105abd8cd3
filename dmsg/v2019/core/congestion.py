"""Back-pressure and queue limits for clients that read more slowly than others send to them. No I/O.

A peer is *congested* while too many bytes are queued for it, because its connection accepts them too slowly. The
*sources* of a peer are the connections of the clients that send to it. While all routes of a source lead to the
congested peer, the relay pauses reading from that source. Other sources are not paused, so that no other pair of
clients has to wait. The pause is limited in time; after it, the peer is *stalled*. Then a route may queue
``ROUTE_QUEUE_LIMIT`` bytes, and all routes together ``PEER_QUEUE_LIMIT`` bytes. A route that exceeds its limit is
closed with a reason; the other routes continue.
"""

from __future__ import annotations

from collections.abc import Callable

from dmsg.v2019.core.peers import RelayPeer, Route

ROUTE_QUEUE_LIMIT = 2 * 1024 * 1024
"""Maximum bytes of one route in the queue of a congested peer."""
PEER_QUEUE_LIMIT = 16 * 1024 * 1024
"""Number of bytes in a peer's queue above which routes that use more than an equal share of it are closed."""
ANSWERS_MAXIMUM = 4 * 1024 * 1024
"""Number of bytes by which control frames may exceed ``PEER_QUEUE_MAXIMUM`` in a peer's queue before the peer is
disconnected. Only answers to the peer's own frames can become so many. Other clients can fill the queue only up to
``PEER_QUEUE_MAXIMUM``."""
PEER_QUEUE_MAXIMUM = PEER_QUEUE_LIMIT + 4 * 1024 * 1024
"""Maximum bytes of a peer's queue for forwarded frames. A transport whose frames would exceed this limit is closed. If
control frames exceed this limit by more than ``ANSWERS_MAXIMUM``, the peer's own connection is closed."""


class Congestion:
    """Rules that pause the sources of congested peers, and limit the bytes queued for these peers.

    :param on_paused: callback invoked with a congested peer when its first source is paused. The caller then starts a
        timer that calls :meth:`stall`.
    """

    def __init__(self, on_paused: Callable[[RelayPeer], None]) -> None:
        self._on_paused = on_paused

    def begin(self, peer: RelayPeer) -> None:
        """Mark a peer as congested, because its queue is above the high-water mark."""
        if not peer.congested:
            peer.congested = True
            peer.sent = peer.port.queued()
            for route in peer.routes.values():
                route.back.queued = route.back.mark = 0

    def relieve(self, peer: RelayPeer) -> None:
        """Mark a peer as no longer congested, because its queue is empty, and resume reading from its sources."""
        peer.congested = False
        peer.stalled = False
        self._release_sources(peer)

    def stall(self, peer: RelayPeer) -> None:
        """Mark a peer as stalled, because it has been congested for too long. Reading from its sources is resumed.
        From now on, only the queue limits apply to what they send to the peer."""
        if peer.congested:
            peer.stalled = True
            self._release_sources(peer)

    def forget(self, peer: RelayPeer) -> None:
        """Remove a peer that has disconnected, and resume reading from the sources that were paused for it."""
        peer.congested = False
        self._release_sources(peer)
        if peer.paused_by is not None:
            peer.paused_by.pausing.pop(peer, None)
            peer.paused_by = None

    @staticmethod
    def reserve(route: Route, size: int) -> bool:
        """Count ``size`` more bytes of ``route`` in the queue of its congested peer. If they would exceed a limit,
        count nothing and return False. The caller must then close the transport."""
        destination = route.peer
        queue = destination.port.queued()
        if destination.sent - queue >= route.mark:  # All bytes of route.queued are sent, so a new count begins.
            route.queued = 0
            route.mark = destination.sent
        queued = route.queued + size
        # Above the peer's limit, only routes with more than an equal share of the queue are closed, so that quiet
        # routes survive a flood by others.
        if (
            queued > ROUTE_QUEUE_LIMIT
            or queue + size > PEER_QUEUE_MAXIMUM
            or (queue > PEER_QUEUE_LIMIT and queued > PEER_QUEUE_LIMIT // len(destination.routes))
        ):
            return False
        route.queued = queued
        destination.sent += size
        return True

    @staticmethod
    def reserve_answer(peer: RelayPeer, size: int) -> bool:
        """Count a control frame of ``size`` bytes in the queue of a congested peer. If it would exceed the limit, count
        nothing and return False."""
        if peer.port.queued() + size > PEER_QUEUE_MAXIMUM + ANSWERS_MAXIMUM:
            return False
        peer.sent += size
        return True

    def pause_if_alone(self, source: RelayPeer, destination: RelayPeer) -> None:
        """Pause reading from ``source`` if all its routes lead to the congested ``destination``."""
        # A source with several destinations is not paused. Otherwise one slow reader would stop the source's traffic to
        # all others.
        if source.paused_by is None and not destination.stalled and len(source.destinations) == 1:
            source.paused_by = destination
            first = not destination.pausing
            destination.pausing[source] = None
            source.port.pause_reading()
            if first:
                self._on_paused(destination)

    @staticmethod
    def route_added(source: RelayPeer, destination: RelayPeer) -> None:
        """Resume a source that is paused for another peer than ``destination``, because not all of its routes lead to
        that peer any more."""
        if source.paused_by not in (None, destination):
            _resume(source)

    @staticmethod
    def route_removed(source: RelayPeer, destination: RelayPeer) -> None:
        """Resume a source that is paused for ``destination``, because its last route to ``destination`` was removed."""
        if source.paused_by is destination:
            _resume(source)

    @staticmethod
    def _release_sources(peer: RelayPeer) -> None:
        # The state is cleared before the call, because a source that is resumed may congest the peer again at once.
        while peer.pausing:
            source = next(iter(peer.pausing))  # The source that has been paused for longest is resumed first.
            del peer.pausing[source]
            source.paused_by = None
            source.port.resume_reading()


def _resume(source: RelayPeer) -> None:
    assert source.paused_by is not None
    source.paused_by.pausing.pop(source, None)
    source.paused_by = None
    source.port.resume_reading()
