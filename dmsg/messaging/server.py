"""The server entity of the Messaging System."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.task import deferLater
from twisted.logger import Logger

from dmsg.discovery.entries.entry import with_feature
from dmsg.keys import SecKey
from dmsg.messaging.core.dialect import profile_of
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.policing import Limits
from dmsg.messaging.core.wire import Profile
from dmsg.messaging.protocol import ServerFactory
from dmsg.net.flush import TurnFlush
from dmsg.net.links.link import Link, MakeUser, OnFailure
from dmsg.net.links.plain import PlainLink
from dmsg.net.reactor import Reactor
from dmsg.servers.server import DRAIN_LOOK, RelayServer
from dmsg.servers.settings import DEFAULTS, ServerSettings

_log = Logger()


class Server(RelayServer):
    """A messaging server.

    :param listen: Twisted endpoint strings.
    :param profile: of its clients; a :class:`~dmsg.messaging.Profile`, or its name.
    :param two_ids: with ``skywire``: whether a client that has answered no OpenChannel yet knows two ids (Go from
        2019-03-13 on); None: what who answers it does.
    :param settings: what all servers have.
    :param limits: what one client may have.
    :ivar ready: fires with the listening ports.
    """

    name = "dmsg-messaging-server"
    metrics_prefix = "dmsg_messaging_server"
    factory: ServerFactory

    def __init__(
        self,
        reactor: Reactor,
        key: SecKey,
        listen: Sequence[str],
        settings: ServerSettings = DEFAULTS,
        *,
        profile: Profile | str = Profile.SEED,
        two_ids: bool | None = None,
        limits: Limits | None = None,
    ) -> None:
        """:raises DmsgError: the public address is malformed.

        :raises ValueError: no such profile.
        """
        profile = profile_of(profile)
        factory = ServerFactory(reactor, key, profile, limits=limits, admission=settings.admission, two_ids=two_ids)
        super().__init__(
            reactor, key, listen, factory, settings, mark=lambda version: with_feature(version, profile.feature)
        )

    def _make_visit(self, make_user: MakeUser, failed: OnFailure) -> Link:
        handshake = JSONHandshake(self._key, self._key.public, profile=self.factory.profile)
        return PlainLink(self._reactor, TurnFlush(self._reactor), handshake, make_user, failed=failed)

    async def _leave(self) -> None:
        # first out of discovery, so that nobody new is sent here meanwhile
        await self.registration.withdraw()
        relay = self.factory.relay
        relay.draining = True
        until = self._reactor.seconds() + self.settings.drain_timeout
        while relay.channel_count and self._reactor.seconds() < until:
            await deferLater(self._reactor, DRAIN_LOOK)
        if relay.channel_count:
            _log.info("{count} channels are closed", count=relay.channel_count)

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What goes up and down."""
        return {**super().gauges(), "channels": ("Number of open channels", self.factory.relay.channel_count)}

    def counters(self) -> dict[str, tuple[str, float]]:
        """What only goes up."""
        opened = self.factory.relay.channels_opened
        return {**super().counters(), "channels_opened": ("Number of channels opened since the start", opened)}

    def health(self) -> dict[str, object]:
        """What ``/health`` says."""
        return {**super().health(), "channels": self.factory.relay.channel_count}
