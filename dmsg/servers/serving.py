"""A server's side of its clients' connections: who is admitted is given to one relay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from prometheus_client import Histogram
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.blocks import blocks_of
from dmsg.net.isolate import isolated
from dmsg.net.links.acceptor import MAX_HANDSHAKES, Acceptor
from dmsg.net.links.link import Link
from dmsg.net.turn_share import STEPS
from dmsg.net.turns import Hold
from dmsg.servers.admission import Admission
from dmsg.servers.registration import Registration
from dmsg.servers.relays import LimitsT, PeerT, ServedRelay

FRAME_RATE = 100_000.0
"""Frames a second of one address that are handled one by one, by default: control frames, frames of no transport, and
those that go elsewhere than the ones before them.  More is read later."""
CLOSED_AT_ONCE = 512
"""Transports of a connection that ended that are closed in one turn of the reactor."""
STRAY_RATE = 2_000.0
"""Frames of no transport a second of one address, beyond what each client may send, before its connection ends."""
STRAY_BURST = 200_000.0
"""And so many at once: what the windows of many transports hold when their other ends are lost."""
REFUSED_RATE = 2_000.0
"""REQUESTs or OpenChannels a second from one address that are over the rate of their destinations, before those of its
connections end that go on with them."""
REFUSED_BURST = 4_000.0
"""The same, at once."""
_COUNTED_BY_RELAY = frozenset(
    {
        DropReason.REPLACED,
        DropReason.SEND_BUFFER_FULL,
        DropReason.TOO_MANY_CONNECTIONS,
        DropReason.TOO_MANY_FROM_ADDRESS,
        DropReason.CROWDED_OUT,
        DropReason.DRAINING,
        DropReason.FLOODED_BEFORE,
    }
)
"""Ends of links that are counted where they are decided."""


class ServedSession(Generic[PeerT, LimitsT]):
    """One connected client of a server; it is served once it is admitted."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: ServingFactory[PeerT, LimitsT]) -> None:
        self._factory = factory
        self._peer: PeerT | None = None
        self.link: Link | None = None

    @property
    def backlog(self) -> int:
        """Bytes that wait for it before they come to its link."""
        return self._factory.backlog_of(self._peer) if self._peer is not None else 0

    # --- for a family ---

    def _connected(self, link: Link) -> None:
        """The handshake is done, nothing is decided yet."""

    def _serve(self, link: Link) -> PeerT:
        """It is admitted: let the relay have it.  :returns: what the relay calls it."""
        assert link.remote is not None
        return self._factory.relay.add(link.remote, link)

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        """There is no room, or this key is not, or no longer, admitted."""
        assert self.link is not None
        self.link.close(reason)

    @property
    def idle(self) -> bool:
        """Whether the client has no transport, and asks for none."""
        return self._peer is None or not self._factory.is_busy(self._peer)

    def crowd_out(self) -> None:
        """Its place is another client's: old programs connect again, and are then refused as at any full server."""
        assert self.link is not None
        self.link.close(DropReason.CROWDED_OUT)

    # --- the link's side ---

    def link_up(self, link: Link) -> None:
        self.link = link
        assert link.remote is not None
        self._connected(link)
        self._factory.session_up(self)
        if link.ended_for is not None:
            return
        admitted = self._factory.admission.check(link.remote)
        if isinstance(admitted, bool):
            self._decided(admitted)
            return
        link.hold(Hold.PENDING)

        def decided(result: bool | Failure) -> None:
            if self.link is not None:
                link.release(Hold.PENDING)
                self._decided(result is True)
                link.read_again()

        admitted.addBoth(decided)

    def _decided(self, admitted: bool) -> None:
        link = self.link
        assert link is not None
        if not admitted:
            self.refuse()
        elif link.ended_for is None and self._factory.keep_place(self):
            self._peer = self._serve(link)

    def frames_received(self, buffer: bytearray, end: int) -> int:
        if self._peer is None:
            return 0 if self.link is not None and self.link.ended_for is None else end
        relay, link = self._factory.relay, self.link
        taken = relay.receive_frames(self._peer, buffer, end, STEPS)
        if relay.steps and link is not None:
            if relay.steps >= STEPS:
                link.left()
            self._factory.paid(link, self._peer, relay.steps, relay.strays, relay.refused)
        return taken

    def link_congested(self) -> None:
        if self._peer is not None:
            self._factory.relay.congest(self._peer)

    def link_relieved(self) -> None:
        if self._peer is not None:
            self._factory.relay.relieve(self._peer)

    def link_lost(self, reason: Failure) -> None:
        self._leave()
        self._factory.session_down(self)
        self.link = None

    def _leave(self) -> None:
        """A little at a time: others are not to wait until thousands of transports are closed."""

        def close_some(peer: PeerT) -> None:
            if not self._factory.relay.remove(peer, CLOSED_AT_ONCE):
                self._factory.later(self._leave)

        if self._peer is not None:
            isolated(close_some, self._peer)


