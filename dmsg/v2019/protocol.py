"""Twisted protocol and factory of the server, over links with Noise encryption.

``ServerSession`` connects one link to the relay. The rules of the protocol are in :mod:`dmsg.v2019.core.relay`; this
module adds timers and flow control. The client's counterpart is :mod:`dmsg.v2019.session`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import Bucket
from dmsg.base.policing import BURST_SECONDS
from dmsg.errors import (
    CloseReason,
    DropReason,
)
from dmsg.keys import PubKey, SecKey
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import HANDSHAKE_TIMEOUT, Link
from dmsg.net.links.link_counts import MAX_HANDSHAKES
from dmsg.net.links.records import RecordLink
from dmsg.net.turns import HoldReason
from dmsg.noise.xk import XKHandshake
from dmsg.servers.admission import Admission
from dmsg.servers.serving import ServedSession, ServingFactory
from dmsg.telemetry.latencies import DurationHistogram
from dmsg.v2019.core.peers import RelayPeer
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.wire import OK_FRAME, encode_close, encode_drain

if TYPE_CHECKING:
    from dmsg.telemetry.relays import RelayTelemetry
    from dmsg.telemetry.service import Telemetry

ROUTE_SIZE = 450
"""Number of bytes of memory that a server uses for one end of a transport."""
STALL_GRACE = 0.5
"""Maximum number of seconds for which reading from sources is paused because their receiver does not read."""

_TOLD = {
    DropReason.NOT_ADMITTED: CloseReason.NOT_ADMITTED,
    DropReason.TOO_MANY_CONNECTIONS: CloseReason.FULL,
    DropReason.TOO_MANY_FROM_ADDRESS: CloseReason.TOO_MANY_FROM_ADDRESS,
    DropReason.FLOODED_BEFORE: CloseReason.RATE_LIMITED,
}
_log = Logger()


class ServerSession(ServedSession[RelayPeer, Limits]):
    """Server's session with one connected client."""

    __slots__ = ("_bytes", "_opened", "_slow", "number")

    _factory: ServerFactory

    def __init__(self, factory: ServerFactory) -> None:
        super().__init__(factory)
        self._bytes: Bucket | None = None
        self._slow: IDelayedCall | None = None
        self._opened = 0.0
        self.number = 0
        """Number of the session in telemetry; 0 if telemetry is off."""

    def _connected(self, link: Link) -> None:
        factory = self._factory
        self._opened = factory.now()
        if factory.telemetry is not None:
            self.number = factory.telemetry.session_opened(link, self._opened - link.made_at)

    def _serve(self, link: Link) -> RelayPeer:
        link.send(OK_FRAME)
        return super()._serve(link)

    def refuse(self, reason: DropReason = DropReason.NOT_ADMITTED) -> None:
        """Send the client the reason for the refusal, such as a full server or a key that is not admitted, and close
        the link."""
        assert self.link is not None
        self.link.send(encode_close(0, _TOLD.get(reason, CloseReason.UNSPECIFIED)))
        super().refuse(reason)

    def crowd_out(self) -> None:
        """Close the link, because the server is full and needs the place for another client. A client that understands
        DRAIN first receives a DRAIN, so that it moves its streams at once."""
        if self._peer is not None and self._peer.speaks_drain and self.link is not None:
            self.link.send(encode_drain(0, ()))
        super().crowd_out()

    def frames_received(self, buffer: bytearray, end: int) -> int:
        taken = super().frames_received(buffer, end)
        if self._peer is not None and self._factory.limits.byte_rate:
            self._slow_down(taken)
        return taken

    def _slow_down(self, taken_bytes: int) -> None:
        """Pause reading from a client that exceeds its byte rate. Meanwhile, its data wait on its own machine."""
        factory = self._factory
        rate = factory.limits.byte_rate
        now = factory.now()
        if self._bytes is None:
            self._bytes = Bucket(rate * BURST_SECONDS, now)
        self._bytes.fill(rate, rate * BURST_SECONDS, now)
        self._bytes.level -= taken_bytes
        if self._bytes.level < 0 and self._slow is None and self.link is not None:
            factory.throttled += 1
            self.link.hold(HoldReason.THROTTLED)
            self._slow = factory.call_later(-self._bytes.level / rate, self._proceed)

    def _proceed(self) -> None:
        self._slow = None
        if self.link is not None:
            self.link.release(HoldReason.THROTTLED)

    def link_lost(self, reason: Failure) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        link, peer = self.link, self._peer
        super().link_lost(reason)
        if self.number and self._factory.telemetry is not None and link is not None:
            self._factory.telemetry.session_closed(self.number, link, self._factory.now() - self._opened, peer)


