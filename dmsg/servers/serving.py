"""Server side of clients' connections: checks admission, and gives admitted clients to the relay."""

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
from dmsg.net.isolate import call_isolated
from dmsg.net.links.acceptor import MAX_HANDSHAKES, Acceptor
from dmsg.net.links.link import Link
from dmsg.net.turn_share import STEPS
from dmsg.net.turns import HoldReason
from dmsg.servers.admission import Admission
from dmsg.servers.registration import Registration
from dmsg.servers.relays import LimitsT, PeerT, ServedRelay

FRAME_RATE = 100_000.0
"""Frames per second of one address that are handled one by one, by default; further reads are delayed. These are
control frames, frames of no transport, and frames to another destination than the previous one.
"""
CLOSED_AT_ONCE = 512
"""Maximum number of transports of a lost connection that are closed in one turn of the reactor."""
STRAY_RATE = 2_000.0
"""Number of frames without a transport, above the limits of its clients, that one address may send per second; above
it, the sending connection is ended."""
STRAY_BURST = 200_000.0
"""Number of such frames that one address may send in a burst.  When the other ends of many transports are lost, the
windows of all of them may be full."""
REFUSED_RATE = 2_000.0
"""REQUESTs or OpenChannels per second of one address that may exceed the rate of their destinations. Above it,
connections that continue are ended.
"""
REFUSED_BURST = 4_000.0
"""REQUESTs or OpenChannels above the rate of their destinations that one address may send in a burst."""
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
"""Reasons for the end of a link that are counted where they are decided."""


class ServedSession(Generic[PeerT, LimitsT]):
    """Session of a connected client, which is served once it is admitted."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: ServingFactory[PeerT, LimitsT]) -> None:
        self._factory = factory
        self._peer: PeerT | None = None
        self.link: Link | None = None

    @property
    def backlog(self) -> int:
        """Number of bytes that the relay has queued for the client and not yet given to its link."""
        return self._factory.backlog_of(self._peer) if self._peer is not None else 0

    # --- hooks for a protocol family ---

    def _connected(self, link: Link) -> None:
        """Prepare the session after the handshake, before admission is decided."""

    def _serve(self, link: Link) -> PeerT:
        """Add the admitted client to the relay.

        :returns: the relay's object for the client.
        """
        assert link.remote is not None
        return self._factory.relay.add(link.remote, link)

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        """End the link, because the server is full, or the key is not admitted or no longer."""
        assert self.link is not None
        self.link.close(reason)

    @property
    def idle(self) -> bool:
        """Whether the client has no transport and is opening none."""
        return self._peer is None or not self._factory.is_busy(self._peer)

    def crowd_out(self) -> None:
        """End the link to give its place to another client. Clients that know no DRAIN reconnect, and are then refused,
        as by any full server.
        """
        assert self.link is not None
        self.link.close(DropReason.CROWDED_OUT)

    # --- calls of the link ---

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
        link.hold(HoldReason.PENDING)

        def decided(result: bool | Failure) -> None:
            if self.link is not None:
                link.release(HoldReason.PENDING)
                # Only True admits the client; a failed hook refuses it.
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
            # The frames stay in the link's buffer until admission is decided.  After a refusal they are dropped.
            return 0 if self.link is not None and self.link.ended_for is None else end
        relay, link = self._factory.relay, self.link
        # At most STEPS frames are handled one by one in a call. Otherwise one read of tiny frames could hold up all
        # other clients.
        taken = relay.receive_frames(self._peer, buffer, end, STEPS)
        if relay.steps and link is not None:
            if relay.steps >= STEPS:
                # The relay stopped at the limit of frames, so whole frames may be left in the buffer.
                link.note_frames_left()
            self._factory.charge_frames(link, self._peer, relay.steps, relay.strays, relay.refused)
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
        """Close the client's transports, some per turn, so that others need not wait until thousands are closed."""

        def close_some(peer: PeerT) -> None:
            if not self._factory.relay.remove(peer, CLOSED_AT_ONCE):
                self._factory.call_next_turn(self._leave)

        if self._peer is not None:
            call_isolated(close_some, self._peer)


