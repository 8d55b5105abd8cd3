"""Protocol and factory classes of the messaging server.

``ServerSession`` gives one link to the relay.  Rules are in
:mod:`dmsg.messaging.relay`; here are Deferreds and timers.  The client's are in
:mod:`dmsg.messaging.session`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from dmsg.delegation.admission import Admission
from dmsg.errors import DropReason
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.handshake import LinkHandshake
from dmsg.messaging.policing import Limits
from dmsg.messaging.relay import Relay, RelayPeer, descending
from dmsg.messaging.wire import Profile
from dmsg.net.acceptor import MAX_HANDSHAKES, Acceptor
from dmsg.net.link import Link, TurnFlush
from dmsg.net.plain import PlainLink

HANDSHAKE_TIMEOUT = 3.0
"""Seconds for TCP accept to the last handshake frame, at both ends (Go, 2019: 3 s)."""
PENDING = 2
"""Who pauses a link, besides the relay, which is 1."""


class ServerSession:
    """One connected client of a server."""

    __slots__ = ("_factory", "_peer", "link")

    def __init__(self, factory: ServerFactory) -> None:
        self._factory = factory
        self._peer: RelayPeer | None = None
        self.link: Link | None = None

    def link_up(self, link: Link) -> None:
        self.link = link
        assert link.remote is not None
        self._factory.session_up(self)
        admitted = self._factory.admission.check(link.remote)
        if isinstance(admitted, bool):
            self._decided(admitted)
            return
        link.pause_reading(PENDING)

        def decided(result: Any) -> None:
            if self.link is not None:
                link.resume_reading(PENDING)
                self._decided(result is True)

        admitted.addBoth(decided)

    def _decided(self, admitted: bool) -> None:
        link = self.link
        assert link is not None and link.remote is not None
        if not admitted:
            self.refuse()
        elif link.ended_for is None:
            self._peer = self._factory.relay.add(link.remote, link)

    def refuse(self) -> None:
        """This key is not, or no longer, admitted."""
        assert self.link is not None
        self.link.close(DropReason.NOT_ADMITTED)

    def frames_received(self, buffer: bytearray, end: int) -> int:
        if self._peer is None:
            return 0 if self.link is not None and self.link.ended_for is None else end
        return self._factory.relay.receive_frames(self._peer, buffer, end)

    def link_congested(self) -> None:
        if self._peer is not None:
            self._factory.relay.congest(self._peer)

    def link_relieved(self) -> None:
        if self._peer is not None:
            self._factory.relay.relieve(self._peer)

    def link_lost(self, reason: Failure) -> None:
        if self._peer is not None:
            self._factory.relay.remove(self._peer)
        self._factory.session_down(self)
        self.link = None


class ServerFactory(Acceptor):
    """Accepts links and gives them to one relay.

    :ivar relay: the table, with the drop counters.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        profile: Profile = Profile.SEED,
        *,
        limits: Limits | None = None,
        admission: Admission | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
        handshake_timeout: float = HANDSHAKE_TIMEOUT,
        handshake: Callable[[], LinkHandshake] | None = None,
        choose: Callable[[RelayPeer], int | None] = descending,
    ) -> None:
        """:param handshake: and ``choose``: for tests with recorded randomness."""
        self.relay = Relay(profile, limits=limits, now=reactor.seconds, choose=choose)
        super().__init__(reactor, self.relay.drops, max_handshakes=max_handshakes, counted=_COUNTED_BY_RELAY)
        self.profile = profile
        self.admission = admission or Admission()
        self._turn = TurnFlush(reactor)
        self._handshake = handshake or (lambda: LinkHandshake(key, profile=profile))
        self._handshake_timeout = handshake_timeout

    @property
    def limits(self) -> Limits:
        """What one client may have; may be set at any time."""
        return self.relay.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.relay.limits = limits

    @property
    def draining(self) -> bool:
        """Nobody new is taken."""
        return self.relay.draining

    def admission_changed(self) -> None:
        """The lists are others now: end the links of those who are no longer admitted."""
        for session in list(self.sessions):
            link = session.link
            if link is not None and link.remote is not None and self.admission.listed(link.remote) is False:
                session.refuse()

    def _make_link(self) -> Link:
        return PlainLink(
            self._reactor,
            self._turn,
            self._handshake(),
            self._make_session,
            failed=self._handshake_failed,
            timeout=self._handshake_timeout,
            tuned=self.tuned,
        )

    def _make_session(self, remote: PubKey) -> ServerSession:
        return ServerSession(self)

    def drain(self) -> Deferred[None]:
        """Close every channel and link, take no new ones; fires when all are gone."""
        self.relay.close_all()
        return self.close_all()


_COUNTED_BY_RELAY = frozenset(
    {DropReason.REPLACED, DropReason.SEND_BUFFER_FULL, DropReason.TOO_MANY_CONNECTIONS, DropReason.DRAINING}
)
"""Ends of links that are counted where they are decided."""