class ServerFactory(ServingFactory[RelayPeer, Limits]):
    """Factory that accepts connections for one relay.

    :ivar relay: core of the server, with the tables of connections and routes and the drop counters.
    """

    relay: Relay

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        *,
        limits: Limits | None = None,
        admission: Admission | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        random: Random | None = None,
        ephemeral: Callable[[], SecKey | None] = lambda: None,
        telemetry: Telemetry | None = None,
        aes_gcm: bool = False,
    ) -> None:
        self._key = key
        self._aes_gcm = aes_gcm
        self.telemetry: RelayTelemetry | None = None
        if telemetry is not None:
            # The import is here, because most servers run without telemetry.
            from dmsg.telemetry.relays import RelayTelemetry

            self.telemetry = RelayTelemetry(telemetry, reactor.seconds, bytes(key.public))
        self.relay_seconds = DurationHistogram()
        self._turn = TurnFlush(reactor, self.relay_seconds.observe)
        self._ephemeral = ephemeral
        self._handshake_timeout = handshake_timeout
        self.throttled = 0
        """Number of times that reading from a client was paused because of its byte rate."""
        self.now = reactor.seconds
        self.call_later = reactor.callLater
        self.relay = Relay(
            limits=limits, now=reactor.seconds, random=random, on_congested=self._watch, observer=self.telemetry
        )
        super().__init__(reactor, self.relay.drops, admission=admission, max_handshakes=max_handshakes)
        if telemetry is not None and self.telemetry is not None:
            self.telemetry.relay = self.relay
            telemetry.loads.append(self._load)
            telemetry.about["capacity"] = self.limits.max_connections

    def _load(self) -> dict[str, object]:
        """Return the figures of the server's load for the heartbeat of telemetry."""
        assert self.telemetry is not None
        registration = self.registration
        return {
            "sessions": len(self.sessions),
            "capacity": self.limits.max_connections,
            "handshakes": self.handshakes,
            "registered": registration.is_registered if registration is not None and registration.is_wanted else None,
            **self.telemetry.load(),
        }

    def _make_link(self) -> Link:
        return RecordLink(
            self._reactor,
            self._turn,
            XKHandshake(self._key, ephemeral=self._ephemeral(), aes_gcm=self._aes_gcm),
            self._make_session,
            on_failure=self._handshake_failed,
            timeout=self._handshake_timeout,
            tuned=self.tuned,
        )

    def _make_session(self, remote: PubKey) -> ServerSession:
        return ServerSession(self)

    def _failed(self, reason: DropReason, host: str | None) -> None:
        if self.telemetry is not None:
            self.telemetry.handshake_failed(reason, host)

    def is_busy(self, peer: RelayPeer) -> bool:
        return bool(peer.routes)

    def backlog_of(self, peer: RelayPeer) -> int:
        return len(peer.routes) * ROUTE_SIZE

    def _watch(self, peer: RelayPeer) -> None:
        self._schedule_once(STALL_GRACE, peer, self.relay.stall)

    def _close_relay(self) -> None:
        self.relay.close_all(CloseReason.SHUTTING_DOWN)
