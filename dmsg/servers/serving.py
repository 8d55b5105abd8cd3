"""Server's side of the connections of clients: checks whether a client is admitted, and adds admitted clients to the
relay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.base.buckets import RateLimit
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.net.blocks import blocks_of
from dmsg.net.isolate import call_isolated
from dmsg.net.links.acceptor import Acceptor
from dmsg.net.links.link import Link
from dmsg.net.links.link_counts import MAX_HANDSHAKES
from dmsg.net.own_pauses import FairTimeout
from dmsg.net.turn_share import SERVER_FRAMES
from dmsg.net.turns import HoldReason
from dmsg.servers.admission import Admission
from dmsg.servers.registration import Registration
from dmsg.servers.relays import LimitsT, PeerT, ServedRelay
from dmsg.telemetry.latencies import DurationHistogram

FRAME_RATE = 100_000.0
"""Maximum number of frames per second that a server handles for one address; above it, reads are delayed. Consecutive
data frames of one transport are forwarded together, and count as one frame. Each control or stray frame counts as one.
"""
CLOSED_AT_ONCE = 512
"""Maximum number of transports of a lost client that are closed in one reactor turn."""
STRAY_RATE = 2_000.0
"""Number of stray frames per second from one address, not counting those that are within the limits of its clients.
Above this number, the connection that sends them is closed.
"""
STRAY_BURST = 200_000.0
"""Burst of the stray frames that ``STRAY_RATE`` limits. It is large, because many transports may end at the same time,
and then whole windows of data for them are still on the way.
"""
REFUSED_RATE = 2_000.0
"""Number of requests (REQUEST, OpenChannel) per second from one address that may be refused because of the rate limit
of their destinations. Above this number, connections that continue to send them are closed.
"""
REFUSED_BURST = 4_000.0
"""Burst of the refused requests that ``REFUSED_RATE`` limits."""
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
"""Reasons for the end of a link that the link does not count, because the code that ends the link counts them."""


class ServedSession(Generic[PeerT, LimitsT]):
    """Server's session of a connected client. The relay handles the client's frames once the client is admitted."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: ServingFactory[PeerT, LimitsT]) -> None:
        self._factory = factory
        self._peer: PeerT | None = None
        self.link: Link | None = None

    @property
    def backlog(self) -> int:
        """Number of bytes that the relay has queued for the client and not yet written to the client's link."""
        return self._factory.backlog_of(self._peer) if self._peer is not None else 0

    # --- hooks for a protocol family ---

    def _connected(self, link: Link) -> None:
        """Prepare the session after the handshake, before it is decided whether the client is admitted."""

    def _serve(self, link: Link) -> PeerT:
        """Add the client to the relay, because it is admitted.

        :returns: object with which the relay represents the client.
        """
        assert link.remote is not None
        return self._factory.relay.add(link.remote, link)

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        """Close the link to the client for ``reason``: because the server is full, or does not admit the client's key
        (any more).
        """
        assert self.link is not None
        self.link.close(reason)

    @property
    def idle(self) -> bool:
        """Whether the client has no transport, open or opening."""
        return self._peer is None or not self._factory.is_busy(self._peer)

    def crowd_out(self) -> None:
        """Close the link to make room for another client. Clients that do not support DRAIN reconnect, and are refused
        then, because the server is full.
        """
        assert self.link is not None
        self.link.close(DropReason.CROWDED_OUT)

    # --- called by the link ---

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
                # Only True admits the client. After an error of the hook the result is a Failure, which refuses the
                # client.
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
            # Until it is decided whether the client is admitted, its frames stay in the link's buffer. After a refusal
            # they are dropped.
            return 0 if self.link is not None and self.link.ended_for is None else end
        relay, link = self._factory.relay, self.link
        # At most STEPS frames are handled one by one in a call. Otherwise a single read of tiny frames could delay all
        # other clients.
        taken = relay.receive_frames(self._peer, buffer, end, SERVER_FRAMES)
        if relay.steps and link is not None:
            if relay.steps >= SERVER_FRAMES:
                # The relay stopped at the limit, so whole frames may be left in the buffer.
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
        """Close the client's transports, a limited number per reactor turn. A client may have thousands, and to close
        all at once would delay other clients.
        """

        def close_some(peer: PeerT) -> None:
            if not self._factory.relay.remove(peer, CLOSED_AT_ONCE):
                self._factory.call_next_turn(self._leave)

        if self._peer is not None:
            call_isolated(close_some, self._peer)


