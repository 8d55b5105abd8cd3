"""Clients that read slower than they are sent to.  No I/O.

A peer whose port has more queued than it can send is *congested*.  A source is
paused for it only while all its routes lead there, so that no other pair waits,
and for a bounded time; beyond that each route may queue ``ROUTE_QUEUE_LIMIT``
and the peer ``PEER_QUEUE_LIMIT`` bytes, and past those the route is closed with
a reason while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable

from dmsg.v2019.core.peers import RelayPeer, Route

ROUTE_QUEUE_LIMIT = 2 * 1024 * 1024
"""Bytes that one route may have in a congested peer's queue."""
PEER_QUEUE_LIMIT = 16 * 1024 * 1024
"""Bytes in a peer's queue beyond which routes that use more than their share are closed."""
ANSWERS_MAXIMUM = 4 * 1024 * 1024
"""Bytes of control frames beyond ``PEER_QUEUE_MAXIMUM``: others can fill the queue, only
the peer itself provokes so many answers."""
PEER_QUEUE_MAXIMUM = PEER_QUEUE_LIMIT + 4 * 1024 * 1024
"""Bytes of forwarded frames in a peer's queue: a transport for which there is no room is closed.  With
``ANSWERS_MAXIMUM`` more, of control frames, the peer's own connection ends."""


class Congestion:
    """Which peers are congested, and who is not read for that.

    :param on_paused: told when a source was paused for that peer, so that :meth:`stall` can follow after a time.
    """

    def __init__(self, on_paused: Callable[[RelayPeer], None]) -> None:
        self._on_paused = on_paused

    def begin(self, peer: RelayPeer) -> None:
        """The peer's queue is longer than it should be."""
        if not peer.congested:
            peer.congested = True
            peer.sent = peer.port.queued()
            for route in peer.routes.values():
                route.back.queued = route.back.mark = 0

    def relieve(self, peer: RelayPeer) -> None:
        """The peer's queue is empty again."""
        peer.congested = False
        peer.stalled = False
        self._release_sources(peer)

    def stall(self, peer: RelayPeer) -> None:
        """The peer stayed congested: its sources are read again, within the limits."""
        if peer.congested:
            peer.stalled = True
            self._release_sources(peer)

    def forget(self, peer: RelayPeer) -> None:
        """The peer is gone."""
        peer.congested = False
        self._release_sources(peer)
        if peer.paused_by is not None:
            peer.paused_by.pausing.discard(peer)
            peer.paused_by = None

    @staticmethod
    def takes(route: Route, size: int) -> bool:
        """Whether the congested peer of ``route`` has room for so many bytes more; if so, they are counted."""
        destination = route.peer
        queue = destination.port.queued()
        if destination.sent - queue >= route.mark:  # all that was counted is sent
            route.queued = 0
            route.mark = destination.sent
        route.queued += size
        if (
            route.queued > ROUTE_QUEUE_LIMIT
            or queue > PEER_QUEUE_MAXIMUM
            or (queue > PEER_QUEUE_LIMIT and route.queued > PEER_QUEUE_LIMIT // len(destination.routes))
        ):
            return False
        destination.sent += size
        return True

    @staticmethod
    def takes_answer(peer: RelayPeer, size: int) -> bool:
        """Whether a congested peer has room for a control frame; if so, it is counted."""
        if peer.port.queued() > PEER_QUEUE_MAXIMUM + ANSWERS_MAXIMUM:
            return False
        peer.sent += size
        return True

    def pause_if_alone(self, source: RelayPeer, destination: RelayPeer) -> None:
        """Read no more from a source all of whose routes lead to a congested peer."""
        if source.paused_by is None and not destination.stalled and len(source.destinations) == 1:
            source.paused_by = destination
            first = not destination.pausing
            destination.pausing.add(source)
            source.port.pause_reading()
            if first:
                self._on_paused(destination)

    @staticmethod
    def routed(source: RelayPeer, destination: RelayPeer) -> None:
        """A route from one to the other is there: a source that is paused for somebody else is not alone any more."""
        if source.paused_by not in (None, destination):
            _resume(source)

    @staticmethod
    def unrouted(source: RelayPeer, destination: RelayPeer) -> None:
        """No route leads from one to the other any more."""
        if source.paused_by is destination:
            _resume(source)

    @staticmethod
    def _release_sources(peer: RelayPeer) -> None:
        while peer.pausing:
            source = peer.pausing.pop()
            source.paused_by = None
            source.port.resume_reading()


def _resume(source: RelayPeer) -> None:
    assert source.paused_by is not None
    source.paused_by.pausing.discard(source)
    source.paused_by = None
    source.port.resume_reading()