class ServingFactory(Acceptor, Generic[PeerT, LimitsT]):
    """Accepts links, admits their keys, and gives them to one relay.

    :ivar relay: of the family.
    :ivar relay_seconds: how long the relay takes, one turn of the reactor at a time.
    """

    relay: ServedRelay[PeerT, LimitsT]
    relay_seconds: Histogram

    def __init__(
        self,
        reactor: IReactorTime,
        drops: Counter[DropReason],
        *,
        admission: Admission | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
    ) -> None:
        super().__init__(reactor, drops, max_handshakes=max_handshakes, counted=_COUNTED_BY_RELAY)
        self.admission = admission or Admission()
        self._timers: dict[PeerT, IDelayedCall] = {}
        self._frames = RateLimit(FRAME_RATE, FRAME_RATE, blocks_of)
        self._strays = RateLimit(STRAY_RATE, STRAY_BURST, blocks_of)
        self._refusals = RateLimit(REFUSED_RATE, REFUSED_BURST, blocks_of)
        self.registration: Registration | None = None
        """The server's entry in discovery; None: nobody keeps one."""
        self.slowed = 0
        """How often a client was read later for its frames a second."""

    @property
    def limits(self) -> LimitsT:
        """What one client may have; may be set at any time."""
        return self.relay.limits

    @limits.setter
    def limits(self, limits: LimitsT) -> None:
        self.relay.limits = limits

    @property
    def draining(self) -> bool:
        """Nobody new is taken: the clients are told to leave, or all is closed."""
        return self.relay.draining

    def _sessions_changed(self) -> None:
        if self.registration is not None:
            self.registration.changed()

    def admission_changed(self) -> None:
        """The lists are others now: end the connections of those who are no longer admitted."""
        for session in list(self.sessions):
            link = session.link
            if link is not None and link.remote is not None and self.admission.listed(link.remote) is False:
                session.refuse()

    def later(self, call: Callable[[], None]) -> None:
        """In the next turn of the reactor."""
        self._reactor.callLater(0, call)

    def _once_after(self, seconds: float, peer: PeerT, call: Callable[[PeerT], None]) -> None:
        """Tell the relay something of ``peer`` in a while, unless that is due already."""
        if peer in self._timers:
            return

        def due() -> None:
            del self._timers[peer]
            call(peer)

        self._timers[peer] = self._reactor.callLater(seconds, due)

    def paid(self, link: Link, peer: PeerT, steps: int, strays: int, refused: int) -> None:
        """Charge the address of a link for frames that were handled one by one.

        :param strays: frames of no transport among them, beyond what a client may send.
        :param refused: those that were refused because others would have had to answer too many.
        :raises RemoteProtocolError: more of these than can be an accident.
        """
        now = self._reactor.seconds()
        owner = str(link.owner)
        wait = self._frames.charge(owner, steps, now)
        if wait > 0.0 and Hold.TOO_FAST not in link.held_by:
            self.slowed += 1
            link.hold(Hold.TOO_FAST)
            self._reactor.callLater(wait, link.release, Hold.TOO_FAST)
        if strays and self._strays.charge(owner, strays, now) > 0.0:
            raise RemoteProtocolError(DropReason.FLOOD, "flood of frames without a transport")
        if refused and self._refusals.charge(owner, refused, now) > 0.0 and peer.police.goes_on(now):
            raise RemoteProtocolError(DropReason.FLOOD, "flood of requests")

    def is_busy(self, peer: PeerT) -> bool:
        """Whether a client has something open."""
        raise NotImplementedError

    def backlog_of(self, peer: PeerT) -> int:
        """Bytes that the relay itself keeps for a client."""
        return 0

    def _close_relay(self) -> None:
        """Close what clients have open, and take nobody new."""
        raise NotImplementedError

    def drain(self) -> Deferred[None]:
        """Close everything, take nobody new; fires when all are gone."""
        self._close_relay()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        return self.close_all()


AnyServing: TypeAlias = ServingFactory[Any, Any]
"""Factory of whichever family, for those who never give it a client or limits of their own."""