class ServingFactory(Acceptor, Generic[PeerT, LimitsT]):
    """Factory that accepts links, checks the admission of their keys, and adds them to one relay.

    :ivar relay: relay of the protocol family.
    :ivar relay_seconds: histogram of the seconds that the relay works in one reactor turn.
    """

    relay: ServedRelay[PeerT, LimitsT]
    relay_seconds: DurationHistogram

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
        self._timeouts: dict[PeerT, FairTimeout] = {}
        self._frames = RateLimit(FRAME_RATE, FRAME_RATE, blocks_of)
        self._strays = RateLimit(STRAY_RATE, STRAY_BURST, blocks_of)
        self._refusals = RateLimit(REFUSED_RATE, REFUSED_BURST, blocks_of)
        self.registration: Registration | None = None
        """Publisher of the server's entry; None if the server has none."""
        self.slowed = 0
        """Number of reads that were delayed because an address sent too many frames per second."""

    @property
    def limits(self) -> LimitsT:
        """Limits for each client, which may be changed at any time."""
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
        """Disconnect the clients that the changed lists no longer admit."""
        # Refusing a session changes the set of sessions, so the loop runs over a copy.
        for session in list(self.sessions):
            link = session.link
            if link is not None and link.remote is not None and self.admission.listed(link.remote) is False:
                session.refuse()

    def call_next_turn(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the next reactor turn."""
        self._reactor.callLater(0, call)

    def _schedule_once(self, seconds: float, peer: PeerT, call: Callable[[PeerT], None]) -> None:
        """Call ``call`` with ``peer`` after ``seconds``, unless a call for this client is already scheduled.

        Pauses of this process do not count, because the client could not be served in them.
        """
        if peer in self._timeouts:
            return

        def due() -> None:
            del self._timeouts[peer]
            call(peer)

        self._timeouts[peer] = FairTimeout(self._reactor, seconds, due)

    def charge_frames(self, link: Link, peer: PeerT, steps: int, strays: int, refused: int) -> None:
        """Count frames of a read against the rate limits of the link's address, and delay further reads above the
        limit.

        :param steps: number of frames that were handled one by one.
        :param strays: number of the frames in ``steps`` that belonged to no transport and exceeded the client's limit
            of such frames.
        :param refused: number of the frames in ``steps`` that exceeded the rate limit of their destination.
        :raises RemoteProtocolError: the address has sent too many stray or refused frames; the connection has to end.
        """
        # Frames are counted for the address and not for the connection, because an attacker can open many connections.
        now = self._reactor.seconds()
        owner = str(link.owner)
        wait = self._frames.charge(owner, steps, now)
        # A client that sends too fast is only read more slowly. If its connection were closed, it would just reconnect.
        if wait > 0.0 and HoldReason.TOO_FAST not in link.held_by:
            self.slowed += 1
            link.hold(HoldReason.TOO_FAST)
            self._reactor.callLater(wait, link.release, HoldReason.TOO_FAST)
        if strays and self._strays.charge(owner, strays, now) > 0.0:
            raise RemoteProtocolError(
                DropReason.FLOOD, "the client sent too many frames that belong to none of its transports"
            )
        if refused and self._refusals.charge(owner, refused, now) > 0.0 and peer.police.ignores_refusals(now):
            raise RemoteProtocolError(
                DropReason.FLOOD, "the client sent too many requests to destinations at their rate limit"
            )

    def is_busy(self, peer: PeerT) -> bool:
        """Whether a client has transports or channels open."""
        raise NotImplementedError

    def backlog_of(self, peer: PeerT) -> int:
        """Return the number of bytes that the relay itself has queued for a client."""
        return 0

    def _close_relay(self) -> None:
        """Close all transports in the relay, and refuse new clients."""
        raise NotImplementedError

    def drain(self) -> Deferred[None]:
        """Close all transports and all connections, and refuse new clients.

        :returns: Deferred that fires when all clients are disconnected.
        """
        self._close_relay()
        for timeout in self._timeouts.values():
            timeout.stop()
        self._timeouts.clear()
        return self.close_all()


AnyServing: TypeAlias = ServingFactory[Any, Any]
"""Type of the factory of any protocol family, for code that does not depend on the family's types of clients and
limits.
"""
