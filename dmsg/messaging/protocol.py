"""Factory of the messaging server, which accepts links and attaches them to the relay.

The rules are in :mod:`dmsg.messaging.core.relay`.  A :class:`~dmsg.servers.serving.ServedSession` passes the bytes of
one link to the relay.  The client's side is :mod:`dmsg.messaging.session`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twisted.internet.interfaces import IReactorTime

from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.congestion import PAUSE_CHECK_INTERVAL, STALLED_AFTER
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.peers import RelayPeer, descending
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.relay import Relay
from dmsg.messaging.core.wire import Profile
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import Link
from dmsg.net.links.link_counts import MAX_HANDSHAKES
from dmsg.net.links.plain import PlainLink
from dmsg.net.own_pauses import PauseMeter
from dmsg.servers.admission import Admission
from dmsg.servers.serving import ServedSession, ServingFactory
from dmsg.telemetry.latencies import DurationHistogram

HANDSHAKE_TIMEOUT = 3.0
"""Maximum seconds from the opening of the TCP connection to the last handshake frame. After that, either end closes the
link. (The Go code of 2019 uses 3 s.)"""


class ServerFactory(ServingFactory[RelayPeer, Limits]):
    """Factory that attaches the links that it accepts to one relay.

    :ivar relay: relay with the table of links and channels, and the drop counters.
    """

    relay: Relay

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
        handshake: Callable[[], JSONHandshake] | None = None,
        choose: Callable[[RelayPeer], int | None] = descending,
        two_ids: bool | None = None,
    ) -> None:
        """:param two_ids: see :class:`~dmsg.messaging.core.relay.Relay`.

        :param handshake: function that returns the handshake for a new link. Like ``choose``, this is only for tests
            that replay recorded handshakes.
        """
        self.relay = Relay(
            profile,
            limits=limits,
            now=reactor.seconds,
            choose=choose,
            on_paused=self._paused,
            measure=partial(PauseMeter, reactor, STALLED_AFTER),
            two_ids=two_ids,
        )
        super().__init__(reactor, self.relay.drops, admission=admission, max_handshakes=max_handshakes)
        self.profile = profile
        self.relay_seconds = DurationHistogram()
        self._turn = TurnFlush(reactor, self.relay_seconds.observe)
        self._handshake = handshake or (lambda: JSONHandshake(key, profile=profile))
        self._handshake_timeout = handshake_timeout

    def _make_link(self) -> Link:
        return PlainLink(
            self._reactor,
            self._turn,
            self._handshake(),
            self._make_session,
            on_failure=self._handshake_failed,
            timeout=self._handshake_timeout,
            tuned=self.tuned,
        )

    def _make_session(self, remote: PubKey) -> ServedSession[RelayPeer, Limits]:
        return ServedSession(self)

    def is_busy(self, peer: RelayPeer) -> bool:
        return bool(peer.ends)

    def backlog_of(self, peer: RelayPeer) -> int:
        return sum(end.queued for end in peer.waiting)

    def _paused(self, peer: RelayPeer) -> None:
        self._schedule_once(PAUSE_CHECK_INTERVAL, peer, self.relay.let_read)

    def _close_relay(self) -> None:
        self.relay.close_all()
