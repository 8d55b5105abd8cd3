"""The server entity of the Messaging System."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entry import with_feature
from dmsg.discovery.lookups import Lookups
from dmsg.keys import PubKey, SecKey
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.protocol import ServerFactory
from dmsg.net.links.link import Link
from dmsg.net.links.plain import PlainLink
from dmsg.net.turn import TurnFlush
from dmsg.servers.admission import Admission
from dmsg.servers.server import DRAIN_LOOK, DRAIN_TIMEOUT, RelayServer

_log = Logger()


class Server(RelayServer):
    """A messaging server.

    :param listen: Twisted endpoint strings.
    :param profile: of its clients.
    :param two_ids: with ``skywire``: whether a client that has answered no OpenChannel yet knows two ids (Go from
        2019-03-13 on); None: what who answers it does.
    :param public_address: ``host:port`` at which clients reach it; None takes
        the first listening port, which must then be on one interface.
    :param discovery: URLs, or a Lookups; empty means it is not registered.
    :param limits: what one client may have.
    :param admission: whom it admits.
    :param drain_timeout: seconds that stopping leaves to channels to end: the protocol knows no way to move them.
    :param memory: bytes that are held for clients, in all; None: a quarter of what the machine has.
    :param metrics: endpoint string for ``/metrics`` and ``/health``, or None.
    :ivar ready: fires with the listening ports.
    """

    name = "dmsg-messaging-server"
    metrics_prefix = "dmsg_messaging_server"
    factory: ServerFactory

    def __init__(
        self,
        reactor: Any,
        key: SecKey,
        listen: Sequence[str],
        *,
        profile: Profile = Profile.SEED,
        two_ids: bool | None = None,
        public_address: str | None = None,
        discovery: Sequence[str] | Lookups = (),
        limits: Limits | None = None,
        admission: Admission | None = None,
        drain_timeout: float = DRAIN_TIMEOUT,
        metrics: str | None = None,
        memory: int | None = None,
        random: Random | None = None,
    ) -> None:
        """:raises DmsgError: the public address is malformed."""
        super().__init__(
            reactor,
            key,
            listen,
            ServerFactory(reactor, key, profile, limits=limits, admission=admission, two_ids=two_ids),
            mark=lambda version: with_feature(version, profile.feature),
            public_address=public_address,
            discovery=discovery,
            drain_timeout=drain_timeout,
            metrics=metrics,
            memory=memory,
            random=random,
        )

    def _make_visit(self, make_user: Callable[[PubKey], Any], failed: Callable[[Any, Failure], None]) -> Link:
        handshake = JSONHandshake(self._key, self._key.public, profile=self.factory.profile)
        return PlainLink(self._reactor, TurnFlush(self._reactor), handshake, make_user, failed=failed)

    async def _leave(self) -> None:
        # first out of discovery, so that nobody new is sent here meanwhile
        await self.registration.withdraw()
        relay = self.factory.relay
        relay.draining = True
        until = self._reactor.seconds() + self._drain_timeout
        while relay.channel_count and self._reactor.seconds() < until:
            await deferLater(self._reactor, DRAIN_LOOK)
        if relay.channel_count:
            _log.info("{count} channels are closed", count=relay.channel_count)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What goes up and down."""
        return {**super().gauges(), "channels": ("Open channels", self.factory.relay.channel_count)}

    def counters(self) -> dict[str, tuple[str, float]]:
        """What only goes up."""
        opened = self.factory.relay.channels_opened
        return {**super().counters(), "channels_opened": ("Channels that were opened", opened)}

    def health(self) -> dict[str, Any]:
        """What ``/health`` says."""
        return {**super().health(), "channels": self.factory.relay.channel_count}