class ServingFactory(Acceptor, Generic[PeerT, LimitsT]):
    """Factory that accepts links, checks the admission of their keys, and adds them to one relay.

    :ivar relay: relay of the protocol family.
    :ivar relay_seconds: histogram of the seconds that the relay takes in one turn of the reactor.
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
        """Entry of the server in discovery; None if the server is not registered."""
        self.slowed = 0
        """Number of times that a read was delayed because of too many frames per second."""

    @property
    def limits(self) -> LimitsT:
        """Limits of one client, which may be changed at any time."""
        return self.relay.limits

    @limits.setter
    def limits(self, limits: LimitsT) -> None:
        self.relay.limits = limits

    @property
    def draining(self) -> bool:
        """Whether new clients are refused, because the server shuts down."""
        return self.relay.draining

    def _sessions_changed(self) -> None:
        if self.registration is not None:
            self.registration.changed()

    def admission_changed(self) -> None:
        """End the connections of clients that the changed lists no longer admit."""
        # Refusing a session changes the set of sessions, so the loop runs over a copy.
        for session in list(self.sessions):
            link = session.link
            if link is not None and link.remote is not None and self.admission.listed(link.remote) is False:
                session.refuse()

    def call_next_turn(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the next turn of the reactor."""
        self._reactor.callLater(0, call)

    def _schedule_once(self, seconds: float, peer: PeerT, call: Callable[[PeerT], None]) -> None:
        """Schedule a call with ``peer`` in ``seconds``, unless one is already scheduled."""
        if peer in self._timers:
            return

        def due() -> None:
            del self._timers[peer]
            call(peer)

        self._timers[peer] = self._reactor.callLater(seconds, due)

    def charge_frames(self, link: Link, peer: PeerT, steps: int, strays: int, refused: int) -> None:
        """Charge the address of a link for frames that were handled one by one.

        :param strays: number of these frames that belonged to no transport, beyond what a client may send.
        :param refused: number of these frames that were refused to protect their destinations.
        :raises RemoteProtocolError: there are more of these than can be an accident.
        """
        # The address is charged and not the connection: an attacker can open many connections, each of them within its
        # limits.
        now = self._reactor.seconds()
        owner = str(link.owner)
        wait = self._frames.charge(owner, steps, now)
        # A client above the rate is read more slowly. Its connection is not ended, because it would only reconnect.
        if wait > 0.0 and HoldReason.TOO_FAST not in link.held_by:
            self.slowed += 1
            link.hold(HoldReason.TOO_FAST)
            self._reactor.callLater(wait, link.release, HoldReason.TOO_FAST)
        if strays and self._strays.charge(owner, strays, now) > 0.0:
            raise RemoteProtocolError(DropReason.FLOOD, "too many frames that belong to no transport of this client")
        if refused and self._refusals.charge(owner, refused, now) > 0.0 and peer.police.ignores_refusals(now):
            raise RemoteProtocolError(DropReason.FLOOD, "too many requests above the rate of their destinations")

    def is_busy(self, peer: PeerT) -> bool:
        """Whether a client has transports or channels open."""
        raise NotImplementedError

    def backlog_of(self, peer: PeerT) -> int:
        """Return the number of bytes that the relay itself keeps for a client."""
        return 0

    def _close_relay(self) -> None:
        """Close all transports of clients, and refuse new clients."""
        raise NotImplementedError

    def drain(self) -> Deferred[None]:
        """Close all transports, end all connections and refuse new clients. Return a Deferred that fires when all
        clients have left."""
        self._close_relay()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        return self.close_all()


AnyServing: TypeAlias = ServingFactory[Any, Any]
"""Factory of any protocol family, for code that passes neither clients nor limits of a certain family to it."""
